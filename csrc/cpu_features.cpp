#include "cpu_features.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace octavo {

std::vector<std::pair<const char*, bool>> CpuFeatures::list() const {
    return {
        {"sse4_2", sse4_2},           {"avx", avx},
        {"f16c", f16c},               {"fma", fma},
        {"avx2", avx2},               {"avx_vnni", avx_vnni},
        {"avx512f", avx512f},         {"avx512bw", avx512bw},
        {"avx512vl", avx512vl},       {"avx512dq", avx512dq},
        {"avx512_vnni", avx512_vnni}, {"avx512_bf16", avx512_bf16},
        {"avx512_fp16", avx512_fp16}, {"amx_tile", amx_tile},
        {"amx_int8", amx_int8},       {"amx_bf16", amx_bf16},
    };
}

#if defined(__x86_64__)
namespace {

struct Registers {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
    Registers r;
    // False, with r all zero, where the processor does not know the leaf.
    __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
    return r;
}

bool bit(uint32_t word, int position) { return (word >> position) & 1; }

// XCR0: the register states that the OS saves on a context switch.
uint64_t saved_states() {
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (static_cast<uint64_t>(high) << 32) | low;
}

constexpr uint64_t kAvxState = 0x6;       // XMM, YMM
constexpr uint64_t kAvx512State = 0xe6;   // + opmask, upper ZMM, ZMM16-31
constexpr uint64_t kAmxState = 0x60000;   // tile configuration, tile data

// Linux hands out the 8 KiB of tile data only to processes that ask (Documentation/arch/x86/xstate.rst).
bool tiles_permitted() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

std::string brand_string() {
    constexpr uint32_t kFirst = 0x80000002, kLast = 0x80000004;
    if (__get_cpuid_max(0x80000000, nullptr) < kLast) return {};
    char text[49] = {};
    for (uint32_t leaf = kFirst; leaf <= kLast; ++leaf) {
        const Registers r = cpuid(leaf, 0);
        std::memcpy(text + 16 * (leaf - kFirst), &r, sizeof r);
    }
    const std::string name = text;
    const size_t first = name.find_first_not_of(' ');
    if (first == std::string::npos) return {};
    return name.substr(first, name.find_last_not_of(' ') - first + 1);
}

CpuFeatures detect() {
    CpuFeatures f;
    f.model_name = brand_string();
    const Registers basic = cpuid(1, 0);
    f.sse4_2 = bit(basic.ecx, 20);
    const bool os_saves_states = bit(basic.ecx, 27);
    const uint64_t states = os_saves_states ? saved_states() : 0;
    const auto saved = [states](uint64_t mask) { return (states & mask) == mask; };
    if (!saved(kAvxState)) return f;
    f.avx = bit(basic.ecx, 28);
    f.f16c = f.avx && bit(basic.ecx, 29);
    f.fma = f.avx && bit(basic.ecx, 12);
    const Registers extended = cpuid(7, 0);
    const Registers more = extended.eax >= 1 ? cpuid(7, 1) : Registers{};
    f.avx2 = f.avx && bit(extended.ebx, 5);
    f.avx_vnni = f.avx2 && bit(more.eax, 4);
    if (saved(kAvx512State) && bit(extended.ebx, 16)) {
        f.avx512f = true;
        f.avx512dq = bit(extended.ebx, 17);
        f.avx512bw = bit(extended.ebx, 30);
        f.avx512vl = bit(extended.ebx, 31);
        f.avx512_vnni = bit(extended.ecx, 11);
        f.avx512_bf16 = bit(more.eax, 5);
        f.avx512_fp16 = bit(extended.edx, 23);
    }
    if (saved(kAmxState) && bit(extended.edx, 24) && tiles_permitted()) {
        f.amx_tile = true;
        f.amx_bf16 = bit(extended.edx, 22);
        f.amx_int8 = bit(extended.edx, 25);
    }
    return f;
}

}  // namespace
#else
namespace {
CpuFeatures detect() { return {}; }
}  // namespace
#endif

const CpuFeatures& cpu_features() {
    static const CpuFeatures features = detect();
    return features;
}

}  // namespace octavo
