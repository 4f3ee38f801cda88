// Attention over the paged cache, and writing to it. The rules that fix every bit stand in attention.h.
//
// A unit of work is a block of rows (a row is a query token and one query head of the KV head's group) of one request
// and one KV head. It walks its partitions: scores of all rows against one tile of keys after another, weights row by
// row, then weighted sums over one block of 32 tokens of values after another, so that keys and values are read once
// for all the rows. Rows are computed in small groups that fill the registers.
#include "isa/current.h"
#include "isa/math.h"
#include "ops/attention_plan.h"
#include "ops/functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kLane = static_cast<int64_t>(kLanes);
constexpr int64_t kTiles = kPartition / kTokenTile;
constexpr int64_t kValueBlock = 32;  // tokens; the blocks of the sums of bfloat16 products
// Rows of scores lie this far apart: not a multiple of a page's part, or rows would share cache sets.
constexpr int64_t kScoreStride = kPartition + 16;

int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Tokens [first, end) of a partition, or of all positions.
struct Range {
    int64_t first, end;
    bool empty() const { return first >= end; }
    Range within(Range other) const { return {larger(first, other.first), smaller(end, other.end)}; }
};

// -- formats of the cache --------------------------------------------------------------------------------------

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

// -- products of a group of rows -------------------------------------------------------------------------------

// A group has at most kRows rows, for its sums to stay in registers. One of up to kBothRows sums the even and the odd
// products of bfloat16 at once, a larger one first the even ones and then the odd ones.
#if defined(__AVX512F__)
constexpr int kRows = 12, kBothRows = 12;
#else
constexpr int kRows = 6, kBothRows = 3;
#endif

#define OCTAVO_EACH_ROW(r) _Pragma("GCC unroll 16") for (int r = 0; r < rows; ++r)

template <class T>
int64_t bytes_between(const T* from, const T* to) {
    return static_cast<int64_t>(reinterpret_cast<intptr_t>(to) - reinterpret_cast<intptr_t>(from));
}

// Memory is read one tile for each tile computed with, `ahead` bytes from it; 0: nothing is.
template <class T>
void fetch(const T* address, int64_t ahead) {
    __builtin_prefetch(reinterpret_cast<const char*>(address) + ahead);
}

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

// -- weights ---------------------------------------------------------------------------------------------------

// exp of math.h, to the bit, where x <= 0; of a NaN a NaN.
F32 exp_of_negative(F32 x) {
    const F32 lowest = broadcast(-87.33f);
    const F32 inside = max(lowest, x);
    const I32 n = to_i32(inside * broadcast(1.44269504f));
    const F32 whole = to_f32(n);
    F32 r = fma(whole, broadcast(-0.693359375f), inside);
    r = fma(whole, broadcast(2.12194440e-4f), r);
    F32 p = broadcast(1.3934544519920112e-3f);
    p = fma(p, r, broadcast(8.36377646663759e-3f));
    p = fma(p, r, broadcast(4.166645677792509e-2f));
    p = fma(p, r, broadcast(1.6666573358081568e-1f));
    p = fma(p, r, broadcast(0.5f));
    p = fma(p * r, r, r) + broadcast(1.0f);
    return select(less(x, lowest), broadcast(0.0f), p * as_f32(shift_left<23>(n + broadcast(int32_t{127}))));
}

F32 only_lanes(Range lanes, F32 x, F32 otherwise) {
    const Mask end = first_lanes(static_cast<size_t>(smaller(lanes.end, kLane)));
    const Mask before = first_lanes(static_cast<size_t>(larger(lanes.first, 0)));
    return select(end, select(before, otherwise, x), otherwise);
}

struct Softmax {
    float scale, softcap;
    bool to_bf16;  // round the weights

    // Scores of tokens `seen` become weights, those of the others in `stored` (which ends at whole vectors) zero.
    // Gives the largest score and the sum of the weights.
    void row(float* scores, Range seen, Range stored, float* largest, float* sum) const {
        const F32 lowest = broadcast(-__builtin_inff()), zero = broadcast(0.0f);
        if (softcap != 0.0f) {
            for (int64_t t = seen.first / kLane * kLane; t < seen.end; t += kLane) {
                store(scores + t, broadcast(softcap) * tanh(load(scores + t) * broadcast(scale) / broadcast(softcap)));
            }
        }
        const F32 factor = broadcast(softcap != 0.0f ? 1.0f : scale);
        F32 most = lowest;
        for (int64_t t = seen.first / kLane * kLane; t < seen.end; t += kLane) {
            F32 s = load(scores + t) * factor;
            if (t < seen.first || t + kLane > seen.end) s = only_lanes({seen.first - t, seen.end - t}, s, lowest);
            most = max(most, s);
        }
        *largest = reduce_max(most);
        const F32 top = broadcast(*largest);
        F32 total = zero;
        for (int64_t t = stored.first / kLane * kLane; t < stored.end; t += kLane) {
            if (t + kLane <= seen.first || t >= seen.end) {
                store(scores + t, zero);
                continue;
            }
            F32 weight = exp_of_negative(load(scores + t) * factor - top);
            if (t < seen.first || t + kLane > seen.end) {
                weight = only_lanes({seen.first - t, seen.end - t}, weight, zero);
            }
            total = total + weight;
            store(scores + t, to_bf16 ? round_to_bf16(weight) : weight);
        }
        *sum = reduce_add(total);
    }
};

// -- the running result of rows --------------------------------------------------------------------------------

// Of `rows` rows: what the combine rule carries from partition to partition. Arrays are padded to whole vectors.
struct Running {
    float* largest;
    float* total;
    float* out;  // [rows][dim]
    int64_t dim;

    void start(int64_t rows) const {
        for (int64_t r = 0; r < rows; ++r) {
            largest[r] = -__builtin_inff();
            total[r] = 0.0f;
        }
        memset(out, 0, static_cast<size_t>(rows * dim) * sizeof *out);
    }

    // From the first partition on: out = 0, total = 0 and exp(-inf) = 0 make its results the start.
    void combine(int64_t row, float partition_largest, float sum, const float* values) const {
        const F32 old = broadcast(largest[row]), fresh = broadcast(partition_largest);
        const F32 most = max(old, fresh), a = exp(old - most), b = exp(fresh - most);
        const F32 new_total = fma(broadcast(total[row]), a, broadcast(sum) * b);
        float lanes[kLanes];
        store(lanes, most);
        largest[row] = lanes[0];
        store(lanes, new_total);
        total[row] = lanes[0];
        float* target = out + row * dim;
        for (int64_t d = 0; d < dim; d += kLane) {
            store(target + d, fma(load(target + d), a, (load(values + d) + broadcast(0.0f)) * b));
        }
    }

    // `count` values of the row's result.
    void finish(int64_t row, const float* sink, Rounding rounding, int64_t count, float* target) const {
        F32 sum = broadcast(total[row]), factor = broadcast(1.0f);
        if (sink != nullptr) {
            const F32 old = broadcast(largest[row]), most = max(old, broadcast(*sink));
            factor = exp(old - most);
            sum = fma(sum, factor, exp(broadcast(*sink) - most));
        }
        for (int64_t d = 0; d < count; d += kLane) {
            const F32 y = load(out + row * dim + d) * factor / sum;
            store_first(target + d, rounded(y, rounding), static_cast<size_t>(count - d));
        }
    }
};

// -- a unit ----------------------------------------------------------------------------------------------------

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

template <KvFormat format>
struct Attention {
    using Element = typename Cache<format>::Element;

    // Where the keys and values of a partition's tiles are.
    struct Tiles {
        const Element* keys[kTiles];
        const Element* values[kTiles];
        Range range;  // of tiles
    };

    // Rows that are computed together, and the tokens that one of them sees in a partition.
    struct RowGroup {
        int64_t first, count;
        Range tokens;
    };

    const AttentionArgs& args;
    const AttentionPlan& plan;
    Team& team;
    const KvLayout& layout = *args.layout;
    int64_t dim = layout.padded_head_dim;
    int64_t group = args.num_heads / layout.num_kv_heads;
    int64_t tile_elements = kTokenTile * dim;
    bool is_tiled = layout.block_size % kTokenTile == 0;  // else tiles are put together from several blocks

    int64_t first_token(int64_t request) const { return args.rows.query_starts[request]; }
    Range seen(int64_t request, int64_t row) const {
        const int64_t tokens = args.rows.query_starts[request + 1] - args.rows.query_starts[request];
        const int64_t position = args.rows.context_lens[request] - tokens + row / group;
        return {args.window > 0 ? larger(0, position - args.window + 1) : 0, position + 1};
    }

    const Element* head_keys(int64_t request, int64_t head, int64_t position) const {
        const int64_t block = args.rows.block_table[request * args.rows.max_blocks + position / layout.block_size];
        return reinterpret_cast<const Element*>(args.blocks + block * layout.block_bytes + args.layer * layout.layer_bytes +
                                                head * layout.head_bytes);
    }

    // The tiles of tokens `tokens` (absolute) of one partition.
    void find_tiles(int64_t request, int64_t head, Range tokens, Tiles* tiles) const {
        const int64_t start = tokens.first / kPartition * kPartition;
        tiles->range = {(tokens.first - start) / kTokenTile, (tokens.end - start + kTokenTile - 1) / kTokenTile};
        for (int64_t t = tiles->range.first; t < tiles->range.end; ++t) {
            const int64_t position = start + t * kTokenTile, slot = position % layout.block_size;
            const Element* keys = head_keys(request, head, position);
            tiles->keys[t] = keys + slot * dim;
            tiles->values[t] = keys + layout.padded_tokens * dim + slot * dim;
        }
    }

    // The same, put together in `copy`, for blocks that are not whole tiles.
    void copy_tiles(int64_t request, int64_t head, Range tokens, Element* copy, Tiles* tiles) const {
        const int64_t start = tokens.first / kPartition * kPartition;
        tiles->range = {(tokens.first - start) / kTokenTile, (tokens.end - start + kTokenTile - 1) / kTokenTile};
        constexpr int64_t width = format == KvFormat::bf16 ? 2 : 1;  // elements of a token or value next to each other
        for (int64_t t = tiles->range.first; t < tiles->range.end; ++t) {
            Element* keys = copy + t * tile_elements;
            Element* values = copy + (kTiles + t) * tile_elements;
            tiles->keys[t] = keys;
            tiles->values[t] = values;
            memset(keys, 0, static_cast<size_t>(tile_elements) * sizeof *keys);
            memset(values, 0, static_cast<size_t>(tile_elements) * sizeof *values);
            const Range inside = tokens.within({start + t * kTokenTile, start + (t + 1) * kTokenTile});
            for (int64_t position = inside.first; position < inside.end; ++position) {
                const int64_t slot = position % layout.block_size, in_tile = position % kTokenTile;
                const Element* from = head_keys(request, head, position);
                const Element* from_keys = from + slot / kTokenTile * tile_elements + slot % kTokenTile * width;
                for (int64_t d = 0; d < dim; d += width) {
                    memcpy(keys + d * kTokenTile + in_tile * width, from_keys + d * kTokenTile, width * sizeof *keys);
                }
                const Element* from_values = from + (layout.padded_tokens + slot / width * width) * dim + slot % width;
                Element* to_values = values + in_tile / width * width * dim + in_tile % width;
                for (int64_t d = 0; d < dim; ++d) to_values[d * width] = from_values[d * width];
            }
        }
    }

    // The weighted values of one row over exactly the tokens that it sees.
    void exact_values(const float* weights, const Tiles& tiles, Range tokens, float* sums) const {
        for (int64_t d = 0; d < dim; d += kLane) {
            F32 acc = broadcast(0.0f);
            for (int64_t block = tokens.first / kValueBlock * kValueBlock; block < tokens.end; block += kValueBlock) {
                const Range inside = tokens.within({block, block + kValueBlock});
                F32 even = broadcast(0.0f), odd = broadcast(0.0f);
                for (int64_t t = inside.first; t < inside.end; ++t) {
                    const Element* tile = tiles.values[t / kTokenTile];
                    const int64_t in_tile = t % kTokenTile;
                    const F32 weight = broadcast(weights[t]);
                    if constexpr (format == KvFormat::bf16) {
                        const Element* pair = tile + in_tile / 2 * 2 * dim + 2 * d;
                        if (t % 2 == 0) {
                            even = fma(weight, load_even(pair), even);
                        } else {
                            odd = fma(weight, load_odd(pair), odd);
                        }
                    } else {
                        acc = fma(weight, Cache<format>::load16(tile + in_tile * dim + d), acc);
                    }
                }
                if constexpr (format == KvFormat::bf16) acc = acc + (even + odd);
            }
            store(sums + d, acc);
        }
    }

    bool has_nan(const float* values) const {
        F32 sum = broadcast(0.0f);
        for (int64_t d = 0; d < dim; d += kLane) sum = select(is_nan(load(values + d)), broadcast(1.0f), sum);
        return reduce_max(sum) > 0.0f;
    }

    // q of the task's rows, group of rows by group: [dim][rows of the group].
    void gather_queries(const AttentionTask& task, int64_t head, int64_t num_groups, float* q) const {
        float row_values[kMaxHeadDim];
        for (int64_t g = 0; g < num_groups; ++g) {
            const int64_t first = chunk_start(task.num_rows, num_groups, g);
            const int64_t rows = chunk_start(task.num_rows, num_groups, g + 1) - first;
            for (int64_t r = 0; r < rows; ++r) {
                const int64_t row = task.first_row + first + r;
                const float* source = args.q + (first_token(task.request) + row / group) * args.q_stride +
                                      (head * group + row % group) * layout.head_dim;
                for (int64_t d = 0; d < dim; d += kLane) {
                    const int64_t count = larger(0, layout.head_dim - d);
                    F32 x = load_first(source + d, static_cast<size_t>(count));
                    if (format == KvFormat::bf16) x = round_to_bf16(x);
                    store(row_values + d, x);
                }
                for (int64_t d = 0; d < dim; ++d) q[first * dim + d * rows + r] = row_values[d];
            }
        }
    }

    // The positions of a partition that rows of the task see.
    Range seen_in(const AttentionTask& task, int64_t partition) const {
        const Range first = seen(task.request, task.first_row);
        const Range last = seen(task.request, task.first_row + task.num_rows - 1);
        return Range{first.first, last.end}.within({partition * kPartition, (partition + 1) * kPartition});
    }

    // `next`: the unit after this one, null where there is none; its first keys are fetched ahead.
    void run(const AttentionTask& task, int64_t head, const AttentionTask* next, int64_t next_head, int thread) const {
        const int64_t num_rows = task.num_rows, request = task.request;
        Scratch scratch{team.scratch(thread)};
        float* q = scratch.take<float>(kTaskRows * dim);
        float* scores = scratch.take<float>(kTaskRows * kScoreStride);
        float* values = scratch.take<float>(kTaskRows * dim);
        const Running running{scratch.take<float>(kTaskRows), scratch.take<float>(kTaskRows),
                              scratch.take<float>(kTaskRows * dim), dim};
        Range* row_ranges = scratch.take<Range>(kTaskRows);
        Element* copy = scratch.take<Element>(is_tiled ? 0 : 2 * kPartition * dim);
        Tiles tiles{}, ahead{};

        const int64_t num_groups = (num_rows + kRows - 1) / kRows;
        gather_queries(task, head, num_groups, q);
        running.start(num_rows);
        for (int64_t r = 0; r < num_rows; ++r) row_ranges[r] = seen(request, task.first_row + r);
        const Softmax softmax{args.scale, args.softcap, format == KvFormat::bf16};

        for (int64_t p = task.first_partition; p < task.end_partition; ++p) {
            const int64_t start = p * kPartition;
            const Range partition{start, start + kPartition};
            // Rows are in the order of their positions: those that see nothing here are at the ends.
            Range rows{0, num_rows};
            while (row_ranges[rows.first].within(partition).empty()) ++rows.first;
            while (row_ranges[rows.end - 1].within(partition).empty()) --rows.end;
            const auto row_tokens = [&](int64_t row) {
                const Range tokens = row_ranges[row].within(partition);
                return Range{tokens.first - start, tokens.end - start};
            };
            const Range all{row_tokens(rows.first).first + start, row_tokens(rows.end - 1).end + start};
            ahead.range = {0, 0};
            if (!is_tiled) {
                copy_tiles(request, head, all, copy, &tiles);
            } else {
                find_tiles(request, head, all, &tiles);
                if (p + 1 < task.end_partition) {
                    find_tiles(request, head, seen_in(task, p + 1), &ahead);
                } else if (next != nullptr) {
                    find_tiles(next->request, next_head, seen_in(*next, next->first_partition), &ahead);
                }
            }

            RowGroup groups[kTaskRows];
            int64_t count = 0;
            for (int64_t g = 0; g < num_groups; ++g) {
                const int64_t first = chunk_start(num_rows, num_groups, g);
                const int64_t end = chunk_start(num_rows, num_groups, g + 1);
                const Range inside = rows.within({first, end});
                if (inside.empty()) continue;
                groups[count++] = {first, end - first,
                                   {row_tokens(inside.first).first, row_tokens(inside.end - 1).end}};
            }
            const auto each_group = [&](const auto& each) {
                for (int64_t g = 0; g < count; ++g) each(groups[g].first, groups[g].count, groups[g].tokens);
            };
            for (int64_t t = tiles.range.first; t < tiles.range.end; ++t) {
                int64_t to_ahead = is_tiled ? bytes_between(tiles.keys[t], tiles.values[t]) : 0;
                each_group([&](int64_t first, int64_t count, Range tokens) {
                    if (tokens.within({t * kTokenTile, (t + 1) * kTokenTile}).empty()) return;
                    with_rows<kRows>(count, [&]<int n>() {
                        score_tile<format, n>(q + first * dim, tiles.keys[t], dim, to_ahead,
                                              scores + first * kScoreStride + t * kTokenTile);
                    });
                    to_ahead = 0;
                });
            }
            float largest[kTaskRows], sums[kTaskRows];
            each_group([&](int64_t first, int64_t count, Range tokens) {
                for (int64_t r = first; r < first + count; ++r) {
                    if (r < rows.first || r >= rows.end) {
                        memset(scores + r * kScoreStride, 0, kPartition * sizeof *scores);
                    } else {
                        softmax.row(scores + r * kScoreStride, row_tokens(r), tokens, largest + r, sums + r);
                    }
                }
            });
            for (int64_t block = all.first - start; block / kValueBlock * kValueBlock < all.end - start;
                 block += kValueBlock) {
                const int64_t block_start = block / kValueBlock * kValueBlock;
                int64_t to_ahead[kValueBlock / kTokenTile] = {};
                for (int64_t i = 0; i < kValueBlock / kTokenTile && ahead.range.first < ahead.range.end; ++i) {
                    to_ahead[i] =
                        bytes_between(tiles.values[block_start / kTokenTile + i], ahead.keys[ahead.range.first++]);
                }
                each_group([&](int64_t first, int64_t count, Range tokens) {
                    Range inside = tokens.within({block_start, block_start + kValueBlock});
                    if (inside.empty()) return;
                    if (format == KvFormat::bf16) inside = {inside.first / 2 * 2, (inside.end + 1) / 2 * 2};
                    with_rows<kRows>(count, [&]<int n>() {
                        add_values<format, n>(scores + first * kScoreStride + block_start,
                                              tiles.values + block_start / kTokenTile,
                                              {inside.first - block_start, inside.end - block_start}, dim, to_ahead,
                                              tokens.first >= block_start, values + first * dim);
                    });
                    for (int64_t& bytes : to_ahead) bytes = 0;
                });
            }
            for (int64_t r = rows.first; r < rows.end; ++r) {
                float* row_values = values + r * dim;
                // A weight of zero times a NaN or an infinity of a token that another row sees, or nobody.
                if (has_nan(row_values)) exact_values(scores + r * kScoreStride, tiles, row_tokens(r), row_values);
                if (task.partials < 0) {
                    running.combine(r, largest[r], sums[r], row_values);
                } else {
                    float* partial = partials(task, p - task.first_partition, head, r);
                    memcpy(partial, row_values, static_cast<size_t>(dim) * sizeof *partial);
                    partial[dim] = largest[r];
                    partial[dim + 1] = sums[r];
                }
            }
        }
        if (task.partials < 0) finish(task, head, running);
    }

    float* partials(const AttentionTask& task, int64_t partition, int64_t head, int64_t row) const {
        return plan.partials + task.partials +
               ((partition * layout.num_kv_heads + head) * task.num_rows + row) * plan.partial_floats;
    }

    void finish(const AttentionTask& task, int64_t head, const Running& running) const {
        for (int64_t r = 0; r < task.num_rows; ++r) {
            const int64_t row = task.first_row + r, query_head = head * group + row % group;
            float* target =
                args.out + (first_token(task.request) + row / group) * args.out_stride + query_head * layout.head_dim;
            running.finish(r, args.sinks == nullptr ? nullptr : args.sinks + query_head, args.rounding, layout.head_dim,
                           target);
        }
    }

    // Combines the partitions of a task that was cut.
    void join(const AttentionTask& task, int64_t head, int thread) const {
        Scratch scratch{team.scratch(thread)};
        const Running running{scratch.take<float>(kTaskRows), scratch.take<float>(kTaskRows),
                              scratch.take<float>(kTaskRows * dim), dim};
        running.start(task.num_rows);
        for (int64_t p = task.first_partition; p < task.end_partition; ++p) {
            for (int64_t r = 0; r < task.num_rows; ++r) {
                if (seen(task.request, task.first_row + r).within({p * kPartition, (p + 1) * kPartition}).empty()) continue;
                const float* partial = partials(task, p - task.first_partition, head, r);
                running.combine(r, partial[dim], partial[dim + 1], partial);
            }
        }
        finish(task, head, running);
    }
};

template <KvFormat format>
void attend_as(const AttentionArgs& args, Team& team) {
    const AttentionPlan plan = plan_attention(args, team.num_threads());
    const Attention<format> attention{args, plan, team};
    const int64_t num_heads = args.layout->num_kv_heads;
    team.each(plan.num_chunks, [&](int64_t chunk, int thread) {
        const int64_t end = plan.chunks[chunk + 1];
        for (int64_t unit = plan.chunks[chunk]; unit < end; ++unit) {
            const AttentionTask* next = unit + 1 < end ? &plan.tasks[(unit + 1) / num_heads] : nullptr;
            attention.run(plan.tasks[unit / num_heads], unit % num_heads, next, (unit + 1) % num_heads, thread);
        }
    });
    if (plan.num_cut == 0) return;
    team.each(plan.num_cut * num_heads, [&](int64_t unit, int thread) {
        attention.join(plan.cut[unit / num_heads], unit % num_heads, thread);
    });
}

// -- writing ---------------------------------------------------------------------------------------------------

// `keys`: the tile of the token; `values`: the row of the token, of the pair of tokens for bfloat16.
template <KvFormat format>
void store_token(const float* k, const float* v, int64_t head_dim, int64_t dim, int64_t slot,
                 typename Cache<format>::Element* keys, typename Cache<format>::Element* values) {
    typename Cache<format>::Element k_row[kMaxHeadDim], v_row[kMaxHeadDim];
    for (int64_t d = 0; d < dim; d += kLane) {
        const size_t count = static_cast<size_t>(larger(0, head_dim - d));
        Cache<format>::store16(k_row + d, load_first(k + d, count));
        Cache<format>::store16(v_row + d, load_first(v + d, count));
    }
    const int64_t in_tile = slot % kTokenTile;
    if constexpr (format == KvFormat::bf16) {
        for (int64_t d = 0; d < dim; d += 2) memcpy(keys + d * kTokenTile + 2 * in_tile, k_row + d, 2 * sizeof *keys);
        for (int64_t d = 0; d < dim; ++d) values[2 * d + slot % 2] = v_row[d];
    } else {
        for (int64_t d = 0; d < dim; ++d) keys[d * kTokenTile + in_tile] = k_row[d];
        memcpy(values, v_row, static_cast<size_t>(dim) * sizeof *values);
    }
}

template <KvFormat format>
void store_as(const StoreKvArgs& args, Team& team) {
    using Element = typename Cache<format>::Element;
    const KvLayout& layout = *args.layout;
    const Rows& rows = args.rows;
    const int64_t dim = layout.padded_head_dim;
    const int64_t num_chunks = smaller(4 * team.num_threads(), (rows.num_tokens * layout.num_kv_heads * dim + 4095) / 4096);
    team.each(num_chunks, [&](int64_t chunk, int) {
        const int64_t first = chunk_start(rows.num_tokens, num_chunks, chunk);
        const int64_t end = chunk_start(rows.num_tokens, num_chunks, chunk + 1);
        int64_t request = 0;
        for (int64_t token = first; token < end; ++token) {
            while (rows.query_starts[request + 1] <= token) ++request;
            const int64_t position = rows.positions[token], slot = position % layout.block_size;
            const int64_t block = rows.block_table[request * rows.max_blocks + position / layout.block_size];
            uint8_t* base = args.blocks + block * layout.block_bytes + args.layer * layout.layer_bytes;
            for (int64_t head = 0; head < layout.num_kv_heads; ++head) {
                Element* keys = reinterpret_cast<Element*>(base + head * layout.head_bytes);
                const int64_t value_slot = format == KvFormat::bf16 ? slot / 2 * 2 : slot;
                store_token<format>(args.k + token * args.k_stride + head * layout.head_dim,
                                    args.v + token * args.v_stride + head * layout.head_dim, layout.head_dim, dim, slot,
                                    keys + slot / kTokenTile * kTokenTile * dim,
                                    keys + (layout.padded_tokens + value_slot) * dim);
            }
        }
    });
}

}  // namespace

void store_kv(const StoreKvArgs& args, Team& team) {
    if (args.rows.num_tokens == 0) return;
    switch (args.layout->format) {
        case KvFormat::f32: return store_as<KvFormat::f32>(args, team);
        case KvFormat::bf16: return store_as<KvFormat::bf16>(args, team);
        case KvFormat::f16: return store_as<KvFormat::f16>(args, team);
    }
}

void attend(const AttentionArgs& args, Team& team) {
    if (args.rows.num_tokens == 0) return;
    switch (args.layout->format) {
        case KvFormat::f32: return attend_as<KvFormat::f32>(args, team);
        case KvFormat::bf16: return attend_as<KvFormat::bf16>(args, team);
        case KvFormat::f16: return attend_as<KvFormat::f16>(args, team);
    }
}

}  // namespace octavo::OCTAVO_ISA
