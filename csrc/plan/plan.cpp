#include "plan/plan.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "plan/nodes.h"

namespace octavo {
namespace {

// Steps only ever grow the arena to these sizes, so that a few steps reach the last of them.
int64_t capacity_for(int64_t count) { return static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count))); }

constexpr int64_t kAlignment = 64;

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

int32_t Plan::add_slot(int64_t width, Extent extent) {
    lifetimes_.push_back({width, extent});
    slots_.push_back({nullptr, width, 0});
    return static_cast<int32_t>(slots_.size()) - 1;
}

void Plan::add_node(std::unique_ptr<Node> node, const std::vector<int32_t>& slots) {
    const int64_t index = num_nodes();
    for (const int32_t slot : slots) {
        Lifetime& life = lifetimes_[static_cast<size_t>(slot)];
        if (life.first < 0) life.first = index;
        life.last = index;
    }
    nodes_.push_back(std::move(node));
    token_capacity_ = row_capacity_ = 0;
}

void Plan::keep(int32_t slot) { lifetimes_[static_cast<size_t>(slot)].is_kept = true; }

// First fit: a slot takes the lowest place that no slot living at the same time covers.
void Plan::lay_out(int64_t num_tokens, int64_t num_logits_rows) {
    struct Placed {
        int64_t start, end, first, last;
    };
    std::vector<Placed> placed;
    std::vector<int64_t> offsets(slots_.size(), 0);
    int64_t total = 0;
    for (size_t i = 0; i < slots_.size(); ++i) {
        const Lifetime& life = lifetimes_[i];
        if (life.first < 0) continue;
        const int64_t last = life.is_kept ? num_nodes() : life.last;
        const int64_t rows = life.extent == Extent::tokens ? num_tokens : num_logits_rows;
        const int64_t size = aligned(rows * life.width * static_cast<int64_t>(sizeof(float)));
        std::vector<Placed> rivals;
        for (const Placed& other : placed) {
            if (other.first <= last && life.first <= other.last) rivals.push_back(other);
        }
        std::sort(rivals.begin(), rivals.end(), [](const Placed& a, const Placed& b) { return a.start < b.start; });
        int64_t start = 0;
        for (const Placed& other : rivals) {
            if (start + size <= other.start) break;
            start = std::max(start, other.end);
        }
        placed.push_back({start, start + size, life.first, last});
        offsets[i] = start;
        total = std::max(total, start + size);
    }
    // Vector loads may touch the line behind a row's end.
    if (total + kAlignment > arena_.size()) arena_ = Memory(total + kAlignment);
    for (size_t i = 0; i < slots_.size(); ++i) slots_[i].data = reinterpret_cast<float*>(arena_.data() + offsets[i]);
}

void Plan::reserve(int64_t num_tokens, int64_t num_logits_rows, int64_t max_context) {
    if (num_tokens > token_capacity_ || num_logits_rows > row_capacity_) {
        token_capacity_ = std::max(token_capacity_, capacity_for(num_tokens));
        row_capacity_ = std::max(row_capacity_, capacity_for(num_logits_rows));
        lay_out(token_capacity_, row_capacity_);
        context_capacity_ = 0;
        int64_t panels = 0;
        for (const auto& node : nodes_) {
            if (const auto* linear = dynamic_cast<const LinearNode*>(node.get()); linear && linear->is_logits) {
                panels = std::max(panels, linear->weight.num_panels);
            }
        }
        best_scratch_ = Memory(panels * row_capacity_ * static_cast<int64_t>(sizeof(LinearArgs::Best)));
    }
    if (max_context > context_capacity_) {
        context_capacity_ = capacity_for(max_context);
        int64_t bytes = 0;
        for (const auto& node : nodes_) {
            bytes = std::max(bytes, node->workspace_bytes(token_capacity_, context_capacity_, team_.num_threads()));
        }
        if (bytes > workspace_.size()) workspace_ = Memory(bytes);
    }
}

void Plan::run(const StepArrays& arrays, int64_t first, int64_t end, int64_t max_context, int32_t* best) {
    // Hidden states of an earlier part must survive: only a step that starts at the first node may move the arena.
    if (first == 0) reserve(arrays.num_tokens, std::max<int64_t>(arrays.num_tokens, 1), max_context);
    for (size_t i = 0; i < slots_.size(); ++i) {
        slots_[i].rows = lifetimes_[i].extent == Extent::tokens ? arrays.num_tokens : arrays.num_logits_rows;
    }
    const Step step{arrays, slots_.data(), kernels_, team_, rounding_, workspace_.data(), best,
                    reinterpret_cast<LinearArgs::Best*>(best_scratch_.data())};
    for (int64_t i = first; i < end; ++i) nodes_[static_cast<size_t>(i)]->run(step);
}

}  // namespace octavo
