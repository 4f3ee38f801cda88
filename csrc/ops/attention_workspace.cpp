#include <algorithm>
#include <array>
#include <bit>
#include <cassert>

#include "ops/attention_plan.h"

namespace octavo {
namespace {

constexpr int64_t kChunksPerThread = 8;
constexpr int64_t kMinTaskRows = 12;
// Work that a token costs beside that of its rows: reading its key and value.
constexpr int64_t kReadCost = 4;
// Partial results may take this much, or what one request of up to eight tokens needs where that is more.
constexpr int64_t kPartialBytes = 2 << 20;

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }
int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

// Where the parts of the workspace lie, and how large they are. All grow with each argument.
struct WorkspaceLayout {
    int64_t max_tasks, max_chunks, partial_floats, max_partial_floats;
    int64_t sorted_offset, cut_offset, chunks_offset, partials_offset, bytes;

    WorkspaceLayout(int64_t tokens, int64_t context, int64_t num_heads, int64_t head_dim, int64_t num_threads) {
        // Blocks of rows, one incomplete block a request, and pieces of long tasks.
        max_tasks = divide_up(tokens * num_heads, kTaskRows) + tokens + 4 * kChunksPerThread * num_threads;
        max_chunks = 2 * kChunksPerThread * num_threads + 2;
        partial_floats = round_up(head_dim, kTokenTile) + 2;
        const int64_t row_floats = divide_up(context, kPartition) * num_heads * partial_floats;
        const int64_t one_request = row_floats * std::min<int64_t>(tokens, 8);
        max_partial_floats = std::max<int64_t>(one_request, kPartialBytes / 4);
        if (num_threads == 1) max_partial_floats = 0;
        const int64_t tasks_bytes = round_up(max_tasks * static_cast<int64_t>(sizeof(AttentionTask)), 64);
        sorted_offset = tasks_bytes;
        cut_offset = sorted_offset + tasks_bytes;
        chunks_offset = cut_offset + tasks_bytes;
        partials_offset = chunks_offset + round_up(max_chunks * 8, 64);
        bytes = partials_offset + max_partial_floats * 4;
    }
};

struct Planner {
    const AttentionArgs& args;
    const WorkspaceLayout& space;
    int64_t num_kv_heads = args.layout->num_kv_heads;
    int64_t group = args.num_heads / num_kv_heads;
    int64_t block_rows = kTaskRows;
    int64_t target = 0;  // cost of a chunk
    AttentionTask* tasks = reinterpret_cast<AttentionTask*>(args.workspace);
    AttentionTask* cut = reinterpret_cast<AttentionTask*>(args.workspace + space.cut_offset);
    int64_t num_tasks = 0, num_cut = 0, used_partial_floats = 0;

    static int64_t cost(const AttentionTask& task) { return (task.num_rows + kReadCost) * (task.tokens + kTokenTile); }

    // each(task) for every block of rows of every request, its partitions uncut.
    template <class Each>
    void blocks(const Each& each) const {
        for (int64_t r = 0; r < args.rows.num_requests; ++r) {
            const int64_t tokens = args.rows.query_starts[r + 1] - args.rows.query_starts[r];
            const int64_t rows = tokens * group, num_blocks = divide_up(rows, block_rows);
            for (int64_t b = 0; b < num_blocks; ++b) {
                const int64_t first = chunk_start(rows, num_blocks, b), end = chunk_start(rows, num_blocks, b + 1);
                const int64_t position = args.rows.context_lens[r] - tokens;
                const int64_t seen_end = position + (end - 1) / group + 1;
                int64_t seen = 0;
                if (args.window > 0) seen = std::max<int64_t>(0, position + first / group - args.window + 1);
                each(AttentionTask{
                    .request = static_cast<int32_t>(r),
                    .first_row = static_cast<int32_t>(first),
                    .num_rows = static_cast<int32_t>(end - first),
                    .first_partition = static_cast<int32_t>(seen / kPartition),
                    .end_partition = static_cast<int32_t>(divide_up(seen_end, kPartition)),
                    .tokens = static_cast<int32_t>(seen_end - seen),
                    .partials = -1,
                });
            }
        }
    }

    void add(const AttentionTask& task) {
        assert(num_tasks < space.max_tasks);
        tasks[num_tasks++] = task;
    }

    void add_cut(AttentionTask task) {
        const int64_t partitions = task.end_partition - task.first_partition;
        const int64_t pieces = std::min(partitions, divide_up(cost(task), target));
        const int64_t floats = partitions * num_kv_heads * task.num_rows * space.partial_floats;
        if (cost(task) <= 2 * target || pieces < 2 || used_partial_floats + floats > space.max_partial_floats) {
            add(task);
            return;
        }
        task.partials = used_partial_floats;
        used_partial_floats += floats;
        cut[num_cut++] = task;
        for (int64_t i = 0; i < pieces; ++i) {
            AttentionTask piece = task;
            const int64_t first = chunk_start(partitions, pieces, i), end = chunk_start(partitions, pieces, i + 1);
            piece.first_partition = static_cast<int32_t>(task.first_partition + first);
            piece.end_partition = static_cast<int32_t>(task.first_partition + end);
            piece.tokens = static_cast<int32_t>(std::min<int64_t>(task.tokens, (end - first) * kPartition));
            piece.partials += first * num_kv_heads * task.num_rows * space.partial_floats;
            add(piece);
        }
    }

    // By falling powers of two of the cost.
    AttentionTask* sorted() const {
        AttentionTask* target_tasks = reinterpret_cast<AttentionTask*>(args.workspace + space.sorted_offset);
        std::array<int64_t, 65> ends{};
        const auto bucket = [](const AttentionTask& task) {
            return static_cast<size_t>(std::countl_zero(static_cast<uint64_t>(cost(task))));
        };
        for (int64_t i = 0; i < num_tasks; ++i) ++ends[bucket(tasks[i]) + 1];
        for (size_t i = 1; i < ends.size(); ++i) ends[i] += ends[i - 1];
        for (int64_t i = 0; i < num_tasks; ++i) target_tasks[ends[bucket(tasks[i])]++] = tasks[i];
        return target_tasks;
    }
};

}  // namespace

KvLayout make_kv_layout(KvFormat format, int64_t block_size, int64_t num_layers, int64_t num_kv_heads,
                        int64_t head_dim) {
    KvLayout layout{
        .format = format,
        .block_size = block_size,
        .padded_tokens = round_up(block_size, kTokenTile),
        .num_layers = num_layers,
        .num_kv_heads = num_kv_heads,
        .head_dim = head_dim,
        .padded_head_dim = round_up(head_dim, kTokenTile),
        .key_bytes = 0,
        .head_bytes = 0,
        .layer_bytes = 0,
        .block_bytes = 0,
    };
    layout.key_bytes = layout.padded_tokens * layout.padded_head_dim * (format == KvFormat::f32 ? 4 : 2);
    layout.head_bytes = 2 * layout.key_bytes;
    layout.layer_bytes = num_kv_heads * layout.head_bytes;
    layout.block_bytes = num_layers * layout.layer_bytes;
    return layout;
}

int64_t attention_workspace(int64_t max_tokens, int64_t max_context, int64_t num_heads, int64_t head_dim,
                            int num_threads) {
    return WorkspaceLayout(max_tokens, max_context, num_heads, head_dim, num_threads).bytes;
}

AttentionPlan plan_attention(const AttentionArgs& args, int num_threads) {
    const Rows& rows = args.rows;
    const int64_t context = *std::max_element(rows.context_lens, rows.context_lens + rows.num_requests);
    const WorkspaceLayout space(rows.num_tokens, context, args.num_heads, args.layout->head_dim, num_threads);
    Planner planner{args, space};
    const int64_t wanted = kChunksPerThread * num_threads;
    planner.block_rows = std::clamp<int64_t>(divide_up(rows.num_tokens * args.num_heads, wanted / 2),
                                             std::clamp(planner.group, kMinTaskRows, kTaskRows), kTaskRows);
    int64_t total = 0;
    planner.blocks([&](const AttentionTask& task) { total += Planner::cost(task) * planner.num_kv_heads; });
    planner.target = total / wanted + 1;
    planner.blocks([&](const AttentionTask& task) { planner.add_cut(task); });

    AttentionTask* tasks = planner.sorted();
    int64_t* chunks = reinterpret_cast<int64_t*>(args.workspace + space.chunks_offset);
    int64_t num_chunks = 0, in_chunk = planner.target;
    const int64_t num_units = planner.num_tasks * planner.num_kv_heads;
    for (int64_t unit = 0; unit < num_units; ++unit) {
        if (in_chunk >= planner.target && num_chunks + 1 < space.max_chunks) {
            chunks[num_chunks++] = unit;
            in_chunk = 0;
        }
        in_chunk += Planner::cost(tasks[unit / planner.num_kv_heads]);
    }
    chunks[num_chunks] = num_units;
    return {
        .tasks = tasks,
        .num_tasks = planner.num_tasks,
        .chunks = chunks,
        .num_chunks = num_chunks,
        .cut = planner.cut,
        .num_cut = planner.num_cut,
        .partials = reinterpret_cast<float*>(args.workspace + space.partials_offset),
        .partial_floats = space.partial_floats,
    };
}

}  // namespace octavo
