// Many quantized rows on AMX: two tiles of 16 rows meet two panels. Integer sums are exact, so that these are the bits
// of quantized_many.h.
#pragma once

#include "ops/quantized.h"

namespace octavo::OCTAVO_ISA {

constexpr int64_t kTile = 16;            // rows of a tile
constexpr int64_t kTileK = 64;           // k of a whole tile of int8
constexpr int64_t kTileInts = kTile * kPanel;
constexpr int64_t kTileBytes = kTile * kTileK;
constexpr int64_t kTilesDepth = 1024;    // k walked at once, at most
constexpr int64_t kTilesRows = 128;      // of a chunk, at most
constexpr int64_t kTilesPanels = 32;

struct TilesScratch {
    static constexpr int64_t kMaxGroups = kTilesDepth / 32;
    alignas(64) uint8_t rows[kTilesRows * kTilesDepth];  // [rows / 16][k / 64][16 rows][64 k]
    alignas(64) uint8_t weights[2 * kTilesDepth * kPanel];  // of two panels of int4, widened
    alignas(64) float scales[2][kMaxGroups * kPanel];
    alignas(64) float mins[2][kMaxGroups * kPanel];
    alignas(64) float acc[kTilesPanels * kTilesRows * kPanel];  // int32 where a group is all of k
    alignas(64) int32_t dots[2][4 * kTileInts];
    RowGroup groups[kTilesRows * kMaxGroups];
};
static_assert(sizeof(TilesScratch) <= Team::kScratchBytes);

// The tile registers: 0 to 3 sums of (row tile, panel), 4 and 5 activations, 6 and 7 weights. With groups of 32 the
// operands hold half as many k.
static inline void configure_tiles(int64_t k) {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } config;
    for (int t = 0; t < 8; ++t) {
        config.row_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? k : 64);
        config.rows[t] = static_cast<uint8_t>(t >= 6 ? k / 4 : kTile);
    }
    // gcc 12 does not know that these instructions read memory.
    asm volatile("" ::: "memory");
    _tile_loadconfig(&config);
}

struct TileOperands {
    const uint8_t* rows;     // the second row tile is row_stride further
    const uint8_t* weights;  // the second panel is panel_stride further
    int64_t row_stride, panel_stride;
};

// Into `sums` (tile r * 2 + p), which are added to or written, `steps` tiles of k.
template <WeightFormat format, int row_tiles, int panels>
OCTAVO_INLINE void multiply_tiles(const TileOperands& at, int64_t steps, int32_t* sums, bool adds) {
    asm volatile("" ::: "memory");
    if (adds) {
        _tile_loadd(0, sums, 64);
        if constexpr (panels > 1) _tile_loadd(1, sums + kTileInts, 64);
        if constexpr (row_tiles > 1) _tile_loadd(2, sums + 2 * kTileInts, 64);
        if constexpr (row_tiles > 1 && panels > 1) _tile_loadd(3, sums + 3 * kTileInts, 64);
    } else {
        _tile_zero(0);
        if constexpr (panels > 1) _tile_zero(1);
        if constexpr (row_tiles > 1) _tile_zero(2);
        if constexpr (row_tiles > 1 && panels > 1) _tile_zero(3);
    }
    for (int64_t i = 0; i < steps; ++i) {
        const uint8_t *x = at.rows + i * kTileBytes, *w = at.weights + i * kTileBytes;
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        if constexpr (panels > 1) _tile_loadd(7, w + at.panel_stride, 64);
        if constexpr (row_tiles > 1) _tile_loadd(5, x + at.row_stride, 64);
        if constexpr (format == WeightFormat::int8) {
            _tile_dpbssd(0, 4, 6);
            if constexpr (panels > 1) _tile_dpbssd(1, 4, 7);
            if constexpr (row_tiles > 1) _tile_dpbssd(2, 5, 6);
            if constexpr (row_tiles > 1 && panels > 1) _tile_dpbssd(3, 5, 7);
        } else {
            _tile_dpbsud(0, 4, 6);
            if constexpr (panels > 1) _tile_dpbsud(1, 4, 7);
            if constexpr (row_tiles > 1) _tile_dpbsud(2, 5, 6);
            if constexpr (row_tiles > 1 && panels > 1) _tile_dpbsud(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    if constexpr (panels > 1) _tile_stored(1, sums + kTileInts, 64);
    if constexpr (row_tiles > 1) _tile_stored(2, sums + 2 * kTileInts, 64);
    if constexpr (row_tiles > 1 && panels > 1) _tile_stored(3, sums + 3 * kTileInts, 64);
    asm volatile("" ::: "memory");
}

// acc of a chunk: [panels in pairs][row tiles in pairs][row tile, panel][16 rows][16 columns]; an accumulator block is
// what multiply_tiles() adds to.
struct AccBlocks {
    int64_t row_pairs;
    int64_t block(int64_t panel, int64_t row) const {
        return ((panel / 2) * row_pairs + row / (2 * kTile)) * 4 * kTileInts;
    }
    int64_t at(int64_t panel, int64_t row) const {
        return block(panel, row) + ((row / kTile % 2) * 2 + panel % 2) * kTileInts + row % kTile * kPanel;
    }
};

// Adds group g of `num_rows` rows and of `panels` panels to their accumulators.
template <int panels>
OCTAVO_INLINE void add_tile_groups(const TilesScratch& scratch, int64_t row, int64_t num_rows, int64_t g, bool has_min,
                                   const int32_t* dots, float* acc) {
    const RowGroup* groups = scratch.groups + row * scratch.kMaxGroups + g;
    for (int p = 0; p < panels; ++p) {
        const F32 scale = load(scratch.scales[p] + g * kPanel), min = load(scratch.mins[p] + g * kPanel);
        for (int64_t r = 0; r < num_rows; ++r) {
            const int64_t at = (r / kTile * 2 + p) * kTileInts + r % kTile * kPanel;
            const RowGroup& group = groups[r * scratch.kMaxGroups];
            F32 sum = add_group(load(acc + at), load(dots + at), group, scale);
            if (has_min) sum = add_min(sum, group, min);
            store(acc + at, sum);
        }
    }
}

// One accumulator block: rows from `row`, of a chunk, with `panels` panels.
template <WeightFormat format, int row_tiles, int panels>
[[gnu::noinline]] static void multiply_tile_block(TilesScratch& scratch, const TileOperands& at, const PackedMatrix& w,
                                                  int64_t depth, int64_t row, int64_t num_rows, float* acc) {
    if (w.group == w.padded_k) {
        multiply_tiles<format, row_tiles, panels>(at, depth / kTileK, reinterpret_cast<int32_t*>(acc), true);
        return;
    }
    // Tiles of the next group are multiplied while those of this one are added.
    const int64_t num_groups = depth / w.group, steps = w.group < kTileK ? 1 : w.group / kTileK;
    const auto multiply_group = [&](int64_t g) {
        // Half a tile: its activations are half of each row, its weights half of the rows.
        const int64_t tile = g * w.group / kTileK * kTileBytes, half = g * w.group % kTileK;
        TileOperands here = at;
        here.rows += tile + half;
        here.weights += tile + half * kPanel;
        multiply_tiles<format, row_tiles, panels>(here, steps, scratch.dots[g % 2], false);
    };
    multiply_group(0);
    for (int64_t g = 0; g < num_groups; ++g) {
        if (g + 1 < num_groups) multiply_group(g + 1);
        add_tile_groups<panels>(scratch, row, num_rows, g, w.has_min, scratch.dots[g % 2], acc);
    }
}

template <WeightFormat format>
static void multiply_tiles_chunk(const LinearArgs& args, const Chunk& chunk, TilesScratch& scratch) {
    const PackedMatrix& w = *args.weight;
    const QuantizedRows& x = *args.quantized;
    const auto [first_row, num_rows, panel, num_panels] = chunk;
    const int64_t num_groups = w.padded_k / w.group, panel_bytes = packed_bytes(format, w.padded_k);
    const auto* data = static_cast<const uint8_t*>(w.data);
    const bool is_whole = num_groups == 1;
    const int32_t bias = -middle(w);
    const Depths depths(w, kTilesDepth);
    const AccBlocks blocks{parts(num_rows, 2 * kTile)};

    configure_tiles(w.group < kTileK ? w.group : kTileK);
    memset(scratch.acc, 0, static_cast<size_t>(blocks.block(num_panels + num_panels % 2, 0)) * sizeof(float));
    for (int64_t d = 0; d < depths.count; ++d) {
        const int64_t k = depths.start(d), depth = depths.start(d + 1) - k, num_tiles = depth / kTileK;
        const int64_t first_group = k / w.group, depth_groups = is_whole ? 0 : depth / w.group;
        for (int64_t r = 0; r < num_rows; ++r) {
            const int8_t* from = x.q + (first_row + r) * x.padded_k + k;
            uint8_t* to = scratch.rows + r / kTile * num_tiles * kTileBytes + r % kTile * kTileK;
            for (int64_t t = 0; t < num_tiles; ++t) {
                _mm512_store_si512(to + t * kTileBytes, _mm512_loadu_si512(from + t * kTileK));
            }
            for (int64_t g = 0; g < depth_groups; ++g) {
                const int64_t index = (first_row + r) * num_groups + first_group + g;
                scratch.groups[r * scratch.kMaxGroups + g] = row_group(x, index, bias);
            }
        }
        for (int64_t p = 0; p < num_panels; p += 2) {
            const int64_t pair = smaller(2, num_panels - p);
            const uint8_t* packed = data + (panel + p) * panel_bytes + packed_bytes(format, k);
            TileOperands at{nullptr, packed, num_tiles * kTileBytes, panel_bytes};
            if constexpr (format == WeightFormat::int4) {
                at.weights = scratch.weights;
                at.panel_stride = depth * kPanel;
                for (int64_t i = 0; i < pair; ++i) {
                    widen_weights<format>(packed + i * panel_bytes, depth, scratch.weights + i * at.panel_stride);
                }
            }
            for (int64_t i = 0; i < pair; ++i) {
                for (int64_t g = 0; g < depth_groups; ++g) {
                    const int64_t index = (panel + p + i) * num_groups + first_group + g;
                    store(scratch.scales[i] + g * kPanel, load_group(w.scales, w.scale_format, index));
                    if (w.has_min) store(scratch.mins[i] + g * kPanel, load_group(w.mins, w.scale_format, index));
                }
            }
            for (int64_t r = 0; r < num_rows; r += 2 * kTile) {
                const int64_t rows = smaller(2 * kTile, num_rows - r), bytes = packed_bytes(format, depth);
                for (int64_t next = p + 2; next < smaller(p + 4, num_panels); ++next) {
                    prefetch_share(packed + (next - p) * panel_bytes, bytes, r / (2 * kTile), blocks.row_pairs);
                }
                at.rows = scratch.rows + r / kTile * at.row_stride;
                float* acc = scratch.acc + blocks.block(p, r);
                with_count<2>(parts(rows, kTile), [&]<int row_tiles>() {
                    with_count<2>(pair, [&]<int panels>() {
                        multiply_tile_block<format, row_tiles, panels>(scratch, at, w, depth, r, rows, acc);
                    });
                });
            }
        }
    }
    _tile_release();
    for (int64_t r = 0; r < num_rows; ++r) {
        const RowGroup group = row_group(x, (first_row + r) * num_groups, bias);
        finish_panels(args, panel, num_panels, first_row + r, [&](int64_t p) {
            const float* acc = scratch.acc + blocks.at(p, r);
            return is_whole ? whole_sum(w, panel + p, load(reinterpret_cast<const int32_t*>(acc)), group) : load(acc);
        });
    }
}

// Groups of 16 would leave a tile mostly empty.
static inline bool fits_tiles(const PackedMatrix& w) { return w.group != 16; }

template <WeightFormat format>
static void multiply_rows_in_tiles(const LinearArgs& args, Team& team) {
    each_chunk(args, team, kTilesRows, kTile, kTilesPanels, [&](const Chunk& chunk, int thread) {
        multiply_tiles_chunk<format>(args, chunk, *reinterpret_cast<TilesScratch*>(team.scratch(thread)));
    });
}

}  // namespace octavo::OCTAVO_ISA
