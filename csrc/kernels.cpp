#include "kernels.h"

#include "cpu_features.h"

namespace octavo {

namespace portable {
extern const Kernels kernels;
}
#if defined(OCTAVO_BUILDS_avx2)
namespace avx2 {
extern const Kernels kernels;
}
#endif
#if defined(OCTAVO_BUILDS_avx512)
namespace avx512 {
extern const Kernels kernels;
}
#endif
#if defined(OCTAVO_BUILDS_amx)
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

const std::vector<Isa>& built_isas() {
    static const std::vector<Isa> built{
        Isa::portable,
#if defined(OCTAVO_BUILDS_avx2)
        Isa::avx2,
#endif
#if defined(OCTAVO_BUILDS_avx512)
        Isa::avx512,
#endif
#if defined(OCTAVO_BUILDS_amx)
        Isa::amx,
#endif
    };
    return built;
}

const std::vector<Isa>& usable_isas() {
    static const std::vector<Isa> usable = [] {
        const CpuFeatures& f = cpu_features();
        const bool avx2 = f.avx2 && f.fma && f.f16c;
        const bool avx512 = avx2 && f.avx512f && f.avx512bw && f.avx512dq && f.avx512vl && f.avx512_vnni;
        const bool amx = avx512 && f.avx512_bf16 && f.amx_tile && f.amx_bf16 && f.amx_int8;
        std::vector<Isa> isas;
        for (Isa isa : built_isas()) {
            if (isa == Isa::portable || (isa == Isa::avx2 && avx2) || (isa == Isa::avx512 && avx512) ||
                (isa == Isa::amx && amx)) {
                isas.push_back(isa);
            }
        }
        return isas;
    }();
    return usable;
}

std::optional<Isa> find_isa(std::string_view name) {
    for (Isa isa : usable_isas()) {
        if (name == isa_name(isa)) return isa;
    }
    return std::nullopt;
}

const Kernels& kernels(Isa isa) {
    switch (isa) {
#if defined(OCTAVO_BUILDS_avx2)
        case Isa::avx2: return avx2::kernels;
#endif
#if defined(OCTAVO_BUILDS_avx512)
        case Isa::avx512: return avx512::kernels;
#endif
#if defined(OCTAVO_BUILDS_amx)
        case Isa::amx: return amx::kernels;
#endif
        default: return portable::kernels;
    }
}

}  // namespace octavo
