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

// Vectors of sums that fit the registers beside weights and x, and rows of x at once.
#if defined(__AVX512F__)
constexpr int kSums = 24;
constexpr int kMaxRows = 12;
#else
constexpr int kSums = 6;
constexpr int kMaxRows = 6;
#endif

// One block of k for a few rows and up to kGroup panels: adds to `sums` [panel][sum_rows][16]. `ahead` is where the
// first panel's block is that comes to memory's turn.
struct Block {
    const float* x;  // [row][x_stride]
    int64_t x_stride;
    const uint8_t* weights;
    const uint8_t* ahead;
    int64_t panel_bytes;
    int64_t num_panels;
    float* sums;
    int64_t sum_rows;
};

// As many panels at once as the registers hold, of `chains` sums for each row.
constexpr int panels_at_once(int rows, int chains) {
    const int fit = kSums / (rows * chains);
    return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
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

    template <int kRows, int kPanels>
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
        for (int k = 0; k < kDepth; ++k) {
            F32 weight[kPanels];
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                prefetch(ahead + p * block.panel_bytes + k * kPanel * kBytes);
                weight[p] = Weights::row(weights + p * block.panel_bytes, k);
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                const F32 x = broadcast(block.x[r * block.x_stride + k]);
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
    static constexpr bool together(int rows) { return rows <= 3; }
    static constexpr int chains(int rows) { return together(rows) ? 2 : 1; }

    static I32 pair(const uint8_t* block, int i) { return load(reinterpret_cast<const int32_t*>(block) + i * kPanel); }
    static F32 even(I32 pair) { return as_f32(shift_left<16>(pair)); }
    static F32 odd(I32 pair) { return as_f32(pair & broadcast(static_cast<int32_t>(0xffff0000))); }

    template <int kRows, int kPanels>
    static inline void add(const Block& block, int64_t panel) {
        const uint8_t* weights = block.weights + panel * block.panel_bytes;
        const uint8_t* ahead = block.ahead + panel * block.panel_bytes;
        float* sums = block.sums + panel * block.sum_rows * kPanel;
        F32 evens[kRows][kPanels], odds[kRows][kPanels];
        zero(evens);
        if constexpr (together(kRows)) {
            zero(odds);
            for (int i = 0; i < kDepth / 2; ++i) {
                I32 pairs[kPanels];
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p) {
                    prefetch(ahead + p * block.panel_bytes + i * 64);
                    pairs[p] = pair(weights + p * block.panel_bytes, i);
                }
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    const F32 x_even = broadcast(block.x[r * block.x_stride + 2 * i]);
                    const F32 x_odd = broadcast(block.x[r * block.x_stride + 2 * i + 1]);
#pragma GCC unroll 4
                    for (int p = 0; p < kPanels; ++p) {
                        evens[r][p] = fma(x_even, even(pairs[p]), evens[r][p]);
                        odds[r][p] = fma(x_odd, odd(pairs[p]), odds[r][p]);
                    }
                }
            }
        } else {
            chain<kRows, kPanels, false>(block, weights, ahead, evens);
            zero(odds);
            chain<kRows, kPanels, true>(block, weights, nullptr, odds);
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

    template <int kRows, int kPanels, bool kOdd>
    static inline void chain(const Block& block, const uint8_t* weights, const uint8_t* ahead,
                             F32 (&sum)[kRows][kPanels]) {
        for (int i = 0; i < kDepth / 2; ++i) {
            F32 weight[kPanels];
#pragma GCC unroll 4
            for (int p = 0; p < kPanels; ++p) {
                if constexpr (!kOdd) prefetch(ahead + p * block.panel_bytes + i * 64);
                const I32 both = pair(weights + p * block.panel_bytes, i);
                weight[p] = kOdd ? odd(both) : even(both);
            }
#pragma GCC unroll 12
            for (int r = 0; r < kRows; ++r) {
                const F32 x = broadcast(block.x[r * block.x_stride + 2 * i + kOdd]);
#pragma GCC unroll 4
                for (int p = 0; p < kPanels; ++p) sum[r][p] = fma(x, weight[p], sum[r][p]);
            }
        }
    }
};

using AddBlock = void (*)(const Block&);

template <class Order, int kRows>
void add_block(const Block& block) {
    constexpr int kPanels = panels_at_once(kRows, Order::chains(kRows));
    int64_t panel = 0;
    for (; panel + kPanels <= block.num_panels; panel += kPanels) Order::template add<kRows, kPanels>(block, panel);
    if constexpr (kPanels > 1) {
        for (; panel < block.num_panels; ++panel) Order::template add<kRows, 1>(block, panel);
    }
}

template <class Order, int kRows = kMaxRows>
AddBlock add_block_of(int64_t rows) {
    if constexpr (kRows == 1) {
        return add_block<Order, 1>;
    } else {
        return rows == kRows ? add_block<Order, kRows> : add_block_of<Order, kRows - 1>(rows);
    }
}

// `rows` rows and `num_panels` panels of finished sums [panel][sum_rows][16].
void finish_rows(const LinearArgs& args, int64_t first_row, int64_t rows, int64_t first_panel, int64_t num_panels,
                 const float* sums, int64_t sum_rows) {
    if (args.epilogue.gated) {
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t panel = 0; panel < num_panels; panel += 2) {
                const F32 gate = load(sums + (panel * sum_rows + row) * kPanel);
                const F32 up = load(sums + ((panel + 1) * sum_rows + row) * kPanel);
                finish_gated(args, (first_panel + panel) / 2, first_row + row, gate, up);
            }
        }
        return;
    }
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t panel = 0; panel < num_panels; ++panel) {
            finish(args, first_panel + panel, first_row + row, load(sums + (panel * sum_rows + row) * kPanel));
        }
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

constexpr int64_t kRowBlock = 72;  // at most
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

// x[row][k .. k + depth) of a block of rows, zero where k ends. The odd number of cache lines from row to row keeps
// the rows of a tile out of each other's way in the caches.
void copy_x(const LinearArgs& args, int64_t first_row, int64_t rows, int64_t k, int64_t depth, float* target,
            int64_t stride) {
    const int64_t left = args.weight->k - k;
    const int64_t count = left < depth ? left : depth;
    for (int64_t row = 0; row < rows; ++row) {
        memcpy(target + row * stride, args.x + (first_row + row) * args.x_stride + k,
               static_cast<size_t>(count) * sizeof(float));
        if (count < depth) memset(target + row * stride + count, 0, static_cast<size_t>(depth - count) * sizeof(float));
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
    const int64_t slices = ceil_div(most_rows * (matrix.padded_k + kPanel) * 4, kXBytes);
    if (slices > 1) {
        const int64_t most_panels = kSumsBytes / (most_rows * kPanel * 4) / kGroup * kGroup;
        const int64_t needed = ceil_div(cut.panels, most_panels - kGroup);
        if (cut.panel_blocks < needed) cut.panel_blocks = needed;
    }
    const int64_t x_stride = ceil_div(depth_blocks, slices) * kDepth + kPanel;

    team.each(cut.chunks(), [&](int64_t chunk, int thread) {
        const int64_t first_row = cut.row(chunk), rows = cut.row_end(chunk) - first_row;
        const int64_t first_panel = cut.first_panel(chunk), panel_end = cut.panel_end(chunk);
        float* all_sums = reinterpret_cast<float*>(team.scratch(thread));
        float* x = reinterpret_cast<float*>(team.scratch(thread) + kSumsBytes);
        const int64_t tiles = ceil_div(rows, kMaxRows);
        const AddBlock add_more = add_block_of<Order>(ceil_div(rows, tiles));
        const AddBlock add_fewer = add_block_of<Order>(rows / tiles);

        for (int64_t slice = 0; slice < slices; ++slice) {
            const int64_t start = chunk_start(depth_blocks, slices, slice);
            const int64_t end = chunk_start(depth_blocks, slices, slice + 1);
            copy_x(args, first_row, rows, start * kDepth, (end - start) * kDepth, x, x_stride);
            for (int64_t panel = first_panel; panel < panel_end; panel += kGroup) {
                const int64_t panels = panel_end - panel < kGroup ? panel_end - panel : kGroup;
                float* sums = slices == 1 ? all_sums : all_sums + (panel - first_panel) * rows * kPanel;
                if (slice == 0) memset(sums, 0, static_cast<size_t>(panels * rows * kPanel) * sizeof(float));
                const uint8_t* weights = static_cast<const uint8_t*>(matrix.data) + panel * panel_bytes;
                for (int64_t k = start; k < end; ++k) {
                    Block block{x + (k - start) * kDepth, x_stride, weights + k * block_bytes, nullptr, panel_bytes,
                                panels, sums, rows};
                    const int64_t next = k + blocks_ahead;
                    block.ahead = next < end ? weights + next * block_bytes
                                             : weights + kGroup * panel_bytes + (start + next - end) * block_bytes;
                    for (int64_t tile = 0; tile < tiles; ++tile) {
                        const int64_t row = chunk_start(rows, tiles, tile);
                        const int64_t count = chunk_start(rows, tiles, tile + 1) - row;
                        block.x = x + row * x_stride + (k - start) * kDepth;
                        block.sums = sums + row * kPanel;
                        (count * tiles < rows ? add_fewer : add_more)(block);
                        block.ahead = block.weights;
                    }
                }
                if (slice == slices - 1) finish_rows(args, first_row, rows, panel, panels, sums, rows);
            }
        }
    });
}

}  // namespace

void linear_float(const LinearArgs& args, Team& team) {
    if (args.rows == 0) return;
    switch (args.weight->format) {
        case WeightFormat::f32: multiply<Sequential<F32Weights>>(args, team); break;
        case WeightFormat::f16: multiply<Sequential<F16Weights>>(args, team); break;
        default: multiply<EvenOdd>(args, team);
    }
    if (args.best != nullptr) choose_best(args);
}

}  // namespace octavo::OCTAVO_ISA
