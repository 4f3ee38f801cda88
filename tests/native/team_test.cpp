// What the thread team promises to its callers. Built and run by test_team.py, and by `make sanitize-threads` with the
// thread sanitizer.
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "core/team.h"

using namespace octavo;

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);     \
            std::abort();                                                            \
        }                                                                            \
    } while (false)

// Every chunk once, and all done on return, for as many regions as asked.
static void run_regions(Team& team, int regions, int64_t chunks, int64_t work) {
    std::vector<int64_t> counts(static_cast<size_t>(chunks));  // not atomic: the team orders them
    for (int region = 0; region < regions; ++region) {
        team.each(chunks, [&](int64_t chunk, int thread) {
            CHECK(thread >= 0 && thread < team.num_threads());
            uint8_t* scratch = team.scratch(thread);
            for (int64_t i = 0; i <= work; ++i) scratch[i] = static_cast<uint8_t>(chunk);
            CHECK(scratch[work] == static_cast<uint8_t>(chunk));
            ++counts[static_cast<size_t>(chunk)];
        });
        for (int64_t count : counts) CHECK(count == region + 1);
    }
}

static void tiny_regions() {
    for (int threads : {1, 2, 3, 7}) {
        Team team(threads);
        CHECK(team.num_threads() == threads);
        run_regions(team, 3000, 2, 0);
        run_regions(team, 500, 1, 0);
        run_regions(team, 10, 0, 0);
        run_regions(team, 300, 40, 10);
        run_regions(team, 3, 5000, 0);
    }
}

// Workers that slept between regions, or wake when the region is over, take nothing of a later one.
static void late_workers() {
    Team team(4);
    for (int i = 0; i < 60; ++i) {
        std::this_thread::sleep_for(std::chrono::microseconds(20 * (i % 8)));
        run_regions(team, 3, 2 + i % 3, 0);
    }
}

// One caller at a time, but not always the same one.
static void callers_in_turn() {
    Team team(3);
    std::mutex turn;
    int64_t total = 0;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&] {
            for (int i = 0; i < 200; ++i) {
                const std::lock_guard lock(turn);
                std::vector<int64_t> parts(6);
                team.each(6, [&](int64_t chunk, int) { parts[static_cast<size_t>(chunk)] = chunk + total; });
                total = std::accumulate(parts.begin(), parts.end(), int64_t{0}) % 1000;
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
}

static void errors_reach_the_caller() {
    for (int threads : {1, 2, 5}) {
        Team team(threads);
        for (int64_t bad : {0, 3, 19}) {
            for (int64_t chunks : {int64_t{1}, int64_t{20}}) {
                if (bad >= chunks) continue;
                bool is_caught = false;
                try {
                    team.each(chunks, [&](int64_t chunk, int) {
                        if (chunk == bad) throw std::runtime_error(std::to_string(chunk));
                    });
                } catch (const std::runtime_error& error) {
                    is_caught = error.what() == std::to_string(bad);
                }
                CHECK(is_caught);
                run_regions(team, 20, 4, 0);  // and the team goes on
            }
        }
        int caught = 0;
        for (int i = 0; i < 50; ++i) {
            try {
                team.each(8, [](int64_t, int) { throw 1; });
            } catch (int) {
                ++caught;
            }
        }
        CHECK(caught == 50);
    }
}

static void teams_come_and_go() {
    for (int i = 0; i < 60; ++i) {
        Team idle(3);  // destroyed while its workers look for work
        if (i % 2) run_regions(idle, 1, 3, 0);
        if (i % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));  // or while they sleep
    }
    Team one(2), other(2);
    for (int i = 0; i < 50; ++i) run_regions(one, 2, 3, 0), run_regions(other, 2, 3, 0);
}

// A process forked off has only the thread that forked: it computes alone and does not wait for the others.
static void forked_processes() {
#if !defined(__SANITIZE_THREAD__)
    auto team = std::make_unique<Team>(3);
    run_regions(*team, 10, 5, 0);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        alarm(20);
        run_regions(*team, 100, 5, 0);
        team.reset();
        Team own(2);
        run_regions(own, 100, 5, 0);
        _exit(7);
    }
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7);
    run_regions(*team, 100, 5, 0);
#endif
}

static void fewer_cores_than_threads() {
    cpu_set_t before, one;
    CHECK(sched_getaffinity(0, sizeof before, &before) == 0);
    CPU_ZERO(&one);
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(core, &before)) {
            CPU_SET(core, &one);
            break;
        }
    }
    Team made_before(4);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);  // of this thread; those of later teams inherit it
    Team made_after(4);
    run_regions(made_before, 50, 9, 0);
    run_regions(made_after, 50, 9, 0);
    CHECK(sched_setaffinity(0, sizeof before, &before) == 0);
    run_regions(made_after, 50, 9, 0);
}

int main() {
    alarm(300);
    tiny_regions();
    late_workers();
    callers_in_turn();
    errors_reach_the_caller();
    teams_come_and_go();
    forked_processes();
    fewer_cores_than_threads();
    std::puts("ok");
}
