// Packed matrices, and checkpoint rows into them (backends/native/weights.py).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#if defined(__unix__)
#include <sys/mman.h>
#endif

#include "bind/bind.h"
#include "weights/pack.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using Bytes = Array1<uint8_t>;
using WritableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using RowBytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::device::cpu>;
using Parts = std::vector<std::pair<std::string, RowBytes>>;

constexpr std::pair<WeightFormat, const char*> kFormats[] = {
    {WeightFormat::f32, "f32"}, {WeightFormat::bf16, "bf16"}, {WeightFormat::f16, "f16"},
    {WeightFormat::int8, "int8"}, {WeightFormat::int4, "int4"},
};

WeightFormat format_of(const std::string& name) {
    for (const auto& [format, known] : kFormats) {
        if (name == known) return format;
    }
    throw nb::value_error(("unknown weight format '" + name + "'").c_str());
}

const char* format_name(WeightFormat format) { return kFormats[static_cast<size_t>(format)].second; }

ScaleFormat scale_format_of(const std::string& name) {
    if (name == "f32") return ScaleFormat::f32;
    if (name == "f16") return ScaleFormat::f16;
    throw nb::value_error(("unknown scale format '" + name + "'").c_str());
}

PackedMatrix shaped(const std::string& format, int64_t n, int64_t k, int64_t group, const std::string& scale_format,
                    bool has_min, bool gated) {
    PackedMatrix matrix{};
    matrix.format = format_of(format);
    matrix.scale_format = scale_format_of(scale_format);
    matrix.has_min = has_min;
    matrix.gated = gated;
    matrix.n = n;
    matrix.k = k;
    matrix.group = group;
    return with_layout(matrix);
}

int64_t packed_bytes(const std::string& format, int64_t n, int64_t k, int64_t group, const std::string& scale_format,
                     bool has_min, bool gated) {
    return region_layout(shaped(format, n, k, group, scale_format, has_min, gated)).size;
}

void create(PackedMatrix* self, Bytes memory, const std::string& format, int64_t n, int64_t k, int64_t group,
            const std::string& scale_format, bool has_min, bool gated) {
    PackedMatrix matrix = shaped(format, n, k, group, scale_format, has_min, gated);
    const RegionLayout layout = region_layout(matrix);
    const uint8_t* data = memory.data();
    if (static_cast<int64_t>(memory.size()) != layout.size || reinterpret_cast<uintptr_t>(data) % 64 != 0) {
        const std::string text = "the matrix takes " + std::to_string(layout.size) + " bytes at a multiple of 64; given " +
                                 std::to_string(memory.size());
        throw nb::value_error(text.c_str());
    }
    matrix.data = data;
    if (matrix.group != 0) matrix.scales = data + layout.scales;
    if (matrix.has_min) matrix.mins = data + layout.mins;
    new (self) PackedMatrix(matrix);
}

// Rows of `k` values each; shorter ones would be read beyond their end.
std::vector<RowSource> sources_of(const Parts& parts, int64_t k) {
    std::vector<RowSource> sources;
    for (const auto& [name, rows] : parts) {
        const std::optional<RowType> type = find_row_type(name);
        if (!type) throw nb::value_error(("rows of the unknown type '" + name + "'").c_str());
        const auto count = static_cast<int64_t>(rows.shape(0)), bytes = static_cast<int64_t>(rows.shape(1));
        if (bytes > 1 && rows.stride(1) != 1) throw nb::value_error("the bytes of a row must follow each other");
        const RowShape shape = row_shape(*type);
        const int64_t values = bytes / shape.bytes * shape.block;
        if (bytes % shape.bytes != 0 || values != k) {
            const std::string text = name + " rows of " + std::to_string(bytes) + " bytes for " + std::to_string(k) + " values";
            throw nb::value_error(text.c_str());
        }
        sources.push_back({*type, rows.data(), count, count > 1 ? rows.stride(0) : bytes});
    }
    return sources;
}

// `memory` proves that the bytes may be written: a matrix may lie in a file that is mapped read-only.
void check_memory(const PackedMatrix& target, const WritableBytes& memory) {
    if (target.data != memory.data()) throw nb::value_error("the matrix lies elsewhere");
}

int64_t pack_values_of(const PackedMatrix& target, WritableBytes memory, const Parts& parts, Team& team) {
    check_memory(target, memory);
    const std::vector<RowSource> sources = sources_of(parts, target.k);
    nb::gil_scoped_release release;
    return pack_values(target, sources, team);
}

void pack_blocks_of(const PackedMatrix& target, WritableBytes memory, const Parts& parts, Team& team) {
    check_memory(target, memory);
    const std::vector<RowSource> sources = sources_of(parts, target.k);
    nb::gil_scoped_release release;
    pack_blocks(target, sources, team);
}

float quantize_values_of(const PackedMatrix& target, WritableBytes memory, const Parts& parts, Team& team) {
    check_memory(target, memory);
    const std::vector<RowSource> sources = sources_of(parts, target.k);
    nb::gil_scoped_release release;
    return quantize_values(target, sources, team);
}

bool values_fit_in(const std::string& format, const Parts& parts, int64_t k, Team& team) {
    const std::vector<RowSource> sources = sources_of(parts, k);
    const WeightFormat target = format_of(format);
    nb::gil_scoped_release release;
    return values_fit(target, sources, k, team);
}

bool scales_fit_in_f16(const Parts& parts, int64_t k) {
    const std::vector<RowSource> sources = sources_of(parts, k);
    nb::gil_scoped_release release;
    return scales_fit_f16(sources, k);
}

std::optional<std::tuple<std::string, int64_t, bool>> integer_form_of(const std::string& type_name) {
    const std::optional<RowType> type = find_row_type(type_name);
    const std::optional<IntegerForm> form = type ? integer_form(*type) : std::nullopt;
    if (!form) return std::nullopt;
    return std::make_tuple(std::string(format_name(form->format)), form->group, form->has_min);
}

// Let the pages of `memory` be those of a file with the same bytes.
void map_over(Bytes memory, int fd, int64_t offset) {
#if defined(__unix__)
    void* at = const_cast<uint8_t*>(memory.data());
    if (mmap(at, memory.size(), PROT_READ, MAP_SHARED | MAP_FIXED, fd, static_cast<off_t>(offset)) == MAP_FAILED) {
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
#else
    (void)memory, (void)fd, (void)offset;
#endif
}

}  // namespace

void bind_weights(nb::module_& m) {
    m.attr("PACK_VERSION") = kPackVersion;
    nb::class_<PackedMatrix>(m, "PackedMatrix")
        .def("__init__", &create, "memory"_a, "format"_a, "n"_a, "k"_a, "group"_a = 0, "scale_format"_a = "f32",
             "has_min"_a = false, "gated"_a = false, nb::keep_alive<1, 2>())
        .def_prop_ro("format", [](const PackedMatrix& w) { return format_name(w.format); })
        .def_prop_ro("scale_format", [](const PackedMatrix& w) {
            return w.scale_format == ScaleFormat::f16 ? "f16" : "f32";
        })
        .def_ro("has_min", &PackedMatrix::has_min)
        .def_ro("gated", &PackedMatrix::gated)
        .def_ro("n", &PackedMatrix::n)
        .def_ro("k", &PackedMatrix::k)
        .def_ro("padded_k", &PackedMatrix::padded_k)
        .def_ro("num_panels", &PackedMatrix::num_panels)
        .def_ro("group", &PackedMatrix::group)
        .def_prop_ro("memory", [](nb::handle self) {
            const auto& w = nb::cast<const PackedMatrix&>(self);
            const size_t size = static_cast<size_t>(region_layout(w).size);
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(w.data, {size}, self);
        }, nb::rv_policy::reference)
        .def_prop_ro("nbytes", [](const PackedMatrix& w) { return region_layout(w).size; });
    m.def("packed_bytes", &packed_bytes, "format"_a, "n"_a, "k"_a, "group"_a = 0, "scale_format"_a = "f32",
          "has_min"_a = false, "gated"_a = false);
    m.def("integer_form", &integer_form_of, "type_name"_a,
          "Format, group and whether there are minima, of a block type; None for other types.");
    m.def("values_fit", &values_fit_in, "format"_a, "parts"_a, "k"_a, "team"_a);
    m.def("scales_fit_f16", &scales_fit_in_f16, "parts"_a, "k"_a);
    m.def("pack_values", &pack_values_of, "target"_a, "memory"_a, "parts"_a, "team"_a);
    m.def("pack_blocks", &pack_blocks_of, "target"_a, "memory"_a, "parts"_a, "team"_a);
    m.def("quantize_values", &quantize_values_of, "target"_a, "memory"_a, "parts"_a, "team"_a);
    m.def("map_over", &map_over, "memory"_a, "fd"_a, "offset"_a);
}

}  // namespace octavo
