// How the attention of a step is cut into tasks and these into chunks for the threads. No result depends on it.
#pragma once

#include <cstdint>

#include "ops/attention.h"

namespace octavo {

// A task takes at most this many rows; a row is a (token, query head of the KV head's group), token by token.
constexpr int64_t kTaskRows = 48;

// Some rows of a request against some partitions of its keys, for each KV head alike.
struct AttentionTask {
    int32_t request;
    int32_t first_row;  // of the request
    int32_t num_rows;
    int32_t first_partition;
    int32_t end_partition;
    int32_t tokens;    // that the rows see in these partitions, roughly
    int64_t partials;  // where its partitions' results go, in partials; or -1: it makes its rows' output itself
};

// A unit is a task and a KV head: unit u is task u / K, head u % K. Long units come first.
struct AttentionPlan {
    const AttentionTask* tasks;
    int64_t num_tasks;
    const int64_t* chunks;  // first unit of each chunk, and the end
    int64_t num_chunks;
    const AttentionTask* cut;  // the tasks that were cut by partitions, whole again
    int64_t num_cut;
    // Of a cut task: [partitions][K][rows][partial_floats], from its `partials` on.
    float* partials;
    int64_t partial_floats;  // the weighted values, the largest score, the sum of weights
};

// In args.workspace.
AttentionPlan plan_attention(const AttentionArgs& args, int num_threads);

}  // namespace octavo
