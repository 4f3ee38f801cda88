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
        float values[kLanes];
        store(values, v);
        LinearArgs::Best best{-__builtin_inff(), static_cast<int32_t>(column)};
        for (size_t i = 0; i < width; ++i) {
            if (values[i] > best.value) best = {values[i], static_cast<int32_t>(column + static_cast<int64_t>(i))};
        }
        args.best_scratch[panel * args.rows + row] = best;
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

// After all panels are finished: `best` from `best_scratch`, in the order of the columns.
static inline void choose_best(const LinearArgs& args) {
    for (int64_t row = 0; row < args.rows; ++row) {
        LinearArgs::Best best = args.best_scratch[row];
        for (int64_t panel = 1; panel < args.weight->num_panels; ++panel) {
            const LinearArgs::Best& next = args.best_scratch[panel * args.rows + row];
            if (next.value > best.value) best = next;
        }
        args.best[row] = best.column;
    }
}

}  // namespace octavo::OCTAVO_ISA
