#include "kernels.h"

#include "cpu_features.h"

namespace octavo {

namespace portable {
extern const Kernels kernels;
}
#if defined(OCTAVO_X86_KERNELS)
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
namespace amx {
extern const Kernels kernels;
}
#endif

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::portable: return "portable";
        case Isa::avx2: return "avx2";
        case Isa::avx512: return "avx512";
        case Isa::amx: return "amx";
    }
    return "";
}

const std::vector<Isa>& usable_isas() {
    static const std::vector<Isa> usable = [] {
        std::vector<Isa> isas{Isa::portable};
#if defined(OCTAVO_X86_KERNELS)
        const CpuFeatures& f = cpu_features();
        const bool avx2 = f.avx2 && f.fma && f.f16c;
        if (avx2) isas.push_back(Isa::avx2);
        const bool avx512 = avx2 && f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl && f.avx512_vnni;
        if (avx512) isas.push_back(Isa::avx512);
        if (avx512 && f.avx512_bf16 && f.amx_tile && f.amx_bf16 && f.amx_int8) isas.push_back(Isa::amx);
#endif
        return isas;
    }();
    return usable;
}

const std::vector<Isa>& built_isas() {
#if defined(OCTAVO_X86_KERNELS)
    static const std::vector<Isa> built{Isa::portable, Isa::avx2, Isa::avx512, Isa::amx};
#else
    static const std::vector<Isa> built{Isa::portable};
#endif
    return built;
}

std::optional<Isa> find_isa(std::string_view name) {
    for (Isa isa : usable_isas()) {
        if (name == isa_name(isa)) return isa;
    }
    return std::nullopt;
}

const Kernels& kernels(Isa isa) {
    switch (isa) {
#if defined(OCTAVO_X86_KERNELS)
        case Isa::avx2: return avx2::kernels;
        case Isa::avx512: return avx512::kernels;
        case Isa::amx: return amx::kernels;
#endif
        default: return portable::kernels;
    }
}

}  // namespace octavo
