from __future__ import annotations

import random

import pytest

from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.block_tables import BlockTables
from octavo.kv_cache.cache_spec import LayerKv, make_cache_spec
from octavo.request import Request, SamplingParams

ROOT = b"root"
SIZE = 4


class Tables:
    def __init__(self, *windows: int | None, num_blocks: int = 64, caches: bool = True) -> None:
        spec = make_cache_spec([LayerKv(1, 8, window) for window in windows], block_size=SIZE, dtype_bytes=2)
        self.pool = BlockPool(num_blocks, SIZE)
        self.tables = BlockTables(spec, self.pool, max_chunk=64, enable_prefix_caching=caches)
        self.requests: list[Request] = []

    def request(self, num_tokens: int) -> Request:
        request = Request(len(self.requests), tuple(range(num_tokens)), SamplingParams(), 1, 0.0)
        self.requests.append(request)
        return request

    def start(self, num_tokens: int, *, num_computed: int | None = None) -> Request:
        """A request that was admitted with a match and has computed and committed its tokens."""
        request = self.request(num_tokens)
        hit = self.tables.match(request, ROOT)
        assert self.tables.admit(request, hit, end=num_tokens, num_known=num_tokens, headroom=0)
        request.num_computed_tokens = hit.num_blocks * SIZE
        self.tables.advance(request, ROOT, num_tokens if num_computed is None else num_computed)
        self.check()
        return request

    def check(self) -> None:
        self.pool.check(self.requests)


@pytest.mark.parametrize("num_tokens", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE - 1, 2 * SIZE, 2 * SIZE + 1])
def test_a_second_equal_prompt_hits_all_but_its_last_token(num_tokens: int) -> None:  # PFX-05
    t = Tables(None)
    first = t.start(num_tokens)
    hit = t.tables.match(t.request(num_tokens), ROOT)
    assert hit.num_blocks == (num_tokens - 1) // SIZE
    assert hit.block_ids[0] == first.block_ids[0][: hit.num_blocks]
    longer = t.tables.match(t.request(num_tokens + SIZE), ROOT)
    assert longer.num_blocks == num_tokens // SIZE, "every full block of the first prompt"


def test_another_root_hits_nothing() -> None:
    t = Tables(None)
    t.start(12)
    assert t.tables.match(t.request(12), b"other").num_blocks == 0


def test_only_committed_blocks_are_published() -> None:
    t = Tables(None)
    t.start(13, num_computed=7)
    assert t.tables.match(t.request(13), ROOT).num_blocks == 1


def test_nothing_is_published_without_prefix_caching() -> None:
    t = Tables(None, caches=False)
    request = t.start(12)
    t.tables.free(request)
    assert t.pool.num_cached == 0 and request.block_hashes == request.block_hashes[:2]


def test_admission_needs_room_for_all_known_tokens_and_the_headroom() -> None:
    t = Tables(None, num_blocks=4)
    request = t.request(13)
    hit = t.tables.no_match()
    assert not t.tables.admit(request, hit, end=4, num_known=13, headroom=1)
    assert request.block_ids == [] and t.pool.num_free == 4
    assert t.tables.admit(request, hit, end=4, num_known=13, headroom=0)
    assert len(request.block_ids[0]) == 1, "only the first range takes blocks"
    t.check()


def test_growth_is_all_or_nothing() -> None:
    t = Tables(8, None, num_blocks=5)
    request = t.start(4)
    before = [list(table) for table in request.block_ids]
    assert t.tables.grow(request, 4, 12) is None, "2 groups need 2 blocks each; 3 are free"
    assert request.block_ids == before and t.pool.num_free == 3
    t.check()


def test_growth_within_a_block_takes_nothing() -> None:
    t = Tables(None)
    request = t.start(5)
    free = t.pool.num_free
    assert t.tables.grow(request, 5, 8) == () and t.pool.num_free == free
    assert t.tables.grow(request, 8, 9) == () and t.pool.num_free == free - 1


def test_forks_share_everything_and_copy_a_partly_filled_block_once_less_than_their_number() -> None:
    t = Tables(None, 3)
    leader = t.start(6)
    siblings = [t.request(6) for _ in range(2)]
    free = t.pool.num_free
    for sibling in siblings:
        t.tables.share(leader, sibling)
        sibling.num_computed_tokens = 6
    assert t.pool.num_free == free
    t.check()
    copies = [t.tables.grow(request, 6, 7) for request in (leader, *siblings)]
    assert [len(c or ()) for c in copies] == [2, 2, 0], "one copy a group; the last holder writes in place"
    assert len({request.block_ids[0][1] for request in (leader, *siblings)}) == 3
    assert {request.block_ids[0][0] for request in (leader, *siblings)} == {leader.block_ids[0][0]}
    t.check()


def test_forks_at_a_block_border_copy_nothing() -> None:
    t = Tables(None)
    leader, sibling = t.start(8), t.request(8)
    t.tables.share(leader, sibling)
    assert t.tables.grow(leader, 8, 9) == t.tables.grow(sibling, 8, 9) == ()
    assert leader.block_ids[0][2] != sibling.block_ids[0][2]
    t.check()


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9])
def test_a_window_keeps_exactly_what_the_next_query_sees(window: int) -> None:  # ATT-05, ATT-07
    t = Tables(None, window)
    request = t.start(1)
    for num_computed in range(2, 40):
        assert t.tables.grow(request, num_computed - 1, num_computed) == ()
        request.token_ids.append(num_computed)
        t.tables.advance(request, ROOT, num_computed)
        full, windowed = request.block_ids
        assert len(full) == len(windowed) and -1 not in full
        kept = {index for index, block_id in enumerate(windowed) if block_id >= 0}
        seen = {p // SIZE for p in range(max(0, num_computed - window + 1), num_computed)}
        assert seen <= kept <= seen | {num_computed // SIZE}
        t.check()


def test_a_block_is_published_before_it_leaves_the_window() -> None:
    t = Tables(None, 4)
    request = t.start(32)
    assert request.block_ids[1].count(-1) == 7
    hit = t.tables.match(t.request(17), ROOT)
    assert hit.num_blocks == 4, "a prompt that branches off in the middle finds the window that it needs"


def test_the_frozen_table_follows_every_change() -> None:
    t = Tables(None, 3)
    request = t.start(9)
    sibling = t.request(9)
    t.tables.share(request, sibling)
    for step in (
        lambda: t.tables.grow(request, 9, 14),
        lambda: t.tables.advance(request, ROOT, 9),
        lambda: t.tables.grow(sibling, 9, 10),
        lambda: t.tables.free(request),
    ):
        step()
        for each in (request, sibling):
            assert t.tables.frozen(each) == tuple(map(tuple, each.block_ids))


def test_keys_are_forgotten_only_without_blocks() -> None:
    t = Tables(None)
    request = t.start(9)
    with pytest.raises(AssertionError, match="under one root"):
        t.tables.forget_keys(request)
    t.tables.free(request)
    t.tables.forget_keys(request)
    assert request.block_hashes == []


def test_under_pressure_a_prefix_shrinks_from_its_tail_in_all_groups_alike() -> None:  # PFX-09
    t = Tables(None, 64, num_blocks=10)
    t.tables.free(t.start(20))
    hits = []
    for _ in range(5):
        t.pool.acquire((), 2)
        hits.append(t.tables.match(t.request(21), ROOT).num_blocks)
    assert hits == [4, 3, 2, 1, 0]


def test_random_growth_and_release_keep_the_pool_sound() -> None:
    rng = random.Random(0)
    t = Tables(None, 3, 9, num_blocks=40)
    for _ in range(600):
        live = [request for request in t.requests if request.block_ids]
        if live and rng.random() < 0.5:
            request = rng.choice(live)
            end = request.num_computed_tokens + rng.randint(1, 6)
            if t.tables.grow(request, request.num_computed_tokens, end) is None or rng.random() < 0.2:
                t.tables.free(request)
            else:
                request.token_ids += [1] * (end - len(request.token_ids))
                t.tables.advance(request, ROOT, end)
        else:
            request = t.request(rng.randint(1, 20))
            hit, num_known = t.tables.match(request, ROOT), len(request.token_ids)
            if t.tables.admit(request, hit, end=num_known, num_known=num_known, headroom=0):
                request.num_computed_tokens = hit.num_blocks * SIZE
                t.tables.advance(request, ROOT, num_known)
        t.check()
    assert t.pool.num_evictions and t.tables.num_window_frees
