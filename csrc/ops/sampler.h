// One token per row of logits, and log-probabilities: the arguments, and the rules that fix every bit.
//
// The definition is octavo.sampling (Python); this gives its bits, on every instruction set, for any number of rows
// and threads. Its order: token mask, allowed ids, banned ids, bias, penalties; argmax for temperature 0; else
//   scaled   (value - peak) * (1 / temperature), each rounded to float32
//   weight   rint(exp(scaled) * 2^k), k = 52 - ceil(log2(vocab_size)): an integer, and the sum of a row's weights is
//            below 2^53, so that every sum is exact in whatever order it is formed
//   kept     top_k largest; of those scaled >= min_scaled; of those the fewest largest whose weights reach top_p of
//            their sum. Of equal values the lowest id comes first.
//   drawn    the first kept id at which the running sum of weights exceeds floor(uniform * their sum)
// A subnormal logit counts as zero.
#pragma once

#include <cstdint>

#include "core/team.h"

namespace octavo {

// Of a row; options that are off have their neutral value. Laid out as octavo.backends.sampler.ROW_OPTIONS.
struct RowOptions {
    float temperature;    // 0: greedy
    int32_t top_k;        // 0: all
    double top_p;         // 1: all
    double repetition_penalty;
    double frequency_penalty;
    double presence_penalty;
    uint64_t seed;
    uint32_t choice;
    int32_t num_logprobs;  // alternatives beside the token; -1: no log-probabilities
    float min_scaled;      // log(min_p); -infinity: all
};

// Ids of edited row e: ids[starts[e]] to ids[starts[e + 1] - 1], each below vocab_size.
struct RaggedIds {
    const int64_t* starts;
    const int32_t* ids;
};

enum class SampleStatus : uint8_t {
    sampled,
    not_finite,    // a logit is NaN or infinity, or all are -infinity
    nothing_left,  // masks and bans exclude every token
};

// Log-probabilities of a row: value - peak - log(total), of the token and of the likeliest tokens.
struct Described {
    float* values;       // [N], of the token
    float* peaks;        // [N]
    double* totals;      // [N], sum of exp(value - peak)
    int32_t* ranks;      // [N], 1 + how many tokens are likelier
    int32_t* num_top;    // [N], at most the row's num_logprobs: tokens that are excluded are left out
    int32_t* top_ids;    // [N][top_stride], likeliest first, lowest id first among equals
    float* top_values;   // [N][top_stride]
    int64_t top_stride;
};

struct SampleArgs {
    const float* logits;  // [M][logits_stride]
    int64_t logits_stride;
    int64_t vocab_size;  // what lies beyond is not read
    int64_t rows;        // N
    const RowOptions* options;
    const int64_t* positions;    // of the token in its sequence
    const int32_t* sources;      // the row of logits
    const int32_t* given;        // null, or the tokens: nothing is sampled, they are described
    const int32_t* edit_of_row;  // e, or -1; null: no row is edited
    RaggedIds allowed;           // all others are excluded; empty: none is
    RaggedIds banned;
    RaggedIds biased;
    const float* biases;
    RaggedIds seen;  // what penalties concern
    const int32_t* counts;       // how often each stands in the output
    const int32_t* mask_of_row;  // row of `masks`, or -1; null: no row is masked
    const uint32_t* masks;       // bit t % 32 of word t / 32 is set when token t may come
    int64_t mask_words;
    bool processed;  // log-probabilities are of the distribution drawn from, not of the model's (after the mask)
    int32_t* token_ids;     // [N], -1 where nothing was sampled
    SampleStatus* statuses;  // [N]
    Described described;     // rows whose num_logprobs is -1 are left alone
    uint8_t* workspace;      // sample_workspace().bytes, 64-byte aligned
};

// One slot for each row in work: a row per thread, or a few rows that all threads share. Only what is used of it is
// written, so that most of it needs no memory.
struct SampleWorkspace {
    static constexpr int64_t kMaxParts = 256;  // of a row
    static constexpr int64_t kPartBytes = 32;
    static constexpr int64_t kStateBytes = 256;

    int64_t row_bytes;  // vocab_size floats, padded to whole groups of 1024
    int64_t slot_bytes;
    int64_t num_slots;
    int64_t bytes;
};

static inline SampleWorkspace sample_workspace(int64_t vocab_size, int num_threads) {
    SampleWorkspace w;
    const int64_t groups = (vocab_size + 1023) / 1024;
    w.row_bytes = groups * 1024 * 4;
    // Values, the list's values, ids and weights, eight spare bytes a token; a group's 16 maxima and sum; the parts.
    w.slot_bytes = 6 * w.row_bytes + groups * 128 + SampleWorkspace::kMaxParts * SampleWorkspace::kPartBytes;
    w.num_slots = 2 * num_threads;
    w.bytes = w.num_slots * (w.slot_bytes + SampleWorkspace::kStateBytes);
    return w;
}

}  // namespace octavo
