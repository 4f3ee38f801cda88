// int4 and int8 weights with int8 activations: which kernel multiplies how many rows.
#include "ops/functions.h"
#include "ops/quantized_few.h"
#include "ops/quantized_many.h"
#if defined(__AMX_TILE__)
#include "ops/quantized_tiles.h"
#endif

namespace octavo::OCTAVO_ISA {
namespace {

template <WeightFormat format>
void multiply(const LinearArgs& args, Team& team) {
    if (args.rows <= kDirectRows) return multiply_few_rows<format>(args, team);
#if defined(__AMX_TILE__)
    if (fits_tiles(*args.weight)) return multiply_rows_in_tiles<format>(args, team);
#endif
    multiply_many_rows<format>(args, team);
}

}  // namespace

void linear_quantized(const LinearArgs& args, Team& team) {
    if (args.rows == 0) return;
    if (args.weight->format == WeightFormat::int8) {
        multiply<WeightFormat::int8>(args, team);
    } else {
        multiply<WeightFormat::int4>(args, team);
    }
    if (args.best != nullptr) choose_best(args, team);
}

}  // namespace octavo::OCTAVO_ISA
