#include "plan/nodes.h"

#include <cmath>
#include <cstring>

namespace octavo {

void EmbeddingNode::run(const Step& step) const {
    const int64_t rows = step.arrays.num_tokens;
    const int32_t* ids = step.arrays.token_ids;
    if (table.size() == 1) {
        step.kernels.unpack_rows(table.front(), ids, rows, step.out(y), step.stride(y), step.team);
    } else {
        for (int64_t row = 0; row < rows; ++row) {
            int64_t id = ids[row];
            const PackedMatrix* segment = table.data();
            while (id >= segment->n) id -= (segment++)->n;
            const auto local = static_cast<int32_t>(id);
            step.kernels.unpack_rows(*segment, &local, 1, step.out(y) + row * step.stride(y), step.stride(y), step.team);
        }
    }
    step.kernels.scale_rows({.rows = rows, .width = y.width, .x = step.out(y), .x_stride = step.stride(y), .scale = scale,
                             .rounding = step.rounding}, step.team);
}

void NormNode::run(const Step& step) const {
    NormArgs args{
        .rows = step.rows(y),
        .heads = heads,
        .width = y.width / heads,
        .x = step.in(x),
        .x_stride = step.stride(x),
        .weight = weight,
        .bias = bias,
        .offset = offset,
        .eps = eps,
        .y = step.out(y),
        .y_stride = step.stride(y),
        .rounding = step.rounding,
    };
    if (has_addend) {
        args.addend = step.in(addend);
        args.addend_stride = step.stride(addend);
        args.addend_scale = addend_scale;
        args.sum = step.out(sum);
        args.sum_stride = step.stride(sum);
    }
    (is_layer_norm ? step.kernels.layer_norm : step.kernels.rms_norm)(args, step.team);
}

namespace {

QuantizedRows quantized_rows(float* slot, int64_t rows, int64_t padded_k, int64_t group) {
    const int64_t groups = padded_k / group;
    float* scales = slot + rows * padded_k / 4;
    return {reinterpret_cast<const int8_t*>(slot), scales, reinterpret_cast<const int32_t*>(scales + rows * groups),
            padded_k, group};
}

}  // namespace

void QuantizeNode::run(const Step& step) const {
    const int64_t rows = step.rows(x);
    const QuantizedRows target = quantized_rows(step.out(y), rows, padded_k, group);
    step.kernels.quantize_rows(
        {
            .x = step.in(x),
            .x_stride = step.stride(x),
            .rows = rows,
            .k = x.width,
            .padded_k = padded_k,
            .group = group,
            .q = const_cast<int8_t*>(target.q),
            .scales = const_cast<float*>(target.scales),
            .sums = const_cast<int32_t*>(target.sums),
        },
        step.team);
}

void LinearNode::run(const Step& step) const {
    const int64_t rows = step.rows(y);
    const bool best_only = is_logits && step.best != nullptr;
    LinearArgs args{
        .weight = &weight,
        .rows = rows,
        .epilogue =
            {
                .bias = bias,
                .scale = scale,
                .softcap = softcap,
                .activation = activation,
                .gated = gated,
                .residual_scale = residual_scale,
                .rounding = is_logits ? Rounding::f32 : step.rounding,
            },
    };
    if (!best_only) {
        args.y = step.out(y);
        args.y_stride = step.stride(y);
    } else {
        args.best = step.best;
        args.best_scratch = step.best_scratch;
    }
    if (has_residual) {
        args.epilogue.residual = step.in(residual);
        args.epilogue.residual_stride = step.stride(residual);
    }
    const bool is_int = weight.format == WeightFormat::int8 || weight.format == WeightFormat::int4;
    if (is_quantized) {
        const QuantizedRows quantized = quantized_rows(step.out(x), rows, weight.padded_k, weight.group);
        args.quantized = &quantized;
        step.kernels.linear_quantized(args, step.team);
        return;
    }
    args.x = step.in(x);
    args.x_stride = step.stride(x);
    args.x_is_bf16 = step.rounding == Rounding::bf16;
    (is_int ? step.kernels.linear_dequantized : step.kernels.linear_float)(args, step.team);
}

void ActivationNode::run(const Step& step) const {
    step.kernels.activation(
        {
            .rows = step.rows(y),
            .width = y.width,
            .gated = gated,
            .kind = kind,
            .x = step.in(x),
            .x_stride = step.stride(x),
            .y = step.out(y),
            .y_stride = step.stride(y),
            .rounding = step.rounding,
        },
        step.team);
}

void AddNode::run(const Step& step) const {
    step.kernels.add(
        {
            .rows = step.rows(y),
            .width = y.width,
            .x = step.in(x),
            .x_stride = step.stride(x),
            .addend = step.in(addend),
            .addend_stride = step.stride(addend),
            .scale = scale,
            .y = step.out(y),
            .y_stride = step.stride(y),
            .rounding = step.rounding,
        },
        step.team);
}

void AnglesNode::run(const Step& step) const {
    const StepArrays& arrays = step.arrays;
    const int64_t pairs = y.width / 2;
    const int64_t num_chunks = arrays.num_tokens < 16 ? 1 : 8;
    step.team.each(num_chunks, [&](int64_t chunk, int) {
        const int64_t end = chunk_start(arrays.num_tokens, num_chunks, chunk + 1);
        for (int64_t row = chunk_start(arrays.num_tokens, num_chunks, chunk); row < end; ++row) {
            const auto known = static_cast<int32_t>(inv_freq.size());
            const auto variant = static_cast<size_t>(arrays.rope_variants[row] < known ? arrays.rope_variants[row] : known - 1);
            float* cosines = step.out(y) + row * step.stride(y);
            for (int64_t i = 0; i < pairs; ++i) {
                const float angle = static_cast<float>(arrays.positions[row]) * inv_freq[variant][static_cast<size_t>(i)];
                cosines[i] = std::cos(angle) * attention_factor[variant];
                cosines[pairs + i] = std::sin(angle) * attention_factor[variant];
            }
        }
    });
}

void RopeNode::run(const Step& step) const {
    step.kernels.rope(
        {
            .rows = step.rows(y),
            .heads = y.width / head_dim,
            .head_dim = head_dim,
            .rotary_dim = rotary_dim,
            .x = step.in(x),
            .x_stride = step.stride(x),
            .cos_sin = step.in(angles),
            .y = step.out(y),
            .y_stride = step.stride(y),
            .rounding = step.rounding,
        },
        step.team);
}

void AttendNode::run(const Step& step) const {
    const StepArrays& arrays = step.arrays;
    const StepArrays::BlockTable& table = arrays.block_tables[static_cast<size_t>(group)];
    const Rows rows{
        .num_tokens = arrays.num_tokens,
        .num_requests = arrays.num_requests,
        .positions = arrays.positions,
        .query_starts = arrays.query_starts,
        .context_lens = arrays.context_lens,
        .block_table = table.ids,
        .max_blocks = table.max_blocks,
    };
    step.kernels.store_kv(
        {
            .k = step.in(k),
            .v = step.in(v),
            .k_stride = step.stride(k),
            .v_stride = step.stride(v),
            .layout = arrays.layout,
            .blocks = arrays.blocks,
            .layer = layer,
            .rows = rows,
        },
        step.team);
    step.kernels.attend(
        {
            .q = step.in(q),
            .q_stride = step.stride(q),
            .out = step.out(y),
            .out_stride = step.stride(y),
            .layout = arrays.layout,
            .blocks = arrays.blocks,
            .layer = layer,
            .rows = rows,
            .num_heads = num_heads,
            .scale = scale,
            .window = window,
            .softcap = softcap,
            .sinks = sinks,
            .rounding = step.rounding,
            .workspace = step.workspace,
        },
        step.team);
}

int64_t AttendNode::workspace_bytes(int64_t num_tokens, int64_t max_context, int num_threads) const {
    return attention_workspace(num_tokens, max_context, num_heads, head_dim, num_threads);
}

void PickRowsNode::run(const Step& step) const {
    const StepArrays& arrays = step.arrays;
    for (int64_t row = 0; row < arrays.num_logits_rows; ++row) {
        const float* source = step.in(x) + arrays.logits_rows[row] * step.stride(x);
        std::memcpy(step.out(y) + row * step.stride(y), source, static_cast<size_t>(y.width) * sizeof(float));
    }
}

}  // namespace octavo
