"""RoPE variants: short requests as trained, long ones scaled, and never a mixture in one KV."""

from __future__ import annotations

import pytest
from tests.scheduler.harness import FILLER, Harness


def variants(h: Harness) -> list[tuple[int, int, int]]:
    return [(part.start, part.num_tokens, part.rope_variant) for b in h.batches for part in b.requests]


def test_a_request_within_the_native_context_is_never_scaled() -> None:
    h = Harness(rope_native_len=16)
    h.add(10, 6)
    h.run()
    assert {variant for _, _, variant in variants(h)} == {0} and h.scheduler.num_rope_restarts == 0


def test_a_prompt_beyond_it_is_scaled_from_its_first_token() -> None:
    h = Harness(rope_native_len=16, max_num_batched_tokens=8)
    h.add(17, 2)
    h.run()
    assert variants(h) == [(0, 8, 1), (8, 8, 1), (16, 1, 1), (17, 1, 1)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_request_that_crosses_it_is_computed_again_and_not_called_preempted(depth: int) -> None:
    h = Harness(rope_native_len=16)
    request = h.add(14, 6)
    h.run(depth=depth)
    assert variants(h) == [(0, 14, 0), (14, 1, 0), (15, 1, 0), (0, 17, 1), (17, 1, 1), (18, 1, 1)]
    assert h.output(request) == [FILLER] * 6
    assert request.num_preemptions == h.scheduler.num_preemptions == 0 and h.scheduler.num_rope_restarts == 1


def test_a_request_whose_last_token_crosses_it_is_left_alone() -> None:
    h = Harness(rope_native_len=16)
    h.add(14, 3)
    h.run()
    assert h.scheduler.num_rope_restarts == 0 and variants(h)[-1] == (15, 1, 0)


def test_variants_do_not_share_a_prefix() -> None:
    h = Harness(rope_native_len=16)
    text = tuple(range(1, 30))
    short = h.add(text[:14], 2)
    h.run()
    long = h.add(text, 2)
    h.run()
    again, longer = h.add(text[:14], 2), h.add((*text, 30), 2)
    h.run()
    assert (short.num_cached_tokens, long.num_cached_tokens) == (0, 0)
    assert (again.num_cached_tokens, longer.num_cached_tokens) == (12, 28)


def test_drafts_stop_at_the_native_context() -> None:
    h = Harness(rope_native_len=16)
    request = h.add(13, 20)
    h.step()
    assert h.scheduler.set_drafts(request.request_id, [FILLER] * 8) == 2
    h.run()
    assert h.output(request) == [FILLER] * 20


def test_crossing_keeps_every_token_of_a_fork() -> None:
    h = Harness(rope_native_len=16)
    family = h.add_fork(15, 3, 8)
    h.run(depth=1)
    assert [h.output(request) for request in family] == [[FILLER] * 8] * 3
    assert h.scheduler.num_rope_restarts == 3
