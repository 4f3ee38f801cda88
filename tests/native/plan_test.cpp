// A plan that several threads run in turn, on a team of threads: the same bits as on one. Built and run by
// `make sanitize-threads` with the thread sanitizer, over the portable kernels.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "core/team.h"
#include "kernels.h"
#include "plan/nodes.h"
#include "plan/plan.h"

using namespace octavo;

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
            std::abort();                                                            \
        }                                                                            \
    } while (false)

// A norm, a product with an activation, and logits.
constexpr int64_t kWidth = 48;

struct Model {
    std::vector<float> weight, norm;
    float* panels = nullptr;
    PackedMatrix matrix{.format = WeightFormat::f32, .n = kWidth, .k = kWidth, .padded_k = kWidth, .num_panels = 3};

    Model() : weight(kWidth * kWidth + 16), norm(kWidth, 1.0f) {
        panels = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(weight.data()) + 63) / 64 * 64);
        for (int64_t i = 0; i < kWidth * kWidth; ++i) panels[i] = static_cast<float>(i * 37 % 101 - 50) / 100.0f;
        matrix.data = panels;
    }
};

struct Recorded {
    Plan plan;
    int32_t x, y;
    int64_t num_forward_nodes = 0;

    Recorded(const Model& model, Team& team) : plan(kernels(usable_isas().back()), team, Rounding::bf16) {
        x = plan.add_slot(kWidth, Extent::tokens);
        const int32_t normed = plan.add_slot(kWidth, Extent::tokens);
        y = plan.add_slot(kWidth, Extent::tokens);
        const int32_t picked = plan.add_slot(kWidth, Extent::logits_rows), logits = plan.add_slot(kWidth, Extent::logits_rows);
        const auto whole = [](int32_t slot) { return View{slot, 0, kWidth}; };
        auto norm = std::make_unique<NormNode>();
        norm->x = whole(x), norm->y = whole(normed), norm->weight = model.norm.data(), norm->eps = 1e-5f;
        plan.add_node(std::move(norm), {x, normed});
        auto linear = std::make_unique<LinearNode>();
        linear->x = whole(normed), linear->weight = model.matrix, linear->activation = Activation::silu;
        linear->y = whole(y);
        plan.add_node(std::move(linear), {normed, y});
        num_forward_nodes = plan.num_nodes();
        auto pick = std::make_unique<PickRowsNode>();
        pick->x = whole(y), pick->y = whole(picked);
        plan.add_node(std::move(pick), {y, picked});
        auto head = std::make_unique<LinearNode>();
        head->x = whole(picked), head->weight = model.matrix, head->is_logits = true, head->y = whole(logits);
        plan.add_node(std::move(head), {picked, logits});
        plan.keep(x), plan.keep(y);
    }

    // The hidden states of `rows` tokens, and the best column of the last one's logits behind them.
    std::vector<float> run(int64_t rows) {
        StepArrays arrays;
        arrays.num_tokens = arrays.num_logits_rows = rows;
        plan.run(arrays, 0, 0, 1);
        for (int64_t i = 0; i < rows * kWidth; ++i) plan.slot(x).data[i] = static_cast<float>(i % 17 - 8) / 8.0f;
        plan.run(arrays, 0, num_forward_nodes, 1);
        const float* values = plan.slot(y).data;
        std::vector<float> found(values, values + rows * kWidth);
        const auto last = static_cast<int32_t>(rows - 1);
        int32_t best = -2;
        arrays.logits_rows = &last;
        arrays.num_logits_rows = 1;
        plan.run(arrays, num_forward_nodes, plan.num_nodes(), 1, &best);
        CHECK(best >= 0 && best < kWidth);
        found.push_back(static_cast<float>(best));
        return found;
    }
};

int main() {
    alarm(300);
    const Model model;
    Team alone(1), team(3);
    Recorded expected(model, alone), shared(model, team);
    std::mutex turn;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
        callers.emplace_back([&, caller] {
            for (int64_t i = 0; i < 40; ++i) {
                const std::lock_guard lock(turn);
                const int64_t rows = 1 + (i * 7 + caller * 3) % 33;
                const std::vector<float> wanted = expected.run(rows), found = shared.run(rows);
                CHECK(std::memcmp(wanted.data(), found.data(), wanted.size() * sizeof(float)) == 0);
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    std::puts("ok");
}
