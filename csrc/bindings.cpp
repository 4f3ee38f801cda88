// octavo._native: what Python sees of the extension. Typed by src/octavo/_native.pyi.
#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "bind/bind.h"
#include "cpu_features.h"
#include "kernels.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {

const Kernels& kernels_for(const std::string& isa) {
    if (isa == "auto") return kernels(usable_isas().back());
    const auto found = find_isa(isa);
    if (!found) throw nb::value_error(("instruction set '" + isa + "' is not usable on this processor").c_str());
    return kernels(*found);
}

}  // namespace octavo

namespace {

template <typename T>
using Row = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_same_size(size_t source, size_t target) {
    if (source == target) return;
    const std::string sizes = std::to_string(source) + " and " + std::to_string(target);
    throw nb::value_error(("source and target differ in size: " + sizes).c_str());
}

void bf16_to_f32(Row<const uint16_t> source, Row<float> target, const std::string& isa) {
    check_same_size(source.size(), target.size());
    const octavo::Kernels& kernels = octavo::kernels_for(isa);
    nb::gil_scoped_release release;
    kernels.bf16_to_f32(source.data(), target.data(), source.size());
}

void f32_to_bf16(Row<const float> source, Row<uint16_t> target, const std::string& isa) {
    check_same_size(source.size(), target.size());
    const octavo::Kernels& kernels = octavo::kernels_for(isa);
    nb::gil_scoped_release release;
    kernels.f32_to_bf16(source.data(), target.data(), source.size());
}

nb::dict cpu_features() {
    nb::dict features;
    for (const auto& [name, present] : octavo::cpu_features().list()) features[name] = present;
    return features;
}

nb::tuple usable_isas() {
    nb::list names;
    for (octavo::Isa isa : octavo::usable_isas()) names.append(octavo::isa_name(isa));
    return nb::tuple(names);
}

// The kernel's place in memory, for tests that run it on an emulated processor.
uintptr_t kernel_address(const std::string& isa_name, const std::string& kernel) {
    const std::vector<octavo::Isa>& built = octavo::built_isas();
    const auto isa = std::find_if(built.begin(), built.end(), [&](octavo::Isa each) { return isa_name == octavo::isa_name(each); });
    if (isa == built.end()) throw nb::value_error(("this build has no kernels for '" + isa_name + "'").c_str());
    const octavo::Kernels& k = octavo::kernels(*isa);
#define OCTAVO_KERNEL(name) \
    if (kernel == #name) return reinterpret_cast<uintptr_t>(k.name)
    OCTAVO_KERNEL(bf16_to_f32);
    OCTAVO_KERNEL(f32_to_bf16);
    OCTAVO_KERNEL(linear_float);
    OCTAVO_KERNEL(linear_dequantized);
    OCTAVO_KERNEL(linear_quantized);
    OCTAVO_KERNEL(quantize_rows);
    OCTAVO_KERNEL(unpack_rows);
    OCTAVO_KERNEL(store_kv);
    OCTAVO_KERNEL(attend);
    OCTAVO_KERNEL(rms_norm);
    OCTAVO_KERNEL(layer_norm);
    OCTAVO_KERNEL(rope);
    OCTAVO_KERNEL(add);
    OCTAVO_KERNEL(activation);
    OCTAVO_KERNEL(scale_rows);
    OCTAVO_KERNEL(sample);
#undef OCTAVO_KERNEL
    throw nb::value_error(("there is no kernel '" + kernel + "'").c_str());
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Octavo's kernels and what the processor offers them.";
    m.def("cpu_features", &cpu_features, "Every known feature by name, and whether this process may use it.");
    m.def("cpu_model_name", [] { return octavo::cpu_features().model_name; },
          "The processor's brand string; empty where it has none.");
    m.def("usable_isas", &usable_isas, "The instruction sets that kernels can run with here, best last.");
    m.def("kernel_address", &kernel_address, "isa"_a, "kernel"_a,
          "Where the kernel of an instruction set lies, whether or not this processor can run it.");
    m.def("bf16_to_f32", &bf16_to_f32, "source"_a, "target"_a, "isa"_a = "auto");
    m.def("f32_to_bf16", &f32_to_bf16, "source"_a, "target"_a, "isa"_a = "auto");
    octavo::bind_plan(m);
    octavo::bind_weights(m);
    octavo::bind_sampler(m);
    octavo::bind_roofline(m);
}
