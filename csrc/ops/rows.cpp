#include "ops/rows.h"

#include "isa/current.h"
#include "isa/math.h"
#include "ops/functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Rows are cut into about two chunks a thread; fewer values than this are not worth waking anyone for.
constexpr int64_t kSerialValues = 4096;

template <class Body>
void each_row(Team& team, int64_t rows, int64_t values_per_row, const Body& body) {
    const int64_t wanted = rows * values_per_row <= kSerialValues ? 1 : 4 * team.num_threads();
    const int64_t num_chunks = wanted < rows ? wanted : rows;
    team.each(num_chunks, [&](int64_t chunk, int) {
        const int64_t end = chunk_start(rows, num_chunks, chunk + 1);
        for (int64_t row = chunk_start(rows, num_chunks, chunk); row < end; ++row) body(row);
    });
}

// body(first column, how many) for sixteen columns at a time.
template <class Body>
inline void each_vector(int64_t width, const Body& body) {
    int64_t i = 0;
    for (; i + static_cast<int64_t>(kLanes) <= width; i += kLanes) body(i, kLanes);
    if (i < width) body(i, static_cast<size_t>(width - i));
}

// The row that is normalized: x, or x + addend, which is stored on the way.
const float* summed(const NormArgs& args, int64_t row) {
    const float* x = args.x + row * args.x_stride;
    if (args.addend == nullptr) return x;
    const float* addend = args.addend + row * args.addend_stride;
    float* sum = args.sum + row * args.sum_stride;
    const F32 scale = broadcast(args.addend_scale);
    each_vector(args.heads * args.width, [&](int64_t i, size_t count) {
        const F32 y = fma(scale, load_first(addend + i, count), load_first(x + i, count));
        store_first(sum + i, rounded(y, args.rounding), count);
    });
    return sum;
}

}  // namespace

void rms_norm(const NormArgs& args, Team& team) {
    const float inverse_width = 1.0f / static_cast<float>(args.width);
    each_row(team, args.rows, args.heads * args.width, [&](int64_t row) {
        const float* base = summed(args, row);
        for (int64_t head = 0; head < args.heads; ++head) {
            const float* x = base + head * args.width;
            float* y = args.y + row * args.y_stride + head * args.width;
            F32 squares = broadcast(0.0f);
            each_vector(args.width, [&](int64_t i, size_t count) {
                const F32 v = load_first(x + i, count);
                squares = fma(v, v, squares);
            });
            const float mean = reduce_add(squares) * inverse_width;
            const F32 factor = broadcast(1.0f / __builtin_sqrtf(mean + args.eps));
            const F32 offset = broadcast(args.offset);
            each_vector(args.width, [&](int64_t i, size_t count) {
                F32 weight = load_first(args.weight + i, count);
                if (args.offset != 0.0f) weight = weight + offset;
                store_first(y + i, rounded(load_first(x + i, count) * factor * weight, args.rounding), count);
            });
        }
    });
}

void layer_norm(const NormArgs& args, Team& team) {
    const float inverse_width = 1.0f / static_cast<float>(args.width);
    each_row(team, args.rows, args.heads * args.width, [&](int64_t row) {
        const float* base = summed(args, row);
        for (int64_t head = 0; head < args.heads; ++head) {
            const float* x = base + head * args.width;
            float* y = args.y + row * args.y_stride + head * args.width;
            F32 sums = broadcast(0.0f);
            each_vector(args.width, [&](int64_t i, size_t count) { sums = sums + load_first(x + i, count); });
            const F32 mean = broadcast(reduce_add(sums) * inverse_width);
            F32 squares = broadcast(0.0f);
            each_vector(args.width, [&](int64_t i, size_t count) {
                const F32 v = load_first(x + i, count) - mean;
                const F32 inside = count == kLanes ? v : select(first_lanes(count), v, broadcast(0.0f));
                squares = fma(inside, inside, squares);
            });
            const F32 factor = broadcast(1.0f / __builtin_sqrtf(reduce_add(squares) * inverse_width + args.eps));
            each_vector(args.width, [&](int64_t i, size_t count) {
                F32 v = (load_first(x + i, count) - mean) * factor * load_first(args.weight + i, count);
                if (args.bias != nullptr) v = v + load_first(args.bias + i, count);
                store_first(y + i, rounded(v, args.rounding), count);
            });
        }
    });
}

void rope(const RopeArgs& args, Team& team) {
    const int64_t half = args.rotary_dim / 2;
    each_row(team, args.rows, args.heads * args.head_dim, [&](int64_t row) {
        const float* cos = args.cos_sin + row * args.rotary_dim;
        const float* sin = cos + half;
        for (int64_t head = 0; head < args.heads; ++head) {
            const float* x = args.x + row * args.x_stride + head * args.head_dim;
            float* y = args.y + row * args.y_stride + head * args.head_dim;
            each_vector(half, [&](int64_t i, size_t count) {
                const F32 x1 = load_first(x + i, count), x2 = load_first(x + half + i, count);
                const F32 c = load_first(cos + i, count), s = load_first(sin + i, count);
                store_first(y + i, rounded(x1 * c - x2 * s, args.rounding), count);
                store_first(y + half + i, rounded(x2 * c + x1 * s, args.rounding), count);
            });
            if (x == y) continue;
            each_vector(args.head_dim - args.rotary_dim, [&](int64_t i, size_t count) {
                const int64_t d = args.rotary_dim + i;
                store_first(y + d, load_first(x + d, count), count);
            });
        }
    });
}

void add(const AddArgs& args, Team& team) {
    const F32 scale = broadcast(args.scale);
    each_row(team, args.rows, args.width, [&](int64_t row) {
        const float* x = args.x + row * args.x_stride;
        const float* addend = args.addend + row * args.addend_stride;
        float* y = args.y + row * args.y_stride;
        each_vector(args.width, [&](int64_t i, size_t count) {
            const F32 sum = fma(scale, load_first(addend + i, count), load_first(x + i, count));
            store_first(y + i, rounded(sum, args.rounding), count);
        });
    });
}

void activation(const ActivationArgs& args, Team& team) {
    each_row(team, args.rows, args.width, [&](int64_t row) {
        const float* x = args.x + row * args.x_stride;
        float* y = args.y + row * args.y_stride;
        each_vector(args.width, [&](int64_t i, size_t count) {
            F32 v = activate(load_first(x + i, count), args.kind);
            if (args.gated) v = v * load_first(x + args.width + i, count);
            store_first(y + i, rounded(v, args.rounding), count);
        });
    });
}

void scale_rows(const ScaleArgs& args, Team& team) {
    const F32 scale = broadcast(args.scale);
    each_row(team, args.rows, args.width, [&](int64_t row) {
        float* x = args.x + row * args.x_stride;
        each_vector(args.width, [&](int64_t i, size_t count) {
            store_first(x + i, rounded(load_first(x + i, count) * scale, args.rounding), count);
        });
    });
}

}  // namespace octavo::OCTAVO_ISA
