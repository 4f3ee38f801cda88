// A recorded forward pass: nodes that run in order over slots of one arena, with the step's sizes as run-time values.
//
// Built once from Python (bind/plan.cpp), then one call a step: no allocation unless a step is larger than every one
// before it, no dispatch per layer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/memory.h"
#include "core/team.h"
#include "kernels.h"

namespace octavo {

// How many rows a slot has in a step.
enum class Extent : uint8_t { tokens, logits_rows };

// A slot's rows in this step. Values that stand next to each other in a row belong to one token.
struct Slot {
    float* data = nullptr;
    int64_t stride = 0;  // floats from row to row
    int64_t rows = 0;
};

// Columns [offset, offset + width) of a slot.
struct View {
    int32_t slot;
    int32_t offset;
    int32_t width;
};

// The arrays of one step; see backends.ops.ForwardBatch.
struct StepArrays {
    const int32_t* token_ids = nullptr;
    const int32_t* positions = nullptr;
    const int32_t* rope_variants = nullptr;
    const int32_t* query_starts = nullptr;
    const int32_t* context_lens = nullptr;
    const int32_t* logits_rows = nullptr;
    int64_t num_tokens = 0;
    int64_t num_requests = 0;
    int64_t num_logits_rows = 0;
    struct BlockTable {
        const int32_t* ids;
        int64_t max_blocks;
    };
    std::vector<BlockTable> block_tables;  // of each KV group
    uint8_t* blocks = nullptr;
    const KvLayout* layout = nullptr;
};

struct Step {
    const StepArrays& arrays;
    const Slot* slots;
    const Kernels& kernels;
    Team& team;
    Rounding rounding;
    uint8_t* workspace;
    int32_t* best;  // [N], where the step wants the best column of the logits
    LinearArgs::Best* best_scratch;

    const float* in(const View& view) const { return slots[view.slot].data + view.offset; }
    float* out(const View& view) const { return slots[view.slot].data + view.offset; }
    int64_t stride(const View& view) const { return slots[view.slot].stride; }
    int64_t rows(const View& view) const { return slots[view.slot].rows; }
};

class Node {
  public:
    virtual ~Node() = default;
    virtual void run(const Step& step) const = 0;
    // Of the workspace that nodes share in turn.
    virtual int64_t workspace_bytes(int64_t num_tokens, int64_t max_context, int num_threads) const {
        (void)num_tokens, (void)max_context, (void)num_threads;
        return 0;
    }
};

class Plan {
  public:
    Plan(const Kernels& kernels, Team& team, Rounding rounding) : kernels_(kernels), team_(team), rounding_(rounding) {}

    // A slot lives from the first to the last node that names it.
    int32_t add_slot(int64_t width, Extent extent);
    void add_node(std::unique_ptr<Node> node, const std::vector<int32_t>& slots);
    // Keep a slot's values until the end of the plan: its readers are outside.
    void keep(int32_t slot);
    int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }

    // Run nodes [first, end). With `best`, the logits node leaves its output out and fills `best` instead.
    void run(const StepArrays& arrays, int64_t first, int64_t end, int64_t max_context, int32_t* best = nullptr);

    // Where the values of a slot are after a run.
    const Slot& slot(int32_t index) const { return slots_[static_cast<size_t>(index)]; }
    int64_t arena_bytes() const { return arena_.size(); }
    // How many rows of logits the step that ran last left room for.
    int64_t row_capacity() const { return row_capacity_; }

  private:
    struct Lifetime {
        int64_t width;
        Extent extent;
        int64_t first = -1;
        int64_t last = -1;
        bool is_kept = false;
    };
    void reserve(int64_t num_tokens, int64_t num_logits_rows, int64_t max_context);
    void lay_out(int64_t num_tokens, int64_t num_logits_rows);

    const Kernels& kernels_;
    Team& team_;
    Rounding rounding_;
    std::vector<std::unique_ptr<Node>> nodes_;
    std::vector<Lifetime> lifetimes_;
    std::vector<Slot> slots_;
    int64_t token_capacity_ = 0, row_capacity_ = 0, context_capacity_ = 0;
    Memory arena_, workspace_, best_scratch_;
};

}  // namespace octavo
