"""Static batching: the mechanism that continuous batching replaced, kept to measure what that buys."""

from __future__ import annotations

from tests.scheduler.harness import Harness


def test_a_batch_runs_until_its_last_request_ends() -> None:
    h = Harness(batching="static", max_num_seqs=3)
    requests = [h.add(4, length) for length in (2, 6, 3, 2)]
    for _ in range(6):
        batch = h.step()
        assert requests[3].request_id not in {part.request_id for part in batch.requests}
    batch = h.step()
    assert [part.request_id for part in batch.requests] == [requests[3].request_id]
    h.run()


def test_padding_counts_the_rows_that_have_ended() -> None:
    h = Harness(batching="static", max_num_seqs=3)
    for length in (1, 4, 2):
        h.add(4, length)
    h.run()
    assert h.scheduler.padding_tokens == 3 + 2


def test_continuous_batching_pads_nothing() -> None:
    h = Harness(max_num_seqs=3)
    for length in (1, 4, 2):
        h.add(4, length)
    h.run()
    assert h.scheduler.padding_tokens == 0


def test_who_arrives_later_waits_for_the_next_batch_even_if_there_is_room() -> None:
    h = Harness(batching="static", max_num_seqs=8)
    h.add(4, 5)
    h.step()
    late = h.add(4, 1)
    for _ in range(4):
        h.step()
    assert h.scheduled(late) == []
    h.run()
    assert late.is_finished


def test_a_batch_may_take_several_steps_to_start() -> None:
    h = Harness(batching="static", max_num_seqs=4, max_num_batched_tokens=8)
    requests = [h.add(7, 6) for _ in range(4)]
    late = h.add(7, 1)
    h.run()
    first = [min(b.step_id for b in h.batches for p in b.requests if p.request_id == r.request_id) for r in requests]
    last = max(b.step_id for b in h.batches for p in b.requests if p.request_id in {r.request_id for r in requests})
    assert first[-1] > first[0]
    assert min(b.step_id for b in h.batches for p in b.requests if p.request_id == late.request_id) > last


def test_members_that_were_preempted_come_back_within_their_batch() -> None:
    h = Harness(batching="static", num_blocks=8)
    requests = [h.add(4, 16) for _ in range(3)]
    h.run(depth=1)
    assert h.scheduler.num_preemptions > 0
    assert [len(h.output(request)) for request in requests] == [16] * 3


def test_the_choices_of_one_request_share_a_batch() -> None:
    h = Harness(batching="static", max_num_seqs=4)
    single = h.add(4, 2)
    family = h.add_fork(4, 4, 3)
    h.step()
    assert h.scheduler.num_running == 1
    h.step()
    assert single.is_finished
    h.step()
    assert h.scheduler.num_running == 4
    h.run()
    assert [len(h.output(request)) for request in family] == [3] * 4


def test_more_choices_than_rows_still_all_end() -> None:
    h = Harness(batching="static", max_num_seqs=2)
    family = h.add_fork(4, 5, 3)
    h.run()
    assert [len(h.output(request)) for request in family] == [3] * 5
