#include "weights/pack.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <string>

namespace octavo {
namespace {

constexpr int64_t kSlab = 256;  // values of a row that are taken at a time: a whole number of blocks of every type
constexpr int64_t kSlabGroups = kSlab / 16;

// ---- numbers ----------------------------------------------------------------------------------------------------
// The threads count subnormals as zero, so no conversion may pass through a float32 subnormal.

inline float from_bits(uint32_t bits) { return std::bit_cast<float>(bits); }
inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }

inline float from_bf16(uint16_t x) { return from_bits(static_cast<uint32_t>(x) << 16); }

inline float from_f16(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, magnitude = half & 0x7fff;
    const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t large = (magnitude << 13) + (magnitude >= 0x7c00 ? 0x70000000 : 0x38000000);
    return from_bits((magnitude < 0x400 ? small : large) | sign);
}

inline uint16_t to_bf16(float x) {
    const uint32_t bits = bits_of(x);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t quiet_nan = ((bits >> 16) & 0x8000) | 0x7fc0;
    return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? quiet_nan : nearest);
}

inline uint16_t to_f16(float x) {
    const uint32_t bits = bits_of(x), magnitude = bits & 0x7fffffff;
    const uint32_t large = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    const uint32_t small = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000;  // the sum rounds to multiples of 2^-24
    uint32_t half = magnitude < 0x38800000 ? small : large;
    half = magnitude >= 0x477ff000 ? 0x7c00 : half;
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
}

inline bool is_f16(float x) {
    return bits_of(from_f16(to_f16(x))) == bits_of(x);
}

inline uint16_t read_u16(const uint8_t* at) {
    uint16_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
inline uint32_t read_u32(const uint8_t* at) {
    uint32_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}
inline float read_f16(const uint8_t* at) { return from_f16(read_u16(at)); }

// ---- blocks -----------------------------------------------------------------------------------------------------
// Each decoder writes the integers, scales and minima of one block, as quantization/gguf_blocks.py defines them.

constexpr std::array<int8_t, 16> kIq4Values{-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr std::array<int8_t, 16> kFp4Values{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice E2M1

inline void nibbles(const uint8_t* packed, int64_t count, int8_t* q) {
    for (int64_t i = 0; i < count; ++i) {
        q[i] = static_cast<int8_t>(packed[i] & 15);
        q[count + i] = static_cast<int8_t>(packed[i] >> 4);
    }
}

inline void table_nibbles(const std::array<int8_t, 16>& table, const uint8_t* packed, int8_t* q) {
    for (int64_t i = 0; i < 16; ++i) {
        q[i] = table[packed[i] & 15];
        q[16 + i] = table[packed[i] >> 4];
    }
}

inline void fifth_bits(const uint8_t* word, int bias, int8_t* q) {
    const uint32_t bits = read_u32(word);
    for (int i = 0; i < 32; ++i) q[i] = static_cast<int8_t>((q[i] | static_cast<int>((bits >> i) & 1) << 4) - bias);
}

// 64 bytes of 2-bit codes: value 128 h + 32 s + l is field s of byte 32 h + l.
inline void two_bits(const uint8_t* packed, int8_t* q) {
    for (int h = 0; h < 2; ++h) {
        for (int s = 0; s < 4; ++s) {
            const uint8_t* from = packed + 32 * h;
            int8_t* to = q + 128 * h + 32 * s;
            for (int l = 0; l < 32; ++l) to[l] = static_cast<int8_t>((from[l] >> (2 * s)) & 3);
        }
    }
}

void q4_0(const uint8_t* b, int8_t* q, float* scales, float*) {
    scales[0] = read_f16(b);
    nibbles(b + 2, 16, q);
}

void q4_1(const uint8_t* b, int8_t* q, float* scales, float* mins) {
    scales[0] = read_f16(b);
    mins[0] = read_f16(b + 2);
    nibbles(b + 4, 16, q);
}

void q5_0(const uint8_t* b, int8_t* q, float* scales, float*) {
    scales[0] = read_f16(b);
    nibbles(b + 6, 16, q);
    fifth_bits(b + 2, 16, q);
}

void q5_1(const uint8_t* b, int8_t* q, float* scales, float* mins) {
    scales[0] = read_f16(b);
    mins[0] = read_f16(b + 2);
    nibbles(b + 8, 16, q);
    fifth_bits(b + 4, 0, q);
}

void q8_0(const uint8_t* b, int8_t* q, float* scales, float*) {
    scales[0] = read_f16(b);
    std::memcpy(q, b + 2, 32);
}

void q2_k(const uint8_t* b, int8_t* q, float* scales, float* mins) {
    const float scale = read_f16(b + 80), min = read_f16(b + 82);
    for (int g = 0; g < 16; ++g) {
        scales[g] = scale * static_cast<float>(b[g] & 15);
        mins[g] = -(min * static_cast<float>(b[g] >> 4));
    }
    two_bits(b + 16, q);
}

void q3_k(const uint8_t* b, int8_t* q, float* scales, float*) {
    const float scale = read_f16(b + 108);
    for (int g = 0; g < 16; ++g) {
        const int low = (b[96 + g % 8] >> (g < 8 ? 0 : 4)) & 15, high = (b[104 + g % 4] >> (2 * (g / 4))) & 3;
        scales[g] = scale * static_cast<float>((low | high << 4) - 32);
    }
    two_bits(b + 32, q);
    for (int s = 0; s < 8; ++s) {
        // The block means code - 4, int4 without minima means q - 8.
        for (int l = 0; l < 32; ++l) q[32 * s + l] = static_cast<int8_t>((q[32 * s + l] | ((b[l] >> s) & 1) << 2) + 4);
    }
}

// Scale and minimum of 8 groups, from the 16 bytes that begin a Q4_K or Q5_K block.
void k_scales(const uint8_t* b, float* scales, float* mins) {
    const float scale = read_f16(b), min = read_f16(b + 2);
    const uint8_t* p = b + 4;
    for (int g = 0; g < 4; ++g) {
        scales[g] = scale * static_cast<float>(p[g] & 63);
        mins[g] = -(min * static_cast<float>(p[4 + g] & 63));
        scales[4 + g] = scale * static_cast<float>((p[8 + g] & 15) | ((p[g] >> 2) & 0x30));
        mins[4 + g] = -(min * static_cast<float>((p[8 + g] >> 4) | ((p[4 + g] >> 2) & 0x30)));
    }
}

void q4_k(const uint8_t* b, int8_t* q, float* scales, float* mins) {
    k_scales(b, scales, mins);
    for (int pair = 0; pair < 4; ++pair) nibbles(b + 16 + 32 * pair, 32, q + 64 * pair);
}

void q5_k(const uint8_t* b, int8_t* q, float* scales, float* mins) {
    k_scales(b, scales, mins);
    for (int pair = 0; pair < 4; ++pair) nibbles(b + 48 + 32 * pair, 32, q + 64 * pair);
    for (int g = 0; g < 8; ++g) {
        for (int l = 0; l < 32; ++l) {
            q[32 * g + l] = static_cast<int8_t>(q[32 * g + l] | ((b[16 + l] >> g) & 1) << 4);
        }
    }
}

void q6_k(const uint8_t* b, int8_t* q, float* scales, float*) {
    const float scale = read_f16(b + 208);
    for (int g = 0; g < 16; ++g) scales[g] = scale * static_cast<float>(static_cast<int8_t>(b[192 + g]));
    for (int half = 0; half < 2; ++half) nibbles(b + 64 * half, 64, q + 128 * half);
    int8_t top[kSlab];
    two_bits(b + 128, top);
    for (int i = 0; i < 256; ++i) q[i] = static_cast<int8_t>((q[i] | top[i] << 4) - 32);
}

void iq4_nl(const uint8_t* b, int8_t* q, float* scales, float*) {
    scales[0] = read_f16(b);
    table_nibbles(kIq4Values, b + 2, q);
}

void iq4_xs(const uint8_t* b, int8_t* q, float* scales, float*) {
    const float scale = read_f16(b);
    for (int g = 0; g < 8; ++g) {
        const int low = (b[4 + g / 2] >> (4 * (g % 2))) & 15, top = (b[2 + g / 4] >> (2 * (g % 4))) & 3;
        scales[g] = scale * static_cast<float>((low | top << 4) - 32);
        table_nibbles(kIq4Values, b + 8 + 16 * g, q + 32 * g);
    }
}

void mxfp4(const uint8_t* b, int8_t* q, float* scales, float*) {
    const uint32_t exponent = b[0];
    scales[0] = from_bits(exponent < 2 ? uint32_t{0x00200000} << exponent : (exponent - 1) << 23);
    table_nibbles(kFp4Values, b + 1, q);
}

using Decode = void (*)(const uint8_t* block, int8_t* q, float* scales, float* mins);

struct TypeInfo {
    RowType type;
    std::string_view name;
    RowShape shape;
    IntegerForm form;
    Decode decode;  // null for plain types
};

constexpr WeightFormat i4 = WeightFormat::int4, i8 = WeightFormat::int8;
constexpr TypeInfo kTypes[] = {
    {RowType::f32, "F32", {1, 4}, {}, nullptr},
    {RowType::bf16, "BF16", {1, 2}, {}, nullptr},
    {RowType::f16, "F16", {1, 2}, {}, nullptr},
    {RowType::q4_0, "Q4_0", {32, 18}, {i4, 32, false, true}, q4_0},
    {RowType::q4_1, "Q4_1", {32, 20}, {i4, 32, true, true}, q4_1},
    {RowType::q5_0, "Q5_0", {32, 22}, {i8, 32, false, true}, q5_0},
    {RowType::q5_1, "Q5_1", {32, 24}, {i8, 32, true, true}, q5_1},
    {RowType::q8_0, "Q8_0", {32, 34}, {i8, 32, false, true}, q8_0},
    {RowType::q2_k, "Q2_K", {256, 84}, {i4, 16, true, false}, q2_k},
    {RowType::q3_k, "Q3_K", {256, 110}, {i4, 16, false, false}, q3_k},
    {RowType::q4_k, "Q4_K", {256, 144}, {i4, 32, true, false}, q4_k},
    {RowType::q5_k, "Q5_K", {256, 176}, {i8, 32, true, false}, q5_k},
    {RowType::q6_k, "Q6_K", {256, 210}, {i8, 16, false, false}, q6_k},
    {RowType::iq4_nl, "IQ4_NL", {32, 18}, {i8, 32, false, true}, iq4_nl},
    {RowType::iq4_xs, "IQ4_XS", {256, 136}, {i8, 32, false, false}, iq4_xs},
    {RowType::mxfp4, "MXFP4", {32, 17}, {i8, 32, false, false}, mxfp4},
};

const TypeInfo& info(RowType type) { return kTypes[static_cast<size_t>(type)]; }

bool is_symmetric_int4(WeightFormat format, bool has_min) { return format == WeightFormat::int4 && !has_min; }

// ---- rows -------------------------------------------------------------------------------------------------------

struct Row {
    const TypeInfo* type = nullptr;  // null for a column that only fills up its panel
    const uint8_t* data = nullptr;
    const uint8_t* at(int64_t k) const { return data + k / type->shape.block * type->shape.bytes; }
};

// Which row stands in which column of which panel; see PackedMatrix.
class RowMap {
  public:
    RowMap(const PackedMatrix& target, const std::vector<RowSource>& sources) : target_(target), sources_(sources) {
        int64_t count = 0;
        for (const RowSource& source : sources) {
            const RowShape& shape = info(source.type).shape;
            if (target.k % shape.block != 0 || source.stride < target.k / shape.block * shape.bytes) {
                throw std::invalid_argument("rows of " + std::to_string(target.k) + " values do not fit " +
                                            std::string(info(source.type).name) + " rows of " +
                                            std::to_string(source.stride) + " bytes");
            }
            count += source.count;
        }
        if (count != target.n) {
            throw std::invalid_argument(std::to_string(count) + " rows for a matrix of " + std::to_string(target.n));
        }
    }

    Row at(int64_t panel, int64_t column) const {
        int64_t row = panel * kPanel + column, end = target_.n;
        if (target_.gated) {
            const int64_t half = target_.n / 2, which = panel % 2;
            row = which * half + panel / 2 * kPanel + column;
            end = (which + 1) * half;
        }
        if (row >= end) return {};
        const RowSource* source = sources_.data();
        for (; row >= source->count; ++source) row -= source->count;
        return {&info(source->type), source->data + row * source->stride};
    }

  private:
    const PackedMatrix& target_;
    const std::vector<RowSource>& sources_;
};

struct Codes {
    alignas(64) int8_t q[kSlab];
    float scales[kSlabGroups];
    float mins[kSlabGroups];
};

void decode(const Row& row, int64_t k, int64_t count, Codes& codes) {
    const auto& [block, bytes] = row.type->shape;
    const int64_t groups = block / row.type->form.group;
    const uint8_t* at = row.at(k);
    for (int64_t i = 0; i < count / block; ++i) {
        row.type->decode(at + i * bytes, codes.q + i * block, codes.scales + i * groups, codes.mins + i * groups);
    }
}

void read_values(const Row& row, int64_t k, int64_t count, float* out) {
    const uint8_t* at = row.at(k);
    switch (row.type->type) {
        case RowType::f32: std::memcpy(out, at, static_cast<size_t>(count) * 4); return;
        case RowType::bf16:
            for (int64_t i = 0; i < count; ++i) out[i] = from_bf16(read_u16(at + 2 * i));
            return;
        case RowType::f16:
            for (int64_t i = 0; i < count; ++i) out[i] = from_f16(read_u16(at + 2 * i));
            return;
        default: break;
    }
    Codes codes;
    decode(row, k, count, codes);
    const IntegerForm& form = row.type->form;
    const int zero = is_symmetric_int4(form.format, form.has_min) ? 8 : 0;
    for (int64_t g = 0; g < count / form.group; ++g) {
        const int8_t* q = codes.q + g * form.group;
        float* values = out + g * form.group;
        const float scale = codes.scales[g], min = form.has_min ? codes.mins[g] : 0.0f;
        for (int64_t i = 0; i < form.group; ++i) values[i] = scale * static_cast<float>(q[i] - zero);
        if (!form.has_min) continue;
        for (int64_t i = 0; i < form.group; ++i) values[i] = values[i] + min;
    }
}

// ---- panels -----------------------------------------------------------------------------------------------------

// A slab of the sixteen rows of a panel. Rows are a line longer than the slab, so that they do not meet in the cache.
template <class T>
struct Tile {
    static constexpr int64_t kStride = kSlab + 64 / sizeof(T);
    alignas(64) T rows[kPanel][kStride];
};

// [16 rows][k] -> [k / per][16 rows][per], `Unit` being `per` values.
template <class Unit, class T>
void interleave(const Tile<T>& tile, int64_t k, Unit* out) {
    constexpr int64_t per = sizeof(Unit) / sizeof(T);
    for (int64_t i = 0; i < k / per; ++i) {
        for (int64_t c = 0; c < kPanel; ++c) std::memcpy(out + i * kPanel + c, tile.rows[c] + i * per, sizeof(Unit));
    }
}

void interleave_int4(const Tile<int8_t>& tile, int64_t k, uint32_t* out) {
    for (int64_t i = 0; i < k / 8; ++i) {
        for (int64_t c = 0; c < kPanel; ++c) {
            uint32_t halves[2];
            std::memcpy(halves, tile.rows[c] + i * 8, sizeof halves);
            out[i * kPanel + c] = halves[0] | halves[1] << 4;
        }
    }
}

struct Region {
    uint8_t* data;
    uint8_t* scales;
    uint8_t* mins;
};

Region region_of(const PackedMatrix& m) {
    const auto writable = [](const void* at) { return static_cast<uint8_t*>(const_cast<void*>(at)); };
    return {writable(m.data), writable(m.scales), writable(m.mins)};
}

int64_t data_bytes(WeightFormat format, int64_t values) {
    switch (format) {
        case WeightFormat::f32: return values * 4;
        case WeightFormat::bf16:
        case WeightFormat::f16: return values * 2;
        case WeightFormat::int8: return values;
        case WeightFormat::int4: return values / 2;
    }
    return 0;
}

int64_t scale_bytes(ScaleFormat format) { return format == ScaleFormat::f16 ? 2 : 4; }

uint8_t* data_at(const PackedMatrix& m, int64_t panel, int64_t k) {
    return region_of(m).data + data_bytes(m.format, (panel * m.padded_k + k) * kPanel);
}

void store_codes(const PackedMatrix& m, int64_t panel, int64_t k, int64_t count, const Tile<int8_t>& tile) {
    auto* out = reinterpret_cast<uint32_t*>(data_at(m, panel, k));
    if (m.format == WeightFormat::int4) {
        interleave_int4(tile, count, out);
    } else {
        interleave<uint32_t>(tile, count, out);
    }
}

void store_scale(const PackedMatrix& m, uint8_t* array, int64_t panel, int64_t group, int64_t column, float value) {
    const int64_t index = (panel * (m.padded_k / m.group) + group) * kPanel + column;
    if (m.scale_format == ScaleFormat::f16) {
        const uint16_t half = to_f16(value);
        std::memcpy(array + 2 * index, &half, sizeof half);
    } else {
        std::memcpy(array + 4 * index, &value, sizeof value);
    }
}

// One slab after the other: body(panel, k, the slab's padded size, the slab's values that exist).
template <class Body>
void each_slab(const PackedMatrix& m, const Body& body) {
    for (int64_t k = 0; k < m.padded_k; k += kSlab) {
        body(k, std::min(kSlab, m.padded_k - k), std::clamp(m.k - k, int64_t{0}, kSlab));
    }
}

template <class T>
struct Plain;  // how a float format is read and made; `overflow`: the bits of the least float32 that is infinite in it
template <>
struct Plain<float> {
    using Unit = uint32_t;
    static constexpr RowType type = RowType::f32;
    static constexpr int32_t overflow = 0x7f800000;
    static float from(float x) { return x; }
};
struct Bf16 {
    uint16_t bits;
};
template <>
struct Plain<Bf16> {
    using Unit = uint32_t;  // of two k
    static constexpr RowType type = RowType::bf16;
    static constexpr int32_t overflow = 0x7f7f8000;
    static Bf16 from(float x) { return {to_bf16(x)}; }
};
struct F16 {
    uint16_t bits;
};
template <>
struct Plain<F16> {
    using Unit = uint16_t;
    static constexpr RowType type = RowType::f16;
    static constexpr int32_t overflow = 0x477ff000;
    static F16 from(float x) { return {to_f16(x)}; }
};

template <class T>
int64_t pack_plain(const PackedMatrix& m, const RowMap& rows, Team& team) {
    std::atomic<int64_t> num_overflows{0};
    team.each(m.num_panels, [&](int64_t panel, int) {
        Tile<T> tile;
        int64_t overflows = 0;
        each_slab(m, [&](int64_t k, int64_t padded, int64_t count) {
            for (int64_t c = 0; c < kPanel; ++c) {
                T* out = tile.rows[c];
                const Row row = rows.at(panel, c);
                const int64_t filled = row.type == nullptr ? 0 : count;
                std::memset(static_cast<void*>(out + filled), 0, static_cast<size_t>(padded - filled) * sizeof(T));
                if (filled == 0) continue;
                if (row.type->type == Plain<T>::type) {
                    std::memcpy(static_cast<void*>(out), row.at(k), static_cast<size_t>(filled) * sizeof(T));
                    continue;
                }
                float values[kSlab];
                read_values(row, k, filled, values);
                for (int64_t i = 0; i < filled; ++i) out[i] = Plain<T>::from(values[i]);
                int32_t infinite = 0;
                for (int64_t i = 0; i < filled; ++i) {
                    const auto magnitude = static_cast<int32_t>(bits_of(values[i]) & 0x7fffffff);
                    infinite += magnitude >= Plain<T>::overflow && magnitude < 0x7f800000;
                }
                overflows += infinite;
            }
            using Unit = typename Plain<T>::Unit;
            interleave<Unit>(tile, padded, reinterpret_cast<Unit*>(data_at(m, panel, k)));
        });
        if (overflows != 0) num_overflows += overflows;
    });
    return num_overflows;
}

// ---- round to nearest -------------------------------------------------------------------------------------------

struct Range {
    float low = __builtin_inff();
    float high = -__builtin_inff();
    float poison = 0.0f;  // NaN once a value was infinity or NaN

    void add(const float* values, int64_t count) {
        constexpr int64_t lanes = 8;
        float lows[lanes], highs[lanes], poisons[lanes];
        for (int64_t l = 0; l < lanes; ++l) lows[l] = low, highs[l] = high, poisons[l] = poison;
        int64_t i = 0;
        for (; i + lanes <= count; i += lanes) {
            for (int64_t l = 0; l < lanes; ++l) {
                const float x = values[i + l];
                lows[l] = x < lows[l] ? x : lows[l];
                highs[l] = x > highs[l] ? x : highs[l];
                poisons[l] = poisons[l] + x * 0.0f;
            }
        }
        for (int64_t l = 0; i < count; ++i, ++l) {
            const float x = values[i];
            lows[l] = x < lows[l] ? x : lows[l];
            highs[l] = x > highs[l] ? x : highs[l];
            poisons[l] = poisons[l] + x * 0.0f;
        }
        for (int64_t l = 0; l < lanes; ++l) {
            low = std::min(low, lows[l]);
            high = std::max(high, highs[l]);
            poison += poisons[l];
        }
    }

    bool is_empty() const { return high < low; }
    float magnitude() const { return is_empty() ? poison : std::max(-low, high) + poison; }
};

// w is about scale * (q - zero) + min, q in [least, most].
struct Grid {
    float scale = 0.0f;
    float min = 0.0f;
    int zero = 0;
    int least = 0;
    int most = 0;
};

Grid choose_grid(const PackedMatrix& m, const Range& range) {
    const bool is_int4 = m.format == WeightFormat::int4;
    const auto stored = [&](float x) { return m.scale_format == ScaleFormat::f16 ? from_f16(to_f16(x)) : x; };
    Grid grid;
    if (m.has_min) {
        grid.least = is_int4 ? 0 : -128;
        grid.most = is_int4 ? 15 : 127;
        if (range.is_empty()) return grid;
        grid.scale = stored((range.high - range.low) / (is_int4 ? 15.0f : 255.0f));
        grid.min = stored(range.low - static_cast<float>(grid.least) * grid.scale);
        return grid;
    }
    grid.zero = is_int4 ? 8 : 0;
    grid.least = is_int4 ? 0 : -127;
    grid.most = is_int4 ? 15 : 127;
    if (range.is_empty()) return grid;
    const float largest = range.high >= -range.low ? range.high : range.low;
    grid.scale = stored(is_int4 ? largest / -8.0f : std::max(-range.low, range.high) / 127.0f);
    return grid;
}

void round_to_grid(const Grid& grid, const float* values, int64_t count, int8_t* q) {
    const auto least = static_cast<float>(grid.least - grid.zero), most = static_cast<float>(grid.most - grid.zero);
    if (grid.scale == 0.0f) {
        std::memset(q, grid.zero, static_cast<size_t>(count));
        return;
    }
    for (int64_t i = 0; i < count; ++i) {
        float x = (values[i] - grid.min) / grid.scale;
        x = x > least ? x : least;  // NaN becomes `least`
        x = x < most ? x : most;
        const auto nearest = static_cast<int32_t>(bits_of(x + 0x1.8p23f)) - 0x4b400000;
        q[i] = static_cast<int8_t>(nearest + grid.zero);
    }
}

void check_target(const PackedMatrix& m, bool is_integer) {
    const bool found = m.format == WeightFormat::int8 || m.format == WeightFormat::int4;
    if (found != is_integer) throw std::invalid_argument("the matrix has the wrong kind of format");
    if (m.data == nullptr) throw std::invalid_argument("the matrix has no memory");
}

}  // namespace

std::optional<RowType> find_row_type(std::string_view name) {
    for (const TypeInfo& type : kTypes) {
        if (type.name == name) return type.type;
    }
    return std::nullopt;
}

RowShape row_shape(RowType type) { return info(type).shape; }

std::optional<IntegerForm> integer_form(RowType type) {
    if (info(type).decode == nullptr) return std::nullopt;
    return info(type).form;
}

PackedMatrix with_layout(PackedMatrix m) {
    const auto round_up = [](int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; };
    if (m.n < 1 || m.k < 1 || m.n > INT32_MAX || m.k > INT32_MAX) {
        throw std::invalid_argument("a matrix of " + std::to_string(m.n) + " x " + std::to_string(m.k));
    }
    if (m.gated && m.n % 2 != 0) throw std::invalid_argument("a gated matrix of " + std::to_string(m.n) + " rows");
    const bool is_integer = m.format == WeightFormat::int8 || m.format == WeightFormat::int4;
    m.padded_k = round_up(m.k, is_integer ? 64 : 32);
    m.num_panels = m.gated ? 2 * (round_up(m.n / 2, kPanel) / kPanel) : round_up(m.n, kPanel) / kPanel;
    if (!is_integer) {
        if (m.group != 0 || m.has_min) throw std::invalid_argument("float formats have no groups");
        return m;
    }
    if (m.group == 0) m.group = m.padded_k;
    const bool is_known = m.group == 16 || m.group == 32 || m.group == 64 || m.group == 128;
    if (m.group != m.padded_k && (!is_known || m.padded_k % m.group != 0)) {
        throw std::invalid_argument("groups of " + std::to_string(m.group) + " in rows of " +
                                    std::to_string(m.padded_k));
    }
    return m;
}

RegionLayout region_layout(const PackedMatrix& m) {
    const auto aligned = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
    const int64_t data = aligned(data_bytes(m.format, m.num_panels * m.padded_k * kPanel));
    if (m.group == 0) return {data, data, data};
    const int64_t scales = aligned(m.num_panels * (m.padded_k / m.group) * kPanel * scale_bytes(m.scale_format));
    return {data, data + scales, data + scales + (m.has_min ? scales : 0)};
}

bool values_fit(WeightFormat format, const std::vector<RowSource>& sources, int64_t k, Team& team) {
    constexpr int64_t rows_at_once = 16;
    for (const RowSource& source : sources) {
        std::atomic<bool> fits{true};
        team.each((source.count + rows_at_once - 1) / rows_at_once, [&](int64_t chunk, int) {
            const int64_t end = std::min(source.count, (chunk + 1) * rows_at_once);
            for (int64_t r = chunk * rows_at_once; r < end && fits.load(std::memory_order_relaxed); ++r) {
                const Row row{&info(source.type), source.data + r * source.stride};
                float values[kSlab];
                for (int64_t at = 0; at < k; at += kSlab) {
                    const int64_t count = std::min(kSlab, k - at);
                    read_values(row, at, count, values);
                    uint32_t lost = 0;
                    if (format == WeightFormat::bf16) {
                        for (int64_t i = 0; i < count; ++i) lost |= bits_of(values[i]) & 0xffff;
                    } else if (format == WeightFormat::f16) {
                        for (int64_t i = 0; i < count; ++i) lost |= !is_f16(values[i]);
                    }
                    if (lost != 0) {
                        fits.store(false, std::memory_order_relaxed);
                        return;
                    }
                }
            }
        });
        if (!fits) return false;
    }
    return true;
}

bool scales_fit_f16(const std::vector<RowSource>& sources, int64_t k) {
    for (const RowSource& source : sources) {
        const TypeInfo& type = info(source.type);
        if (type.form.has_f16_scales) continue;
        for (int64_t r = 0; r < source.count; ++r) {
            const Row row{&type, source.data + r * source.stride};
            for (int64_t at = 0; at < k; at += kSlab) {
                const int64_t count = std::min(kSlab, k - at);
                Codes codes;
                decode(row, at, count, codes);
                for (int64_t g = 0; g < count / type.form.group; ++g) {
                    if (!is_f16(codes.scales[g]) || (type.form.has_min && !is_f16(codes.mins[g]))) return false;
                }
            }
        }
    }
    return true;
}

int64_t pack_values(const PackedMatrix& target, const std::vector<RowSource>& sources, Team& team) {
    check_target(target, false);
    const RowMap rows(target, sources);
    switch (target.format) {
        case WeightFormat::bf16: return pack_plain<Bf16>(target, rows, team);
        case WeightFormat::f16: return pack_plain<F16>(target, rows, team);
        default: return pack_plain<float>(target, rows, team);
    }
}

void pack_blocks(const PackedMatrix& target, const std::vector<RowSource>& sources, Team& team) {
    check_target(target, true);
    for (const RowSource& source : sources) {
        const std::optional<IntegerForm> form = integer_form(source.type);
        if (!form || form->format != target.format || form->group != target.group || form->has_min != target.has_min) {
            throw std::invalid_argument(std::string(info(source.type).name) + " has another integer form than the matrix");
        }
    }
    const RowMap rows(target, sources);
    const Region region = region_of(target);
    const int zero = is_symmetric_int4(target.format, target.has_min) ? 8 : 0;
    team.each(target.num_panels, [&](int64_t panel, int) {
        Tile<int8_t> tile;
        each_slab(target, [&](int64_t k, int64_t padded, int64_t count) {
            const int64_t first_group = k / target.group, num_groups = padded / target.group;
            for (int64_t c = 0; c < kPanel; ++c) {
                const Row row = rows.at(panel, c);
                const int64_t filled = row.type == nullptr ? 0 : count;
                Codes codes{};
                if (filled != 0) decode(row, k, filled, codes);
                std::memcpy(tile.rows[c], codes.q, static_cast<size_t>(filled));
                std::memset(tile.rows[c] + filled, zero, static_cast<size_t>(padded - filled));
                for (int64_t g = 0; g < num_groups; ++g) {
                    store_scale(target, region.scales, panel, first_group + g, c, codes.scales[g]);
                    if (target.has_min) store_scale(target, region.mins, panel, first_group + g, c, codes.mins[g]);
                }
            }
            store_codes(target, panel, k, padded, tile);
        });
    });
}

float quantize_values(const PackedMatrix& target, const std::vector<RowSource>& sources, Team& team) {
    check_target(target, true);
    const RowMap rows(target, sources);
    const Region region = region_of(target);
    const bool is_per_row = target.group == target.padded_k;
    std::atomic<uint32_t> largest{0};
    team.each(target.num_panels, [&](int64_t panel, int) {
        uint32_t magnitude = 0;
        Grid grids[kPanel];  // of whole rows
        float values[kSlab];
        const auto choose = [&](const Range& range, int64_t group, int64_t column) {
            const Grid grid = choose_grid(target, range);
            store_scale(target, region.scales, panel, group, column, grid.scale);
            if (target.has_min) store_scale(target, region.mins, panel, group, column, grid.min);
            // As integers, infinity and NaN are the largest.
            magnitude = std::max(magnitude, bits_of(range.magnitude()) & 0x7fffffff);
            return grid;
        };
        for (int64_t c = 0; is_per_row && c < kPanel; ++c) {
            const Row row = rows.at(panel, c);
            Range range;
            each_slab(target, [&](int64_t k, int64_t, int64_t count) {
                if (row.type == nullptr || count == 0) return;
                read_values(row, k, count, values);
                range.add(values, count);
            });
            grids[c] = choose(range, 0, c);
        }
        Tile<int8_t> tile;
        each_slab(target, [&](int64_t k, int64_t padded, int64_t count) {
            for (int64_t c = 0; c < kPanel; ++c) {
                const Row row = rows.at(panel, c);
                const int64_t filled = row.type == nullptr ? 0 : count;
                if (filled != 0) read_values(row, k, filled, values);
                const int64_t step = is_per_row ? padded : target.group;
                for (int64_t at = 0; at < padded; at += step) {
                    const int64_t present = std::clamp(filled - at, int64_t{0}, step);
                    Grid grid = grids[c];
                    if (!is_per_row) {
                        Range range;
                        range.add(values + at, present);
                        grid = choose(range, (k + at) / target.group, c);
                    }
                    round_to_grid(grid, values + at, present, tile.rows[c] + at);
                    std::memset(tile.rows[c] + at + present, grid.zero, static_cast<size_t>(step - present));
                }
            }
            store_codes(target, panel, k, padded, tile);
        });
        uint32_t seen = largest.load();
        while (seen < magnitude && !largest.compare_exchange_weak(seen, magnitude)) {
        }
    });
    return from_bits(largest);
}

}  // namespace octavo
