// What the processor can do and the operating system allows, asked at run time.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace octavo {

// A feature counts only if the OS saves its registers too (XGETBV). On processors other than x86-64
// everything is false, and the portable kernels run.
struct CpuFeatures {
    bool sse4_2 = false;
    bool avx = false;
    bool f16c = false;
    bool fma = false;
    bool avx2 = false;
    bool avx_vnni = false;
    bool avx512f = false;
    bool avx512bw = false;
    bool avx512vl = false;
    bool avx512dq = false;
    bool avx512_vnni = false;
    bool avx512_bf16 = false;
    bool avx512_fp16 = false;
    bool amx_tile = false;
    bool amx_int8 = false;
    bool amx_bf16 = false;
    std::string model_name;  // the brand string; empty where the processor has none

    // Every feature by name, oldest first.
    std::vector<std::pair<const char*, bool>> list() const;
};

// Detected on first use. For AMX this asks the kernel to let this process use the tile registers; where it
// refuses, the AMX features are false.
const CpuFeatures& cpu_features();

}  // namespace octavo
