// A few quantized rows: bound by memory. They meet the packed weights as these are, four panels in turn, so that four
// streams of weights are read at once.
#pragma once

#include "ops/quantized.h"

namespace octavo::OCTAVO_ISA {

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
[[gnu::noinline]] static void multiply_packed(const LinearArgs& args, const Stream* streams, int64_t num_streams) {
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
static void multiply_few_rows(const LinearArgs& args, Team& team) {
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

}  // namespace octavo::OCTAVO_ISA
