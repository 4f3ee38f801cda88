// The kernels, compiled once for each instruction set; the caller picks a table at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/team.h"
#include "ops/attention.h"
#include "ops/linear.h"
#include "ops/roofline.h"
#include "ops/rows.h"
#include "ops/sampler.h"

namespace octavo {

// In rising order of preference. avx2 stands for AVX2 + FMA + F16C, avx512 for the F, BW, DQ, VL and VNNI sets,
// amx for those and the tile, bf16 and int8 sets. All give the same bits.
enum class Isa { portable, avx2, avx512, amx };

struct Kernels {
    // Exact: every bfloat16 is a float32.
    void (*bf16_to_f32)(const uint16_t* source, float* target, size_t count);
    // Rounds to nearest, ties to even; overflow becomes infinity, subnormals are kept, every NaN becomes
    // the quiet NaN of its sign.
    void (*f32_to_bf16)(const float* source, uint16_t* target, size_t count);

    void (*linear_float)(const LinearArgs&, Team&);        // f32, bf16, f16 weights
    void (*linear_dequantized)(const LinearArgs&, Team&);  // int4, int8 weights, float activations
    void (*linear_quantized)(const LinearArgs&, Team&);    // int4, int8 weights, int8 activations
    void (*quantize_rows)(const QuantizeArgs&, Team&);
    // Rows `ids` of a packed matrix (not gated), dequantized: out [count][out_stride].
    void (*unpack_rows)(const PackedMatrix&, const int32_t* ids, int64_t count, float* out, int64_t out_stride, Team&);

    void (*store_kv)(const StoreKvArgs&, Team&);
    void (*attend)(const AttentionArgs&, Team&);

    void (*rms_norm)(const NormArgs&, Team&);
    void (*layer_norm)(const NormArgs&, Team&);
    void (*rope)(const RopeArgs&, Team&);
    void (*add)(const AddArgs&, Team&);
    void (*activation)(const ActivationArgs&, Team&);
    void (*scale_rows)(const ScaleArgs&, Team&);

    void (*sample)(const SampleArgs&, Team&);

    void (*read_memory)(const ReadArgs&, Team&);
    int64_t (*multiply)(const ProductsArgs&, Team&);  // how many multiplications and additions that were
};

const char* isa_name(Isa isa);

// The instruction sets that this build holds kernels for and this processor can run, best last.
const std::vector<Isa>& usable_isas();

// Those that this build holds kernels for, whatever the processor.
const std::vector<Isa>& built_isas();

// By name; empty when unknown or not usable here.
std::optional<Isa> find_isa(std::string_view name);

const Kernels& kernels(Isa isa);

}  // namespace octavo
