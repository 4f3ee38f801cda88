"""Random runs of the whole scheduler: every request's tokens, scores and ending equal those of a naive loop.

Runs mix chunk budgets, block sizes, layouts with windows, forks, preemption, priorities, aborts and failures in
flight (SCH-05), none to two steps in flight, drafts, later turns on earlier texts, salts and adapters, stop tokens,
static batches, prompt logprobs and RoPE restarts; the invariants of queues and pool are checked after every step.
"""

from __future__ import annotations

from collections import Counter

import pytest
from tests.fuzz.driver import play

RUNS_PER_TEST = 300

# Each must have happened often enough over all runs that the runs prove something.
FLOORS = {
    "preemptions": 50,
    "preempted_in_flight": 10,
    "hit_tokens": 1000,
    "copies": 200,
    "window_frees": 5000,
    "forks": 300,
    "rope_restarts": 30,
    "accepted_drafts": 300,
    "evictions": 1000,
    "aborts": 200,
    "failures": 50,
    "padding": 100,
}


@pytest.mark.parametrize("first", range(0, 7 * RUNS_PER_TEST, RUNS_PER_TEST))
def test_every_answer_equals_the_naive_loop(first: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + RUNS_PER_TEST):
        counts.update(play(seed))
    print(dict(counts))
    missing = {name: (counts[name], floor) for name, floor in FLOORS.items() if counts[name] < floor}
    assert not missing, f"too rare (seen, wanted): {missing}"
