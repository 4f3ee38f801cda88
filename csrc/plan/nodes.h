// The nodes of a plan: each holds what was known when it was recorded, and calls a kernel with the step's sizes.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace octavo {

struct EmbeddingNode : Node {
    std::vector<PackedMatrix> table;  // rows of the segments follow each other
    float scale = 1.0f;               // rounded already
    View y;
    void run(const Step& step) const override;
};

struct NormNode : Node {
    bool is_layer_norm = false;
    View x, y;
    int64_t heads = 1;
    bool has_addend = false;
    View addend, sum;
    float addend_scale = 1.0f;
    const float* weight = nullptr;
    const float* bias = nullptr;
    float eps = 0.0f;
    float offset = 0.0f;
    void run(const Step& step) const override;
};

// Rows in int8: [rows][padded_k] values, then [rows][groups] scales, then as many sums, in one slot.
struct QuantizeNode : Node {
    View x, y;
    int64_t padded_k = 0;
    int64_t group = 0;
    void run(const Step& step) const override;
    static int64_t width(int64_t padded_k, int64_t group) { return padded_k / 4 + 2 * (padded_k / group); }
};

struct LinearNode : Node {
    View x;
    PackedMatrix weight;
    bool is_quantized = false;  // x is the slot of a QuantizeNode
    bool is_logits = false;     // may leave y out for the best column alone
    const float* bias = nullptr;
    float scale = 1.0f;
    float softcap = 0.0f;
    Activation activation = Activation::none;
    bool gated = false;
    bool has_residual = false;
    View residual;
    float residual_scale = 1.0f;
    View y;
    void run(const Step& step) const override;
};

struct ActivationNode : Node {
    View x, y;
    Activation kind = Activation::none;
    bool gated = false;
    void run(const Step& step) const override;
};

struct AddNode : Node {
    View x, addend, y;
    float scale = 1.0f;
    void run(const Step& step) const override;
};

// cos and sin of each token's angles: [T][rotary_dim], once a step for all layers.
struct AnglesNode : Node {
    std::vector<std::vector<float>> inv_freq;  // of each variant, [rotary_dim / 2]
    std::vector<float> attention_factor;
    View y;
    void run(const Step& step) const override;
};

struct RopeNode : Node {
    View x, angles, y;
    int64_t head_dim = 0;
    int64_t rotary_dim = 0;
    void run(const Step& step) const override;
};

struct AttendNode : Node {
    View q, k, v, y;
    int64_t group = 0;
    int64_t layer = 0;
    int64_t num_heads = 0;
    int64_t head_dim = 0;
    float scale = 1.0f;
    int64_t window = 0;
    float softcap = 0.0f;
    const float* sinks = nullptr;
    void run(const Step& step) const override;
    int64_t workspace_bytes(int64_t num_tokens, int64_t max_context, int num_threads) const override;
};

// y = x[logits_rows]
struct PickRowsNode : Node {
    View x, y;
    void run(const Step& step) const override;
};

}  // namespace octavo
