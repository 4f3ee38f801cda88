// Sampling as backends/native/sampler.py calls it: arrays in, arrays filled.
#include "ops/sampler.h"

#include <nanobind/stl/optional.h>

#include <optional>

#include "bind/bind.h"
#include "core/memory.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <typename T>
using Out1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Out2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Logits = nb::ndarray<const float, nb::ndim<2>, nb::device::cpu>;

void check(bool holds, const char* what) {
    if (!holds) throw nb::value_error(what);
}

// As it is: a converted copy would be gone before it is read.
template <typename A>
A array_of(nb::handle object) {
    A array;
    if (!nb::try_cast(object, array, false)) throw nb::type_error("an array has another type");
    return array;
}

// Starts [E + 1] and ids of one kind of edit.
RaggedIds ragged(const Array1<int64_t>& starts, const Array1<int32_t>& ids, size_t num_edits, int64_t vocab_size) {
    check(starts.size() == num_edits + 1, "the starts of an edit have another length");
    const int64_t* s = starts.data();
    check(s[0] == 0 && s[num_edits] == static_cast<int64_t>(ids.size()), "the starts of an edit do not fit its ids");
    for (size_t i = 0; i < num_edits; ++i) check(s[i] <= s[i + 1], "the starts of an edit do not rise");
    for (size_t i = 0; i < ids.size(); ++i) {
        if (ids.data()[i] < 0 || ids.data()[i] >= vocab_size) throw nb::index_error("a token id is out of range");
    }
    return {s, ids.data()};
}

class Sampler {
  public:
    Sampler(const std::string& isa, nb::object team, int64_t vocab_size)
        : kernels_(kernels_for(isa)),
          keep_(team),
          team_(nb::cast<Team&>(team)),
          vocab_size_(vocab_size),
          workspace_(sample_workspace(vocab_size, team_.num_threads()).bytes) {}

    void sample(Logits logits, Array2<uint8_t> options, Array1<int64_t> positions, Array1<int32_t> sources,
                std::optional<nb::tuple> edits, std::optional<nb::tuple> masks, std::optional<Array1<int32_t>> given,
                bool processed, Out1<int32_t> token_ids, Out1<uint8_t> statuses, std::optional<nb::tuple> described) {
        const size_t n = sources.size();
        check(options.shape(0) == n && options.shape(1) == sizeof(RowOptions), "options have another shape");
        check(positions.size() == n && token_ids.size() == n && statuses.size() == n, "columns differ in length");
        check(static_cast<int64_t>(logits.shape(1)) >= vocab_size_ && logits.stride(1) == 1, "logits are too narrow");
        for (size_t i = 0; i < n; ++i) {
            check(sources.data()[i] >= 0 && static_cast<size_t>(sources.data()[i]) < logits.shape(0),
                  "a source is out of range");
        }
        SampleArgs args{};
        args.logits = logits.data();
        args.logits_stride = logits.stride(0);
        args.vocab_size = vocab_size_;
        args.rows = static_cast<int64_t>(n);
        args.options = reinterpret_cast<const RowOptions*>(options.data());
        args.positions = positions.data();
        args.sources = sources.data();
        args.processed = processed;
        args.token_ids = token_ids.data();
        args.statuses = reinterpret_cast<SampleStatus*>(statuses.data());
        args.workspace = workspace_.data();
        if (given) {
            check(given->size() == n, "given tokens differ in number");
            for (size_t i = 0; i < n; ++i) {
                check(given->data()[i] >= 0 && given->data()[i] < vocab_size_, "a given token is out of range");
            }
            args.given = given->data();
        }
        if (edits) set_edits(args, *edits);
        if (masks) set_masks(args, *masks);
        set_described(args, described);
        nb::gil_scoped_release release;
        kernels_.sample(args, team_);
    }

  private:
    // (edit of each row, then starts and ids of allowed, banned, biased and seen, biases, counts)
    void set_edits(SampleArgs& args, const nb::tuple& edits) const {
        const auto of_row = array_of<Array1<int32_t>>(edits[0]);
        const size_t num_edits = array_of<Array1<int64_t>>(edits[1]).size() - 1;
        check(of_row.size() == static_cast<size_t>(args.rows), "edits differ in number of rows");
        for (size_t i = 0; i < of_row.size(); ++i) {
            check(of_row.data()[i] < static_cast<int32_t>(num_edits), "an edit is out of range");
        }
        args.edit_of_row = of_row.data();
        RaggedIds* const lists[] = {&args.allowed, &args.banned, &args.biased, &args.seen};
        for (size_t i = 0; i < 4; ++i) {
            *lists[i] = ragged(array_of<Array1<int64_t>>(edits[1 + 2 * i]), array_of<Array1<int32_t>>(edits[2 + 2 * i]),
                               num_edits, vocab_size_);
        }
        const auto biases = array_of<Array1<float>>(edits[9]);
        const auto counts = array_of<Array1<int32_t>>(edits[10]);
        check(static_cast<int64_t>(biases.size()) == args.biased.starts[num_edits], "biases differ in number");
        check(static_cast<int64_t>(counts.size()) == args.seen.starts[num_edits], "counts differ in number");
        args.biases = biases.data();
        args.counts = counts.data();
    }

    // (mask of each row, masks)
    void set_masks(SampleArgs& args, const nb::tuple& masks) const {
        const auto of_row = array_of<Array1<int32_t>>(masks[0]);
        const auto words = array_of<Array2<uint32_t>>(masks[1]);
        check(of_row.size() == static_cast<size_t>(args.rows), "masks differ in number of rows");
        check(static_cast<int64_t>(words.shape(1)) * 32 >= vocab_size_, "masks are too narrow");
        for (size_t i = 0; i < of_row.size(); ++i) {
            check(of_row.data()[i] < static_cast<int64_t>(words.shape(0)), "a mask is out of range");
        }
        args.mask_of_row = of_row.data();
        args.masks = words.data();
        args.mask_words = static_cast<int64_t>(words.shape(1));
    }

    // (values, peaks, totals, ranks, num_top, top_ids, top_values)
    void set_described(SampleArgs& args, const std::optional<nb::tuple>& described) const {
        int64_t widest = -1;
        for (int64_t i = 0; i < args.rows; ++i) {
            if (args.options[i].num_logprobs > widest) widest = args.options[i].num_logprobs;
        }
        if (widest < 0) return;
        check(described.has_value(), "rows want log-probabilities and there is no room for them");
        const nb::tuple& d = *described;
        const auto values = array_of<Out1<float>>(d[0]);
        const auto peaks = array_of<Out1<float>>(d[1]);
        const auto totals = array_of<Out1<double>>(d[2]);
        const auto ranks = array_of<Out1<int32_t>>(d[3]);
        const auto num_top = array_of<Out1<int32_t>>(d[4]);
        const auto top_ids = array_of<Out2<int32_t>>(d[5]);
        const auto top_values = array_of<Out2<float>>(d[6]);
        const size_t n = static_cast<size_t>(args.rows), width = static_cast<size_t>(widest);
        check(values.size() == n && peaks.size() == n && totals.size() == n && ranks.size() == n &&
                  num_top.size() == n && top_ids.shape(0) == n && top_values.shape(0) == n &&
                  top_ids.shape(1) >= width && top_values.shape(1) == top_ids.shape(1),
              "the room for log-probabilities has another shape");
        args.described = {values.data(),  peaks.data(),   totals.data(),
                          ranks.data(),   num_top.data(), top_ids.data(),
                          top_values.data(), static_cast<int64_t>(top_ids.shape(1))};
    }

    const Kernels& kernels_;
    nb::object keep_;
    Team& team_;
    int64_t vocab_size_;
    Memory workspace_;
};

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<Sampler>(m, "Sampler")
        .def(nb::init<const std::string&, nb::object, int64_t>(), "isa"_a, "team"_a, "vocab_size"_a)
        .def("sample", &Sampler::sample, "logits"_a.noconvert(), "options"_a.noconvert(), "positions"_a.noconvert(),
             "sources"_a.noconvert(), "edits"_a.none(), "masks"_a.none(), "given"_a.none().noconvert(), "processed"_a,
             "token_ids"_a.noconvert(), "statuses"_a.noconvert(), "described"_a.none());
}

}  // namespace octavo
