// Many quantized rows: bound by arithmetic. A block of panels meets a block of rows, whose operands are widened once
// into scratch.
#pragma once

#include "ops/quantized.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kManyDepth = 640;       // k widened at once, at most: a panel of it and a few rows fit L1
constexpr int64_t kManyRows = 120;   // rows of a chunk, at most: a multiple of every kBlockRows
constexpr int64_t kManyPanels = 8;

// What a chunk keeps in scratch.
template <WeightFormat format>
struct ManyScratch {
    static constexpr int64_t kRowStride = kManyDepth * kWideRow<format> + 64;  // rows start in different cache sets
    static constexpr int64_t kMaxGroups = kManyDepth / 16;
    alignas(64) uint8_t rows[kManyRows * kRowStride];
    alignas(64) uint8_t weights[kManyDepth * kPanel * kWideWeight<format>];
    alignas(64) float scales[kMaxGroups * kPanel];
    alignas(64) float mins[kMaxGroups * kPanel];
    alignas(64) float acc[kManyPanels * kManyRows * kPanel];  // int32 where a group is all of k
    RowGroup groups[kManyRows * kMaxGroups];
};

// `depth` values of k of a panel and of a few rows of a chunk, `row` the first of them, where a group is all of k.
template <WeightFormat format, int rows>
[[gnu::noinline]] static void multiply_whole(const ManyScratch<format>& scratch, int64_t row, float* acc,
                                             int64_t depth) {
    I32 dot[rows];
    dot_wide<format, rows>(scratch.weights, scratch.rows + row * scratch.kRowStride, scratch.kRowStride, depth, dot);
    for (int r = 0; r < rows; ++r) {
        auto* sum = reinterpret_cast<int32_t*>(acc + r * kPanel);
        store(sum, load(sum) + dot[r]);
    }
}

// The same in groups.
template <WeightFormat format, int rows, int64_t fixed_group>
[[gnu::noinline]] static void multiply_groups(const ManyScratch<format>& scratch, int64_t row, float* acc,
                                              int64_t depth, int64_t any_group, bool has_min) {
    const int64_t group = fixed_group != 0 ? fixed_group : any_group;
    const uint8_t* x = scratch.rows + row * scratch.kRowStride;
    const RowGroup* groups = scratch.groups + row * scratch.kMaxGroups;
    F32 sums[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) sums[r] = load(acc + r * kPanel);
    for (int64_t g = 0; g < depth / group; ++g, ++groups) {
        I32 dot[rows];
        dot_wide<format, rows>(scratch.weights + g * group * kPanel * kWideWeight<format>,
                               x + g * group * kWideRow<format>, scratch.kRowStride, group, dot);
        const F32 scale = load(scratch.scales + g * kPanel);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            sums[r] = add_group(sums[r], dot[r], groups[r * scratch.kMaxGroups], scale);
        }
        if (has_min) {
            const F32 min = load(scratch.mins + g * kPanel);
#pragma GCC unroll 16
            for (int r = 0; r < rows; ++r) {
                sums[r] = add_min(sums[r], groups[r * scratch.kMaxGroups], min);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) store(acc + r * kPanel, sums[r]);
}

template <WeightFormat format>
static void multiply_many_chunk(const LinearArgs& args, const Chunk& chunk, ManyScratch<format>& scratch) {
    const PackedMatrix& w = *args.weight;
    const QuantizedRows& x = *args.quantized;
    const auto [first_row, num_rows, panel, num_panels] = chunk;
    const int64_t num_groups = w.padded_k / w.group, panel_bytes = packed_bytes(format, w.padded_k);
    const auto* data = static_cast<const uint8_t*>(w.data);
    const bool is_whole = num_groups == 1;
    const int32_t bias = kBias<format> - middle(w);
    const int64_t num_blocks = parts(num_rows, kBlockRows);
    const Depths depths(w, kManyDepth);

    memset(scratch.acc, 0, static_cast<size_t>(num_panels * num_rows * kPanel) * sizeof(float));
    for (int64_t d = 0; d < depths.count; ++d) {
        const int64_t k = depths.start(d), depth = depths.start(d + 1) - k;
        const int64_t first_group = k / w.group, depth_groups = is_whole ? 0 : depth / w.group;
        for (int64_t r = 0; r < num_rows; ++r) {
            widen_row<format>(x.q + (first_row + r) * x.padded_k + k, depth, scratch.rows + r * scratch.kRowStride);
            for (int64_t g = 0; g < depth_groups; ++g) {
                const int64_t index = (first_row + r) * num_groups + first_group + g;
                scratch.groups[r * scratch.kMaxGroups + g] = row_group(x, index, bias);
            }
        }
        for (int64_t p = 0; p < num_panels; ++p) {
            const uint8_t* packed = data + (panel + p) * panel_bytes + packed_bytes(format, k);
            // The panel after this one, or the first at the next depth.
            const uint8_t* next = p + 1 < num_panels ? packed + panel_bytes
                                                     : data + panel * panel_bytes + packed_bytes(format, k + depth);
            widen_weights<format>(packed, depth, scratch.weights);
            for (int64_t g = 0; g < depth_groups; ++g) {
                const int64_t index = (panel + p) * num_groups + first_group + g;
                store(scratch.scales + g * kPanel, load_group(w.scales, w.scale_format, index));
                if (w.has_min) store(scratch.mins + g * kPanel, load_group(w.mins, w.scale_format, index));
            }
            for (int64_t b = 0; b < num_blocks; ++b) {
                const int64_t r = chunk_start(num_rows, num_blocks, b);
                const int64_t count = chunk_start(num_rows, num_blocks, b + 1) - r;
                prefetch_share(next, packed_bytes(format, depth), b, num_blocks);
                float* acc = scratch.acc + (p * num_rows + r) * kPanel;
                with_count<kBlockRows>(count, [&]<int rows>() {
                    if (is_whole) {
                        multiply_whole<format, rows>(scratch, r, acc, depth);
                    } else if (w.group == 32) {
                        multiply_groups<format, rows, 32>(scratch, r, acc, depth, w.group, w.has_min);
                    } else {
                        multiply_groups<format, rows, 0>(scratch, r, acc, depth, w.group, w.has_min);
                    }
                });
            }
        }
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        const RowGroup group = row_group(x, (first_row + r) * num_groups, bias);
        finish_panels(args, panel, num_panels, first_row + r, [&](int64_t p) {
            const float* acc = scratch.acc + (p * num_rows + r) * kPanel;
            return is_whole ? whole_sum(w, panel + p, load(reinterpret_cast<const int32_t*>(acc)), group) : load(acc);
        });
    }
}

template <WeightFormat format>
static void multiply_many_rows(const LinearArgs& args, Team& team) {
    static_assert(sizeof(ManyScratch<format>) <= Team::kScratchBytes);
    each_chunk(args, team, kManyRows, kBlockRows, kManyPanels, [&](const Chunk& chunk, int thread) {
        multiply_many_chunk(args, chunk, *reinterpret_cast<ManyScratch<format>*>(team.scratch(thread)));
    });
}

}  // namespace octavo::OCTAVO_ISA
