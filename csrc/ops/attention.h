// Paged attention: the layout of the cache, the arguments, and the rules that fix every bit.
//
// Contract: the output of a query token and head depends on that query, on the keys and values that it sees and on
// their positions alone, never on the other tokens of the step, the chunk, the thread or the instruction set. Keys are
// walked in partitions of kPartition positions that start at multiples of it; each partition gives (largest score, sum
// of weights, weighted values), and partitions are combined in rising order. A partition that the query does not see
// at all (causality, window) is as if it did not exist.
//
//   score   f32, f16 cache: acc = 0; for d ascending: acc = fma(q[d], k[d], acc). bf16 cache: q is rounded to bfloat16,
//           d in blocks of 32 (the last may be shorter), pairs as in linear.h. Then times scale; soft cap:
//           cap * tanh(score / cap).
//   weight  exp(score - largest score of the partition), in float32; bf16 cache: rounded to bfloat16
//   value   f32, f16 cache: for tokens of the partition ascending: acc = fma(weight, v[d], acc). bf16 cache: tokens in
//           blocks of 32 that start at multiples of 32, pairs as in linear.h. Tokens that the query does not see take
//           no part, whatever their slots hold. At the end + 0, so that no -0 is left.
//   sum     of the weights as they meet the values (so that they sum to one): sixteen lanes, lane i takes positions
//           = i mod 16 in rising order; reduce_add.
//   combine (largest M, total, out) starts with the first partition's; for each next one, m, sum, values:
//             N = max(M, m), a = exp(M - N), b = exp(m - N), total = fma(total, a, sum * b),
//             out = fma(out, a, values * b), M = N. A sink s comes last: N = max(M, s), total = fma(total, exp(M - N),
//             exp(s - N)), out = out * exp(M - N). The result is out / total, rounded once.
#pragma once

#include <cstdint>

#include "core/team.h"
#include "ops/rounding.h"

namespace octavo {

constexpr int64_t kPartition = 256;
constexpr int64_t kTokenTile = 16;  // tokens of a block that are stored together
constexpr int64_t kMaxHeadDim = 256;

enum class KvFormat : uint8_t { f32, bf16, f16 };

// One block holds, for each layer of its group and each KV head, its keys and then its values, for `padded_tokens`
// (block_size rounded up to 16) tokens. D is the head size rounded up to 16; writing a token zeroes what is beyond its
// head size. Slots that nobody wrote may hold anything.
//   bf16      keys   [padded_tokens / 16][D / 2][16 tokens][2 d]
//             values [padded_tokens / 2][D][2 tokens]
//   f32, f16  keys   [padded_tokens / 16][D][16 tokens]
//             values [padded_tokens][D]
struct KvLayout {
    KvFormat format;
    int64_t block_size;
    int64_t padded_tokens;
    int64_t num_layers;  // layers_per_block
    int64_t num_kv_heads;
    int64_t head_dim;
    int64_t padded_head_dim;
    int64_t key_bytes;   // of one head's keys in a block; values take as many
    int64_t head_bytes;  // key_bytes * 2
    int64_t layer_bytes;
    int64_t block_bytes;
};

KvLayout make_kv_layout(KvFormat format, int64_t block_size, int64_t num_layers, int64_t num_kv_heads,
                        int64_t head_dim);

// Which tokens a step computes; the arrays of backends.ops.ForwardBatch.
struct Rows {
    int64_t num_tokens;
    int64_t num_requests;
    const int32_t* positions;     // [T]
    const int32_t* query_starts;  // [R + 1]
    const int32_t* context_lens;  // [R]
    const int32_t* block_table;   // [R][max_blocks] of the layer's group
    int64_t max_blocks;
};

struct StoreKvArgs {
    const float* k;  // [T][k_stride], K heads of the head size
    const float* v;
    int64_t k_stride;
    int64_t v_stride;
    const KvLayout* layout;
    uint8_t* blocks;
    int64_t layer;
    Rows rows;
};

struct AttentionArgs {
    const float* q;  // [T][q_stride], H heads of the head size
    int64_t q_stride;
    float* out;  // [T][out_stride]
    int64_t out_stride;
    const KvLayout* layout;
    const uint8_t* blocks;
    int64_t layer;
    Rows rows;
    int64_t num_heads;
    float scale;
    int64_t window;  // 0: none
    float softcap;   // 0: none
    const float* sinks;  // [H] or null
    Rounding rounding;
    uint8_t* workspace;  // attention_workspace() bytes, 64-byte aligned
};

// The workspace of a step of at most `max_tokens` tokens of at most `max_context` positions. Free of the step, so that
// it is reserved once.
int64_t attention_workspace(int64_t max_tokens, int64_t max_context, int64_t num_heads, int64_t head_dim,
                            int num_threads);

}  // namespace octavo
