// Plain C++: what every compiler and processor has, and the meaning of the other headers.
#pragma once

namespace octavo::OCTAVO_ISA {

struct F32 {
    float lane[kLanes];
};
struct I32 {
    int32_t lane[kLanes];
};
using Mask = uint16_t;  // bit i stands for lane i

#define OCTAVO_EACH(i) for (size_t i = 0; i < kLanes; ++i)

static inline F32 broadcast(float value) {
    F32 y;
    OCTAVO_EACH(i) y.lane[i] = value;
    return y;
}
static inline I32 broadcast(int32_t value) {
    I32 y;
    OCTAVO_EACH(i) y.lane[i] = value;
    return y;
}

static inline F32 load(const float* source) {
    F32 y;
    memcpy(y.lane, source, sizeof y);
    return y;
}
static inline void store(float* target, F32 x) { memcpy(target, x.lane, sizeof x); }
static inline I32 load(const int32_t* source) {
    I32 y;
    memcpy(y.lane, source, sizeof y);
    return y;
}
static inline void store(int32_t* target, I32 x) { memcpy(target, x.lane, sizeof x); }

static inline Mask first_lanes(size_t count) { return static_cast<Mask>((1u << count) - 1); }
static inline F32 load_masked(const float* source, Mask mask) {
    F32 y;
    OCTAVO_EACH(i) y.lane[i] = (mask >> i) & 1 ? source[i] : 0.0f;
    return y;
}
static inline void store_masked(float* target, F32 x, Mask mask) {
    OCTAVO_EACH(i) {
        if ((mask >> i) & 1) target[i] = x.lane[i];
    }
}
static inline F32 select(Mask mask, F32 yes, F32 no) {
    OCTAVO_EACH(i) no.lane[i] = (mask >> i) & 1 ? yes.lane[i] : no.lane[i];
    return no;
}

static inline F32 operator+(F32 a, F32 b) {
    OCTAVO_EACH(i) a.lane[i] += b.lane[i];
    return a;
}
static inline F32 operator-(F32 a, F32 b) {
    OCTAVO_EACH(i) a.lane[i] -= b.lane[i];
    return a;
}
static inline F32 operator*(F32 a, F32 b) {
    OCTAVO_EACH(i) a.lane[i] *= b.lane[i];
    return a;
}
static inline F32 operator/(F32 a, F32 b) {
    OCTAVO_EACH(i) a.lane[i] /= b.lane[i];
    return a;
}
static inline F32 fma(F32 a, F32 b, F32 c) {
    OCTAVO_EACH(i) c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}
static inline F32 max(F32 a, F32 b) {
    OCTAVO_EACH(i) a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
static inline F32 min(F32 a, F32 b) {
    OCTAVO_EACH(i) a.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}
static inline F32 sqrt(F32 a) {
    OCTAVO_EACH(i) a.lane[i] = __builtin_sqrtf(a.lane[i]);
    return a;
}
static inline F32 abs(F32 a) {
    OCTAVO_EACH(i) a.lane[i] = __builtin_fabsf(a.lane[i]);
    return a;
}
static inline F32 copy_sign(F32 a, F32 sign) {
    OCTAVO_EACH(i) a.lane[i] = __builtin_copysignf(a.lane[i], sign.lane[i]);
    return a;
}
static inline Mask less(F32 a, F32 b) {
    Mask mask = 0;
    OCTAVO_EACH(i) mask = static_cast<Mask>(mask | (a.lane[i] < b.lane[i] ? 1u << i : 0u));
    return mask;
}
static inline Mask is_nan(F32 a) {
    Mask mask = 0;
    OCTAVO_EACH(i) mask = static_cast<Mask>(mask | (a.lane[i] != a.lane[i] ? 1u << i : 0u));
    return mask;
}

static inline F32 as_f32(I32 a) {
    F32 y;
    memcpy(&y, &a, sizeof y);
    return y;
}
static inline I32 as_i32(F32 a) {
    I32 y;
    memcpy(&y, &a, sizeof y);
    return y;
}
static inline F32 to_f32(I32 a) {
    F32 y;
    OCTAVO_EACH(i) y.lane[i] = static_cast<float>(a.lane[i]);
    return y;
}
static inline I32 to_i32(F32 a) {
    I32 y;
    OCTAVO_EACH(i) y.lane[i] = static_cast<int32_t>(__builtin_lrintf(a.lane[i]));
    return y;
}
static inline I32 operator+(I32 a, I32 b) {
    OCTAVO_EACH(i) a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) + static_cast<uint32_t>(b.lane[i]));
    return a;
}
static inline I32 operator&(I32 a, I32 b) {
    OCTAVO_EACH(i) a.lane[i] &= b.lane[i];
    return a;
}
template <int count>
static inline I32 shift_left(I32 a) {
    OCTAVO_EACH(i) a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) << count);
    return a;
}
template <int count>
static inline I32 shift_right(I32 a) {  // zeros come in
    OCTAVO_EACH(i) a.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(a.lane[i]) >> count);
    return a;
}

static inline float reduce_add(F32 x) {
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
        for (size_t i = 0; i < half; ++i) x.lane[i] += x.lane[i + half];
    }
    return x.lane[0];
}
static inline float reduce_max(F32 x) {
    for (size_t half = kLanes / 2; half > 0; half /= 2) {
        for (size_t i = 0; i < half; ++i) x.lane[i] = x.lane[i] > x.lane[i + half] ? x.lane[i] : x.lane[i + half];
    }
    return x.lane[0];
}

static inline F32 load_bf16(const uint16_t* source) {
    I32 bits;
    OCTAVO_EACH(i) bits.lane[i] = static_cast<int32_t>(static_cast<uint32_t>(source[i]) << 16);
    return as_f32(bits);
}
static inline void store_bf16(uint16_t* target, F32 x) {
    const I32 bits = as_i32(x);
    OCTAVO_EACH(i) {
        const uint32_t b = static_cast<uint32_t>(bits.lane[i]);
        const bool is_nan = (b & 0x7fffffff) > 0x7f800000;
        const uint32_t rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
        target[i] = static_cast<uint16_t>(is_nan ? ((b >> 16) & 0x8000) | 0x7fc0 : rounded);
    }
}

static inline F32 load_f16(const uint16_t* source) {
    F32 y;
    OCTAVO_EACH(i) {
        const uint32_t half = source[i], sign = (half & 0x8000) << 16, exponent = (half >> 10) & 31;
        uint32_t mantissa = half & 1023, bits;
        if (exponent == 31) {
            bits = sign | 0x7f800000 | (mantissa << 13) | (mantissa ? 0x400000 : 0);
        } else if (exponent != 0) {
            bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
        } else if (mantissa == 0) {
            bits = sign;
        } else {  // subnormal: normal in float32
            const int shift = __builtin_clz(mantissa) - 21;
            bits = sign | (static_cast<uint32_t>(113 - shift) << 23) | (((mantissa << shift) & 1023) << 13);
        }
        memcpy(&y.lane[i], &bits, sizeof bits);
    }
    return y;
}
static inline void store_f16(uint16_t* target, F32 x) {
    const I32 all = as_i32(x);
    OCTAVO_EACH(i) {
        const uint32_t bits = static_cast<uint32_t>(all.lane[i]), sign = (bits >> 16) & 0x8000;
        const uint32_t magnitude = bits & 0x7fffffff;
        uint32_t half;
        if (magnitude > 0x7f800000) {
            half = 0x7e00 | ((magnitude >> 13) & 1023);
        } else if (magnitude >= 0x477ff000) {  // rounds to infinity
            half = 0x7c00;
        } else if (magnitude >= 0x38800000) {
            half = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        } else if (magnitude < 0x33000000) {  // below half of the smallest subnormal
            half = 0;
        } else {
            const uint32_t shift = 126 - (magnitude >> 23), mantissa = (magnitude & 0x7fffff) | 0x800000;
            const uint32_t whole = mantissa >> shift, rest = mantissa & ((1u << shift) - 1), middle = 1u << (shift - 1);
            half = whole + (rest > middle || (rest == middle && (whole & 1)));
        }
        target[i] = static_cast<uint16_t>(sign | half);
    }
}

#undef OCTAVO_EACH

}  // namespace octavo::OCTAVO_ISA
