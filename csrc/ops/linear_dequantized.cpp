// int4 and int8 weights with float activations: a panel is dequantized into scratch and meets all the rows of a chunk.
#include "ops/epilogue.h"
#include "ops/functions.h"
#include "ops/groups.h"
#include "ops/unpack.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kDepth = 512;  // k dequantized at once: 32 KiB
constexpr int64_t kBlockRows = 6;
constexpr int64_t kChunkRows = 240;  // at most: a multiple of kBlockRows
constexpr int64_t kUnitPanels = 2;   // of a chunk

struct Scratch {
    alignas(64) float weights[kDepth * kPanel];
    alignas(64) float acc[kUnitPanels * kChunkRows * kPanel];
};
static_assert(sizeof(Scratch) <= Team::kScratchBytes);

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// The integers of row `k0 + j` of a panel, for j from 0 to 7; `packed` is its row k0, a multiple of 8.
template <int j>
inline I32 weights_at(const PackedMatrix& w, const uint8_t* packed) {
    const auto* words = reinterpret_cast<const int32_t*>(packed);
    if (w.format == WeightFormat::int4) {
        return (shift_right<8 * (j % 4) + 4 * (j / 4)>(load(words)) & broadcast(int32_t{15})) + broadcast(middle(w));
    }
    // 128 more, so that the byte is unsigned.
    const I32 more = shift_right<8 * (j % 4)>(load(words + j / 4 * kLanes)) + broadcast(int32_t{128});
    return (more & broadcast(int32_t{255})) + broadcast(int32_t{-128});
}

struct Group {
    F32 scale, min;
};
inline Group group_of(const PackedMatrix& w, int64_t panel, int64_t k) {
    const int64_t index = panel * (w.padded_k / w.group) + k / w.group;
    const F32 scale = load_group(w.scales, w.scale_format, index);
    return {scale, w.has_min ? load_group(w.mins, w.scale_format, index) : broadcast(0.0f)};
}
inline F32 dequantized(const PackedMatrix& w, I32 q, const Group& group) {
    return w.has_min ? fma(group.scale, to_f32(q), group.min) : group.scale * to_f32(q);
}

inline const uint8_t* packed_at(const PackedMatrix& w, int64_t panel, int64_t k) {
    const int64_t index = (panel * w.padded_k + k) * kPanel;
    return static_cast<const uint8_t*>(w.data) + (w.format == WeightFormat::int4 ? index / 2 : index);
}

// k from `first`, a multiple of 8, for `depth` of them (rounded up to 8) of a panel.
inline void dequantize_panel(const PackedMatrix& w, int64_t panel, int64_t first, int64_t depth, float* out) {
    for (int64_t k = first; k < first + depth; k += 8, out += 8 * kPanel) {
        const uint8_t* packed = packed_at(w, panel, k);
        const Group group = group_of(w, panel, k);
        store(out + 0 * kPanel, dequantized(w, weights_at<0>(w, packed), group));
        store(out + 1 * kPanel, dequantized(w, weights_at<1>(w, packed), group));
        store(out + 2 * kPanel, dequantized(w, weights_at<2>(w, packed), group));
        store(out + 3 * kPanel, dequantized(w, weights_at<3>(w, packed), group));
        store(out + 4 * kPanel, dequantized(w, weights_at<4>(w, packed), group));
        store(out + 5 * kPanel, dequantized(w, weights_at<5>(w, packed), group));
        store(out + 6 * kPanel, dequantized(w, weights_at<6>(w, packed), group));
        store(out + 7 * kPanel, dequantized(w, weights_at<7>(w, packed), group));
    }
}

template <int rows>
[[gnu::noinline]] void multiply_block(const float* weights, const float* x, int64_t stride, int64_t depth, float* acc) {
    F32 sum[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sum[r] = load(acc + r * kPanel);
    for (int64_t k = 0; k < depth; ++k) {
        const F32 w = load(weights + k * kPanel);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) sum[r] = fma(broadcast(x[r * stride + k]), w, sum[r]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) store(acc + r * kPanel, sum[r]);
}

inline void multiply_rows(int64_t rows, const float* weights, const float* x, int64_t stride, int64_t depth,
                          float* acc) {
    switch (rows) {
        case 1: return multiply_block<1>(weights, x, stride, depth, acc);
        case 2: return multiply_block<2>(weights, x, stride, depth, acc);
        case 3: return multiply_block<3>(weights, x, stride, depth, acc);
        case 4: return multiply_block<4>(weights, x, stride, depth, acc);
        case 5: return multiply_block<5>(weights, x, stride, depth, acc);
        default: return multiply_block<6>(weights, x, stride, depth, acc);
    }
}

}  // namespace

void linear_dequantized(const LinearArgs& args, Team& team) {
    const PackedMatrix& w = *args.weight;
    const int64_t num_units = (w.num_panels + kUnitPanels - 1) / kUnitPanels;
    const int64_t row_chunks = (args.rows + kChunkRows - 1) / kChunkRows;
    team.each(num_units * row_chunks, [&](int64_t chunk, int thread) {
        Scratch& scratch = *reinterpret_cast<Scratch*>(team.scratch(thread));
        const int64_t row = chunk % row_chunks * kChunkRows, num_rows = smaller(kChunkRows, args.rows - row);
        const int64_t panel = chunk / row_chunks * kUnitPanels, num_panels = smaller(kUnitPanels, w.num_panels - panel);
        for (int64_t p = 0; p < num_panels; ++p) {
            float* acc = scratch.acc + p * num_rows * kPanel;
            memset(acc, 0, static_cast<size_t>(num_rows * kPanel) * sizeof(float));
            for (int64_t k = 0; k < w.k; k += kDepth) {
                const int64_t depth = smaller(kDepth, w.k - k);
                dequantize_panel(w, panel + p, k, depth, scratch.weights);
                for (int64_t r = 0; r < num_rows; r += kBlockRows) {
                    const float* x = args.x + (row + r) * args.x_stride + k;
                    multiply_rows(smaller(kBlockRows, num_rows - r), scratch.weights, x, args.x_stride, depth,
                                  acc + r * kPanel);
                }
            }
        }
        for (int64_t r = 0; r < num_rows; ++r) {
            const float* acc = scratch.acc + r * kPanel;
            if (args.epilogue.gated) {
                finish_gated(args, panel / 2, row + r, load(acc), load(acc + num_rows * kPanel));
            } else {
                for (int64_t p = 0; p < num_panels; ++p) {
                    finish(args, panel + p, row + r, load(acc + p * num_rows * kPanel));
                }
            }
        }
    });
    if (args.best != nullptr && args.rows > 0) choose_best(args, team);
}

void unpack_int_row(const PackedMatrix& matrix, int64_t row, float* out) {
    const int64_t panel = row / kPanel, column = row % kPanel;
    constexpr auto lanes = static_cast<int64_t>(kLanes);
    for (int64_t first = 0; first < matrix.k; first += lanes) {
        const uint8_t* packed = packed_at(matrix, panel, first);
        int32_t q[kLanes];
        for (int64_t i = 0; i < lanes; ++i) {
            if (matrix.format == WeightFormat::int8) {
                q[i] = static_cast<int8_t>(packed[i / 4 * 64 + column * 4 + i % 4]);
            } else {
                const uint8_t halves = packed[i / 8 * 64 + column * 4 + i % 4];
                q[i] = (i % 8 < 4 ? halves & 15 : halves >> 4) + middle(matrix);
            }
        }
        float scales[kLanes], mins[kLanes];
        const Group group = group_of(matrix, panel, first);
        store(scales, group.scale);
        store(mins, group.min);
        const Group own = {broadcast(scales[column]), broadcast(mins[column])};
        const auto count = static_cast<size_t>(smaller(lanes, matrix.k - first));
        store_first(out + first, dequantized(matrix, load(q), own), count);
    }
}

}  // namespace octavo::OCTAVO_ISA
