"""Losing KV and computing it again, seen by nobody."""

from __future__ import annotations

import pytest
from tests.scheduler.harness import FILLER, Harness

from octavo.request import Request, RequestStatus


def fill(h: Harness, steps: int) -> None:
    for _ in range(steps):
        h.step()


def tight(**config: object) -> tuple[Harness, list[Request]]:
    """Three requests that end at 5 blocks each, in 8."""
    h = Harness(num_blocks=8, **config)
    requests = [h.add(4, 16, logprobs=0) for _ in range(3)]
    for request in requests:
        h.script[request.request_id] = [100 * request.request_id + i for i in range(1, 17)]
    return h, requests


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caches", [True, False])
def test_preemption_is_invisible_to_the_client(caches: bool, depth: int) -> None:  # SCH-01
    h, requests = tight(caches=caches)
    h.run(depth=depth)
    assert h.scheduler.num_preemptions > 0
    assert h.scheduler.num_preemptions == sum(request.num_preemptions for request in requests)
    for request in requests:
        assert h.output(request) == list(h.script[request.request_id])
        assert sum(len(u.logprobs) for u in h.updates if u.request_id == request.request_id) == 16
        assert request.num_prompt_tokens == 4 and request.num_output_tokens == 16
        assert h.last_update(request).num_preemptions == request.num_preemptions
    assert len([row for batch in h.batches for row in batch.new_rows]) == 3, "a preempted request keeps its row"


def test_the_last_to_arrive_gives_way_and_the_first_never_does() -> None:
    h, requests = tight()
    h.run()
    assert requests[0].num_preemptions == 0
    assert requests[2].num_preemptions > 0
    ends = [batch.step_id for batch in h.batches for r in requests if r.request_id in batch.freed_request_ids]
    assert ends == sorted(ends)


def test_with_priorities_the_least_urgent_gives_way() -> None:
    h = Harness(num_blocks=8, scheduling_policy="priority")
    requests = [h.add(4, 16, priority=p) for p in (2, 0, 1)]
    h.run()
    assert requests[1].num_preemptions == 0 < requests[0].num_preemptions


def test_a_preempted_request_restarts_from_its_prefix_hit() -> None:
    h = Harness(num_blocks=8)
    first, second = h.add(12, 9), h.add(12, 9)
    h.run()
    assert first.num_preemptions == 0 and second.num_preemptions == 1
    starts = [start for start, _ in h.scheduled(second)]
    restart = next(i for i in range(1, len(starts)) if starts[i] < starts[i - 1])
    assert starts[restart] == 12, "what the other did not take is still cached"
    assert second.num_cached_tokens == 0, "which is no hit in the client's eyes"


def test_a_preempted_request_waits_and_goes_before_later_arrivals() -> None:
    h, requests = tight(caches=False)
    while not any(request.num_preemptions for request in requests):
        h.step()
    (victim,) = (request for request in requests if request.num_preemptions)
    assert victim.status is RequestStatus.WAITING and victim.block_ids == []
    assert victim.num_computed_tokens == victim.num_in_flight_tokens == 0
    num_before = len(h.batches)
    late = h.add(4, 4)
    h.run()
    served = [part.request_id for batch in h.batches[num_before:] for part in batch.requests]
    assert served.index(victim.request_id) < served.index(late.request_id)


def test_who_has_nobody_behind_keeps_its_blocks_and_waits() -> None:
    h = Harness(num_blocks=7)
    first, last = h.add(8, 16), h.add(7, 8)
    fill(h, 1)
    while h.pool.num_free:
        h.step()
    held = len(last.block_ids[0])
    while last.num_preemptions == 0 and not first.is_finished:
        before = last.num_computed_tokens
        batch = h.step()
        if last.num_preemptions == 0 and last.request_id not in {p.request_id for p in batch.requests}:
            assert len(last.block_ids[0]) == held and last.num_computed_tokens == before
    h.run()
    assert h.output(first) == [FILLER] * 16 and h.output(last) == [FILLER] * 8


def test_admission_leaves_running_requests_their_next_block() -> None:
    h = Harness(num_blocks=4)
    first = h.add(4, 9)
    h.step()
    second = h.add(12, 1)  # fits the three free blocks, but then the first could not go on
    h.step()
    assert second.status is RequestStatus.WAITING
    h.run()
    assert first.num_preemptions == second.num_preemptions == 0


def test_a_long_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    h = Harness(num_blocks=8, max_num_batched_tokens=8)
    h.add(15, 2)
    h.step()
    h.step()
    long = h.add(20, 1)  # its first chunk would fit
    h.step()
    assert long.status is RequestStatus.WAITING and long.block_ids == []
    h.run()
    assert h.scheduler.num_preemptions == 0


def test_a_token_in_flight_outlives_the_preemption() -> None:
    """The worker's row has appended it, so taking it back would tear row and request apart."""
    h = Harness(num_blocks=5)
    h.add(4, 16)
    victim = h.add(6, 12)
    h.script[victim.request_id] = range(1, 13)
    h.plan()
    while h.plan() is None or not victim.num_preemptions:
        h.commit()
    assert victim.request_id in {part.request_id for part in h.planned[0][0].requests}
    before = list(victim.token_ids)
    (update,) = (update for update in h.commit() if update.request_id == victim.request_id)
    assert victim.token_ids == [*before, *update.new_token_ids] and len(update.new_token_ids) == 1
    assert victim.num_computed_tokens == 0 and victim.status is RequestStatus.WAITING
    h.run(depth=1)
    assert h.output(victim) == list(h.script[victim.request_id])


def test_a_request_may_end_while_it_waits_to_be_computed_again() -> None:
    for length in range(4, 17):
        h = Harness(num_blocks=8)
        requests = [h.add(4, length) for _ in range(3)]
        h.run(depth=1)
        assert [len(h.output(request)) for request in requests] == [length] * 3
        assert h.pool.num_free == 8


def test_many_requests_in_a_tiny_pool_all_end() -> None:
    h = Harness(num_blocks=6, max_num_batched_tokens=5)
    requests = [h.add(1 + i % 9, 1 + i % 11) for i in range(30)]
    h.run(depth=1, max_steps=5000)
    assert [len(h.output(request)) for request in requests] == [request.max_tokens for request in requests]
