#include "ops/sampler.h"

#include "isa/current.h"
#include "ops/functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

// A row is walked in groups of 1024 tokens. Of each group the largest value per lane is kept: the maxima of sixteen
// blocks of 64 tokens. The n-th largest of those is a value that at least n tokens reach, and not many more.
constexpr int64_t kStep = static_cast<int64_t>(kLanes);
constexpr int64_t kGroup = 64 * kStep;
constexpr float kInfinity = __builtin_inff();
constexpr float kLargest = 3.402823466e38f;
// top_p looks first at tokens of at least e^-10 of the likeliest one's probability.
constexpr float kLikely = -10.0f;
constexpr int64_t kSmall = 192;  // so many are sorted

// ---- what the vocabulary of vectors lacks ----

inline uint32_t to_bits(Mask mask) {
#if defined(__AVX512F__) || !defined(__AVX2__)
    return mask;
#else
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask.low))) |
           static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(mask.high))) << 8;
#endif
}
inline Mask from_bits(uint32_t bits) {
#if defined(__AVX512F__) || !defined(__AVX2__)
    return static_cast<Mask>(bits);
#else
    const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
    const __m256i low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128), high = _mm256_slli_epi32(low, 8);
    return {_mm256_cmpeq_epi32(_mm256_and_si256(all, low), low),
            _mm256_cmpeq_epi32(_mm256_and_si256(all, high), high)};
#endif
}

// Sums of integers below 2^53: exact, so the lanes may be added up in any order.
struct Sums {
#if defined(__AVX512F__)
    __m512d low = _mm512_setzero_pd(), high = _mm512_setzero_pd();
    void add(F32 x) {
        low = _mm512_add_pd(low, _mm512_cvtps_pd(_mm512_castps512_ps256(x.all)));
        high = _mm512_add_pd(high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(x.all, 1)));
    }
    double total() const {
        double lanes[8];
        _mm512_storeu_pd(lanes, _mm512_add_pd(low, high));
        double sum = 0;
        for (double lane : lanes) sum += lane;
        return sum;
    }
#elif defined(__AVX2__)
    __m256d a = _mm256_setzero_pd(), b = a, c = a, d = a;
    void add(F32 x) {
        a = _mm256_add_pd(a, _mm256_cvtps_pd(_mm256_castps256_ps128(x.low)));
        b = _mm256_add_pd(b, _mm256_cvtps_pd(_mm256_extractf128_ps(x.low, 1)));
        c = _mm256_add_pd(c, _mm256_cvtps_pd(_mm256_castps256_ps128(x.high)));
        d = _mm256_add_pd(d, _mm256_cvtps_pd(_mm256_extractf128_ps(x.high, 1)));
    }
    double total() const {
        double lanes[4];
        _mm256_storeu_pd(lanes, _mm256_add_pd(_mm256_add_pd(a, b), _mm256_add_pd(c, d)));
        return lanes[0] + lanes[1] + lanes[2] + lanes[3];
    }
#else
    double lanes[kLanes] = {};
    void add(F32 x) {
        for (size_t i = 0; i < kLanes; ++i) lanes[i] += static_cast<double>(x.lane[i]);
    }
    double total() const {
        double sum = 0;
        for (double lane : lanes) sum += lane;
        return sum;
    }
#endif
};

// Sixteen values from `first` on; -infinity beyond `end`.
inline F32 load_until(const float* values, int64_t first, int64_t end) {
    if (first + kStep <= end) return load(values + first);
    const Mask inside = first_lanes(static_cast<size_t>(end - first));
    return select(inside, load_masked(values + first, inside), broadcast(-kInfinity));
}

// To the nearest integer, ties to even, of a number that is not negative.
inline F32 round_to_integer(F32 x) {
#if defined(__AVX512F__)
    return {_mm512_roundscale_ps(x.all, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
#elif defined(__AVX2__)
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.low, nearest), _mm256_round_ps(x.high, nearest)};
#else
    // From 2^23 on there is no fraction; below, this sum rounds it away.
    const F32 limit = broadcast(8388608.0f);
    return select(less(x, limit), (x + limit) - limit, x);
#endif
}

// rint(exp(scaled) * 2^k) for scaled <= 0. Not fused: octavo.sampling.filters.weigh computes the same with NumPy.
inline F32 weigh(F32 scaled, I32 k) {
    const F32 x = max(scaled, broadcast(-64.0f));
    const I32 n = to_i32(x * broadcast(1.44269504f));
    const F32 whole = to_f32(n);
    const F32 r = (x - whole * broadcast(0.693359375f)) - whole * broadcast(-2.12194440e-4f);
    F32 p = broadcast(1.3934544519920112e-3f);
    p = p * r + broadcast(8.36377646663759e-3f);
    p = p * r + broadcast(4.166645677792509e-2f);
    p = p * r + broadcast(1.6666573358081568e-1f);
    p = p * r + broadcast(0.5f);
    p = (p * r * r + r) + broadcast(1.0f);
    return round_to_integer(as_f32(as_i32(p) + shift_left<23>(n + k)));
}

inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }

// ---- the state of a row ----

struct Part {  // of a row that several threads work on
    int64_t num_listed;
    int64_t num_above;
    bool is_finite;
};

struct Row {
    int64_t index;
    const RowOptions* options;
    const float* logits;
    const float* values;  // what is chosen from: the logits, or `edited`
    int64_t edit;         // -1: none
    const uint32_t* mask;
    bool is_done;
    bool lists_all;
    bool has_plain_sums;  // `sums` are of the distribution that is described
    float peak;
    int64_t best;
    float inverse_temperature;
    float bound;      // what is listed reaches it
    double total;     // of the weights
    float cut;        // kept: above `cut`, or equal to it up to id `last_cut`
    int64_t last_cut;
    int64_t token;

    float* edited;
    float* maxima;   // [groups][16]
    double* sums;    // [groups], of weights
    Part* parts;
    int64_t num_listed;
    float* list_values;  // part p of a row lists its tokens from its first id on; then they are moved together
    int32_t* list_ids;
    float* list_weights;
    uint64_t* spare;
};

struct Shape {
    int64_t size;    // vocab_size
    int64_t groups;
    int64_t parts;
    I32 k;            // weights are integers in units of 2^-k
    double unit;      // 2^-k

    int64_t first_group(int64_t part) const { return chunk_start(groups, parts, part); }
    int64_t first_id(int64_t part) const { return minimum(first_group(part) * kGroup, size); }
};

// ---- passes over part of a row ----

// `checks`: also whether there is neither NaN nor +infinity.
template <bool checks>
void find_maxima(const Shape& shape, Row& row, int64_t part, const float* values) {
    F32 check = broadcast(0.0f);
    for (int64_t group = shape.first_group(part); group < shape.first_group(part + 1); ++group) {
        const int64_t first = group * kGroup, end = minimum(first + kGroup, shape.size);
        F32 a = broadcast(-kInfinity), b = a, c = a, d = a;
        int64_t i = first;
        for (; i + 4 * kStep <= end; i += 4 * kStep) {
            const F32 w = load(values + i), x = load(values + i + kStep);
            const F32 y = load(values + i + 2 * kStep), z = load(values + i + 3 * kStep);
            a = max(a, w), b = max(b, x), c = max(c, y), d = max(d, z);
            if constexpr (checks) {
                check = fma(w, broadcast(0.0f), fma(x, broadcast(0.0f), check));
                check = fma(y, broadcast(0.0f), fma(z, broadcast(0.0f), check));
            }
        }
        for (; i < end; i += kStep) {
            const F32 x = load_until(values, i, end);
            a = max(a, x);
            if constexpr (checks) {
                check = fma(select(less(x, broadcast(-kLargest)), broadcast(0.0f), x), broadcast(0.0f), check);
            }
        }
        store(row.maxima + group * kStep, max(max(a, b), max(c, d)));
    }
    // NaN and infinities leave a NaN in `check`, but -infinity is allowed.
    bool is_finite = true;
    if (to_bits(is_nan(check)) != 0) {
        for (int64_t i = shape.first_id(part); i < shape.first_id(part + 1); ++i) {
            is_finite = is_finite && values[i] < kInfinity;
        }
    }
    row.parts[part].is_finite = is_finite;
}

// The largest value and the lowest id that has it.
void find_best(const Shape& shape, Row& row, const float* values) {
    F32 all = broadcast(-kInfinity);
    for (int64_t group = 0; group < shape.groups; ++group) all = max(all, load(row.maxima + group * kStep));
    row.peak = reduce_max(all);
    const F32 peak = broadcast(row.peak);
    row.best = 0;
    for (int64_t group = 0; group < shape.groups; ++group) {
        if (to_bits(less(load(row.maxima + group * kStep), peak)) == 0xffff) continue;
        const int64_t first = group * kGroup, end = minimum(first + kGroup, shape.size);
        for (int64_t i = first; i < end; i += kStep) {
            const uint32_t below = to_bits(less(load_until(values, i, end), peak));
            if (below != 0xffff) {
                row.best = i + __builtin_ctz(~below);
                return;
            }
        }
    }
}

bool allows(const uint32_t* mask, int64_t id) { return mask == nullptr || (mask[id / 32] >> (id % 32) & 1); }

// The logits of a part after the token mask.
void copy_masked(const Shape& shape, Row& row, int64_t part) {
    const int64_t first = shape.first_id(part), end = shape.first_id(part + 1);
    for (int64_t i = first; i < end; i += kStep) {
        const size_t count = static_cast<size_t>(minimum(kStep, end - i));
        F32 x = load_first(row.logits + i, count);
        if (row.mask != nullptr) x = select(from_bits(row.mask[i / 32] >> (i % 32)), x, broadcast(-kInfinity));
        store_first(row.edited + i, x, count);
    }
}

// body(place in the list, id) for the ids of the edited row in [first, end).
template <class Body>
void each_id(const RaggedIds& list, int64_t edit, int64_t first, int64_t end, const Body& body) {
    for (int64_t i = list.starts[edit]; i < list.starts[edit + 1]; ++i) {
        const int64_t id = list.ids[i];
        if (id >= first && id < end) body(i, id);
    }
}

void edit(const SampleArgs& args, const Shape& shape, Row& row, int64_t part) {
    const int64_t first = shape.first_id(part), end = shape.first_id(part + 1);
    if (row.edit < 0 || args.allowed.starts[row.edit] == args.allowed.starts[row.edit + 1]) {
        copy_masked(shape, row, part);
    } else {
        for (int64_t i = first; i < end; ++i) row.edited[i] = -kInfinity;
        each_id(args.allowed, row.edit, first, end, [&](int64_t, int64_t id) {
            if (allows(row.mask, id)) row.edited[id] = row.logits[id];
        });
    }
    if (row.edit < 0) return;
    each_id(args.banned, row.edit, first, end, [&](int64_t, int64_t id) { row.edited[id] = -kInfinity; });
    each_id(args.biased, row.edit, first, end, [&](int64_t i, int64_t id) { row.edited[id] += args.biases[i]; });
    const RowOptions& o = *row.options;
    each_id(args.seen, row.edit, first, end, [&](int64_t i, int64_t id) {
        const double before = static_cast<double>(row.edited[id]);
        if (before == -static_cast<double>(kInfinity)) return;
        double after = before > 0 ? before / o.repetition_penalty : before * o.repetition_penalty;
        after -= o.frequency_penalty * args.counts[i];
        if (args.counts[i] > 0) after -= o.presence_penalty;
        // An extreme penalty may leave float32: it must neither become infinity nor mask a token.
        const double largest = static_cast<double>(kLargest);
        row.edited[id] = static_cast<float>(after < -largest ? -largest : after > largest ? largest : after);
    });
}

// The ids of a part whose values reach `row.bound`, with their values.
void list_reaching(const Shape& shape, Row& row, int64_t part, const float* values) {
    const F32 bound = broadcast(row.bound);
    int64_t listed = shape.first_id(part);
    for (int64_t group = shape.first_group(part); group < shape.first_group(part + 1); ++group) {
        if (to_bits(less(load(row.maxima + group * kStep), bound)) == 0xffff) continue;
        const int64_t first = group * kGroup, end = minimum(first + kGroup, shape.size);
        for (int64_t i = first; i < end; i += kStep) {
            uint32_t reached = ~to_bits(less(load_until(values, i, end), bound)) & 0xffff;
            for (; reached != 0; reached &= reached - 1) {
                const int64_t id = i + __builtin_ctz(reached);
                row.list_ids[listed] = static_cast<int32_t>(id);
                row.list_values[listed++] = values[id];
            }
        }
    }
    row.parts[part].num_listed = listed - shape.first_id(part);
}

// Weights of a part, summed by group. If `lists`, those that reach `row.bound` when scaled are listed; unless `has_least`,
// min_scaled is off.
template <bool lists, bool has_least>
void weigh_part(const Shape& shape, Row& row, int64_t part) {
    const F32 peak = broadcast(row.peak), inverse = broadcast(row.inverse_temperature);
    const F32 least = broadcast(row.options->min_scaled), bound = broadcast(row.bound), zero = broadcast(0.0f);
    const I32 k = shape.k;
    int64_t listed = shape.first_id(part);
    for (int64_t group = shape.first_group(part); group < shape.first_group(part + 1); ++group) {
        const int64_t first = group * kGroup, end = minimum(first + kGroup, shape.size);
        Sums sums;
        for (int64_t i = first; i < end; i += kStep) {
            const F32 scaled = (load_until(row.values, i, end) - peak) * inverse;
            F32 weights = weigh(scaled, k);
            if constexpr (has_least) weights = select(less(scaled, least), zero, weights);
            sums.add(weights);
            if constexpr (lists) {
                uint32_t reached = ~to_bits(less(scaled, bound)) & 0xffff;
                if (reached == 0) continue;
                float lanes[kLanes];
                store(lanes, weights);
                for (; reached != 0; reached &= reached - 1) {
                    const int lane = __builtin_ctz(reached);
                    row.list_ids[listed] = static_cast<int32_t>(i + lane);
                    row.list_weights[listed] = lanes[lane];
                    row.list_values[listed++] = row.values[i + lane];
                }
            }
        }
        row.sums[group] = sums.total();
    }
    row.parts[part].num_listed = listed - shape.first_id(part);
}

void weigh_part(const Shape& shape, Row& row, int64_t part, bool lists) {
    const bool has_least = row.options->min_scaled > -kInfinity;
    if (lists) {
        has_least ? weigh_part<true, true>(shape, row, part) : weigh_part<true, false>(shape, row, part);
    } else {
        has_least ? weigh_part<false, true>(shape, row, part) : weigh_part<false, false>(shape, row, part);
    }
}

// For log-probabilities: weights at temperature 1 summed by group, tokens above `value` counted, those that reach
// `row.bound` listed where alternatives are wanted.
void describe_part(const Shape& shape, Row& row, int64_t part, const float* values, float peak, float value) {
    const F32 peaks = broadcast(peak), own = broadcast(value);
    const I32 k = shape.k;
    int64_t above = 0;
    for (int64_t group = shape.first_group(part); group < shape.first_group(part + 1); ++group) {
        const int64_t first = group * kGroup, end = minimum(first + kGroup, shape.size);
        const bool may_be_above = to_bits(less(own, load(row.maxima + group * kStep))) != 0;
        if (may_be_above) {
            for (int64_t i = first; i < end; i += kStep) {
                above += __builtin_popcount(to_bits(less(own, load_until(values, i, end))));
            }
        }
        if (row.has_plain_sums) continue;
        Sums sums;
        for (int64_t i = first; i < end; i += kStep) sums.add(weigh(load_until(values, i, end) - peaks, k));
        row.sums[group] = sums.total();
    }
    row.parts[part].num_above = above;
    if (row.options->num_logprobs > 0) list_reaching(shape, row, part, values);
}

// ---- choosing from a list ----

// The lists of a row's parts, moved together.
void join_lists(const Shape& shape, Row& row, bool with_weights) {
    int64_t joined = 0;
    for (int64_t part = 0; part < shape.parts; ++part) {
        const int64_t first = shape.first_id(part), count = row.parts[part].num_listed;
        for (int64_t i = 0; first != joined && i < count; ++i) {
            row.list_values[joined + i] = row.list_values[first + i];
            row.list_ids[joined + i] = row.list_ids[first + i];
            if (with_weights) row.list_weights[joined + i] = row.list_weights[first + i];
        }
        joined += count;
    }
    row.num_listed = joined;
}

double sum_of(const double* values, int64_t count) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += values[i];
    return sum;
}

// A number that falls as the value rises; the two zeros have the same.
inline uint32_t descending(float value) {
    const float x = value + 0.0f;
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x80000000u ? bits : ~bits & 0x7fffffffu;
}
inline float value_of(uint32_t key) {
    const uint32_t bits = key & 0x80000000u ? key : ~key & 0x7fffffffu;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void sort(uint64_t* keys, int64_t count) {
    static constexpr int64_t kGaps[] = {40423, 17961, 7983, 3548, 1577, 701, 301, 132, 57, 23, 10, 4, 1};
    for (int64_t gap : kGaps) {
        for (int64_t i = gap; i < count; ++i) {
            const uint64_t key = keys[i];
            int64_t j = i;
            for (; j >= gap && keys[j - gap] > key; j -= gap) keys[j] = keys[j - gap];
            keys[j] = key;
        }
    }
}

// Largest values first, lowest place first among equals: the fewest whose weights (null: each 1) reach `need` are
// those above `value` and the first `num_equal` of those that equal it.
struct Cut {
    float value;
    int64_t num_equal;
};

// `need` is at most the sum of the weights, and above 0. `spare` holds `count` words.
Cut find_cut(const float* values, const float* weights, int64_t count, double need, uint64_t* spare) {
    // Words of (descending(value), place). A round keeps those in the bucket in which `need` is reached.
    double above = 0;
    uint64_t* const words = spare;
    int64_t left = 0;
    if (count <= kSmall) {
        for (int64_t i = 0; i < count; ++i) {
            words[i] = static_cast<uint64_t>(descending(values[i])) << 32 | static_cast<uint64_t>(i);
        }
        left = count;
    }
    for (uint32_t shift = 21; count > kSmall; shift = shift == 21 ? 10 : 0) {
        const uint32_t mask = shift == 0 ? 1023 : 2047;
        double sums[2048];
        memset(sums, 0, sizeof(double) * (mask + 1));
        const bool is_first = shift == 21;
        const int64_t num = is_first ? count : left;
        for (int64_t i = 0; i < num; ++i) {
            const int64_t place = is_first ? i : static_cast<int64_t>(words[i] & 0xffffffffu);
            const uint32_t key = is_first ? descending(values[i]) : static_cast<uint32_t>(words[i] >> 32);
            sums[key >> shift & mask] += weights == nullptr ? 1.0 : static_cast<double>(weights[place]);
        }
        uint32_t bucket = 0;
        while (bucket < mask && above + sums[bucket] < need) above += sums[bucket++];
        left = 0;
        for (int64_t i = 0; i < num; ++i) {
            const uint64_t word = is_first ? static_cast<uint64_t>(descending(values[i])) << 32 | static_cast<uint64_t>(i)
                                           : words[i];
            words[left] = word;
            left += (static_cast<uint32_t>(word >> 32) >> shift & mask) == bucket;
        }
        if (shift == 0 || left <= kSmall) break;
    }
    if (left <= kSmall) sort(words, left);  // else they are all equal, and in order
    Cut cut{0.0f, 0};
    uint64_t last = ~uint64_t{0};
    for (int64_t i = 0; i < left; ++i) {
        const uint64_t key = words[i] >> 32;
        cut.num_equal = key == last ? cut.num_equal + 1 : 1;
        last = key;
        above += weights == nullptr ? 1.0 : static_cast<double>(weights[words[i] & 0xffffffffu]);
        if (above >= need) break;
    }
    cut.value = value_of(static_cast<uint32_t>(last));
    return cut;
}

// Keep what `cut` says of the list, and note it in the row.
void apply_cut(Row& row, Cut cut, bool with_weights) {
    int64_t kept = 0;
    row.cut = cut.value;
    for (int64_t i = 0; i < row.num_listed; ++i) {
        const float value = row.list_values[i];
        if (value < cut.value) continue;
        if (value == cut.value) {
            if (cut.num_equal == 0) continue;
            --cut.num_equal;
            row.last_cut = row.list_ids[i];
        }
        row.list_values[kept] = value;
        row.list_ids[kept] = row.list_ids[i];
        if (with_weights) row.list_weights[kept] = row.list_weights[i];
        ++kept;
    }
    row.num_listed = kept;
}

// The n-th largest of the block maxima: a value that n tokens or more reach.
float reached_by(const Shape& shape, Row& row, int64_t n) {
    const int64_t blocks = shape.groups * kStep;
    if (2 * n > blocks) return -kLargest;
    const float nth = find_cut(row.maxima, nullptr, blocks, static_cast<double>(n), row.spare).value;
    return nth < -kLargest ? -kLargest : nth;
}

// ---- the draw ----

// Philox4x32-10 (Salmon et al., SC 2011); octavo.sampling.philox says what the counter is made of.
double uniform(uint64_t seed, uint32_t choice, uint32_t position) {
    uint32_t a = position, b = choice, c = 0, d = 0;
    uint32_t low = static_cast<uint32_t>(seed), high = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t x = uint64_t{0xD2511F53} * a, y = uint64_t{0xCD9E8D57} * c;
        a = static_cast<uint32_t>(y >> 32) ^ b ^ low;
        b = static_cast<uint32_t>(y);
        c = static_cast<uint32_t>(x >> 32) ^ d ^ high;
        d = static_cast<uint32_t>(x);
        low += 0x9E3779B9;
        high += 0xBB67AE85;
    }
    return (static_cast<double>(a >> 5) * 67108864.0 + static_cast<double>(b >> 6)) * 0x1p-53;
}

double target_of(const SampleArgs& args, const Row& row, double total) {
    const RowOptions& o = *row.options;
    const double u = uniform(o.seed, o.choice, static_cast<uint32_t>(args.positions[row.index]));
    const double target = static_cast<double>(static_cast<int64_t>(u * total));
    return target < total - 1 ? target : total - 1;
}

void draw_from_list(const SampleArgs& args, Row& row) {
    double total = 0, sum = 0;
    for (int64_t i = 0; i < row.num_listed; ++i) total += static_cast<double>(row.list_weights[i]);
    const double target = target_of(args, row, total);
    int64_t i = 0;
    while (i < row.num_listed - 1 && (sum += static_cast<double>(row.list_weights[i])) <= target) ++i;
    row.token = row.list_ids[i];
}

void draw_from_all(const SampleArgs& args, const Shape& shape, Row& row) {
    const double target = target_of(args, row, row.total);
    int64_t group = 0;
    double sum = 0;
    while (group < shape.groups - 1 && sum + row.sums[group] <= target) sum += row.sums[group++];
    const int64_t first = group * kGroup, end = minimum(first + kGroup, shape.size);
    const F32 peak = broadcast(row.peak), inverse = broadcast(row.inverse_temperature);
    const F32 least = broadcast(row.options->min_scaled);
    for (int64_t i = first; i < end; i += kStep) {
        const F32 scaled = (load_until(row.values, i, end) - peak) * inverse;
        float weights[kLanes];
        store(weights, select(less(scaled, least), broadcast(0.0f), weigh(scaled, shape.k)));
        for (size_t lane = 0; lane < kLanes; ++lane) {
            sum += static_cast<double>(weights[lane]);
            if (sum > target) {
                row.token = i + static_cast<int64_t>(lane);
                return;
            }
        }
    }
}

// ---- the steps of a row ----

void begin(const SampleArgs& args, Row& row, int64_t index) {
    row.index = index;
    row.options = args.options + index;
    row.logits = args.logits + args.sources[index] * args.logits_stride;
    row.values = row.logits;
    row.edit = args.edit_of_row == nullptr ? -1 : args.edit_of_row[index];
    const int32_t mask = args.mask_of_row == nullptr ? -1 : args.mask_of_row[index];
    row.mask = mask < 0 ? nullptr : args.masks + mask * args.mask_words;
    row.is_done = row.lists_all = row.has_plain_sums = false;
    row.cut = -kInfinity;
    row.last_cut = args.vocab_size;
}

bool is_edited(const Row& row) { return row.edit >= 0 || row.mask != nullptr; }
bool draws(const Row& row) { return !row.is_done && row.options->temperature > 0 && row.options->top_k != 1; }
bool is_described(const Row& row) { return row.options->num_logprobs >= 0; }

bool describes_processed(const SampleArgs& args, const Row& row) {
    return args.processed && args.given == nullptr && row.options->temperature > 0;
}

// Whether `maxima` and `values` are not yet those of the distribution that is described.
bool describes_other(const SampleArgs& args, const Row& row) {
    return describes_processed(args, row) || (!args.processed && row.edit >= 0);
}

void fail(const SampleArgs& args, Row& row, SampleStatus status) {
    args.token_ids[row.index] = -1;
    args.statuses[row.index] = status;
    row.is_done = true;
}

void check_logits(const SampleArgs& args, const Shape& shape, Row& row) {
    find_best(shape, row, row.logits);
    bool is_finite = row.peak > -kInfinity;
    for (int64_t part = 0; part < shape.parts; ++part) is_finite = is_finite && row.parts[part].is_finite;
    if (!is_finite) fail(args, row, SampleStatus::not_finite);
}

void check_edited(const SampleArgs& args, const Shape& shape, Row& row) {
    row.values = row.edited;
    find_best(shape, row, row.edited);
    if (!(row.peak > -kInfinity)) fail(args, row, SampleStatus::nothing_left);
}

void prepare_draw(const SampleArgs& args, const Shape& shape, Row& row) {
    const RowOptions& o = *row.options;
    row.token = args.given == nullptr ? row.best : args.given[row.index];
    if (o.temperature > 0 && o.top_k == 1) {
        row.cut = row.peak;
        row.last_cut = row.best;
    }
    if (o.temperature > 0) row.inverse_temperature = 1.0f / o.temperature;
    if (!draws(row)) return;
    if (o.top_k > 0) {
        row.bound = reached_by(shape, row, o.top_k);
    } else {
        row.bound = kLikely > o.min_scaled ? kLikely : o.min_scaled;
        row.has_plain_sums = o.temperature == 1.0f && !(o.min_scaled > -kInfinity) && !describes_other(args, row);
    }
}

void list_or_weigh(const Shape& shape, Row& row, int64_t part) {
    if (row.options->top_k > 0) {
        list_reaching(shape, row, part, row.values);
    } else {
        weigh_part(shape, row, part, row.options->top_p < 1);
    }
}

void draw_of_top_k(const SampleArgs& args, const Shape& shape, Row& row) {
    const RowOptions& o = *row.options;
    join_lists(shape, row, false);
    if (row.num_listed >= o.top_k) {
        apply_cut(row, find_cut(row.list_values, nullptr, row.num_listed, o.top_k, row.spare), false);
    }
    const F32 peak = broadcast(row.peak), inverse = broadcast(row.inverse_temperature);
    const F32 least = broadcast(o.min_scaled);
    Sums sums;
    for (int64_t i = 0; i < row.num_listed; i += kStep) {
        const F32 scaled = (load_until(row.list_values, i, row.num_listed) - peak) * inverse;
        const F32 weights = select(less(scaled, least), broadcast(0.0f), weigh(scaled, shape.k));
        store(row.list_weights + i, weights);
        sums.add(weights);
    }
    row.total = sums.total();
    if (o.top_p < 1) {
        const double mass = o.top_p * row.total;
        apply_cut(row, find_cut(row.list_values, row.list_weights, row.num_listed, mass, row.spare), true);
    }
    draw_from_list(args, row);
}

// False when the tokens that are listed do not hold the mass of top_p: then all must be.
bool draw_of_top_p(const SampleArgs& args, const Shape& shape, Row& row) {
    row.total = sum_of(row.sums, shape.groups);
    const double mass = row.options->top_p * row.total;
    double listed = 0;
    for (int64_t part = 0; part < shape.parts; ++part) {
        const float* weights = row.list_weights + shape.first_id(part);
        for (int64_t i = 0; i < row.parts[part].num_listed; ++i) listed += static_cast<double>(weights[i]);
    }
    if (listed < mass) return false;
    join_lists(shape, row, true);
    apply_cut(row, find_cut(row.list_values, row.list_weights, row.num_listed, mass, row.spare), true);
    draw_from_list(args, row);
    return true;
}

void draw(const SampleArgs& args, const Shape& shape, Row& row) {
    if (row.options->top_k > 0) {
        draw_of_top_k(args, shape, row);
    } else if (row.options->top_p < 1) {
        if (!draw_of_top_p(args, shape, row)) {
            row.lists_all = true;
            row.bound = row.options->min_scaled > -64.0f ? row.options->min_scaled : -64.0f;  // below, weights are 0
        }
    } else {
        row.total = sum_of(row.sums, shape.groups);
        draw_from_all(args, shape, row);
    }
}

// ---- log-probabilities ----

// Put the distribution that is described in its place: the logits after the mask, or what was drawn from.
void restore_part(const SampleArgs& args, const Shape& shape, Row& row, int64_t part) {
    if (!describes_processed(args, row)) {
        copy_masked(shape, row, part);
    } else {
        const F32 peak = broadcast(row.peak), inverse = broadcast(row.inverse_temperature);
        const F32 least = broadcast(row.options->min_scaled), cut = broadcast(row.cut), none = broadcast(-kInfinity);
        const int64_t end = shape.first_id(part + 1);
        for (int64_t i = shape.first_id(part); i < end; i += kStep) {
            const F32 x = load_until(row.values, i, end);
            const F32 scaled = (x - peak) * inverse;
            const int64_t first_beyond = row.last_cut + 1 - i;  // equals from this lane on are cut
            const uint32_t up_to = first_beyond <= 0 ? 0 : first_beyond >= kStep ? 0xffff : (1u << first_beyond) - 1;
            const uint32_t above = to_bits(less(cut, x)), equal = ~to_bits(less(x, cut)) & ~above;
            const F32 kept = select(from_bits(above | (equal & up_to)), scaled, none);
            const F32 y = select(less(scaled, least), none, kept);
            store_first(row.edited + i, y, static_cast<size_t>(minimum(kStep, end - i)));
        }
    }
    find_maxima<false>(shape, row, part, row.edited);
}

void prepare_description(const SampleArgs& args, const Shape& shape, Row& row) {
    if (describes_other(args, row)) {
        row.values = row.edited;
        find_best(shape, row, row.values);
    }
    if (row.options->num_logprobs > 0) row.bound = reached_by(shape, row, row.options->num_logprobs);
}

void finish_description(const SampleArgs& args, const Shape& shape, Row& row) {
    const Described& d = args.described;
    d.values[row.index] = row.values[row.token];
    d.peaks[row.index] = row.peak;
    d.totals[row.index] = sum_of(row.sums, shape.groups) * shape.unit;
    int64_t above = 0;
    for (int64_t part = 0; part < shape.parts; ++part) above += row.parts[part].num_above;
    d.ranks[row.index] = static_cast<int32_t>(1 + above);
    d.num_top[row.index] = 0;
    const int64_t wanted = row.options->num_logprobs;
    if (wanted == 0) return;
    join_lists(shape, row, false);
    if (row.num_listed > wanted) {
        const double need = static_cast<double>(wanted);
        apply_cut(row, find_cut(row.list_values, nullptr, row.num_listed, need, row.spare), false);
    }
    for (int64_t i = 0; i < row.num_listed; ++i) {
        row.spare[i] = static_cast<uint64_t>(descending(row.list_values[i])) << 32 | static_cast<uint64_t>(i);
    }
    sort(row.spare, row.num_listed);
    d.num_top[row.index] = static_cast<int32_t>(row.num_listed);
    for (int64_t i = 0; i < row.num_listed; ++i) {
        const int64_t place = static_cast<int64_t>(row.spare[i] & 0xffffffffu);
        d.top_ids[row.index * d.top_stride + i] = row.list_ids[place];
        d.top_values[row.index * d.top_stride + i] = row.list_values[place];
    }
}

// ---- rows and their parts ----

// `each(count, body)` runs body(i) for i below count, in any order, and returns when all have run.
template <class Each>
void sample_rows(const SampleArgs& args, const Shape& shape, Row* rows, int64_t num_rows, const Each& each) {
    const auto any = [&](auto holds) {
        for (int64_t i = 0; i < num_rows; ++i) {
            if (!rows[i].is_done && holds(rows[i])) return true;
        }
        return false;
    };
    const auto each_row = [&](auto holds, auto body) {
        each(any(holds) ? num_rows : 0, [&](int64_t i) {
            if (!rows[i].is_done && holds(rows[i])) body(rows[i]);
        });
    };
    const auto each_part = [&](auto holds, auto body) {
        each(any(holds) ? num_rows * shape.parts : 0, [&](int64_t i) {
            Row& row = rows[i / shape.parts];
            if (!row.is_done && holds(row)) body(row, i % shape.parts);
        });
    };
    const auto always = [](const Row&) { return true; };

    each_part(always, [&](Row& row, int64_t part) { find_maxima<true>(shape, row, part, row.logits); });
    each_row(always, [&](Row& row) { check_logits(args, shape, row); });
    each_part(is_edited, [&](Row& row, int64_t part) {
        edit(args, shape, row, part);
        find_maxima<false>(shape, row, part, row.edited);
    });
    each_row(is_edited, [&](Row& row) { check_edited(args, shape, row); });
    each_row(always, [&](Row& row) { prepare_draw(args, shape, row); });
    each_part(draws, [&](Row& row, int64_t part) { list_or_weigh(shape, row, part); });
    each_row(draws, [&](Row& row) { draw(args, shape, row); });
    const auto lists_all = [](const Row& row) { return row.lists_all; };
    each_part(lists_all, [&](Row& row, int64_t part) { weigh_part(shape, row, part, true); });
    each_row(lists_all, [&](Row& row) { draw_of_top_p(args, shape, row); });
    for (int64_t i = 0; i < num_rows; ++i) {
        if (rows[i].is_done) continue;
        args.token_ids[rows[i].index] = static_cast<int32_t>(rows[i].token);
        args.statuses[rows[i].index] = SampleStatus::sampled;
    }

    const auto restores = [&](const Row& row) { return is_described(row) && describes_other(args, row); };
    each_part(restores, [&](Row& row, int64_t part) { restore_part(args, shape, row, part); });
    each_row(is_described, [&](Row& row) { prepare_description(args, shape, row); });
    each_part(is_described, [&](Row& row, int64_t part) {
        describe_part(shape, row, part, row.values, row.peak, row.values[row.token]);
    });
    each_row(is_described, [&](Row& row) { finish_description(args, shape, row); });
}

int ceil_log2(int64_t n) { return n <= 1 ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(n - 1)); }

}  // namespace

void sample(const SampleArgs& args, Team& team) {
    const int num_threads = team.num_threads();
    const int64_t groups = (args.vocab_size + kGroup - 1) / kGroup;
    const int k = 52 - ceil_log2(args.vocab_size);
    Shape shape{args.vocab_size, groups, 1, broadcast(int32_t{k}), 1.0 / static_cast<double>(int64_t{1} << k)};
    const SampleWorkspace layout = sample_workspace(args.vocab_size, num_threads);
    const auto row_at = [&](int64_t slot, int64_t index) {
        uint8_t* base = args.workspace + slot * layout.slot_bytes;
        uint8_t* ids = base + 2 * layout.row_bytes;
        uint8_t* rest = base + 6 * layout.row_bytes;
        Row row{};
        row.edited = reinterpret_cast<float*>(base);
        row.list_values = reinterpret_cast<float*>(base + layout.row_bytes);
        row.list_ids = reinterpret_cast<int32_t*>(ids);
        row.list_weights = reinterpret_cast<float*>(ids + layout.row_bytes);
        row.spare = reinterpret_cast<uint64_t*>(ids + 2 * layout.row_bytes);
        row.maxima = reinterpret_cast<float*>(rest);
        row.sums = reinterpret_cast<double*>(rest + groups * kStep * 4);
        row.parts = reinterpret_cast<Part*>(rest + groups * (kStep * 4 + 8));
        begin(args, row, index);
        return row;
    };
    static_assert(sizeof(Row) <= SampleWorkspace::kStateBytes && sizeof(Part) <= SampleWorkspace::kPartBytes);
    if (args.rows <= layout.num_slots && groups > 1 && num_threads > 1) {
        // Too few rows to keep all threads busy to the end: all rows step by step, each in parts.
        const int64_t wanted = (4 * num_threads + args.rows - 1) / args.rows;
        shape.parts = minimum(minimum(wanted, groups), SampleWorkspace::kMaxParts);
        Row* rows = reinterpret_cast<Row*>(args.workspace + layout.num_slots * layout.slot_bytes);
        for (int64_t i = 0; i < args.rows; ++i) rows[i] = row_at(i, i);
        sample_rows(args, shape, rows, args.rows, [&](int64_t count, const auto& body) {
            team.each(count, [&](int64_t i, int) { body(i); });
        });
        return;
    }
    team.each(args.rows, [&](int64_t index, int thread) {
        Row row = row_at(thread, index);
        sample_rows(args, shape, &row, 1, [](int64_t count, const auto& body) {
            for (int64_t i = 0; i < count; ++i) body(i);
        });
    });
}

}  // namespace octavo::OCTAVO_ISA
