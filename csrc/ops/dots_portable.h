// Plain C++: the meaning of the other headers.
#pragma once

namespace octavo::OCTAVO_ISA {

constexpr int kDirectRows = 4;
constexpr int kBlockRows = 4;
template <WeightFormat format>
constexpr int32_t kBias = 0;
template <WeightFormat format>
constexpr int64_t kWideWeight = 1;
template <WeightFormat format>
constexpr int64_t kWideRow = 1;

template <WeightFormat format>
static inline void widen_weights(const uint8_t* packed, int64_t k, uint8_t* wide) {
    if constexpr (format == WeightFormat::int8) {
        memcpy(wide, packed, static_cast<size_t>(k * kPanel));
    } else {
        for (int64_t row = 0; row < k / 8; ++row, packed += 64, wide += 128) {
            for (int i = 0; i < 64; ++i) {
                wide[i] = packed[i] & 15;
                wide[64 + i] = packed[i] >> 4;
            }
        }
    }
}

template <WeightFormat format>
static inline void widen_row(const int8_t* q, int64_t k, uint8_t* wide) {
    memcpy(wide, q, static_cast<size_t>(k));
}

template <WeightFormat format, int rows>
OCTAVO_INLINE void dot_wide(const uint8_t* weights, const uint8_t* activations, int64_t stride, int64_t k, I32* sums) {
    for (int r = 0; r < rows; ++r) {
        const uint8_t* w = weights;
        int32_t sum[kPanel] = {};
        for (int64_t i = 0; i < k; i += 4, w += 4 * kPanel) {
            int32_t x[4];
            for (int j = 0; j < 4; ++j) x[j] = static_cast<int8_t>(activations[r * stride + i + j]);
            for (int c = 0; c < kPanel; ++c) {
                for (int j = 0; j < 4; ++j) sum[c] += x[j] * static_cast<int8_t>(w[4 * c + j]);
            }
        }
        sums[r] = load(sum);
    }
}

template <WeightFormat format, int rows>
OCTAVO_INLINE void dot_packed(const uint8_t* packed, const int8_t* q, int64_t stride, int64_t k, I32* sums) {
    const auto* activations = reinterpret_cast<const uint8_t*>(q);
    if constexpr (format == WeightFormat::int8) {
        dot_wide<format, rows>(packed, activations, stride, k, sums);
    } else {
        uint8_t wide[16 * kPanel];
        for (int r = 0; r < rows; ++r) sums[r] = broadcast(int32_t{0});
        for (int64_t i = 0; i < k; i += 16, packed += packed_bytes(format, 16)) {
            I32 part[rows];
            widen_weights<format>(packed, 16, wide);
            dot_wide<format, rows>(wide, activations + i, stride, 16, part);
            for (int r = 0; r < rows; ++r) sums[r] = sums[r] + part[r];
        }
    }
}

}  // namespace octavo::OCTAVO_ISA
