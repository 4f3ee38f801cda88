// What the values of an activation are rounded to. They are stored as float32 whatever it is.
#pragma once

#include <cstdint>

namespace octavo {

enum class Rounding : uint8_t { f32, bf16, f16 };

}  // namespace octavo
