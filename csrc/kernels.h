// The kernels, compiled once for each instruction set; the caller picks a table at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace octavo {

// In rising order of preference. avx2 stands for AVX2 + FMA + F16C, avx512 for the F, BW, DQ and VL sets.
enum class Isa { portable, avx2, avx512 };

struct Kernels {
    // Exact: every bfloat16 is a float32.
    void (*bf16_to_f32)(const uint16_t* source, float* target, size_t count);
    // Rounds to nearest, ties to even; overflow becomes infinity, subnormals are kept, every NaN becomes
    // the quiet NaN of its sign. The same bits on every instruction set.
    void (*f32_to_bf16)(const float* source, uint16_t* target, size_t count);
};

const char* isa_name(Isa isa);

// The instruction sets that this build holds kernels for and this processor can run, best last.
const std::vector<Isa>& usable_isas();

// By name; empty when unknown or not usable here.
std::optional<Isa> find_isa(std::string_view name);

const Kernels& kernels(Isa isa);

}  // namespace octavo
