"""Sliding windows: what is given back, and what never is."""

from __future__ import annotations

import pytest
from tests.scheduler.harness import Harness

from octavo.errors import ContextLengthExceeded
from octavo.kv_cache.cache_spec import window_blocks


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_pure_window_model_holds_a_constant_number_of_blocks(depth: int, caches: bool) -> None:  # ATT-05
    h = Harness(windows=(8,), num_blocks=20, max_model_len=4000, max_num_batched_tokens=16, caches=caches)
    request = h.add(300, 200)
    held = []
    while h.scheduler.has_work:
        batch = h.plan()
        held.append(h.pool.num_blocks - h.pool.num_free)
        if batch is None or len(h.planned) > depth:
            h.commit()
    prefill, decode = held[3:15], held[-150:-3]
    assert max(prefill) <= window_blocks(8, 16 * (1 + depth), 4)
    assert max(decode) <= window_blocks(8, 1 + depth, 4)
    assert len(h.output(request)) == 200 and h.scheduler.num_window_frees > 100


def test_a_hybrid_model_grows_by_its_full_layers_only() -> None:  # ATT-07
    h = Harness(windows=(None, 8, 8), num_blocks=400, max_model_len=1000)
    request = h.add(9, 400)
    used = {}
    while h.scheduler.has_work:
        h.step()
        if request.block_ids:
            full, *sliding = request.block_ids
            assert -1 not in full and len(full) == -(-request.num_computed_tokens // 4)
            assert all(len(table) - table.count(-1) <= 3 for table in sliding)
            used[request.num_computed_tokens] = h.pool.num_blocks - h.pool.num_free
    assert used[401] - used[201] == 50, "one block of full layers every four tokens"


def test_the_batch_shows_minus_one_where_no_query_looks() -> None:
    h = Harness(windows=(None, 8))
    h.add(30, 3)
    h.step()
    full, sliding = h.step().requests[0].block_ids
    # Position 30 sees 23 ... 30: blocks 5, 6 and 7 of four tokens.
    assert -1 not in full and [i for i, block_id in enumerate(sliding) if block_id >= 0] == [5, 6, 7]


def test_what_a_request_may_need_at_most_counts_windows_and_one_chunk() -> None:
    most = window_blocks(8, 16, 4)
    h = Harness(windows=(8,), num_blocks=most, max_model_len=10_000, max_num_batched_tokens=16)
    request = h.add(500, 100)
    h.run(depth=1)
    assert len(h.output(request)) == 100 and request.num_preemptions == 0
    small = Harness(windows=(8,), num_blocks=most - 1, max_model_len=10_000, max_num_batched_tokens=16)
    with pytest.raises(ContextLengthExceeded, match=f"up to {most} KV blocks"):
        small.add(500, 100)


def test_windows_given_back_serve_other_requests() -> None:
    h = Harness(windows=(8,), num_blocks=30, max_model_len=1000, max_num_batched_tokens=32)
    requests = [h.add(100, 100) for _ in range(4)]
    h.run(depth=1)
    assert [len(h.output(request)) for request in requests] == [100] * 4
    assert h.scheduler.num_preemptions == 0
