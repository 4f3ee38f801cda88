"""Who computes how much in a step."""

from __future__ import annotations

import pytest
from tests.scheduler.harness import FILLER, Harness

from octavo.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from octavo.scheduler.policy import ORDERS, victim


def test_nothing_to_do_is_no_batch() -> None:
    h = Harness()
    assert h.scheduler.plan() is None and not h.scheduler.has_work
    request = h.add(3, 1)
    assert h.scheduler.has_work
    h.run()
    assert h.scheduler.plan() is None and h.output(request) == [FILLER]


def test_a_prompt_and_its_tokens_are_one_rule() -> None:
    h = Harness(max_num_batched_tokens=5)
    request = h.add(12, 3)
    h.run()
    assert h.scheduled(request) == [(0, 5), (5, 5), (10, 2), (12, 1), (13, 1)]
    samples = [part.samples for batch in h.batches for part in batch.requests]
    assert samples == [False, False, True, True, True]
    assert h.output(request) == [FILLER] * 3 and h.last_update(request).finish_reason == "length"


def test_a_late_arrival_joins_the_next_step_and_leaves_at_its_own() -> None:
    h = Harness()
    long = h.add(4, 10)
    h.step()
    short = h.add(4, 2)
    batch = h.step()
    assert [part.request_id for part in batch.requests] == [long.request_id, short.request_id]
    h.step()
    assert short.is_finished and not long.is_finished
    assert h.scheduler.num_running == 1


def test_a_freed_place_is_used_in_the_next_step() -> None:
    h = Harness(max_num_seqs=2)
    requests = [h.add(4, length) for length in (1, 5, 2, 2)]
    assert (h.scheduler.num_running, h.scheduler.num_waiting) == (0, 4)
    h.step()
    assert (h.scheduler.num_running, h.scheduler.num_waiting) == (1, 2)
    batch = h.step()
    assert [part.request_id for part in batch.requests] == [requests[1].request_id, requests[2].request_id]


@pytest.mark.parametrize("budget", [1, 2, 7, 64])
def test_no_step_exceeds_its_budget(budget: int) -> None:
    h = Harness(max_num_batched_tokens=budget, max_num_seqs=4)
    for _ in range(6):
        h.add(11, 4)
    h.run()
    assert max(batch.num_tokens for batch in h.batches) <= budget
    assert all(len(batch.requests) <= 4 for batch in h.batches)


def test_a_long_prompt_leaves_every_running_request_its_token() -> None:
    h = Harness(max_num_batched_tokens=6)
    decodes = [h.add(1, 30) for _ in range(3)]
    h.step()
    long = h.add(40, 2, arrival_s=-1.0)  # first in order
    for _ in range(3):
        batch = h.step()
        assert {part.request_id for part in batch.requests} == {r.request_id for r in (long, *decodes)}
        assert batch.num_tokens == 6
    assert h.scheduled(long) == [(0, 3), (3, 3), (6, 3)]


def test_the_threshold_bounds_one_request_not_the_step() -> None:
    h = Harness(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    first, second = h.add(14, 1), h.add(14, 1)
    h.run()
    assert h.scheduled(first) == h.scheduled(second) == [(0, 6), (6, 6), (12, 2)]
    assert h.batches[0].num_tokens == 12


def test_a_negative_threshold_is_refused() -> None:
    with pytest.raises(ConfigError, match="--long-prefill-token-threshold is -1"):
        Harness(long_prefill_token_threshold=-1)


def test_without_chunked_prefill_a_prompt_is_computed_whole() -> None:
    h = Harness(max_num_batched_tokens=40, max_model_len=40, enable_chunked_prefill=False)
    first, second, third = h.add(30, 3), h.add(15, 3), h.add(6, 3)
    h.run()
    assert [h.scheduled(request)[0] for request in (first, second, third)] == [(0, 30), (0, 15), (0, 6)]
    assert [part.request_id for part in h.batches[0].requests] == [first.request_id], "the next does not fit whole"


def test_without_chunked_prefill_the_budget_must_hold_the_longest_prompt() -> None:
    with pytest.raises(ConfigError, match="--max-num-batched-tokens is 39.*40 tokens"):
        Harness(max_num_batched_tokens=39, max_model_len=40, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="--long-prefill-token-threshold 8"):
        Harness(max_model_len=40, enable_chunked_prefill=False, long_prefill_token_threshold=8)


def test_fcfs_serves_by_arrival_whatever_the_priority() -> None:
    h = Harness(max_num_seqs=1)
    late = h.add(3, 1, arrival_s=2.0, priority=-5)
    early = h.add(3, 1, arrival_s=1.0, priority=5)
    h.run()
    assert [batch.requests[0].request_id for batch in h.batches] == [early.request_id, late.request_id]


def test_priority_serves_the_lowest_value_then_the_earliest() -> None:
    h = Harness(max_num_seqs=1, scheduling_policy="priority")
    requests = [h.add(3, 1, priority=p) for p in (1, 0, 1, -1)]
    h.run()
    served = [batch.requests[0].request_id for batch in h.batches]
    assert served == [requests[i].request_id for i in (3, 1, 0, 2)]


def test_the_victim_is_who_would_be_served_last() -> None:
    h = Harness()
    requests = [h.request(3, priority=p) for p in (2, 0, 2, 1)]
    assert victim(requests, ORDERS["fcfs"]) is requests[3]
    assert victim(requests, ORDERS["priority"]) is requests[2]


def test_a_row_is_sent_once_and_freed_once() -> None:
    h = Harness()
    first, second = h.add(3, 2), h.add(3, 6)
    h.run()
    assert [row.request_id for batch in h.batches for row in batch.new_rows] == [first.request_id, second.request_id]
    row = h.batches[0].new_rows[0]
    assert (row.token_ids, row.num_prompt_tokens) == (first.prompt_token_ids, 3)
    freed = [(batch.step_id, i) for batch in h.batches for i in batch.freed_request_ids]
    assert freed == [(2, first.request_id)], "with the first batch after its end"


def test_a_request_that_never_ran_has_no_row_to_free() -> None:
    h = Harness(max_num_seqs=1)
    h.add(3, 4)
    h.step()
    waiting = h.add(3, 4)
    h.scheduler.abort(waiting.request_id)
    h.run()
    assert all(not batch.freed_request_ids for batch in h.batches)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers() -> None:
    h = Harness(num_blocks=5, max_model_len=1000)
    h.add(20, 1)
    with pytest.raises(ContextLengthExceeded, match="needs up to 6 KV blocks; the cache has 5") as error:
        h.add(20, 2)
    assert error.value.status == 400 and "--kv-cache-memory-bytes" in error.value.message
    with pytest.raises(ContextLengthExceeded):
        h.add_fork(21, 3)
    assert h.scheduler.num_waiting == 1, "none of its choices was queued"
    h.run()


def test_a_request_beyond_the_context_is_refused_with_the_numbers() -> None:  # API-17
    h = Harness(max_model_len=32)
    h.add(30, 2)
    h.add(32, 0)
    with pytest.raises(ContextLengthExceeded, match="prompt has 30 tokens and max_tokens is 3; this model serves 32"):
        h.add(30, 3)
    with pytest.raises(ContextLengthExceeded, match="33 tokens"):
        h.add(33, 0)


def test_an_empty_prompt_is_refused_and_the_next_request_served() -> None:  # API-01
    h = Harness()
    with pytest.raises(InvalidRequest, match="no tokens"):
        h.add(())
    request = h.add(3, 1)
    h.run()
    assert request.is_finished


def test_step_statistics_tell_prompts_from_decodes() -> None:
    h = Harness(max_num_batched_tokens=16)
    h.add(4, 5)
    h.step()
    stats = h.scheduler.last_step
    assert (stats.num_requests, stats.num_prefill_tokens, stats.num_decode_tokens) == (1, 4, 0)
    h.add(20, 2)
    h.step()
    stats = h.scheduler.last_step
    assert (stats.num_requests, stats.num_prefill_tokens, stats.num_decode_tokens, stats.num_tokens) == (2, 15, 1, 16)


def test_gauges_count_what_runs_waits_and_is_held() -> None:
    h = Harness(max_num_seqs=2, num_blocks=10)
    h.add(8, 4), h.add(8, 4), h.add(8, 4)
    assert h.scheduler.num_waiting == 3 and h.scheduler.kv_usage == 0
    h.step()
    assert (h.scheduler.num_running, h.scheduler.num_waiting) == (2, 1)
    assert h.scheduler.kv_usage == pytest.approx(0.4)
    h.run()
    assert (h.scheduler.num_running, h.scheduler.num_waiting, h.scheduler.kv_usage) == (0, 0, 0)
