// The threads that compute a step, and how a kernel spreads its work over them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// A fixed set of threads, the caller among them. One caller at a time. In a forked process it is the caller alone.
class Team {
  public:
    // Each thread owns this much scratch memory, 64-byte aligned, whose contents no call may count on.
    static constexpr size_t kScratchBytes = size_t{1} << 20;

    explicit Team(int num_threads);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    // Kernels include this header: what is not inlined there could be kept as compiled for a newer processor.
    [[gnu::always_inline]] int num_threads() const { return num_threads_; }

    // body(chunk, thread) once for every chunk in [0, num_chunks), on whichever thread takes it first; returns when
    // all are done. What a chunk computes may not depend on the thread. A single chunk runs on the caller. Throws what
    // a chunk threw, of several the first.
    template <class Body>
    void each(int64_t num_chunks, const Body& body) {
        run(num_chunks, [](const void* context, int64_t chunk, int thread) {
            (*static_cast<const Body*>(context))(chunk, thread);
        }, &body);
    }

    // Of the thread that runs a chunk.
    [[gnu::always_inline]] uint8_t* scratch(int thread) const { return scratch_ + static_cast<size_t>(thread) * kScratchBytes; }

  private:
    using Run = void (*)(const void* context, int64_t chunk, int thread);
    void run(int64_t num_chunks, Run body, const void* context);
    void close();

    struct State;
    State* state_;
    uint8_t* scratch_;
    int num_threads_;
};

// The first unit of chunk `chunk` when `count` units are cut into `num_chunks` chunks of nearly equal size.
static inline int64_t chunk_start(int64_t count, int64_t num_chunks, int64_t chunk) { return count * chunk / num_chunks; }

}  // namespace octavo
