// Attention over the paged cache, and writing to it. The rules that fix every bit stand in attention.h.
//
// A unit of work is a block of rows (a row is a query token and one query head of the KV head's group) of one request
// and one KV head. It walks its partitions: scores of all rows against one tile of keys after another, weights row by
// row, then weighted sums over one block of 32 tokens of values after another, so that keys and values are read once
// for all the rows.
#include "ops/attention_rows.h"
#if defined(__AMX_TILE__)
#include "ops/attention_tiles.h"
#endif
#include "ops/functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

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

    // Scores of tokens `seen` become weights, those of the others in `stored` (whole vectors) zero. Gives the largest
    // score and the sum of the weights.
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
            if (to_bf16) weight = round_to_bf16(weight);
            total = total + weight;
            store(scores + t, weight);
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

template <KvFormat format>
struct Attention {
    using Element = typename Cache<format>::Element;

    const AttentionArgs& args;
    const AttentionPlan& plan;
    Team& team;
    const KvLayout& layout = *args.layout;
    int64_t dim = layout.padded_head_dim;
    int64_t group_size = args.num_heads / layout.num_kv_heads;
    int64_t tile_elements = kTokenTile * dim;
    bool is_tiled = layout.block_size % kTokenTile == 0;  // else tiles are put together from several blocks

    int64_t first_token(int64_t request) const { return args.rows.query_starts[request]; }

    // The positions that a row of a request sees.
    Range seen(int64_t request, int64_t row) const {
        const int64_t tokens = args.rows.query_starts[request + 1] - args.rows.query_starts[request];
        const int64_t position = args.rows.context_lens[request] - tokens + row / group_size;
        return {args.window > 0 ? larger(0, position - args.window + 1) : 0, position + 1};
    }
    // Those of a partition that rows of a task see.
    Range seen(const AttentionTask& task, int64_t partition) const {
        const Range first = seen(task.request, task.first_row);
        const Range last = seen(task.request, task.first_row + task.num_rows - 1);
        return Range{first.first, last.end}.within({partition * kPartition, (partition + 1) * kPartition});
    }

    const Element* head_keys(int64_t request, int64_t head, int64_t block) const {
        const int64_t id = args.rows.block_table[request * args.rows.max_blocks + block];
        return reinterpret_cast<const Element*>(args.blocks + id * layout.block_bytes +
                                                args.layer * layout.layer_bytes + head * layout.head_bytes);
    }

    // The tiles of `positions`, which lie in one partition.
    void find_tiles(int64_t request, int64_t head, Range positions, Tiles<Element>* tiles) const {
        const Range whole = positions.whole(kTokenTile);
        const int64_t start = positions.first / kPartition * kPartition;
        tiles->range = {(whole.first - start) / kTokenTile, (whole.end - start) / kTokenTile};
        int64_t block = whole.first / layout.block_size, slot = whole.first % layout.block_size;
        const Element* keys = head_keys(request, head, block);
        for (int64_t t = tiles->range.first; t < tiles->range.end; ++t, slot += kTokenTile) {
            if (slot == layout.block_size) {
                keys = head_keys(request, head, ++block);
                slot = 0;
            }
            tiles->keys[t] = keys + slot * dim;
            tiles->values[t] = keys + (layout.padded_tokens + slot) * dim;
        }
    }

    // The same, put together in `copy`, for blocks that are not whole tiles.
    void copy_tiles(int64_t request, int64_t head, Range positions, Element* copy, Tiles<Element>* tiles) const {
        constexpr int64_t width = format == KvFormat::bf16 ? 2 : 1;  // of the pairs of the layout
        const Range whole = positions.whole(kTokenTile);
        const int64_t start = positions.first / kPartition * kPartition;
        tiles->range = {(whole.first - start) / kTokenTile, (whole.end - start) / kTokenTile};
        for (int64_t t = tiles->range.first; t < tiles->range.end; ++t) {
            Element* keys = copy + t * tile_elements;
            Element* values = copy + (kTiles + t) * tile_elements;
            tiles->keys[t] = keys;
            tiles->values[t] = values;
            memset(keys, 0, static_cast<size_t>(tile_elements) * sizeof *keys);
            memset(values, 0, static_cast<size_t>(tile_elements) * sizeof *values);
            const Range inside = positions.within(Range{0, kTokenTile}.shifted(start + t * kTokenTile));
            for (int64_t position = inside.first; position < inside.end; ++position) {
                const int64_t slot = position % layout.block_size, place = position % kTokenTile;
                const Element* from = head_keys(request, head, position / layout.block_size);
                const Element* from_keys = from + slot / kTokenTile * tile_elements + slot % kTokenTile * width;
                for (int64_t d = 0; d < dim; d += width) {
                    memcpy(keys + d * kTokenTile + place * width, from_keys + d * kTokenTile, width * sizeof *keys);
                }
                const Element* from_values = from + (layout.padded_tokens + slot / width * width) * dim + slot % width;
                Element* to_values = values + place / width * width * dim + place % width;
                for (int64_t d = 0; d < dim; ++d) to_values[d * width] = from_values[d * width];
            }
        }
    }

    // The weighted values of one row over exactly the tokens that it sees.
    void exact_values(const float* weights, const Tiles<Element>& tiles, Range tokens, float* sums) const {
        for (int64_t d = 0; d < dim; d += kLane) {
            F32 acc = broadcast(0.0f);
            for (int64_t block = tokens.first / kValueBlock * kValueBlock; block < tokens.end; block += kValueBlock) {
                const Range inside = tokens.within({block, block + kValueBlock});
                F32 even = broadcast(0.0f), odd = broadcast(0.0f);
                for (int64_t t = inside.first; t < inside.end; ++t) {
                    const Element* tile = tiles.values[t / kTokenTile];
                    const int64_t place = t % kTokenTile;
                    const F32 weight = broadcast(weights[t]);
                    if constexpr (format == KvFormat::bf16) {
                        const Element* pair = tile + place / 2 * 2 * dim + 2 * d;
                        if (t % 2 == 0) {
                            even = fma(weight, load_even(pair), even);
                        } else {
                            odd = fma(weight, load_odd(pair), odd);
                        }
                    } else {
                        acc = fma(weight, Cache<format>::load16(tile + place * dim + d), acc);
                    }
                }
                if constexpr (format == KvFormat::bf16) acc = acc + (even + odd);
            }
            store(sums + d, acc);
        }
    }

    bool has_nan(const float* values) const {
        F32 found = broadcast(0.0f);
        for (int64_t d = 0; d < dim; d += kLane) found = select(is_nan(load(values + d)), broadcast(1.0f), found);
        return reduce_max(found) > 0.0f;
    }

    template <class Products>
    void gather_queries(const AttentionTask& task, int64_t head, Products& products) const {
        for (int64_t g = 0; g < products.num_groups; ++g) {
            for (int64_t r = products.group_start(g); r < products.group_start(g + 1); ++r) {
                const int64_t row = task.first_row + r, query_head = head * group_size + row % group_size;
                const float* source = args.q + (first_token(task.request) + row / group_size) * args.q_stride +
                                      query_head * layout.head_dim;
                float values[kMaxHeadDim];
                for (int64_t d = 0; d < dim; d += kLane) {
                    const F32 x = load_first(source + d, static_cast<size_t>(layout.head_dim - d));
                    store(values + d, format == KvFormat::bf16 ? round_to_bf16(x) : x);
                }
                products.set_query(g, r, values);
            }
        }
    }

    // `next` is the unit after this one, null where there is none: its first keys are fetched ahead.
    template <class Products>
    void run(const AttentionTask& task, int64_t head, const AttentionTask* next, int64_t next_head, int thread) const {
        const int64_t num_rows = task.num_rows, request = task.request;
        Scratch scratch{team.scratch(thread)};
        Products products(dim, num_rows, scratch);
        float* scores = scratch.take<float>(kTaskRows * kScoreStride);
        float* values = scratch.take<float>(kTaskRows * dim);
        const Running running{scratch.take<float>(kTaskRows), scratch.take<float>(kTaskRows),
                              scratch.take<float>(kTaskRows * dim), dim};
        Element* copy = scratch.take<Element>(is_tiled ? 0 : 2 * kPartition * dim);
        const Softmax softmax{args.scale, args.softcap, format == KvFormat::bf16};
        Tiles<Element> tiles{}, ahead{};
        Range row_positions[kTaskRows];
        for (int64_t r = 0; r < num_rows; ++r) row_positions[r] = seen(request, task.first_row + r);
        gather_queries(task, head, products);
        running.start(num_rows);

        for (int64_t p = task.first_partition; p < task.end_partition; ++p) {
            const Range partition = Range{0, kPartition}.shifted(p * kPartition);
            if (!is_tiled) {
                copy_tiles(request, head, seen(task, p), copy, &tiles);
            } else {
                find_tiles(request, head, seen(task, p), &tiles);
                ahead.range = {0, 0};
                if (p + 1 < task.end_partition) {
                    find_tiles(request, head, seen(task, p + 1), &ahead);
                } else if (next != nullptr) {
                    find_tiles(next->request, next_head, seen(*next, next->first_partition), &ahead);
                }
            }
            // Rows are in the order of their positions: those that see nothing here are at the ends.
            Range rows{0, num_rows};
            while (row_positions[rows.first].within(partition).empty()) ++rows.first;
            while (row_positions[rows.end - 1].within(partition).empty()) --rows.end;
            const auto tokens_of = [&](int64_t row) {
                return row_positions[row].within(partition).shifted(-partition.first);
            };
            RowGroup groups[kTaskRows];
            int64_t num_groups = 0;
            for (int64_t g = 0; g < products.num_groups; ++g) {
                const int64_t first = products.group_start(g), end = products.group_start(g + 1);
                const Range inside = rows.within({first, end});
                if (inside.empty()) continue;
                groups[num_groups++] = {first, end - first,
                                        {tokens_of(inside.first).first, tokens_of(inside.end - 1).end}};
            }

            products.score(groups, num_groups, tiles, scores);
            float largest[kTaskRows], sums[kTaskRows];
            for (int64_t g = 0; g < num_groups; ++g) {
                const Range stored = groups[g].tokens.whole(Products::kWeightBlock);
                for (int64_t r = groups[g].first; r < groups[g].first + groups[g].count; ++r) {
                    const bool sees = rows.first <= r && r < rows.end;
                    softmax.row(scores + r * kScoreStride, sees ? tokens_of(r) : Range{0, 0}, stored, largest + r,
                                sums + r);
                }
            }
            products.weigh(groups, num_groups, tiles, ahead, scores, values);

            for (int64_t r = rows.first; r < rows.end; ++r) {
                float* row_values = values + r * dim;
                // A weight of zero times a NaN or an infinity of a token that another row sees, or nobody.
                if (has_nan(row_values)) exact_values(scores + r * kScoreStride, tiles, tokens_of(r), row_values);
                if (task.partials < 0) {
                    running.combine(r, largest[r], sums[r], row_values);
                } else {
                    float* partial = partial_of(task, p, head, r);
                    memcpy(partial, row_values, static_cast<size_t>(dim) * sizeof *partial);
                    partial[dim] = largest[r];
                    partial[dim + 1] = sums[r];
                }
            }
        }
        if (task.partials < 0) finish(task, head, running);
    }

    float* partial_of(const AttentionTask& task, int64_t partition, int64_t head, int64_t row) const {
        const int64_t unit = (partition - task.first_partition) * layout.num_kv_heads + head;
        return plan.partials + task.partials + (unit * task.num_rows + row) * plan.partial_floats;
    }

    void finish(const AttentionTask& task, int64_t head, const Running& running) const {
        for (int64_t r = 0; r < task.num_rows; ++r) {
            const int64_t row = task.first_row + r, query_head = head * group_size + row % group_size;
            const int64_t token = first_token(task.request) + row / group_size;
            running.finish(r, args.sinks == nullptr ? nullptr : args.sinks + query_head, args.rounding, layout.head_dim,
                           args.out + token * args.out_stride + query_head * layout.head_dim);
        }
    }

    // Combines the partitions of a task that was cut.
    void join(const AttentionTask& task, int64_t head, int thread) const {
        Scratch scratch{team.scratch(thread)};
        const Running running{scratch.take<float>(kTaskRows), scratch.take<float>(kTaskRows),
                              scratch.take<float>(kTaskRows * dim), dim};
        running.start(task.num_rows);
        for (int64_t p = task.first_partition; p < task.end_partition; ++p) {
            const Range partition = Range{0, kPartition}.shifted(p * kPartition);
            for (int64_t r = 0; r < task.num_rows; ++r) {
                if (seen(task.request, task.first_row + r).within(partition).empty()) continue;
                const float* partial = partial_of(task, p, head, r);
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
            const AttentionTask& task = plan.tasks[unit / num_heads];
            const AttentionTask* next = unit + 1 < end ? &plan.tasks[(unit + 1) / num_heads] : nullptr;
#if defined(__AMX_TILE__)
            if constexpr (format == KvFormat::bf16) {
                if (task.num_rows >= kMinTileRows) {
                    attention.template run<TileProducts>(task, unit % num_heads, next, (unit + 1) % num_heads, thread);
                    continue;
                }
            }
#endif
            attention.template run<RowProducts<format>>(task, unit % num_heads, next, (unit + 1) % num_heads, thread);
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
    const int64_t work = rows.num_tokens * layout.num_kv_heads * dim;
    const int64_t num_chunks = smaller(4 * team.num_threads(), (work + 4095) / 4096);
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
