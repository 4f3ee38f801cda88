// What every linear kernel does with a finished accumulator; the rules are in linear.h.
#pragma once

#include "isa/current.h"
#include "isa/math.h"
#include "ops/linear.h"

namespace octavo::OCTAVO_ISA {

// How many of the panel's columns exist, when they start at output column `column` of `columns`.
static inline size_t panel_width(int64_t column, int64_t columns) {
    const int64_t left = columns - column;
    return static_cast<size_t>(left < kPanel ? left : kPanel);
}

static inline void store_output(const LinearArgs& args, int64_t row, int64_t column, size_t width, F32 v) {
    const Epilogue& e = args.epilogue;
    if (e.residual != nullptr) {
        const F32 base = load_first(e.residual + row * e.residual_stride + column, width);
        v = rounded(fma(broadcast(e.residual_scale), v, base), e.rounding);
    }
    store_first(args.y + row * args.y_stride + column, v, width);
}

// Of the first `width` lanes, which start at `column`; infinity and -1 where one of them is NaN or infinity.
static inline LinearArgs::Best best_of(F32 v, int64_t column, size_t width) {
    static const float lanes_left[kLanes] = {15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0};
    const F32 lowest = broadcast(-__builtin_inff());
    const F32 numbers = select(is_nan(v), broadcast(__builtin_inff()), v);
    const float largest = reduce_max(width < kLanes ? select(first_lanes(width), numbers, lowest) : numbers);
    if (largest == __builtin_inff()) return {largest, -1};
    // A lane beyond the width may hold the value too, but never comes first.
    const F32 left = select(less(numbers, broadcast(largest)), broadcast(-1.0f), load(lanes_left));
    return {largest, static_cast<int32_t>(column) + 15 - static_cast<int32_t>(reduce_max(left))};
}

// The accumulators of panel `panel` of a matrix that is not gated, or is but whose gate is applied elsewhere.
static inline void finish(const LinearArgs& args, int64_t panel, int64_t row, F32 acc) {
    const Epilogue& e = args.epilogue;
    const PackedMatrix& w = *args.weight;
    int64_t column = panel * kPanel, columns = w.n;
    if (w.gated) {
        columns = panel % 2 ? w.n : w.n / 2;
        column = panel / 2 * kPanel + (panel % 2 ? w.n / 2 : 0);
    }
    const size_t width = panel_width(column, columns);
    F32 v = acc;
    if (e.bias != nullptr) v = v + load_first(e.bias + column, width);
    if (e.scale != 1.0f) v = v * broadcast(e.scale);
    v = rounded(v, e.rounding);
    if (e.softcap != 0.0f) v = broadcast(e.softcap) * tanh(v / broadcast(e.softcap));
    if (e.activation != Activation::none) v = rounded(activate(v, e.activation), e.rounding);
    if (args.y != nullptr) store_output(args, row, column, width, v);
    if (args.best != nullptr) {
        args.best_scratch[panel * args.rows + row] = best_of(v, column, width);
    }
}

// The accumulators of gate panel `pair` and of up panel `pair` (packed panels 2 pair and 2 pair + 1).
static inline void finish_gated(const LinearArgs& args, int64_t pair, int64_t row, F32 gate, F32 up) {
    const Epilogue& e = args.epilogue;
    const int64_t column = pair * kPanel, columns = args.weight->n / 2;
    const size_t width = panel_width(column, columns);
    if (e.bias != nullptr) {
        gate = gate + load_first(e.bias + column, width);
        up = up + load_first(e.bias + columns + column, width);
    }
    gate = rounded(gate, e.rounding);
    up = rounded(up, e.rounding);
    store_output(args, row, column, width, rounded(activate(gate, e.activation) * up, e.rounding));
}

// Nothing but rounding and the residual; all columns of the panels exist.
template <Rounding kRounding>
static inline void finish_plain(const LinearArgs& args, int64_t first_row, int64_t rows, int64_t column, int64_t num_panels,
                                const float* sums, int64_t sum_rows) {
    const Epilogue& e = args.epilogue;
    for (int64_t row = 0; row < rows; ++row) {
        float* y = args.y + (first_row + row) * args.y_stride + column;
        const float* sum = sums + row * kPanel;
        if (e.residual == nullptr) {
            for (int64_t p = 0; p < num_panels; ++p) store(y + p * kPanel, rounded(load(sum + p * sum_rows * kPanel), kRounding));
            continue;
        }
        const float* residual = e.residual + (first_row + row) * e.residual_stride + column;
        for (int64_t p = 0; p < num_panels; ++p) {
            const F32 v = rounded(load(sum + p * sum_rows * kPanel), kRounding);
            const F32 total = fma(broadcast(e.residual_scale), v, load(residual + p * kPanel));
            store(y + p * kPanel, rounded(total, kRounding));
        }
    }
}

// A block of accumulators [panel][sum_rows][16], of which the first `rows` rows count. Gated: whole pairs of panels.
static inline void finish_rows(const LinearArgs& args, int64_t first_row, int64_t rows, int64_t first_panel,
                               int64_t num_panels, const float* sums, int64_t sum_rows) {
    const Epilogue& e = args.epilogue;
    const auto acc = [&](int64_t panel, int64_t row) { return load(sums + (panel * sum_rows + row) * kPanel); };
    if (e.gated) {
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t panel = 0; panel < num_panels; panel += 2) {
                finish_gated(args, (first_panel + panel) / 2, first_row + row, acc(panel, row), acc(panel + 1, row));
            }
        }
        return;
    }
    const bool is_plain = e.bias == nullptr && e.scale == 1.0f && e.softcap == 0.0f && e.activation == Activation::none &&
                          args.y != nullptr && args.best == nullptr && !args.weight->gated;
    if (is_plain && (first_panel + num_panels) * kPanel <= args.weight->n) {
        const int64_t column = first_panel * kPanel;
        switch (e.rounding) {
            case Rounding::bf16:
                return finish_plain<Rounding::bf16>(args, first_row, rows, column, num_panels, sums, sum_rows);
            case Rounding::f16:
                return finish_plain<Rounding::f16>(args, first_row, rows, column, num_panels, sums, sum_rows);
            default: return finish_plain<Rounding::f32>(args, first_row, rows, column, num_panels, sums, sum_rows);
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t panel = 0; panel < num_panels; ++panel) finish(args, first_panel + panel, first_row + row, acc(panel, row));
    }
}

constexpr int64_t kBestRows = 8;  // share the cache lines of a panel

// `best` of at most kBestRows rows from `best_scratch`, in the order of the columns.
static inline void choose_best_of(const LinearArgs& args, int64_t first) {
    const int64_t left = args.rows - first, rows = left < kBestRows ? left : kBestRows;
    LinearArgs::Best best[kBestRows];
    for (LinearArgs::Best& each : best) each = {-__builtin_inff(), -1};
    for (int64_t panel = 0; panel < args.weight->num_panels; ++panel) {
        const LinearArgs::Best* next = args.best_scratch + panel * args.rows + first;
        for (int64_t row = 0; row < rows; ++row) {
            if (next[row].value > best[row].value) best[row] = next[row];
        }
    }
    for (int64_t row = 0; row < rows; ++row) args.best[first + row] = best[row].column;
}

// After all panels are finished.
static inline void choose_best(const LinearArgs& args, Team& team) {
    team.each((args.rows + kBestRows - 1) / kBestRows, [&](int64_t chunk, int) { choose_best_of(args, chunk * kBestRows); });
}

}  // namespace octavo::OCTAVO_ISA
