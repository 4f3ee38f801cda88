// octavo._native: what Python sees of the extension. Typed by src/octavo/_native.pyi.
#include <string>

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

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Octavo's kernels and what the processor offers them.";
    m.def("cpu_features", &cpu_features, "Every known feature by name, and whether this process may use it.");
    m.def("cpu_model_name", [] { return octavo::cpu_features().model_name; },
          "The processor's brand string; empty where it has none.");
    m.def("usable_isas", &usable_isas, "The instruction sets that kernels can run with here, best last.");
    m.def("bf16_to_f32", &bf16_to_f32, "source"_a, "target"_a, "isa"_a = "auto");
    m.def("f32_to_bf16", &f32_to_bf16, "source"_a, "target"_a, "isa"_a = "auto");
    octavo::bind_plan(m);
    octavo::bind_weights(m);
    octavo::bind_sampler(m);
}
