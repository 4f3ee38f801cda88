// Measures what the processor does at most (backends/native/roofline.py).
#include <nanobind/stl/pair.h>

#include <chrono>
#include <utility>

#include "bind/bind.h"
#include "core/memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

ProductKind product_kind_of(const std::string& name) {
    if (name == "f32") return ProductKind::f32;
    if (name == "bf16") return ProductKind::bf16;
    if (name == "int8") return ProductKind::int8;
    throw nb::value_error(("no products of '" + name + "'").c_str());
}

class RooflineProbe {
  public:
    // The memory is written by the threads that will read it, so that it lies where they are.
    RooflineProbe(const std::string& isa, nb::object team, int64_t read_bytes)
        : kernels_(kernels_for(isa)), team_(nb::cast<Team&>(team)), kept_(team) {
        if (read_bytes < kReadUnit || read_bytes % kReadUnit != 0) {
            throw nb::value_error("the memory must be a multiple of 256 bytes");
        }
        nb::gil_scoped_release release;
        memory_ = Memory(read_bytes);
        const int64_t units = read_bytes / kReadUnit, chunks = 8 * team_.num_threads();
        team_.each(chunks, [&](int64_t chunk, int) {
            const int64_t first = chunk_start(units, chunks, chunk), end = chunk_start(units, chunks, chunk + 1);
            std::memset(memory_.data() + first * kReadUnit, 1, static_cast<size_t>((end - first) * kReadUnit));
        });
    }

    double read(int64_t streams) {
        if (streams != 1 && streams != 4) throw nb::value_error("a thread reads 1 stream or 4");
        nb::gil_scoped_release release;
        return seconds([&] { kernels_.read_memory({memory_.data(), memory_.size(), streams}, team_); });
    }

    std::pair<double, int64_t> multiply(const std::string& kind, int64_t rounds) {
        const ProductsArgs args{product_kind_of(kind), rounds};
        int64_t operations = 0;
        nb::gil_scoped_release release;
        const double taken = seconds([&] { operations = kernels_.multiply(args, team_); });
        return {taken, operations};
    }

  private:
    template <class Work>
    static double seconds(const Work& work) {
        const auto start = std::chrono::steady_clock::now();
        work();
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    }

    const Kernels& kernels_;
    Team& team_;
    nb::object kept_;
    Memory memory_;
};

}  // namespace

void bind_roofline(nb::module_& m) {
    nb::class_<RooflineProbe>(m, "RooflineProbe")
        .def(nb::init<const std::string&, nb::object, int64_t>(), "isa"_a, "team"_a, "read_bytes"_a)
        .def("read", &RooflineProbe::read, "streams"_a, "Seconds that one pass over the memory takes.")
        .def("multiply", &RooflineProbe::multiply, "kind"_a, "rounds"_a,
             "Seconds, and how many multiplications and additions they were.");
}

}  // namespace octavo
