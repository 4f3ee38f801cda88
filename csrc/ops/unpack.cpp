#include "ops/unpack.h"

#include "isa/current.h"
#include "ops/functions.h"

namespace octavo::OCTAVO_ISA {

// What follows a panel's k in memory: element k of column c stands at offset(k, c).
struct ByK {
    static int64_t offset(int64_t k, int64_t c) { return k * kPanel + c; }
};
struct ByPairsOfK {
    static int64_t offset(int64_t k, int64_t c) { return (k / 2 * kPanel + c) * 2 + k % 2; }
};

template <class Order, class Element, F32 widen(const Element*)>
static void unpack_row(const PackedMatrix& matrix, int64_t row, float* out) {
    const Element* panel = static_cast<const Element*>(matrix.data) + row / kPanel * kPanel * matrix.padded_k;
    const int64_t lanes = kLanes;
    for (int64_t k = 0; k < matrix.k; k += lanes) {
        const int64_t left = matrix.k - k, count = left < lanes ? left : lanes;
        Element gathered[kLanes] = {};
        for (int64_t i = 0; i < count; ++i) gathered[i] = panel[Order::offset(k + i, row % kPanel)];
        store_first(out + k, widen(gathered), static_cast<size_t>(count));
    }
}

void unpack_rows(const PackedMatrix& matrix, const int32_t* ids, int64_t count, float* out, int64_t out_stride,
                 Team& team) {
    const int64_t chunks = count < 8 ? count : 8;
    team.each(chunks, [&](int64_t chunk, int) {
        for (int64_t i = chunk_start(count, chunks, chunk); i < chunk_start(count, chunks, chunk + 1); ++i) {
            float* target = out + i * out_stride;
            switch (matrix.format) {
                case WeightFormat::f32: unpack_row<ByK, float, load>(matrix, ids[i], target); break;
                case WeightFormat::f16: unpack_row<ByK, uint16_t, load_f16>(matrix, ids[i], target); break;
                case WeightFormat::bf16: unpack_row<ByPairsOfK, uint16_t, load_bf16>(matrix, ids[i], target); break;
                default: unpack_int_row(matrix, ids[i], target);
            }
        }
    });
}

}  // namespace octavo::OCTAVO_ISA
