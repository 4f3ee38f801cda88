#include "core/team.h"

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdlib>
#include <exception>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

// A worker that finds nothing to do looks for this long before it sleeps: longer than the serial work between two
// operators, shorter than what the server's thread would miss.
constexpr auto kSpin = std::chrono::microseconds(50);

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Subnormals count as zero: tiles compute so, and everything else must agree with them.
void flush_subnormals() {
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() | 0x8040);  // FTZ, DAZ
#elif defined(__aarch64__)
    uint64_t control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    asm volatile("msr fpcr, %0" : : "r"(control | (uint64_t{1} << 24)));  // FZ
#endif
}

class FlushSubnormals {
  public:
#if defined(__x86_64__)
    FlushSubnormals() : saved_(_mm_getcsr()) { flush_subnormals(); }
    ~FlushSubnormals() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#else
    FlushSubnormals() { flush_subnormals(); }
#endif
};

void sleep_while(std::atomic<uint32_t>& word, uint32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
#else
    word.wait(value);
#endif
}

int64_t process_id() {
#if defined(__linux__)
    return getpid();
#else
    return 0;
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
    syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
    word.notify_all();
#endif
}

}  // namespace

// One call of run() is an epoch. `ticket` holds the epoch in its high half and how many chunks nobody has taken in its
// low half, so that a worker that wakes late can take no chunk of a later epoch for one of its own.
struct Team::State {
    alignas(64) std::atomic<uint64_t> ticket{0};
    alignas(64) std::atomic<int64_t> unfinished{0};
    alignas(64) std::atomic<uint32_t> epoch{0};
    std::atomic<uint32_t> sleepers{0};
    // Of the epoch; read only by who holds one of its chunks, as run() does not return before that is finished.
    alignas(64) Run body = nullptr;
    const void* context = nullptr;
    int64_t num_chunks = 0;
    std::atomic<bool> has_failed{false};
    std::exception_ptr failure;  // of who set `has_failed`
    std::atomic<bool> is_closed{false};
    std::vector<std::thread> workers;
    const int64_t process = process_id();

    // Run chunks of epoch `mine` until none is left.
    void help(uint32_t mine, int thread) {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        for (;;) {
            const auto left = static_cast<uint32_t>(seen);
            if (static_cast<uint32_t>(seen >> 32) != mine || left == 0) return;
            if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) {
                continue;
            }
            try {
                body(context, num_chunks - left, thread);
            } catch (...) {
                if (!has_failed.exchange(true)) failure = std::current_exception();
            }
            unfinished.fetch_sub(1, std::memory_order_acq_rel);
            seen = ticket.load(std::memory_order_acquire);
        }
    }

    void work(int thread) {
        flush_subnormals();
        uint32_t done = 0;
        for (;;) {
            uint32_t now = epoch.load(std::memory_order_acquire);
            if (now == done) {
                const auto deadline = Clock::now() + kSpin;
                do {
                    for (int i = 0; i < 32 && now == done; ++i) {
                        relax();
                        now = epoch.load(std::memory_order_acquire);
                    }
                } while (now == done && Clock::now() < deadline);
            }
            while (now == done) {
                sleepers.fetch_add(1);
                sleep_while(epoch, done);
                sleepers.fetch_sub(1);
                now = epoch.load(std::memory_order_acquire);
            }
            if (is_closed.load(std::memory_order_acquire)) return;
            done = now;
            help(now, thread);
        }
    }
};

Team::Team(int num_threads) : state_(new State), num_threads_(num_threads < 1 ? 1 : num_threads) {
    const size_t size = static_cast<size_t>(num_threads_) * kScratchBytes;
    scratch_ = static_cast<uint8_t*>(std::aligned_alloc(64, size));
    if (scratch_ == nullptr) throw std::bad_alloc();
    try {
        for (int thread = 1; thread < num_threads_; ++thread) {
            state_->workers.emplace_back([state = state_, thread] { state->work(thread); });
        }
    } catch (...) {
        close();
        throw;
    }
}

Team::~Team() { close(); }

void Team::close() {
    state_->is_closed.store(true, std::memory_order_release);
    state_->epoch.fetch_add(1);
    wake_all(state_->epoch);
    // The threads stayed behind in the process that made them: here there is nothing to wait for.
    const bool is_forked = process_id() != state_->process;
    for (std::thread& worker : state_->workers) is_forked ? worker.detach() : worker.join();
    delete state_;
    std::free(scratch_);
}

void Team::run(int64_t num_chunks, Run body, const void* context) {
    const FlushSubnormals flush;
    if (num_chunks <= 1 || num_threads_ == 1) {
        for (int64_t chunk = 0; chunk < num_chunks; ++chunk) body(context, chunk, 0);
        return;
    }
    State& state = *state_;
    state.body = body;
    state.context = context;
    state.num_chunks = num_chunks;
    state.unfinished.store(num_chunks, std::memory_order_relaxed);
    const uint32_t epoch = state.epoch.load(std::memory_order_relaxed) + 1;
    state.ticket.store(static_cast<uint64_t>(epoch) << 32 | static_cast<uint64_t>(num_chunks), std::memory_order_release);
    state.epoch.store(epoch);
    if (state.sleepers.load() != 0) wake_all(state.epoch);
    state.help(epoch, 0);
    for (int spins = 0; state.unfinished.load(std::memory_order_acquire) != 0; ++spins) {
        relax();
        // The core of a worker may be taken by another process: let it run there rather than spin against it.
        if (spins % 1024 == 1023) std::this_thread::yield();
    }
    if (state.has_failed.load(std::memory_order_relaxed)) {
        state.has_failed.store(false, std::memory_order_relaxed);
        std::rethrow_exception(std::exchange(state.failure, nullptr));
    }
}

}  // namespace octavo
