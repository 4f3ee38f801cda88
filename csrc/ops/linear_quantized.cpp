// int4 and int8 weights with int8 activations.
//
// A few rows are bound by memory: they are multiplied with the packed weights, four panels in turn, so that four streams
// of weights are read at once. More rows are bound by arithmetic: a block of panels meets a block of rows, whose
// operands are widened once into scratch.
#include "ops/dots.h"
#include "ops/epilogue.h"
#include "ops/functions.h"
#include "ops/groups.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Calls body.operator()<count>() for a count from 1 to `most`.
template <int most, class Body>
inline void with_count(int64_t count, const Body& body) {
    if constexpr (most > 0) {
        if (count == most) {
            body.template operator()<most>();
        } else {
            with_count<most - 1>(count, body);
        }
    }
}

inline int64_t round_up(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }

// Sums of one panel with one row are final.
template <class Acc>
inline void finish_panels(const LinearArgs& args, int64_t first_panel, int64_t count, int64_t row, const Acc& acc) {
    if (args.epilogue.gated) {
        for (int64_t i = 0; i < count; i += 2) {
            finish_gated(args, (first_panel + i) / 2, row, acc(i), acc(i + 1));
        }
    } else {
        for (int64_t i = 0; i < count; ++i) finish(args, first_panel + i, row, acc(i));
    }
}

// How many panels are finished together.
inline int64_t panels_per_unit(const LinearArgs& args) { return args.epilogue.gated ? 2 : 1; }

// ---- A few rows -----------------------------------------------------------------------------------------------------

constexpr int64_t kStreams = 4;
constexpr int64_t kPrefetchBytes = 2048;  // ahead in each stream
constexpr int64_t kPrefetchScales = 512;
constexpr int64_t kWholePiece = 64;       // k walked in one stream before the next, where a group is all of k

struct Stream {
    int64_t panel;
    int64_t next;  // the panel after it in the same stream
};

// `piece` values of k of one stream are multiplied before those of the next: the group, or kWholePiece.
template <WeightFormat format, int rows, int64_t fixed_piece>
[[gnu::noinline]] void multiply_packed(const LinearArgs& args, const Stream* streams, int64_t num_streams) {
    const PackedMatrix& w = *args.weight;
    const QuantizedRows& x = *args.quantized;
    const int64_t num_groups = w.padded_k / w.group;
    const bool is_whole = num_groups == 1, has_min = w.has_min;
    const int64_t piece = fixed_piece != 0 ? fixed_piece : w.group;
    const int64_t num_pieces = w.padded_k / piece;
    const int64_t piece_bytes = packed_bytes(format, piece), panel_bytes = packed_bytes(format, w.padded_k);
    const ScaleFormat scale_format = w.scale_format;
    const int64_t scale_bytes = group_bytes(scale_format);
    const int32_t bias = kBias<format> - middle(w);

    RowGroup group[rows];
    const uint8_t *data[kStreams], *scales[kStreams], *mins[kStreams];
    int64_t jump[kStreams];  // from behind the panel to the stream's next
    F32 acc[kStreams][rows];
    I32 total[kStreams][rows];
    for (int64_t s = 0; s < num_streams; ++s) {
        const int64_t panel = streams[s].panel;
        data[s] = static_cast<const uint8_t*>(w.data) + panel * panel_bytes;
        scales[s] = static_cast<const uint8_t*>(w.scales) + panel * num_groups * scale_bytes;
        mins[s] = has_min ? static_cast<const uint8_t*>(w.mins) + panel * num_groups * scale_bytes : nullptr;
        jump[s] = (streams[s].next - panel - 1) * panel_bytes;
        for (int r = 0; r < rows; ++r) {
            acc[s][r] = broadcast(0.0f);
            total[s][r] = broadcast(int32_t{0});
        }
    }
    const auto add_groups = [&](int64_t s, int64_t g, const I32* dot) {
        const F32 scale = load_group(scales[s] + g * scale_bytes, scale_format);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) acc[s][r] = add_group(acc[s][r], dot[r], group[r], scale);
        if (has_min) {
            const F32 min = load_group(mins[s] + g * scale_bytes, scale_format);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) acc[s][r] = add_min(acc[s][r], group[r], min);
        }
    };
    for (int64_t p = 0; p < num_pieces; ++p) {
        if (!is_whole || p == 0) {
            for (int r = 0; r < rows; ++r) group[r] = row_group(x, r * num_groups + p, bias);
        }
        const int8_t* q = x.q + p * piece;
        const int64_t offset = p * piece_bytes, ahead = offset + kPrefetchBytes;
        for (int64_t s = 0; s < num_streams; ++s) {
            const uint8_t* coming = data[s] + ahead + (ahead < panel_bytes ? 0 : jump[s]);
            for (int64_t line = 0; line < piece_bytes; line += 64) prefetch(coming + line);
            I32 dot[rows];
            dot_packed<format, rows>(data[s] + offset, q, x.padded_k, piece, dot);
            if (is_whole) {
#pragma GCC unroll 8
                for (int r = 0; r < rows; ++r) total[s][r] = total[s][r] + dot[r];
            } else {
                prefetch(scales[s] + p * scale_bytes + kPrefetchScales);
                if (has_min) prefetch(mins[s] + p * scale_bytes + kPrefetchScales);
                add_groups(s, p, dot);
            }
        }
    }
    if (is_whole) {
        for (int64_t s = 0; s < num_streams; ++s) add_groups(s, 0, total[s]);
    }
    const int64_t unit = panels_per_unit(args);
    for (int64_t s = 0; s < num_streams; s += unit) {
        for (int r = 0; r < rows; ++r) {
            finish_panels(args, streams[s].panel, unit, r, [&](int64_t i) { return acc[s + i][r]; });
        }
    }
}

template <WeightFormat format>
void multiply_few_rows(const LinearArgs& args, Team& team) {
    const int64_t unit = panels_per_unit(args), num_units = args.weight->num_panels / unit;
    const int64_t width = kStreams / unit;  // units at a time
    const int64_t piece = args.weight->group == args.weight->padded_k ? kWholePiece : args.weight->group;
    const int64_t num_chunks = larger(1, smaller(num_units / width, larger(8, 4 * team.num_threads())));
    team.each(num_chunks, [&](int64_t chunk, int) {
        const int64_t first = chunk_start(num_units, num_chunks, chunk);
        const int64_t count = chunk_start(num_units, num_chunks, chunk + 1) - first;
        // Each stream walks units that lie one behind the other.
        const int64_t steps = (count + width - 1) / width;
        for (int64_t step = 0; step < steps; ++step) {
            Stream streams[kStreams];
            int64_t num_streams = 0;
            for (int64_t s = 0; s < width; ++s) {
                const int64_t current = first + chunk_start(count, width, s) + step;
                const int64_t end = first + chunk_start(count, width, s + 1);
                if (current >= end) continue;
                const int64_t next = current + 1 < end ? current + 1 : current;
                for (int64_t i = 0; i < unit; ++i) streams[num_streams++] = {current * unit + i, next * unit + i};
            }
            with_count<kDirectRows>(args.rows, [&]<int rows>() {
                switch (piece) {
                    case 32: return multiply_packed<format, rows, 32>(args, streams, num_streams);
                    case 64: return multiply_packed<format, rows, 64>(args, streams, num_streams);
                    default: return multiply_packed<format, rows, 0>(args, streams, num_streams);
                }
            });
        }
    });
}

// ---- Many rows ------------------------------------------------------------------------------------------------------

constexpr int64_t kDepth = 640;       // k widened at once, at most: a panel of it and a few rows fit L1
constexpr int64_t kChunkRows = 120;   // rows of a chunk, at most: a multiple of every kBlockRows
constexpr int64_t kChunkPanels = 8;

// What a chunk keeps in scratch.
template <WeightFormat format>
struct Scratch {
    static constexpr int64_t kRowStride = kDepth * kWideRow<format> + 64;  // rows start in different sets of the cache
    static constexpr int64_t kMaxGroups = kDepth / 16;
    alignas(64) uint8_t rows[kChunkRows * kRowStride];
    alignas(64) uint8_t weights[kDepth * kPanel * kWideWeight<format>];
    alignas(64) float scales[kMaxGroups * kPanel];
    alignas(64) float mins[kMaxGroups * kPanel];
    alignas(64) float acc[kChunkPanels * kChunkRows * kPanel];  // int32 where a group is all of k
    RowGroup groups[kChunkRows * kMaxGroups];
};

// `depth` values of k of a panel and of a few rows of a chunk, `row` the first of them, where a group is all of k.
template <WeightFormat format, int rows>
[[gnu::noinline]] void multiply_whole(const Scratch<format>& scratch, int64_t row, float* acc, int64_t depth) {
    I32 dot[rows];
    dot_wide<format, rows>(scratch.weights, scratch.rows + row * scratch.kRowStride, scratch.kRowStride, depth, dot);
    for (int r = 0; r < rows; ++r) {
        auto* sum = reinterpret_cast<int32_t*>(acc + r * kPanel);
        store(sum, load(sum) + dot[r]);
    }
}

// The same in groups.
template <WeightFormat format, int rows, int64_t fixed_group>
[[gnu::noinline]] void multiply_groups(const Scratch<format>& scratch, int64_t row, float* acc, int64_t depth, int64_t any_group,
                     bool has_min) {
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

// Rows [row, row + num_rows) of the product with panels [panel, panel + num_panels).
template <WeightFormat format>
void multiply_chunk(const LinearArgs& args, int64_t row, int64_t num_rows, int64_t panel, int64_t num_panels,
                    Scratch<format>& scratch) {
    const PackedMatrix& w = *args.weight;
    const QuantizedRows& x = *args.quantized;
    const int64_t num_groups = w.padded_k / w.group, panel_bytes = packed_bytes(format, w.padded_k);
    const int64_t group = num_groups == 1 ? 0 : w.group;
    const int32_t bias = kBias<format> - middle(w);
    const int64_t unit = group == 128 ? 128 : 64;
    const int64_t num_depths = (w.padded_k + kDepth - 1) / kDepth;

    memset(scratch.acc, 0, static_cast<size_t>(num_panels * num_rows * kPanel) * sizeof(float));
    for (int64_t d = 0; d < num_depths; ++d) {
        const int64_t k = chunk_start(w.padded_k / unit, num_depths, d) * unit;
        const int64_t depth = chunk_start(w.padded_k / unit, num_depths, d + 1) * unit - k;
        const int64_t first_group = group ? k / group : 0, depth_groups = group ? depth / group : 0;
        for (int64_t r = 0; r < num_rows; ++r) {
            widen_row<format>(x.q + (row + r) * x.padded_k + k, depth, scratch.rows + r * scratch.kRowStride);
            for (int64_t g = 0; g < depth_groups; ++g) {
                scratch.groups[r * scratch.kMaxGroups + g] = row_group(x, (row + r) * num_groups + first_group + g, bias);
            }
        }
        for (int64_t p = 0; p < num_panels; ++p) {
            const auto* packed = static_cast<const uint8_t*>(w.data) + (panel + p) * panel_bytes;
            widen_weights<format>(packed + packed_bytes(format, k), depth, scratch.weights);
            for (int64_t g = 0; g < depth_groups; ++g) {
                const int64_t index = (panel + p) * num_groups + first_group + g;
                store(scratch.scales + g * kPanel, load_group(w.scales, w.scale_format, index));
                if (w.has_min) store(scratch.mins + g * kPanel, load_group(w.mins, w.scale_format, index));
            }
            for (int64_t r = 0; r < num_rows; r += kBlockRows) {
                float* acc = scratch.acc + (p * num_rows + r) * kPanel;
                with_count<kBlockRows>(smaller(kBlockRows, num_rows - r), [&]<int rows>() {
                    if (group == 0) {
                        multiply_whole<format, rows>(scratch, r, acc, depth);
                    } else if (group == 32) {
                        multiply_groups<format, rows, 32>(scratch, r, acc, depth, group, w.has_min);
                    } else {
                        multiply_groups<format, rows, 0>(scratch, r, acc, depth, group, w.has_min);
                    }
                });
            }
        }
    }
    for (int64_t r = 0; r < num_rows; ++r) {
        const RowGroup whole = row_group(x, (row + r) * num_groups, bias);
        finish_panels(args, panel, num_panels, row + r, [&](int64_t p) {
            const float* acc = scratch.acc + (p * num_rows + r) * kPanel;
            if (group) return load(acc);
            const F32 scale = load_group(w.scales, w.scale_format, panel + p);
            const F32 sum = add_group(broadcast(0.0f), load(reinterpret_cast<const int32_t*>(acc)), whole, scale);
            return w.has_min ? add_min(sum, whole, load_group(w.mins, w.scale_format, panel + p)) : sum;
        });
    }
}

template <WeightFormat format>
void multiply_many_rows(const LinearArgs& args, Team& team) {
    static_assert(sizeof(Scratch<format>) <= Team::kScratchBytes);
    const int64_t unit = panels_per_unit(args), num_units = args.weight->num_panels / unit;
    const int64_t row_blocks = (args.rows + kBlockRows - 1) / kBlockRows;
    const int64_t row_chunks = (args.rows + kChunkRows - 1) / kChunkRows;
    const int64_t wanted = (4 * team.num_threads() + row_chunks - 1) / row_chunks;
    const int64_t panel_chunks = smaller(num_units, larger(wanted, (num_units * unit + kChunkPanels - 1) / kChunkPanels));
    // Chunks of the same panels follow each other: one thread finds in the cache what another has read.
    team.each(panel_chunks * row_chunks, [&](int64_t chunk, int thread) {
        const int64_t along = chunk % row_chunks, across = chunk / row_chunks;
        const int64_t row = chunk_start(row_blocks, row_chunks, along) * kBlockRows;
        const int64_t row_end = smaller(args.rows, chunk_start(row_blocks, row_chunks, along + 1) * kBlockRows);
        const int64_t panel = chunk_start(num_units, panel_chunks, across) * unit;
        const int64_t panel_end = chunk_start(num_units, panel_chunks, across + 1) * unit;
        multiply_chunk<format>(args, row, row_end - row, panel, panel_end - panel,
                                        *reinterpret_cast<Scratch<format>*>(team.scratch(thread)));
    });
}

template <WeightFormat format>
void multiply(const LinearArgs& args, Team& team) {
    if (args.rows <= kDirectRows) {
        multiply_few_rows<format>(args, team);
    } else {
        multiply_many_rows<format>(args, team);
    }
}

}  // namespace

void linear_quantized(const LinearArgs& args, Team& team) {
    if (args.rows == 0) return;
    if (args.weight->format == WeightFormat::int8) {
        multiply<WeightFormat::int8>(args, team);
    } else {
        multiply<WeightFormat::int4>(args, team);
    }
    if (args.best != nullptr) choose_best(args);
}

}  // namespace octavo::OCTAVO_ISA
