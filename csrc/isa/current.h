// The vector vocabulary of the instruction set that this translation unit is compiled for (OCTAVO_ISA).
//
// A kernel includes this header and no template or inline function of the standard library: the linker keeps
// one copy of those, and it could be the one compiled for a newer processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#else
#include "portable.h"
#endif
