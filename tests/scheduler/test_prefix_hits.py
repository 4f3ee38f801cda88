"""The prefix cache as a client sees it."""

from __future__ import annotations

import random

import pytest
from tests.scheduler.harness import FILLER, Harness

from octavo.kv_cache.prefix_cache import adapter_identity
from octavo.request import FinishReason, RequestStatus

B = 4


def prompt(n: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(random.Random(seed).randrange(1, 10**6) for _ in range(n))


def cached(h: Harness, tokens: tuple[int, ...], **fields: object) -> int:
    request = h.add(tokens, 2, **fields)
    h.run()
    assert h.output(request) == [FILLER] * 2
    assert h.scheduled(request)[0][0] == request.num_cached_tokens == h.last_update(request).num_cached_tokens
    return request.num_cached_tokens


@pytest.mark.parametrize("windows", [(None,), (None, 5)])
@pytest.mark.parametrize("n", [1, B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1])
def test_lengths_around_the_block(n: int, windows: tuple[int | None, ...]) -> None:  # PFX-05
    h = Harness(block_size=B, windows=windows)
    text = prompt(n + B)
    assert cached(h, text[:n]) == 0
    assert cached(h, text[:n]) == (n - 1) // B * B, "the last token is always computed"
    assert cached(h, text[: n + 1]) == n // B * B
    assert cached(h, text) == (n + 1) // B * B
    assert cached(h, (7, *text)) == 0


def test_a_later_turn_hits_the_answer_too() -> None:
    h = Harness()
    first = h.add(prompt(6), 7)
    h.run()
    # All but the last sampled token have KV.
    assert cached(h, (*first.token_ids, 1, 2, 3)) == 12


def test_tenants_and_adapters_never_share() -> None:  # PFX-03, PFX-04
    h = Harness()
    text = prompt(13)
    ways = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"extra": adapter_identity(b"one", 1.0)},
        {"extra": adapter_identity(b"one", 0.5)},
        {"extra": adapter_identity(b"reloaded under the same name", 1.0)},
    ]
    assert [cached(h, text, **way) for way in ways] == [0] * len(ways)
    assert [cached(h, text, **way) for way in reversed(ways)] == [12] * len(ways)


def test_churn_never_leaves_a_stale_entry() -> None:  # PFX-08
    h = Harness(num_blocks=16)
    text = prompt(25)
    for round_no in range(20):
        assert cached(h, text) in (0, 24)
        for k in range(3):
            assert cached(h, prompt(50, seed=1 + 3 * round_no + k)) == 0
        assert h.pool.num_cached == len(h.pool._block_of) == len(h.pool._key_of) <= 16
    assert h.pool.num_evictions > 300


def test_a_hole_ends_the_hit() -> None:  # PFX-09
    h = Harness()
    text = prompt(17)
    request = h.add(text, 1)
    h.run()
    hole = h.pool._block_of.pop((0, request.block_hashes[1]))
    del h.pool._key_of[hole], h.pool._cached[hole]
    h.pool._free.append(hole)
    assert cached(h, text) == B


def test_prompt_logprobs_are_complete_whatever_is_cached() -> None:  # PFX-10
    h = Harness(max_num_batched_tokens=5)
    text = prompt(2 * B + 1)
    for _ in range(2):
        request = h.add(text, 2, prompt_logprobs=1)
        h.run()
        entries = [e for u in h.updates if u.request_id == request.request_id for e in u.prompt_logprobs]
        assert [entry.token_id for entry in entries] == list(range(1, len(text)))
        assert request.num_cached_tokens == 0
    assert cached(h, text) == 2 * B, "they do publish"
    assert h.scheduler.prefix_query_tokens == len(text), "who may not read the cache did not ask it"


def test_prompt_logprobs_come_once_through_preemption() -> None:  # PFX-10, SCH-01
    h = Harness(num_blocks=8, max_num_batched_tokens=6)
    requests = [h.add(prompt(10, seed), 12, prompt_logprobs=0) for seed in range(3)]
    h.run(depth=1)
    assert h.scheduler.num_preemptions
    for request in requests:
        entries = [e for u in h.updates if u.request_id == request.request_id for e in u.prompt_logprobs]
        assert [entry.token_id for entry in entries] == list(range(1, 10))


def test_an_end_in_the_middle_leaves_only_committed_tokens() -> None:  # PFX-12
    h = Harness()
    text = prompt(6)
    for drafts in ((), (51, 52, 53)):
        request = h.add(text, 20)
        h.script[request.request_id] = [50, 51, 52, 53, 54]
        h.step()
        h.scheduler.set_drafts(request.request_id, drafts)
        h.plan()
        h.scheduler.finish(request.request_id, FinishReason.STOP, "text")  # while the step is in flight
        h.commit()
        h.scheduler.check()
    published = {key for _, key in h.pool._block_of}
    assert published == set(request.block_hashes[:1]), "only the block of tokens 0-3 was committed"


def test_rejected_drafts_are_never_published() -> None:
    h = Harness()
    request = h.add(prompt(6), 20)
    h.script[request.request_id] = [50, 51, 52, 53, 54, 55]
    h.step()
    h.scheduler.set_drafts(request.request_id, (51, 99, 98, 97))
    h.step()
    h.scheduler.abort(request.request_id)
    assert cached(h, (*request.token_ids[:8], 99, 98, 97, 1, 2)) == 8
    assert cached(h, (*request.prompt_token_ids, 50, 99, 98, 97)) == 4


def test_without_prefix_caching_nothing_is_kept() -> None:
    h = Harness(caches=False)
    text = prompt(13)
    assert cached(h, text) == cached(h, text) == 0
    assert h.scheduler.prefix_query_tokens == 0 and h.pool.num_cached == 0


def test_a_hit_is_counted_when_it_is_used_and_not_before() -> None:  # MET-03, SCH-09
    h = Harness(num_blocks=10)
    text = prompt(17)
    assert cached(h, text) == 0
    blocker = h.add(prompt(26, 1), 6)
    h.step()
    waiting = h.add(text, 2)
    for _ in range(3):
        h.step()
        assert waiting.status is RequestStatus.WAITING
        assert h.scheduler.prefix_query_tokens == 17 + 26 and h.scheduler.prefix_hit_tokens == 0
    h.run()
    assert blocker.num_preemptions == 0
    # The blocker's growth evicted part of what the first attempts saw.
    assert waiting.num_cached_tokens == h.scheduled(waiting)[0][0] == h.scheduler.prefix_hit_tokens < 16
    assert h.scheduler.prefix_query_tokens == 17 + 26 + 17


def test_recomputation_is_no_hit() -> None:  # MET-03
    h = Harness(num_blocks=8)
    requests = [h.add(prompt(4, seed), 16) for seed in range(5)]
    h.run()
    assert h.scheduler.num_preemptions > 0
    assert h.scheduler.prefix_hit_tokens == 0 and h.scheduler.prefix_query_tokens == 20
    assert [request.num_cached_tokens for request in requests] == [0] * 5


def test_shared_prompts_count_what_was_really_skipped() -> None:  # MET-03
    h = Harness(num_blocks=256)
    system = prompt(40)
    requests = []
    for seed in range(1, 6):
        requests.append(h.add((*system, *prompt(9, seed)), 2))
        h.run()
    assert [request.num_cached_tokens for request in requests] == [0, 40, 40, 40, 40]
    assert h.scheduler.prefix_hit_tokens == 160 <= h.scheduler.prefix_query_tokens == 5 * 49
    computed = sum(n for request in requests for start, n in h.scheduled(request) if start < 49)
    assert computed == 5 * 49 - 160


def test_a_hit_takes_no_more_blocks_than_it_needs() -> None:
    h = Harness(num_blocks=64)
    text = prompt(33)
    requests = [h.add(text, 20) for _ in range(1)]
    h.step()
    requests += [h.add(text, 20) for _ in range(3)]
    h.step()
    assert h.pool.num_blocks - h.pool.num_free == 8 + 4, "eight shared, one each"


def test_reset_forgets_what_nobody_holds_and_says_whether_something_was_held() -> None:
    h = Harness()
    text = prompt(13)
    cached(h, text)
    assert h.scheduler.reset_prefix_cache() and cached(h, text) == 0
    running = h.add(text, 8)
    h.step()
    assert not h.scheduler.reset_prefix_cache()
    h.run()
    assert h.output(running) == [FILLER] * 8


def test_hybrid_models_hit_although_their_windows_have_moved_on() -> None:  # ATT-07
    h = Harness(windows=(None, 8), num_blocks=128)
    system = prompt(40)
    assert cached(h, (*system, *prompt(30, 1))) == 0
    assert cached(h, (*system, *prompt(30, 2))) == 40
    assert cached(h, (*system, *prompt(30, 1))) == 68


def test_a_whole_prompt_in_one_step_still_serves_shorter_prefixes() -> None:
    h = Harness(windows=(None, 6), max_num_batched_tokens=128, max_model_len=256, num_blocks=256)
    text = prompt(100)
    request = h.add(text, 30)
    h.plan()
    h.plan()  # the next step is planned before the prompt is committed
    h.commit(), h.commit()
    h.scheduler.abort(request.request_id)
    for n in (90, 50, 22, 9):
        assert cached(h, (*text[:n], 5, 6, 7)) == n // B * B
