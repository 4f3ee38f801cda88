// The products of attention in AMX tiles, for a bfloat16 cache: sixteen rows at a time. Same bits as attention_rows.h.
#pragma once

#include "ops/attention_rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileDepth = 32;  // products that one tile instruction sums for an element
constexpr int64_t kMinTileRows = 8;  // with fewer rows a unit computes faster in vectors
constexpr int64_t kTileElements = kTileRows * kTileDepth;
// Rows of weights lie this far apart, for the same reason as scores.
constexpr int64_t kWeightStride = kPartition + kTileDepth;

// Tiles 0 to 3 are sums, 4 and 5 factors and values; 6 and 7 are those of a head's last 16 dimensions beyond a multiple
// of 32.
struct alignas(64) TileConfig {
    uint8_t palette = 1;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
};

// GCC 12 takes _tile_loadconfig and _tile_loadd for instructions that read no memory.
void order_memory() { asm volatile("" ::: "memory"); }

struct TileProducts {
    static constexpr int64_t kWeightBlock = kValueBlock;

    int64_t dim, num_rows;
    int64_t num_groups = (num_rows + kTileRows - 1) / kTileRows;
    int64_t depth_tiles = (dim + kTileDepth - 1) / kTileDepth;
    uint16_t* q;        // [group][depth tile][16 rows][32]
    uint16_t* weights;  // [rows][kWeightStride]
    uint16_t* blocks;   // values in tiles: [block of 32 tokens][dim / 16][16 pairs][16][2]

    TileProducts(int64_t dim, int64_t num_rows, Scratch& scratch)
        : dim(dim),
          num_rows(num_rows),
          q(scratch.take<uint16_t>(num_groups * depth_tiles * kTileElements)),
          weights(scratch.take<uint16_t>(num_groups * kTileRows * kWeightStride)),
          blocks(scratch.take<uint16_t>(kPartition * dim)) {
        memset(q, 0, static_cast<size_t>(num_groups * depth_tiles * kTileElements) * sizeof *q);
        memset(weights, 0, static_cast<size_t>(num_groups * kTileRows * kWeightStride) * sizeof *weights);
        const TileConfig config;
        order_memory();
        _tile_loadconfig(&config);
    }
    ~TileProducts() { _tile_release(); }

    int64_t group_start(int64_t group) const { return smaller(num_rows, group * kTileRows); }

    void set_query(int64_t group, int64_t row, const float* values) {
        uint16_t* target = q + group * depth_tiles * kTileElements + (row - group * kTileRows) * kTileDepth;
        for (int64_t d = 0; d < dim; d += kLane) {
            store_bf16(target + d / kTileDepth * kTileElements + d % kTileDepth, load(values + d));
        }
    }

    void score(const RowGroup* groups, int64_t count, const Tiles<uint16_t>& tiles, float* scores) const {
        static_assert(kTaskRows <= 3 * kTileRows);
        order_memory();
        for (int64_t t = tiles.range.first; t < tiles.range.end; ++t) {
            const Range tokens{t * kTokenTile, (t + 1) * kTokenTile};
            // Of the groups of a task those that see a tile follow each other.
            int64_t first = 0, end = count;
            while (first < end && groups[first].tokens.within(tokens).empty()) ++first;
            while (first < end && groups[end - 1].tokens.within(tokens).empty()) --end;
            if (first == end) continue;
            const uint16_t* q_0 = queries(groups[first]);
            const uint16_t* q_1 = end - first > 1 ? queries(groups[first + 1]) : nullptr;
            const uint16_t* q_2 = end - first > 2 ? queries(groups[first + 2]) : nullptr;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            const uint16_t* keys = tiles.keys[t];
            const int64_t ahead = bytes_between(keys, tiles.values[t]);
            for (int64_t d = 0; d < dim; d += kTileDepth, keys += kTileDepth * kTokenTile) {
                const int64_t at = d / kTileDepth * kTileElements;
                for (int64_t line = 0; line < smaller(kTileDepth, dim - d) / 2; ++line) fetch(keys + line * 32, ahead);
                if (dim - d >= kTileDepth) {
                    _tile_loadd(5, keys, 64);
                    _tile_loadd(4, q_0 + at, 64);
                    _tile_dpbf16ps(0, 4, 5);
                    if (q_1 != nullptr) {
                        _tile_loadd(4, q_1 + at, 64);
                        _tile_dpbf16ps(1, 4, 5);
                    }
                    if (q_2 != nullptr) {
                        _tile_loadd(4, q_2 + at, 64);
                        _tile_dpbf16ps(2, 4, 5);
                    }
                } else {
                    _tile_loadd(7, keys, 64);
                    _tile_loadd(6, q_0 + at, 64);
                    _tile_dpbf16ps(0, 6, 7);
                    if (q_1 != nullptr) {
                        _tile_loadd(6, q_1 + at, 64);
                        _tile_dpbf16ps(1, 6, 7);
                    }
                    if (q_2 != nullptr) {
                        _tile_loadd(6, q_2 + at, 64);
                        _tile_dpbf16ps(2, 6, 7);
                    }
                }
            }
            float* target = scores + groups[first].first * kScoreStride + t * kTokenTile;
            constexpr int64_t row_bytes = kScoreStride * 4;
            _tile_stored(0, target, row_bytes);
            if (q_1 != nullptr) _tile_stored(1, target + kTileRows * kScoreStride, row_bytes);
            if (q_2 != nullptr) _tile_stored(2, target + 2 * kTileRows * kScoreStride, row_bytes);
        }
        order_memory();
    }

    void weigh(const RowGroup* groups, int64_t count, const Tiles<uint16_t>& tiles, const Tiles<uint16_t>& next,
               const float* float_weights, float* values) const {
        pack_values(tiles, next);
        for (int64_t g = 0; g < count; ++g) {
            const Range tokens = groups[g].tokens.whole(kValueBlock);
            for (int64_t r = groups[g].first; r < groups[g].first + groups[g].count; ++r) {
                for (int64_t t = tokens.first; t < tokens.end; t += kLane) {
                    store_bf16(weights + r * kWeightStride + t, load(float_weights + r * kScoreStride + t));
                }
            }
            order_memory();
            const uint16_t* group_weights = weights + groups[g].first * kWeightStride;
            float* sums = values + groups[g].first * dim;
            int64_t d = 0;
            for (; d + 4 * kLane <= dim; d += 4 * kLane) weigh_columns<4>(group_weights, tokens, d, sums + d);
            if (dim - d >= 2 * kLane) {
                weigh_columns<2>(group_weights, tokens, d, sums + d);
                d += 2 * kLane;
            }
            if (d < dim) weigh_columns<1>(group_weights, tokens, d, sums + d);
            order_memory();
        }
    }

  private:
    const uint16_t* queries(const RowGroup& group) const {
        return q + group.first / kTileRows * depth_tiles * kTileElements;
    }

    // From pairs of tokens by dimensions to `blocks`; tiles that do not exist count as zero.
    void pack_values(const Tiles<uint16_t>& tiles, const Tiles<uint16_t>& next) const {
        int64_t next_tile = next.range.first;
        const Range all = tiles.range.whole(kBlockTiles);
        for (int64_t tile = all.first; tile < all.end; ++tile) {
            const bool exists = tiles.range.first <= tile && tile < tiles.range.end;
            const uint16_t* source = tiles.values[tile];
            int64_t ahead = 0;
            if (exists && next_tile < next.range.end) ahead = bytes_between(source, next.keys[next_tile++]);
            uint16_t* block = blocks + tile / kBlockTiles * kValueBlock * dim;
            uint16_t* target = block + tile % kBlockTiles * (kTileElements / kBlockTiles);
            for (int64_t pair = 0; pair < kTokenTile / 2; ++pair) {
                for (int64_t d = 0; d < dim; d += kLane) {
                    I32 both = broadcast(int32_t{0});
                    if (exists) {
                        const uint16_t* from = source + 2 * (pair * dim + d);
                        fetch(from, ahead);
                        both = load(reinterpret_cast<const int32_t*>(from));
                    }
                    store(reinterpret_cast<int32_t*>(target + d / kLane * kTileElements + pair * 2 * kLane), both);
                }
            }
        }
    }

    // sums[16 rows][16 columns of each tile] over the blocks of `tokens`.
    template <int columns>
    void weigh_columns(const uint16_t* group_weights, Range tokens, int64_t d, float* sums) const {
        _tile_zero(0);
        if constexpr (columns > 1) _tile_zero(1);
        if constexpr (columns > 2) _tile_zero(2);
        if constexpr (columns > 2) _tile_zero(3);
        constexpr int64_t weight_bytes = kWeightStride * 2;
        for (int64_t t = tokens.first; t < tokens.end; t += kValueBlock) {
            const uint16_t* block = blocks + t * dim + d / kLane * kTileElements;
            _tile_loadd(4, group_weights + t, weight_bytes);
            _tile_loadd(5, block, 64);
            _tile_dpbf16ps(0, 4, 5);
            if constexpr (columns > 1) {
                _tile_loadd(5, block + kTileElements, 64);
                _tile_dpbf16ps(1, 4, 5);
            }
            if constexpr (columns > 2) {
                _tile_loadd(5, block + 2 * kTileElements, 64);
                _tile_dpbf16ps(2, 4, 5);
                _tile_loadd(5, block + 3 * kTileElements, 64);
                _tile_dpbf16ps(3, 4, 5);
            }
        }
        const int64_t row_bytes = dim * 4;
        _tile_stored(0, sums, row_bytes);
        if constexpr (columns > 1) _tile_stored(1, sums + kLane, row_bytes);
        if constexpr (columns > 2) _tile_stored(2, sums + 2 * kLane, row_bytes);
        if constexpr (columns > 2) _tile_stored(3, sums + 3 * kLane, row_bytes);
    }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
