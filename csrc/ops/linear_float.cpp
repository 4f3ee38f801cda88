// f32, bf16 and f16 weights.
//
// A chunk is a block of rows times a range of panels. It copies its rows of x to the thread's scratch memory, then
// takes four panels at a time (four streams from memory) down k, a block of 32 k for all its rows before the next, so
// that a weight is read from memory once and the sums stay in the first-level cache.
//
// With AMX, tiles take over where they give the same bits and there are rows to fill them.
#include "isa/current.h"
#include "ops/epilogue.h"
#include "ops/functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kDepth = 32;  // k of a block
constexpr int64_t kGroup = 4;   // panels side by side

// Vectors of sums and weights that fit the registers beside x, and rows of x at once.
#if defined(__AVX512F__)
constexpr int kVectors = 27;
constexpr int kMaxRows = 12;
#else
constexpr int kVectors = 7;
constexpr int kMaxRows = 6;
#endif

// One block of k for a few rows and up to kGroup panels: adds to `sums` [panel][sum_rows][16]. `ahead` is where the
// first panel's block is that comes to memory's turn.
struct Block {
    const float* x;  // [row][kDepth]
    const uint8_t* weights;
    const uint8_t* ahead;
    int64_t panel_bytes;
    int64_t num_panels;
    float* sums;
    int64_t sum_rows;
};

// As many panels at once as the registers hold, of `chains` sums for each row. A weight that only one row needs comes
// straight from memory. Two panels feed the multipliers from four rows on.
constexpr int panels_at_once(int rows, int chains) {
    const int fit = kVectors / (rows > 1 ? rows * chains + 1 : chains);
    return fit >= 4 && rows < 4 ? 4 : fit >= 2 ? 2 : 1;
}

static inline void prefetch(const uint8_t* address) { __builtin_prefetch(address, 0, 3); }

struct F32Weights {
    static constexpr int64_t kBytes = 4;
    static F32 row(const uint8_t* block, int k) {
        return load(reinterpret_cast<const float*>(block) + k * kPanel);
    }
};

struct F16Weights {
    static constexpr int64_t kBytes = 2;
    static F32 row(const uint8_t* block, int k) {
        return load_f16(reinterpret_cast<const uint16_t*>(block) + k * kPanel);
    }
};

// In order of k, one chain.
template <class Weights>
struct Sequential {
    static constexpr int64_t kBytes = Weights::kBytes;
    static constexpr int chains(int) { return 1; }

    template <int kRows, int kPanels, bool kAhead>
    static inline void add(const Block& block, int64_t panel) {
        const uint8_t* weights = block.weights + panel * block.panel_bytes;
        const uint8_t* ahead = block.ahead + panel * block.panel_bytes;
        float* sums = block.sums + panel * block.sum_rows * kPanel;
        F32 sum[kRows][kPanels];
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) sum[r][p] = load(sums + (p * block.sum_rows + r) * kPanel);
        }
#pragma GCC unroll 4
        for (int k = 0; k < kDepth; ++k) {
            F32 weight[kPanels];
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                if constexpr (kAhead) prefetch(ahead + p * block.panel_bytes + k * kPanel * kBytes);
                weight[p] = Weights::row(weights + p * block.panel_bytes, k);
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                const F32 x = broadcast(block.x[r * kDepth + k]);
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p) sum[r][p] = fma(x, weight[p], sum[r][p]);
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) store(sums + (p * block.sum_rows + r) * kPanel, sum[r][p]);
        }
    }
};

// bfloat16: even and odd k in two chains from zero for each block.
struct EvenOdd {
    static constexpr int64_t kBytes = 2;
    // Few rows leave room for both chains; more take one chain after the other.
    static constexpr bool together(int rows) { return rows <= 2; }
    static constexpr int chains(int rows) { return together(rows) ? 2 : 1; }

    static I32 pair(const uint8_t* block, int i) { return load(reinterpret_cast<const int32_t*>(block) + i * kPanel); }
    static F32 even(I32 pair) { return as_f32(shift_left<16>(pair)); }
    static F32 odd(I32 pair) { return as_f32(pair & broadcast(static_cast<int32_t>(0xffff0000))); }

    template <int kRows, int kPanels, bool kAhead>
    static inline void add(const Block& block, int64_t panel) {
        const uint8_t* weights = block.weights + panel * block.panel_bytes;
        const uint8_t* ahead = block.ahead + panel * block.panel_bytes;
        float* sums = block.sums + panel * block.sum_rows * kPanel;
        F32 evens[kRows][kPanels], odds[kRows][kPanels];
        zero(evens);
        if constexpr (together(kRows)) {
            zero(odds);
#pragma GCC unroll 2
            for (int i = 0; i < kDepth / 2; ++i) {
                I32 pairs[kPanels];
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p) {
                    if constexpr (kAhead) prefetch(ahead + p * block.panel_bytes + i * 64);
                    pairs[p] = pair(weights + p * block.panel_bytes, i);
                }
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    const F32 x_even = broadcast(block.x[r * kDepth + 2 * i]);
                    const F32 x_odd = broadcast(block.x[r * kDepth + 2 * i + 1]);
#pragma GCC unroll 4
                    for (int p = 0; p < kPanels; ++p) {
                        evens[r][p] = fma(x_even, even(pairs[p]), evens[r][p]);
                        odds[r][p] = fma(x_odd, odd(pairs[p]), odds[r][p]);
                    }
                }
            }
        } else {
            chain<kRows, kPanels, kAhead, false>(block, weights, ahead, evens);
            zero(odds);
            chain<kRows, kPanels, kAhead, true>(block, weights, nullptr, odds);
        }
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                float* sum = sums + (p * block.sum_rows + r) * kPanel;
                store(sum, load(sum) + (evens[r][p] + odds[r][p]));
            }
        }
    }

  private:
    template <int kRows, int kPanels>
    static inline void zero(F32 (&sum)[kRows][kPanels]) {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) sum[r][p] = broadcast(0.0f);
        }
    }

    template <int kRows, int kPanels, bool kAhead, bool kOdd>
    static inline void chain(const Block& block, const uint8_t* weights, const uint8_t* ahead,
                             F32 (&sum)[kRows][kPanels]) {
#pragma GCC unroll 4
        for (int i = 0; i < kDepth / 2; ++i) {
            F32 weight[kPanels];
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                if constexpr (kAhead) prefetch(ahead + p * block.panel_bytes + i * 64);
                const I32 both = pair(weights + p * block.panel_bytes, i);
                weight[p] = kOdd ? odd(both) : even(both);
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                const F32 x = broadcast(block.x[r * kDepth + 2 * i + kOdd]);
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p) sum[r][p] = fma(x, weight[p], sum[r][p]);
            }
        }
    }
};

using AddBlock = void (*)(const Block&);

template <class Order, bool kAhead, int kRows>
void add_block(const Block& block) {
    constexpr int kPanels = panels_at_once(kRows, Order::chains(kRows));
    int64_t panel = 0;
    for (; panel + kPanels <= block.num_panels; panel += kPanels) Order::template add<kRows, kPanels, kAhead>(block, panel);
    if constexpr (kPanels > 1) {
        for (; panel < block.num_panels; ++panel) Order::template add<kRows, 1, kAhead>(block, panel);
    }
}

template <class Order, bool kAhead, int kRows = kMaxRows>
AddBlock add_block_of(int64_t rows) {
    if constexpr (kRows == 1) {
        return add_block<Order, kAhead, 1>;
    } else {
        return rows == kRows ? add_block<Order, kAhead, kRows> : add_block_of<Order, kAhead, kRows - 1>(rows);
    }
}

// How rows and panels are cut into chunks. Columns are the slower index: chunks that run at the same time share weights.
struct Cut {
    int64_t rows, row_blocks, panels, panel_blocks;

    int64_t chunks() const { return row_blocks * panel_blocks; }
    int64_t row(int64_t chunk) const { return chunk_start(rows, row_blocks, chunk % row_blocks); }
    int64_t row_end(int64_t chunk) const { return chunk_start(rows, row_blocks, chunk % row_blocks + 1); }
    // Even, so that a gate and its up stay together, and whole groups where there are enough.
    int64_t panel(int64_t block) const {
        const int64_t unit = panels >= 16 * kGroup ? kGroup : 2;
        const int64_t start = unit * chunk_start((panels + unit - 1) / unit, panel_blocks, block);
        return start < panels ? start : panels;
    }
    int64_t first_panel(int64_t chunk) const { return panel(chunk / row_blocks); }
    int64_t panel_end(int64_t chunk) const { return panel(chunk / row_blocks + 1); }
};

constexpr int64_t kTilesAhead = 3;
constexpr int64_t kRowBlock = 48;  // at most
constexpr int64_t kSumsBytes = int64_t{384} << 10;  // of the scratch memory; x has the rest
constexpr int64_t kXBytes = static_cast<int64_t>(Team::kScratchBytes) - kSumsBytes;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

Cut cut_evenly(const LinearArgs& args, const Team& team) {
    const int64_t panels = args.weight->num_panels;
    const int64_t row_blocks = ceil_div(args.rows, kRowBlock);
    const int64_t wanted = row_blocks == 1 && team.num_threads() <= 2 ? 8 : 8 * team.num_threads();
    int64_t panel_blocks = ceil_div(wanted, row_blocks);
    if (panel_blocks > ceil_div(panels, 2)) panel_blocks = ceil_div(panels, 2);
    return {args.rows, row_blocks, panels, panel_blocks};
}

// Blocks [start, end) of k of a block of rows: [block][row][kDepth], zero beyond the end of k.
void copy_x(const LinearArgs& args, int64_t first_row, int64_t rows, int64_t start, int64_t end, float* target) {
    for (int64_t row = 0; row < rows; ++row) {
        const float* x = args.x + (first_row + row) * args.x_stride;
        float* place = target + row * kDepth;
        for (int64_t block = start; block < end; ++block, place += rows * kDepth) {
            const int64_t left = args.weight->k - block * kDepth;
            const size_t count = static_cast<size_t>(left < kDepth ? left : kDepth);
            store(place, load_first(x + block * kDepth, count));
            store(place + kPanel, count > kPanel ? load_first(x + block * kDepth + kPanel, count - kPanel) : broadcast(0.0f));
        }
    }
}

template <class Order>
void multiply(const LinearArgs& args, Team& team) {
    const PackedMatrix& matrix = *args.weight;
    const int64_t block_bytes = kDepth * kPanel * Order::kBytes;
    const int64_t panel_bytes = matrix.padded_k * kPanel * Order::kBytes;
    const int64_t depth_blocks = matrix.padded_k / kDepth;
    const int64_t blocks_ahead = ceil_div(2048, block_bytes);

    Cut cut = cut_evenly(args, team);
    // A very long k is taken in slices, and the sums of all the chunk's panels wait in memory between them.
    const int64_t most_rows = ceil_div(args.rows, cut.row_blocks);
    const int64_t slices = ceil_div(most_rows * matrix.padded_k * 4, kXBytes);
    if (slices > 1) {
        const int64_t most_panels = kSumsBytes / (most_rows * kPanel * 4) / kGroup * kGroup;
        const int64_t needed = ceil_div(cut.panels, most_panels - kGroup);
        if (cut.panel_blocks < needed) cut.panel_blocks = needed;
    }

    team.each(cut.chunks(), [&](int64_t chunk, int thread) {
        const int64_t first_row = cut.row(chunk), rows = cut.row_end(chunk) - first_row;
        const int64_t first_panel = cut.first_panel(chunk), panel_end = cut.panel_end(chunk);
        float* all_sums = reinterpret_cast<float*>(team.scratch(thread));
        float* x = reinterpret_cast<float*>(team.scratch(thread) + kSumsBytes);
        const int64_t tiles = ceil_div(rows, kMaxRows), tile_rows = rows / tiles, larger_tiles = rows % tiles;
        const AddBlock add = add_block_of<Order, false>(tile_rows);
        const AddBlock add_larger = larger_tiles > 0 ? add_block_of<Order, false>(tile_rows + 1) : add;
        // The last tile brings in what comes next, unless there are so many rows that memory has the time.
        const AddBlock add_last = tiles <= kTilesAhead ? add_block_of<Order, true>(tile_rows) : add;

        for (int64_t slice = 0; slice < slices; ++slice) {
            const int64_t start = chunk_start(depth_blocks, slices, slice);
            const int64_t end = chunk_start(depth_blocks, slices, slice + 1);
            copy_x(args, first_row, rows, start, end, x);
            for (int64_t panel = first_panel; panel < panel_end; panel += kGroup) {
                const int64_t panels = panel_end - panel < kGroup ? panel_end - panel : kGroup;
                float* sums = slices == 1 ? all_sums : all_sums + (panel - first_panel) * rows * kPanel;
                if (slice == 0) memset(sums, 0, static_cast<size_t>(panels * rows * kPanel) * sizeof(float));
                const uint8_t* weights = static_cast<const uint8_t*>(matrix.data) + panel * panel_bytes;
                for (int64_t k = start; k < end; ++k) {
                    Block block{nullptr, weights + k * block_bytes, nullptr, panel_bytes, panels, nullptr, rows};
                    const int64_t next = k + blocks_ahead;
                    block.ahead = next < end ? weights + next * block_bytes
                                             : weights + kGroup * panel_bytes + (start + next - end) * block_bytes;
                    block.x = x + (k - start) * rows * kDepth;
                    block.sums = sums;
                    for (int64_t tile = 0; tile < tiles; ++tile) {
                        (tile < larger_tiles ? add_larger : tile < tiles - 1 ? add : add_last)(block);
                        const int64_t count = tile < larger_tiles ? tile_rows + 1 : tile_rows;
                        block.x += count * kDepth;
                        block.sums += count * kPanel;
                    }
                }
                if (slice == slices - 1) finish_rows(args, first_row, rows, panel, panels, sums, rows);
            }
        }
    });
}

#if defined(__AMX_TILE__)

// Tiles. x is packed in tile order, [16 rows][32 k] bfloat16 in 1 KiB, [row tile][k tile], into the scratch memory of
// all threads together, which lies in one piece. A panel of weights is a row of tiles as it is.
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRows = 16;
constexpr int64_t kTiledXBytes = int64_t{3} << 19;  // at most: it should stay in a second-level cache of 2 MiB

struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler (GCC 12) takes tile loads for instructions that read no memory.
static inline void order_memory() { asm volatile("" ::: "memory"); }

static void configure_tiles() {
    const TileConfig config;
    order_memory();
    _tile_loadconfig(&config);
}

// Tiles [first, end) of those of a block of rows, counted along k and then over the row tiles.
static void pack_tiles(const LinearArgs& args, int64_t first_row, int64_t rows, int64_t first, int64_t end,
                       uint8_t* packed) {
    const int64_t k_tiles = args.weight->padded_k / kDepth, k = args.weight->k;
    const __m512i high_halves = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27,
                                                 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
    while (first < end) {
        const int64_t row_tile = first / k_tiles, start = first % k_tiles;
        const int64_t count = end - first < k_tiles - start ? end - first : k_tiles - start;
        for (int64_t r = 0; r < kTileRows; ++r) {
            const int64_t row = row_tile * kTileRows + r;
            const float* x = args.x + (first_row + row) * args.x_stride;
            uint8_t* target = packed + first * kTileBytes + r * 64;
            for (int64_t tile = start; tile < start + count; ++tile, target += kTileBytes) {
                const int64_t left = row < rows ? k - tile * kDepth : 0;
                F32 low = broadcast(0.0f), high = low;
                if (left >= kDepth) {
                    low = load(x + tile * kDepth);
                    high = load(x + tile * kDepth + kPanel);
                } else if (left > 0) {
                    low = load_first(x + tile * kDepth, static_cast<size_t>(left));
                    if (left > kPanel) high = load_first(x + tile * kDepth + kPanel, static_cast<size_t>(left - kPanel));
                }
                _mm512_store_si512(target, _mm512_permutex2var_epi16(as_i32(low).all, high_halves, as_i32(high).all));
            }
        }
        first += count;
    }
}

struct Tiles {
    const uint8_t* x;  // of the first row tile
    const uint8_t* weights;
    int64_t panel_bytes;
    int64_t k_tiles;
    int64_t num_panels;  // those beyond are computed from the last one and not used
};

// One row tile by four panels, four streams from memory: sums [panel][16][16]. `next` is the panel that comes after.
static void multiply_1x4(const Tiles& tiles, const uint8_t* next, float* sums) {
    const int64_t last = (tiles.num_panels - 1) * tiles.panel_bytes;
    const int64_t at_1 = tiles.panel_bytes < last ? tiles.panel_bytes : last;
    const int64_t at_2 = 2 * tiles.panel_bytes < last ? 2 * tiles.panel_bytes : last;
    const int64_t at_3 = 3 * tiles.panel_bytes < last ? 3 * tiles.panel_bytes : last;
    const uint8_t *x = tiles.x, *w = tiles.weights;
    order_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < tiles.k_tiles; ++k, x += kTileBytes, w += kTileBytes) {
        const uint8_t* ahead = k + 2 < tiles.k_tiles ? w + 2 * kTileBytes : next + (k + 2 - tiles.k_tiles) * kTileBytes;
        const auto fetch = [](const uint8_t* tile) {
            for (int line = 0; line < kTileBytes; line += 64) prefetch(tile + line);
        };
        _tile_loadd(4, x, 64);
        fetch(ahead);
        _tile_loadd(5, w, 64);
        _tile_dpbf16ps(0, 4, 5);
        fetch(ahead + at_1);
        _tile_loadd(6, w + at_1, 64);
        _tile_dpbf16ps(1, 4, 6);
        fetch(ahead + at_2);
        _tile_loadd(7, w + at_2, 64);
        _tile_dpbf16ps(2, 4, 7);
        fetch(ahead + at_3);
        _tile_loadd(5, w + at_3, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

// Two row tiles by two panels: sums [row tile][panel][16][16]. Meanwhile lines [first_line, end_line) of 32 of every
// pair of tiles of the next two panels are brought into the second-level cache.
static void multiply_2x2(const Tiles& tiles, int64_t first_line, int64_t end_line, float* sums) {
    const int64_t x_bytes = tiles.k_tiles * kTileBytes;
    const int64_t at_1 = tiles.num_panels > 1 ? tiles.panel_bytes : 0;
    const uint8_t *x = tiles.x, *w = tiles.weights, *next = tiles.weights + 2 * tiles.panel_bytes;
    order_memory();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < tiles.k_tiles; ++k, x += kTileBytes, w += kTileBytes, next += kTileBytes) {
        _tile_loadd(4, x, 64);
        _tile_loadd(6, w, 64);
        _tile_loadd(7, w + at_1, 64);
        _tile_loadd(5, x + x_bytes, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        for (int64_t line = first_line; line < end_line; ++line) {
            __builtin_prefetch(next + line / 16 * at_1 + line % 16 * 64, 0, 2);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

// Panels [panel, panel_end) for the block of packed rows.
static void multiply_panels(const LinearArgs& args, int64_t first_row, int64_t rows, const uint8_t* x, int64_t panel,
                            int64_t panel_end) {
    alignas(64) float sums[4 * 256];
    const int64_t k_tiles = args.weight->padded_k / kDepth, panel_bytes = k_tiles * kTileBytes;
    const int64_t row_tiles = ceil_div(rows, kTileRows), pairs = row_tiles / 2;
    const uint8_t* weights = static_cast<const uint8_t*>(args.weight->data);
    const auto finish_tile = [&](int64_t row_tile, int64_t first_panel, int64_t panels, const float* from) {
        const int64_t row = row_tile * kTileRows, left = rows - row;
        finish_rows(args, first_row + row, left < kTileRows ? left : kTileRows, first_panel, panels, from, kTileRows);
    };
    for (; panel < panel_end; panel += kGroup) {
        const int64_t group_end = panel + kGroup < panel_end ? panel + kGroup : panel_end;
        for (int64_t two = panel; two < group_end; two += 2) {
            const int64_t panels = group_end - two < 2 ? 1 : 2;
            for (int64_t pair = 0; pair < pairs; ++pair) {
                const Tiles tiles{x + 2 * pair * panel_bytes, weights + two * panel_bytes, panel_bytes, k_tiles, panels};
                multiply_2x2(tiles, chunk_start(32, pairs, pair), chunk_start(32, pairs, pair + 1), sums);
                finish_tile(2 * pair, two, panels, sums);
                finish_tile(2 * pair + 1, two, panels, sums + 512);
            }
        }
        if (row_tiles % 2 != 0) {
            const Tiles tiles{x + (row_tiles - 1) * panel_bytes, weights + panel * panel_bytes, panel_bytes, k_tiles,
                              group_end - panel};
            multiply_1x4(tiles, weights + group_end * panel_bytes, sums);
            finish_tile(row_tiles - 1, panel, group_end - panel, sums);
        }
    }
}

// The most rows whose packed x fits, in whole pairs of tiles if that is any; 0: not even one tile fits.
static int64_t most_tiled_rows(const LinearArgs& args, const Team& team) {
    int64_t bytes = team.num_threads() * static_cast<int64_t>(Team::kScratchBytes);
    if (bytes > kTiledXBytes) bytes = kTiledXBytes;
    const int64_t tiles = bytes / (args.weight->padded_k * kTileRows * 2);
    return (tiles > 1 ? tiles / 2 * 2 : tiles) * kTileRows;
}

static void multiply_tiled(const LinearArgs& args, Team& team) {
    const int64_t panels = args.weight->num_panels, k_tiles = args.weight->padded_k / kDepth;
    const int64_t pairs = ceil_div(args.rows, 2 * kTileRows);
    const int64_t blocks = ceil_div(args.rows, most_tiled_rows(args, team));
    uint8_t* x = team.scratch(0);
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t unit = blocks > pairs ? kTileRows : 2 * kTileRows;
        const int64_t units = ceil_div(args.rows, unit);
        const int64_t first_row = unit * chunk_start(units, blocks, block);
        const int64_t end = unit * chunk_start(units, blocks, block + 1);
        const int64_t rows = (end < args.rows ? end : args.rows) - first_row;

        const int64_t x_tiles = ceil_div(rows, kTileRows) * k_tiles;
        const int64_t most_pack_chunks = 4 * team.num_threads();
        const int64_t pack_chunks = ceil_div(x_tiles, 128) < most_pack_chunks ? ceil_div(x_tiles, 128) : most_pack_chunks;
        team.each(pack_chunks, [&](int64_t chunk, int) {
            pack_tiles(args, first_row, rows, chunk_start(x_tiles, pack_chunks, chunk),
                       chunk_start(x_tiles, pack_chunks, chunk + 1), x);
        });

        const int64_t wanted = (rows <= 64 ? 4 : 8) * team.num_threads();
        const int64_t most = ceil_div(panels, 2);
        const Cut cut{rows, 1, panels, wanted < most ? wanted : most};
        team.each(cut.chunks(), [&](int64_t chunk, int) {
            configure_tiles();
            multiply_panels(args, first_row, rows, x, cut.first_panel(chunk), cut.panel_end(chunk));
            _tile_release();
        });
    }
}

#endif

}  // namespace

void linear_float(const LinearArgs& args, Team& team) {
    if (args.rows == 0) return;
    switch (args.weight->format) {
        case WeightFormat::f32: multiply<Sequential<F32Weights>>(args, team); break;
        case WeightFormat::f16: multiply<Sequential<F16Weights>>(args, team); break;
        default:
#if defined(__AMX_TILE__)
            // One or two rows read memory faster without tiles.
            if (args.x_is_bf16 && args.rows > 2 && most_tiled_rows(args, team) > 0) {
                multiply_tiled(args, team);
                break;
            }
#endif
            multiply<EvenOdd>(args, team);
    }
    if (args.best != nullptr) choose_best(args, team);
}

}  // namespace octavo::OCTAVO_ISA
