// What the kernels of linear_quantized.cpp share.
#pragma once

#include "ops/dots.h"
#include "ops/epilogue.h"
#include "ops/groups.h"

namespace octavo::OCTAVO_ISA {

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a < b ? b : a; }
static inline int64_t parts(int64_t count, int64_t most) { return (count + most - 1) / most; }

// Calls body.operator()<count>() for a count from 1 to `most`.
template <int most, class Body>
static inline void with_count(int64_t count, const Body& body) {
    if constexpr (most > 0) {
        if (count == most) {
            body.template operator()<most>();
        } else {
            with_count<most - 1>(count, body);
        }
    }
}

// How many panels are finished together.
static inline int64_t panels_per_unit(const LinearArgs& args) { return args.epilogue.gated ? 2 : 1; }

// acc(i) is the accumulator of panel first_panel + i and the row.
template <class Acc>
static inline void finish_panels(const LinearArgs& args, int64_t first_panel, int64_t count, int64_t row,
                                 const Acc& acc) {
    if (args.epilogue.gated) {
        for (int64_t i = 0; i < count; i += 2) finish_gated(args, (first_panel + i) / 2, row, acc(i), acc(i + 1));
    } else {
        for (int64_t i = 0; i < count; ++i) finish(args, first_panel + i, row, acc(i));
    }
}

// A part of the product: rows and panels.
struct Chunk {
    int64_t row, num_rows, panel, num_panels;
};

// body(chunk, thread) for chunks that cover the product, of at most so many rows (in whole blocks) and panels (even).
template <class Body>
static inline void each_chunk(const LinearArgs& args, Team& team, int64_t most_rows, int64_t block_rows,
                              int64_t most_panels, const Body& body) {
    const int64_t unit = panels_per_unit(args), num_units = args.weight->num_panels / unit;
    const int64_t row_blocks = parts(args.rows, block_rows), row_chunks = parts(args.rows, most_rows);
    const int64_t wanted = parts(4 * team.num_threads(), row_chunks);
    const int64_t panel_chunks = smaller(num_units, larger(wanted, parts(num_units, most_panels / unit)));
    // Chunks of the same panels follow each other: one thread finds in the cache what another has read.
    team.each(panel_chunks * row_chunks, [&](int64_t index, int thread) {
        const int64_t along = index % row_chunks, across = index / row_chunks;
        const int64_t row = chunk_start(row_blocks, row_chunks, along) * block_rows;
        const int64_t row_end = smaller(args.rows, chunk_start(row_blocks, row_chunks, along + 1) * block_rows);
        const int64_t panel = chunk_start(num_units, panel_chunks, across) * unit;
        const int64_t panel_end = chunk_start(num_units, panel_chunks, across + 1) * unit;
        body(Chunk{row, row_end - row, panel, panel_end - panel}, thread);
    });
}

// k in nearly equal pieces of at most `most` that hold whole groups (or, where a group is all of k, any 64).
struct Depths {
    int64_t unit, num_units, count;

    Depths(const PackedMatrix& w, int64_t most) {
        unit = w.group == 128 ? 128 : 64;
        num_units = w.padded_k / unit;
        count = parts(w.padded_k, most);
    }
    int64_t start(int64_t d) const { return chunk_start(num_units, count, d) * unit; }
};

// Asks for a share of `bytes`: the part-th of num_parts.
static inline void prefetch_share(const uint8_t* data, int64_t bytes, int64_t part, int64_t num_parts) {
    const int64_t end = chunk_start(bytes / 64, num_parts, part + 1);
    for (int64_t i = chunk_start(bytes / 64, num_parts, part); i < end; ++i) __builtin_prefetch(data + i * 64, 0, 2);
}

// Where the last step of a chunk whose group is all of k gets its scale from.
static inline F32 whole_sum(const PackedMatrix& w, int64_t panel, I32 dot, const RowGroup& group) {
    const F32 sum = add_group(broadcast(0.0f), dot, group, load_group(w.scales, w.scale_format, panel));
    return w.has_min ? add_min(sum, group, load_group(w.mins, w.scale_format, panel)) : sum;
}

}  // namespace octavo::OCTAVO_ISA
