// What the products of attention share, and those of small groups of rows in vectors of tokens or of values. A row is a
// query token and one query head of the KV head's group. The orders of the sums stand in attention.h.
#pragma once

#include "isa/current.h"
#include "isa/math.h"
#include "ops/attention_plan.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kLane = static_cast<int64_t>(kLanes);
constexpr int64_t kTiles = kPartition / kTokenTile;
constexpr int64_t kValueBlock = 32;  // tokens; the blocks of the sums of bfloat16 products
constexpr int64_t kBlockTiles = kValueBlock / kTokenTile;
// Rows of scores lie this far apart: not a multiple of 1 KiB, or they would share cache sets.
constexpr int64_t kScoreStride = kPartition + 16;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// [first, end), of tokens of a partition or of all positions, of rows or of tiles.
struct Range {
    int64_t first, end;
    bool empty() const { return first >= end; }
    Range within(Range other) const { return {larger(first, other.first), smaller(end, other.end)}; }
    Range shifted(int64_t by) const { return {first + by, end + by}; }
    // Down and up to multiples of `unit`.
    Range whole(int64_t unit) const { return {first / unit * unit, (end + unit - 1) / unit * unit}; }
};

template <KvFormat format>
struct Cache;
template <>
struct Cache<KvFormat::f32> {
    using Element = float;
    static F32 load16(const float* source) { return load(source); }
    static void store16(float* target, F32 x) { store(target, x); }
};
template <>
struct Cache<KvFormat::f16> {
    using Element = uint16_t;
    static F32 load16(const uint16_t* source) { return load_f16(source); }
    static void store16(uint16_t* target, F32 x) { store_f16(target, x); }
};
template <>
struct Cache<KvFormat::bf16> {
    using Element = uint16_t;
    static void store16(uint16_t* target, F32 x) { store_bf16(target, x); }
};

// The even or the odd ones of sixteen pairs of bfloat16.
F32 load_even(const uint16_t* source) {
    return as_f32(shift_left<16>(load(reinterpret_cast<const int32_t*>(source))));
}
F32 load_odd(const uint16_t* source) {
    return as_f32(load(reinterpret_cast<const int32_t*>(source)) & broadcast(static_cast<int32_t>(0xffff0000)));
}

// Takes arrays from a thread's scratch memory.
struct Scratch {
    uint8_t* next;
    template <class T>
    T* take(int64_t count) {
        T* taken = reinterpret_cast<T*>(next);
        next += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        return taken;
    }
};

// Where the keys and values of the tiles of a partition are; those in `range`.
template <class Element>
struct Tiles {
    const Element* keys[kTiles];
    const Element* values[kTiles];
    Range range;
};

// Rows that are computed together, and the tokens of a partition that one of them sees.
struct RowGroup {
    int64_t first, count;
    Range tokens;
};

// Memory is read ahead, a tile for each tile that is computed with.
template <class T>
int64_t bytes_between(const T* from, const T* to) {
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from));
}
template <class T>
void fetch(const T* address, int64_t ahead) {
    __builtin_prefetch(reinterpret_cast<const char*>(address) + ahead);
}

// A group has at most kRows rows, for its sums to stay in registers. One of up to kBothRows sums the even and the odd
// products of bfloat16 at once, a larger one first the even ones and then the odd ones.
#if defined(__AVX512F__)
constexpr int kRows = 12, kBothRows = 12;
#else
constexpr int kRows = 6, kBothRows = 3;
#endif

#define OCTAVO_EACH_ROW(r) _Pragma("GCC unroll 16") for (int r = 0; r < rows; ++r)

// The same address, but what lies there is loaded again: a second load is cheaper than a register for the first one.
template <class T>
const T* again(const T* address) {
    asm("" : "+r"(address));
    return address;
}

// Sums of products of bfloat16 pairs. Sixteen lanes of pair i are at pairs + i * stride; its even element is multiplied
// with factors[r * row_stride + i * pair_stride] for row r, its odd element with the factor `to_odd` further.
template <int rows, int64_t row_stride, int64_t pair_stride, int64_t to_odd>
struct PairSums {
    F32 even[rows], odd[rows];

    void clear() {
        OCTAVO_EACH_ROW(r) even[r] = odd[r] = broadcast(0.0f);
    }
    void add_both(const float* factors, const uint16_t* pairs, int64_t stride, int64_t count, int64_t ahead) {
        for (int64_t i = 0; i < count; ++i, pairs += stride, factors += pair_stride) {
            fetch(pairs, ahead);
            const F32 x = load_even(pairs);
            OCTAVO_EACH_ROW(r) even[r] = fma(broadcast(factors[r * row_stride]), x, even[r]);
            const F32 y = load_odd(again(pairs));
            OCTAVO_EACH_ROW(r) odd[r] = fma(broadcast(factors[r * row_stride + to_odd]), y, odd[r]);
        }
    }
    void add_even(const float* factors, const uint16_t* pairs, int64_t stride, int64_t count, int64_t ahead) {
        for (int64_t i = 0; i < count; ++i, pairs += stride, factors += pair_stride) {
            fetch(pairs, ahead);
            const F32 x = load_even(pairs);
            OCTAVO_EACH_ROW(r) even[r] = fma(broadcast(factors[r * row_stride]), x, even[r]);
        }
    }
    void add_odd(const float* factors, const uint16_t* pairs, int64_t stride, int64_t count) {
        for (int64_t i = 0; i < count; ++i, pairs += stride, factors += pair_stride) {
            const F32 y = load_odd(pairs);
            OCTAVO_EACH_ROW(r) odd[r] = fma(broadcast(factors[r * row_stride + to_odd]), y, odd[r]);
        }
    }
    // target[r * stride] = (fresh ? 0 : target) + (even + odd)
    void add_to(float* target, int64_t stride, bool fresh) const {
        OCTAVO_EACH_ROW(r) {
            float* place = target + r * stride;
            store(place, (fresh ? broadcast(0.0f) : load(place)) + (even[r] + odd[r]));
        }
    }
};

// scores[r][16 tokens] = q[r] . key of the token; q is [dim][rows].
template <KvFormat format, int rows>
void score_tile(const float* q, const typename Cache<format>::Element* keys, int64_t dim, int64_t ahead,
                float* scores) {
    if constexpr (format == KvFormat::bf16) {
        for (int64_t first = 0; first < dim; first += 32) {
            const float* factors = q + first * rows;
            const uint16_t* pairs = keys + first * kTokenTile;
            const int64_t count = smaller(dim - first, 32) / 2;
            PairSums<rows, 1, 2 * rows, rows> sums;
            sums.clear();
            if constexpr (rows <= kBothRows) {
                sums.add_both(factors, pairs, 2 * kTokenTile, count, ahead);
            } else {
                sums.add_even(factors, pairs, 2 * kTokenTile, count, ahead);
                sums.add_odd(factors, pairs, 2 * kTokenTile, count);
            }
            sums.add_to(scores, kScoreStride, first == 0);
        }
    } else {
        F32 acc[rows];
        OCTAVO_EACH_ROW(r) acc[r] = broadcast(0.0f);
        for (int64_t d = 0; d < dim; ++d) {
            fetch(keys + d * kTokenTile, ahead);
            const F32 k = Cache<format>::load16(keys + d * kTokenTile);
            OCTAVO_EACH_ROW(r) acc[r] = fma(broadcast(q[d * rows + r]), k, acc[r]);
        }
        OCTAVO_EACH_ROW(r) store(scores + r * kScoreStride, acc[r]);
    }
}

// sums[r][dim] += weights[r][token] * value of the token, for `tokens` of a block of kValueBlock, which starts at
// `weights` and the first of its `tiles`; whole pairs of tokens. `fresh`: the sums are zero before.
template <KvFormat format, int rows>
void add_values(const float* weights, const typename Cache<format>::Element* const* tiles, Range tokens, int64_t dim,
                const int64_t* ahead, bool fresh, float* sums) {
    using Element = typename Cache<format>::Element;
    for (int64_t d = 0; d < dim; d += kLane) {
        // each(tile, its tokens, the weight of its first token here, their first value)
        const auto each_tile = [&](const auto& each) {
            for (int64_t tile = tokens.first / kTokenTile; tile * kTokenTile < tokens.end; ++tile) {
                const Range inside = tokens.within({tile * kTokenTile, (tile + 1) * kTokenTile});
                const Element* values = tiles[tile] + (inside.first - tile * kTokenTile) * dim;
                each(tile, inside.end - inside.first, weights + inside.first, values);
            }
        };
        if constexpr (format == KvFormat::bf16) {
            PairSums<rows, kScoreStride, 2, 1> pair_sums;
            pair_sums.clear();
            if constexpr (rows <= kBothRows) {
                each_tile([&](int64_t tile, int64_t count, const float* factors, const Element* values) {
                    pair_sums.add_both(factors, values + 2 * d, 2 * dim, count / 2, ahead[tile]);
                });
            } else {
                each_tile([&](int64_t tile, int64_t count, const float* factors, const Element* values) {
                    pair_sums.add_even(factors, values + 2 * d, 2 * dim, count / 2, ahead[tile]);
                });
                each_tile([&](int64_t, int64_t count, const float* factors, const Element* values) {
                    pair_sums.add_odd(factors, values + 2 * d, 2 * dim, count / 2);
                });
            }
            pair_sums.add_to(sums + d, dim, fresh);
        } else {
            F32 acc[rows];
            OCTAVO_EACH_ROW(r) acc[r] = fresh ? broadcast(0.0f) : load(sums + r * dim + d);
            each_tile([&](int64_t tile, int64_t count, const float* factors, const Element* values) {
                for (int64_t t = 0; t < count; ++t) {
                    const Element* value = values + t * dim + d;
                    fetch(value, ahead[tile]);
                    const F32 v = Cache<format>::load16(value);
                    OCTAVO_EACH_ROW(r) acc[r] = fma(broadcast(factors[r * kScoreStride + t]), v, acc[r]);
                }
            });
            OCTAVO_EACH_ROW(r) store(sums + r * dim + d, acc[r]);
        }
    }
}

// Calls body.template operator()<rows>() for rows in [1, most].
template <int most, class Body>
void with_rows(int64_t rows, const Body& body) {
    if constexpr (most > 1) {
        if (rows < most) return with_rows<most - 1>(rows, body);
    }
    body.template operator()<most>();
}

// The products of a unit's rows; attention_tiles.h has the same for AMX.
template <KvFormat format>
struct RowProducts {
    using Element = typename Cache<format>::Element;
    static constexpr int64_t kWeightBlock = kTokenTile;  // weights are defined to multiples of it

    int64_t dim, num_rows;
    int64_t num_groups = (num_rows + kRows - 1) / kRows;
    float* q;  // group by group, [dim][rows of the group]

    RowProducts(int64_t dim, int64_t num_rows, Scratch& scratch)
        : dim(dim), num_rows(num_rows), q(scratch.take<float>(kTaskRows * dim)) {}

    int64_t group_start(int64_t group) const { return chunk_start(num_rows, num_groups, group); }

    void set_query(int64_t group, int64_t row, const float* values) {
        const int64_t first = group_start(group), count = group_start(group + 1) - first;
        for (int64_t d = 0; d < dim; ++d) q[first * dim + d * count + row - first] = values[d];
    }

    // Scores of the groups' rows against the tiles that they see.
    void score(const RowGroup* groups, int64_t count, const Tiles<Element>& tiles, float* scores) const {
        for (int64_t t = tiles.range.first; t < tiles.range.end; ++t) {
            int64_t ahead = bytes_between(tiles.keys[t], tiles.values[t]);
            for (int64_t g = 0; g < count; ++g) {
                const RowGroup& group = groups[g];
                if (group.tokens.within({t * kTokenTile, (t + 1) * kTokenTile}).empty()) continue;
                with_rows<kRows>(group.count, [&]<int rows>() {
                    score_tile<format, rows>(q + group.first * dim, tiles.keys[t], dim, ahead,
                                             scores + group.first * kScoreStride + t * kTokenTile);
                });
                ahead = 0;
            }
        }
    }

    // values[row] = the weighted values of the groups' rows; `next` keys are fetched meanwhile.
    void weigh(const RowGroup* groups, int64_t count, const Tiles<Element>& tiles, const Tiles<Element>& next,
               const float* weights, float* values) const {
        int64_t next_tile = next.range.first;
        const Range blocks = tiles.range.whole(kBlockTiles);
        for (int64_t tile = blocks.first; tile < blocks.end; tile += kBlockTiles) {
            int64_t ahead[kBlockTiles] = {};
            for (int64_t i = 0; i < kBlockTiles && next_tile < next.range.end; ++i) {
                ahead[i] = bytes_between(tiles.values[tile + i], next.keys[next_tile++]);
            }
            const int64_t first_token = tile * kTokenTile;
            for (int64_t g = 0; g < count; ++g) {
                const RowGroup& group = groups[g];
                const Range tokens = group.tokens.within({first_token, first_token + kValueBlock});
                if (tokens.empty()) continue;
                with_rows<kRows>(group.count, [&]<int rows>() {
                    add_values<format, rows>(weights + group.first * kScoreStride + first_token, tiles.values + tile,
                                             tokens.whole(format == KvFormat::bf16 ? 2 : 1).shifted(-first_token), dim,
                                             ahead, group.tokens.first >= first_token, values + group.first * dim);
                });
                for (int64_t& bytes : ahead) bytes = 0;
            }
        }
    }
};

}  // namespace
}  // namespace octavo::OCTAVO_ISA
