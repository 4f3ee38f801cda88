#pragma once

#include <cstdint>

namespace octavo {

enum class Activation : uint8_t { none, silu, gelu, gelu_tanh, relu };

}  // namespace octavo
