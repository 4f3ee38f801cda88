// Functions of sixteen lanes. Polynomials in a fixed order of fused multiply-adds: the same bits on every instruction
// set. Largest errors, measured over their range: exp 1.2e-7 relative, tanh 2.4e-7, erf 2e-7.
#pragma once

#include "isa/current.h"
#include "ops/activation.h"

namespace octavo::OCTAVO_ISA {

// e^x; 0 below -87.33 (where float32 would become subnormal), infinity above 88.72, NaN of NaN.
static inline F32 exp(F32 x) {
    const F32 inside = min(max(broadcast(-87.33f), x), broadcast(88.72f));  // max and min pass a NaN on
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
    // 2^n in two factors, as n may be 128.
    const I32 half = to_i32(whole * broadcast(0.5f));
    const I32 rest = to_i32(whole - to_f32(half));
    const I32 bias = broadcast(int32_t{127});
    const F32 y = p * as_f32(shift_left<23>(half + bias)) * as_f32(shift_left<23>(rest + bias));
    const F32 above = select(less(broadcast(88.72f), x), broadcast(__builtin_inff()), y);
    return select(less(x, broadcast(-87.33f)), broadcast(0.0f), above);
}

static inline F32 tanh(F32 x) {
    const F32 magnitude = abs(x);
    const F32 e = exp(magnitude * broadcast(-2.0f));
    const F32 far = (broadcast(1.0f) - e) / (broadcast(1.0f) + e);
    const F32 s = x * x;
    F32 p = broadcast(2.24905159462261e-3f);
    p = fma(p, s, broadcast(-8.304802287184164e-3f));
    p = fma(p, s, broadcast(2.1756804624716245e-2f));
    p = fma(p, s, broadcast(-5.3957753838952405e-2f));
    p = fma(p, s, broadcast(0.1333329712596721f));
    p = fma(p, s, broadcast(-0.3333333312791039f));
    const F32 near = fma(p * s, x, x);
    return select(less(magnitude, broadcast(0.625f)), near, copy_sign(far, x));
}

static inline F32 erf(F32 x) {
    const F32 magnitude = abs(x), s = x * x;
    F32 near = broadcast(7.882493608127085e-5f);
    near = fma(near, s, broadcast(-8.018853854745088e-4f));
    near = fma(near, s, broadcast(5.1893118004429e-3f));
    near = fma(near, s, broadcast(-2.685432871072762e-2f));
    near = fma(near, s, broadcast(0.11283597460999206f));
    near = fma(near, s, broadcast(-0.3761262690326939f));
    near = fma(near, s, broadcast(0.1283791658813917f));
    near = fma(near, x, x);
    const F32 t = min(magnitude, broadcast(4.0f));
    F32 far = broadcast(-1.6151035711232343e-6f);
    far = fma(far, t, broadcast(4.5612209420924934e-5f));
    far = fma(far, t, broadcast(-5.929608159706482e-4f));
    far = fma(far, t, broadcast(4.741167392884498e-3f));
    far = fma(far, t, broadcast(-2.6367559482212765e-2f));
    far = fma(far, t, broadcast(0.10998356227801641f));
    far = fma(far, t, broadcast(0.6319310618756149f));
    far = fma(far, t, broadcast(1.1301704624505513f));
    far = fma(far, t, broadcast(-3.042190446524984e-4f));
    far = broadcast(1.0f) - exp(broadcast(0.0f) - far);
    return select(less(magnitude, broadcast(1.0f)), near, copy_sign(far, x));
}

static inline F32 activate(F32 x, Activation kind) {
    const F32 one = broadcast(1.0f), half = broadcast(0.5f);
    switch (kind) {
        case Activation::silu: return x / (one + exp(broadcast(0.0f) - x));
        case Activation::gelu: return half * x * (one + erf(x * broadcast(0.70710678f)));
        case Activation::gelu_tanh: {
            const F32 inner = fma(x * x * x, broadcast(0.044715f), x) * broadcast(0.79788456f);
            return half * x * (one + tanh(inner));
        }
        case Activation::relu: return max(x, broadcast(0.0f));
        default: return x;
    }
}

}  // namespace octavo::OCTAVO_ISA
