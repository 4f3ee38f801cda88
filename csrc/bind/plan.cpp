// Team, KvArena and Plan: what backends/native/ops.py and plan.py drive.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "bind/bind.h"
#include "core/memory.h"
#include "plan/nodes.h"
#include "plan/plan.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

using ViewTuple = std::tuple<int32_t, int32_t, int32_t>;  // slot, offset, width
using Vector = Array1<float>;

View view(const ViewTuple& t) { return {std::get<0>(t), std::get<1>(t), std::get<2>(t)}; }

Rounding rounding_of(const std::string& dtype) {
    if (dtype == "float32") return Rounding::f32;
    if (dtype == "bfloat16") return Rounding::bf16;
    if (dtype == "float16") return Rounding::f16;
    throw nb::value_error(("no dtype " + dtype).c_str());
}

KvFormat kv_format_of(const std::string& dtype) {
    switch (rounding_of(dtype)) {
        case Rounding::bf16: return KvFormat::bf16;
        case Rounding::f16: return KvFormat::f16;
        default: return KvFormat::f32;
    }
}

Activation activation_of(const std::string& name) {
    if (name == "none") return Activation::none;
    if (name == "silu") return Activation::silu;
    if (name == "gelu") return Activation::gelu;
    if (name == "gelu_tanh") return Activation::gelu_tanh;
    if (name == "relu") return Activation::relu;
    throw nb::value_error(("no activation " + name).c_str());
}

// The paged keys and values of all layers.
struct KvArena {
    KvLayout layout;
    int64_t num_blocks;
    Memory memory;

    void copy_blocks(const std::vector<std::tuple<int64_t, int64_t>>& pairs) {
        for (const auto& [source, target] : pairs) {
            if (source < 0 || source >= num_blocks || target < 0 || target >= num_blocks) {
                throw nb::index_error("block out of range");
            }
            std::memcpy(memory.data() + target * layout.block_bytes, memory.data() + source * layout.block_bytes,
                        static_cast<size_t>(layout.block_bytes));
        }
    }
};

// A Plan and the Python objects whose memory it reads.
class PlanHandle {
  public:
    PlanHandle(const std::string& isa, nb::object team, const std::string& dtype)
        : plan_(kernels_for(isa), nb::cast<Team&>(team), rounding_of(dtype)), keep_{team} {}

    int32_t slot(int64_t width, const std::string& extent) {
        return plan_.add_slot(width, extent == "tokens" ? Extent::tokens : Extent::logits_rows);
    }

    void keep(int32_t slot) { plan_.keep(slot); }
    int64_t num_nodes() const { return plan_.num_nodes(); }

    void embedding(const std::vector<nb::object>& table, float scale, ViewTuple y) {
        auto node = std::make_unique<EmbeddingNode>();
        for (const nb::object& segment : table) node->table.push_back(matrix(segment));
        node->scale = scale;
        node->y = view(y);
        add(std::move(node), {y});
    }

    void norm(bool is_layer_norm, ViewTuple x, int64_t heads, Vector weight, std::optional<Vector> bias, float eps,
              float offset, std::optional<ViewTuple> addend, float addend_scale, std::optional<ViewTuple> sum,
              ViewTuple y) {
        auto node = std::make_unique<NormNode>();
        node->is_layer_norm = is_layer_norm;
        node->x = view(x);
        node->heads = heads;
        node->weight = vector(weight);
        node->bias = bias ? vector(*bias) : nullptr;
        node->eps = eps;
        node->offset = offset;
        node->y = view(y);
        std::vector<ViewTuple> used{x, y};
        if (addend) {
            node->has_addend = true;
            node->addend = view(*addend);
            node->addend_scale = addend_scale;
            node->sum = view(*sum);
            used.push_back(*addend);
            used.push_back(*sum);
        }
        add(std::move(node), used);
    }

    void quantize(ViewTuple x, int64_t padded_k, int64_t group, ViewTuple y) {
        auto node = std::make_unique<QuantizeNode>();
        node->x = view(x);
        node->padded_k = padded_k;
        node->group = group;
        node->y = view(y);
        add(std::move(node), {x, y});
    }

    void linear(ViewTuple x, nb::object weight, bool is_quantized, bool is_logits, std::optional<Vector> bias, float scale,
                float softcap, const std::string& activation, bool gated, std::optional<ViewTuple> residual,
                float residual_scale, ViewTuple y) {
        auto node = std::make_unique<LinearNode>();
        node->x = view(x);
        node->weight = matrix(weight);
        node->is_quantized = is_quantized;
        node->is_logits = is_logits;
        node->bias = bias ? vector(*bias) : nullptr;
        node->scale = scale;
        node->softcap = softcap;
        node->activation = activation_of(activation);
        node->gated = gated;
        node->y = view(y);
        std::vector<ViewTuple> used{x, y};
        if (residual) {
            node->has_residual = true;
            node->residual = view(*residual);
            node->residual_scale = residual_scale;
            used.push_back(*residual);
        }
        add(std::move(node), used);
    }

    void activation(ViewTuple x, const std::string& kind, bool gated, ViewTuple y) {
        auto node = std::make_unique<ActivationNode>();
        node->x = view(x);
        node->kind = activation_of(kind);
        node->gated = gated;
        node->y = view(y);
        add(std::move(node), {x, y});
    }

    void add_scaled(ViewTuple x, ViewTuple addend, float scale, ViewTuple y) {
        auto node = std::make_unique<AddNode>();
        node->x = view(x);
        node->addend = view(addend);
        node->scale = scale;
        node->y = view(y);
        add(std::move(node), {x, addend, y});
    }

    void angles(const std::vector<Vector>& inv_freq, const std::vector<float>& attention_factor, ViewTuple y) {
        auto node = std::make_unique<AnglesNode>();
        for (const Vector& each : inv_freq) node->inv_freq.emplace_back(each.data(), each.data() + each.size());
        node->attention_factor = attention_factor;
        node->y = view(y);
        add(std::move(node), {y});
    }

    void rope(ViewTuple x, ViewTuple angles, int64_t head_dim, int64_t rotary_dim, ViewTuple y) {
        auto node = std::make_unique<RopeNode>();
        node->x = view(x);
        node->angles = view(angles);
        node->head_dim = head_dim;
        node->rotary_dim = rotary_dim;
        node->y = view(y);
        add(std::move(node), {x, angles, y});
    }

    void attend(ViewTuple q, ViewTuple k, ViewTuple v, int64_t group, int64_t layer, int64_t num_heads, int64_t head_dim,
                float scale, int64_t window, float softcap, std::optional<Vector> sinks, ViewTuple y) {
        auto node = std::make_unique<AttendNode>();
        node->q = view(q);
        node->k = view(k);
        node->v = view(v);
        node->group = group;
        node->layer = layer;
        node->num_heads = num_heads;
        node->head_dim = head_dim;
        node->scale = scale;
        node->window = window;
        node->softcap = softcap;
        node->sinks = sinks ? vector(*sinks) : nullptr;
        node->y = view(y);
        add(std::move(node), {q, k, v, y});
    }

    void pick_rows(ViewTuple x, ViewTuple y) {
        auto node = std::make_unique<PickRowsNode>();
        node->x = view(x);
        node->y = view(y);
        add(std::move(node), {x, y});
    }

    // For nodes that read no array of the step: how many rows there are.
    void set_rows(int64_t num_tokens) {
        arrays_ = {};
        arrays_.num_tokens = arrays_.num_logits_rows = num_tokens;
    }

    // Make room for the step that is set, so that values() may be written before a run.
    void reserve() {
        arrays_.num_logits_rows = arrays_.num_tokens;
        plan_.run(arrays_, 0, 0, max_context_);
    }

    // What the nodes of the next runs read. The arrays are kept alive.
    void set_step(Array1<int32_t> token_ids, Array1<int32_t> positions, Array1<int32_t> rope_variants,
                  Array1<int32_t> query_starts, Array1<int32_t> context_lens,
                  const std::vector<Array2<int32_t>>& block_tables, nb::object cache, int64_t max_context) {
        const size_t num_tokens = token_ids.size(), num_requests = context_lens.size();
        if (positions.size() != num_tokens || rope_variants.size() != num_tokens ||
            query_starts.size() != num_requests + 1 ||
            query_starts.data()[num_requests] != static_cast<int32_t>(num_tokens)) {
            throw nb::value_error("the arrays of the step differ in length");
        }
        arrays_.token_ids = token_ids.data();
        arrays_.positions = positions.data();
        arrays_.rope_variants = rope_variants.data();
        arrays_.query_starts = query_starts.data();
        arrays_.context_lens = context_lens.data();
        arrays_.num_tokens = static_cast<int64_t>(num_tokens);
        arrays_.num_requests = static_cast<int64_t>(num_requests);
        arrays_.block_tables.clear();
        for (const Array2<int32_t>& table : block_tables) {
            if (table.shape(0) != num_requests) throw nb::value_error("a block table has another number of requests");
            arrays_.block_tables.push_back({table.data(), static_cast<int64_t>(table.shape(1))});
        }
        arrays_kept_.clear();
        for (const auto& array : {token_ids, positions, rope_variants, query_starts, context_lens}) arrays_kept_.push_back(array);
        tables_ = block_tables;
        if (!cache.is_none()) {
            KvArena& arena = nb::cast<KvArena&>(cache);
            arrays_.blocks = arena.memory.data();
            arrays_.layout = &arena.layout;
        }
        max_context_ = max_context;
    }

    void run(int64_t first, int64_t end) {
        nb::gil_scoped_release release;
        plan_.run(arrays_, first, end, max_context_);
    }

    // The nodes that compute logits, for packed tokens `rows`; with `best`, the best column of each instead.
    void run_rows(int64_t first, int64_t end, Array1<int32_t> rows,
                  std::optional<nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>> best) {
        for (size_t i = 0; i < rows.size(); ++i) {
            if (rows.data()[i] < 0 || rows.data()[i] >= arrays_.num_tokens) throw nb::index_error("row out of range");
        }
        if (static_cast<int64_t>(rows.size()) > plan_.row_capacity()) {
            throw nb::value_error("more rows of logits than the step has tokens");
        }
        if (best && best->size() != rows.size()) throw nb::value_error("best has another number of rows");
        arrays_.logits_rows = rows.data();
        arrays_.num_logits_rows = static_cast<int64_t>(rows.size());
        int32_t* target = best ? best->data() : nullptr;
        nb::gil_scoped_release release;
        plan_.run(arrays_, first, end, max_context_, target);
    }

    // The values of a view after a run, without a copy: valid until the next one.
    nb::ndarray<nb::numpy, float, nb::ndim<2>> values(nb::handle self, ViewTuple t) {
        const View v = view(t);
        const Slot& slot = plan_.slot(v.slot);
        const size_t shape[2] = {static_cast<size_t>(slot.rows), static_cast<size_t>(v.width)};
        const int64_t strides[2] = {slot.stride, 1};
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(slot.data + v.offset, 2, shape, self, strides);
    }

    int64_t arena_bytes() const { return plan_.arena_bytes(); }

  private:
    void add(std::unique_ptr<Node> node, const std::vector<ViewTuple>& views) {
        std::vector<int32_t> slots;
        for (const ViewTuple& each : views) slots.push_back(std::get<0>(each));
        plan_.add_node(std::move(node), slots);
    }

    PackedMatrix matrix(nb::object packed) {
        keep_.push_back(packed);
        return nb::cast<const PackedMatrix&>(packed);
    }

    const float* vector(const Vector& array) {
        vectors_.push_back(array);
        return array.data();
    }

    Plan plan_;
    std::vector<nb::object> keep_;
    std::vector<Vector> vectors_;
    StepArrays arrays_;
    std::vector<Array1<int32_t>> arrays_kept_;
    std::vector<Array2<int32_t>> tables_;
    int64_t max_context_ = 1;
};

}  // namespace

void bind_plan(nb::module_& m) {
    nb::class_<Team>(m, "Team")
        .def(nb::init<int>(), "num_threads"_a)
        .def_prop_ro("num_threads", &Team::num_threads);

    nb::class_<KvArena>(m, "KvArena")
        .def("__init__",
             [](KvArena* self, const std::string& dtype, int64_t num_blocks, int64_t block_size, int64_t num_layers,
                int64_t num_kv_heads, int64_t head_dim) {
                 if (head_dim < 1 || head_dim > kMaxHeadDim) {
                     throw nb::value_error(("heads of " + std::to_string(head_dim) + " values").c_str());
                 }
                 const KvLayout layout =
                     make_kv_layout(kv_format_of(dtype), block_size, num_layers, num_kv_heads, head_dim);
                 new (self) KvArena{layout, num_blocks, Memory(num_blocks * layout.block_bytes)};
             },
             nb::kw_only(), "dtype"_a, "num_blocks"_a, "block_size"_a, "num_layers"_a, "num_kv_heads"_a, "head_dim"_a)
        .def("copy_blocks", &KvArena::copy_blocks, "pairs"_a)
        .def_prop_ro("block_bytes", [](const KvArena& self) { return self.layout.block_bytes; });

    nb::class_<PlanHandle>(m, "Plan")
        .def(nb::init<const std::string&, nb::object, const std::string&>(), "isa"_a, "team"_a, "dtype"_a)
        .def("slot", &PlanHandle::slot, "width"_a, "extent"_a)
        .def("keep", &PlanHandle::keep, "slot"_a)
        .def_prop_ro("num_nodes", &PlanHandle::num_nodes)
        .def_prop_ro("arena_bytes", &PlanHandle::arena_bytes)
        .def("embedding", &PlanHandle::embedding, nb::kw_only(), "table"_a, "scale"_a, "y"_a)
        .def("norm", &PlanHandle::norm, nb::kw_only(), "is_layer_norm"_a, "x"_a, "heads"_a, "weight"_a,
             "bias"_a.none(), "eps"_a, "offset"_a, "addend"_a.none(), "addend_scale"_a, "sum"_a.none(), "y"_a)
        .def("quantize", &PlanHandle::quantize, nb::kw_only(), "x"_a, "padded_k"_a, "group"_a, "y"_a)
        .def("linear", &PlanHandle::linear, nb::kw_only(), "x"_a, "weight"_a, "is_quantized"_a, "is_logits"_a,
             "bias"_a.none(), "scale"_a, "softcap"_a, "activation"_a, "gated"_a, "residual"_a.none(),
             "residual_scale"_a, "y"_a)
        .def("activation", &PlanHandle::activation, nb::kw_only(), "x"_a, "kind"_a, "gated"_a, "y"_a)
        .def("add", &PlanHandle::add_scaled, nb::kw_only(), "x"_a, "addend"_a, "scale"_a, "y"_a)
        .def("angles", &PlanHandle::angles, nb::kw_only(), "inv_freq"_a, "attention_factor"_a, "y"_a)
        .def("rope", &PlanHandle::rope, nb::kw_only(), "x"_a, "angles"_a, "head_dim"_a, "rotary_dim"_a, "y"_a)
        .def("attend", &PlanHandle::attend, nb::kw_only(), "q"_a, "k"_a, "v"_a, "group"_a, "layer"_a, "num_heads"_a,
             "head_dim"_a, "scale"_a, "window"_a, "softcap"_a, "sinks"_a.none(), "y"_a)
        .def("pick_rows", &PlanHandle::pick_rows, nb::kw_only(), "x"_a, "y"_a)
        .def("set_step", &PlanHandle::set_step, "token_ids"_a, "positions"_a, "rope_variants"_a, "query_starts"_a,
             "context_lens"_a, "block_tables"_a, "cache"_a.none(), "max_context"_a)
        .def("set_rows", &PlanHandle::set_rows, "num_tokens"_a)
        .def("reserve", &PlanHandle::reserve)
        .def("run", &PlanHandle::run, "first"_a, "end"_a)
        .def("run_rows", &PlanHandle::run_rows, "first"_a, "end"_a, "rows"_a, "best"_a.none())
        .def("values", [](nb::handle self, ViewTuple t) { return nb::cast<PlanHandle&>(self).values(self, t); },
             "view"_a, nb::rv_policy::reference);
}

}  // namespace octavo
