"""n choices of one prompt."""

from __future__ import annotations

import pytest
from tests.scheduler.harness import FILLER, Harness

from octavo.request import Request, RequestStatus


def scripted(h: Harness, family: list[Request]) -> None:
    for request in family:
        h.script[request.request_id] = [100 * (request.request_id + 1) + i for i in range(20)]


def assert_answers(h: Harness, family: list[Request]) -> None:
    for request in family:
        assert h.output(request) == list(h.script[request.request_id])[: request.max_tokens]
        assert h.last_update(request).choice == request.choice


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("num_prompt", [1, 3, 4, 5, 8, 11])
def test_the_prompt_is_computed_once(num_prompt: int, depth: int) -> None:
    h = Harness(max_num_batched_tokens=6)
    family = h.add_fork(num_prompt, 3, 5)
    scripted(h, family)
    assert h.scheduler.num_waiting == 3  # SCH-06: n counts as n
    h.run(depth=depth)
    assert_answers(h, family)
    assert sum(n for start, n in h.scheduled(family[0]) if start < num_prompt) == num_prompt
    assert all(start >= num_prompt for request in family[1:] for start, _ in h.scheduled(request))


def test_the_step_that_ends_the_prompt_names_the_siblings_and_brings_their_rows() -> None:
    h = Harness(max_num_batched_tokens=4)
    family = h.add_fork(6, 3)
    first, second = h.step(), h.step()
    assert not first.requests[0].fork_ids and len(first.new_rows) == 1
    assert second.requests[0].fork_ids == (family[1].request_id, family[2].request_id)
    assert [row.request_id for row in second.new_rows] == [family[1].request_id, family[2].request_id]
    assert [row.choice for row in second.new_rows] == [1, 2]
    assert [request.num_computed_tokens for request in family] == [6, 6, 6]
    assert h.scheduler.num_running == 3 and [len(h.output(request)) for request in family] == [1, 1, 1]


def test_full_blocks_are_shared_and_the_partial_one_is_copied_when_written() -> None:
    h = Harness()
    family = h.add_fork(10, 4, 6)
    h.step()
    assert h.pool.num_blocks - h.pool.num_free == 3
    batch = h.step()
    assert len(batch.block_copies) == 3, "the last writer keeps the original"
    source = family[3].block_ids[0][2]
    assert {copy[0] for copy in batch.block_copies} == {source}
    assert h.pool.num_blocks - h.pool.num_free == 2 + 4
    assert len({request.block_ids[0][2] for request in family}) == 4
    h.run()
    assert h.scheduler.num_block_copies == 3


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3])
def test_siblings_without_a_place_wait_and_find_the_prompt_cached(max_num_seqs: int) -> None:
    h = Harness(max_num_seqs=max_num_seqs)
    family = h.add_fork(10, 5, 4)
    scripted(h, family)
    h.step()
    assert h.scheduler.num_running == max_num_seqs and h.scheduler.num_waiting == 5 - max_num_seqs
    h.run()
    assert_answers(h, family)
    computed = sum(n for request in family for start, n in h.scheduled(request) if start < 10)
    num_leaders = -(-5 // max_num_seqs)
    assert computed == 10 + 2 * (num_leaders - 1), "later leaders compute only what no full block holds"


def test_siblings_without_blocks_wait() -> None:
    h = Harness(num_blocks=4)
    family = h.add_fork(8, 4, 5)
    scripted(h, family)
    h.step()
    assert h.scheduler.num_running == 3, "two blocks are left, so two siblings can go on"
    h.run()
    assert_answers(h, family)


def test_choices_count_once_for_the_prefix_cache() -> None:  # MET-03
    h = Harness(max_num_seqs=2)
    for _ in range(2):
        family = h.add_fork(tuple(range(50, 62)), 4, 3)
        h.run()
    assert h.scheduler.prefix_query_tokens == 24 and h.scheduler.prefix_hit_tokens == 8
    assert [request.num_cached_tokens for request in family] == [8] * 4


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_aborting_the_leader_before_the_fork_loses_no_sibling(num_steps: int) -> None:
    h = Harness(max_num_batched_tokens=4)
    family = h.add_fork(10, 3, 4)
    scripted(h, family)
    for _ in range(num_steps):
        h.step()
    h.scheduler.abort(family[0].request_id)
    assert h.scheduler.num_waiting == 2
    h.run()
    assert_answers(h, family[1:])
    assert h.output(family[0]) == []


def test_aborting_the_leader_while_the_fork_is_in_flight_loses_no_sibling() -> None:
    h = Harness()
    family = h.add_fork(10, 3, 4)
    scripted(h, family)
    h.plan()
    h.scheduler.abort(family[0].request_id)
    h.run()
    assert_answers(h, family[1:])


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_aborting_a_sibling_leaves_the_others_alone(num_steps: int) -> None:
    h = Harness(max_num_batched_tokens=8)
    family = h.add_fork(10, 3, 6)
    scripted(h, family)
    for _ in range(num_steps):
        h.step()
    h.scheduler.abort(family[1].request_id)
    assert h.scheduler.num_running + h.scheduler.num_waiting == 2
    h.run()
    assert_answers(h, [family[0], family[2]])


def test_a_failed_choice_fails_alone() -> None:
    h = Harness()
    family = h.add_fork(6, 3, 4)
    scripted(h, family)
    h.failing[family[1].request_id] = "non-finite logits"
    h.run()
    assert h.last_update(family[1]).error == "non-finite logits"
    assert_answers(h, [family[0], family[2]])


def test_siblings_without_logits_of_their_own_share_the_failure_of_their_leader() -> None:
    h = Harness()
    family = h.add_fork(6, 3, 4)
    batch = h.scheduler.plan()
    assert batch is not None
    output = type(h._execute(batch))(batch.step_id, failed={family[0].request_id: "non-finite logits"})
    updates = h.scheduler.commit(batch, output)
    assert [(u.request_id, u.error) for u in updates] == [(r.request_id, "non-finite logits") for r in family]
    assert not h.scheduler.has_work


def test_scoring_several_choices_computes_once_and_ends_all() -> None:
    h = Harness()
    family = h.add_fork(6, 3, 0, prompt_logprobs=0)
    h.run()
    assert sum(len(update.prompt_logprobs) for update in h.updates) == 5
    assert [h.last_update(request).finish_reason for request in family] == ["length"] * 3
    assert sum(batch.num_tokens for batch in h.batches) == 6


def test_prompt_logprobs_come_from_the_leader_alone() -> None:
    h = Harness(max_num_batched_tokens=4, max_num_seqs=2)
    family = h.add_fork(10, 4, 3, prompt_logprobs=1)
    h.run()
    assert sum(len(u.prompt_logprobs) for u in h.updates if u.request_id == family[0].request_id) == 9
    assert all(not u.prompt_logprobs for u in h.updates if u.request_id != family[0].request_id)


def test_forks_survive_preemption() -> None:
    h = Harness(num_blocks=7)
    family = h.add_fork(6, 4, 14)
    scripted(h, family)
    h.run(depth=1)
    assert h.scheduler.num_preemptions > 0
    assert_answers(h, family)


def test_a_fork_never_drafts_before_it_forks() -> None:
    h = Harness(max_num_batched_tokens=5)
    family = h.add_fork(6, 2, 4)
    h.step()
    assert family[0].num_computed_tokens == 5
    assert h.scheduler.set_drafts(family[0].request_id, [FILLER]) == 0
    assert family[1].status is RequestStatus.WAITING
