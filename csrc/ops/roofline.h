// What the processor does at most: reading memory, and products whose operands are in registers.
#pragma once

#include <cstdint>

namespace octavo {

constexpr int64_t kReadUnit = 256;

struct ReadArgs {
    const uint8_t* data;
    int64_t bytes;    // a multiple of kReadUnit
    int64_t streams;  // that a thread reads side by side: 1 or 4
};

// Of float32; of bfloat16, summed in float32; of int8, summed in int32.
enum class ProductKind { f32, bf16, int8 };

struct ProductsArgs {
    ProductKind kind;
    int64_t rounds;  // of every chunk
};

}  // namespace octavo
