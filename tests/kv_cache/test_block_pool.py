from __future__ import annotations

import random

import pytest

from octavo.kv_cache.block_pool import BlockPool
from octavo.request import Request, SamplingParams


def holder(block_ids: list[int]) -> Request:
    return Request(1, (1,), SamplingParams(), 1, 0.0, block_ids=[block_ids])


def key(n: int) -> bytes:
    return n.to_bytes(32, "little")


def fill(pool: BlockPool, count: int, first_key: int = 0) -> list[int]:
    """Hold `count` fresh blocks, published under consecutive keys."""
    blocks = pool.acquire((), count)
    assert blocks is not None
    for i, block_id in enumerate(blocks):
        assert pool.publish(0, key(first_key + i), block_id)
    return blocks


def test_acquire_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    held = pool.acquire((), 3)
    assert held is not None and len(set(held)) == 3
    assert pool.acquire((), 2) is None
    assert pool.num_free == 1 and pool.usage == 0.75
    pool.check([holder(held)])


def test_a_hit_is_pinned_by_the_call_that_takes_fresh_blocks() -> None:
    pool = BlockPool(4, 16)
    old = fill(pool, 2)
    pool.release(old)
    assert pool.acquire(old, 3) is None, "the hit itself would have to be evicted"
    assert pool.num_cached == 2, "nothing changed"
    fresh = pool.acquire(old, 2)
    assert fresh is not None and not set(fresh) & set(old)
    assert pool.lookup(0, key(0)) == old[0] and pool.num_evictions == 0
    pool.check([holder([*old, *fresh])])


def test_a_shared_block_lives_until_its_last_holder_leaves() -> None:
    pool = BlockPool(2, 16)
    (block_id,) = fill(pool, 1)
    pool.acquire([block_id], 0)
    assert pool.is_shared(block_id)
    pool.release([block_id])
    assert not pool.is_shared(block_id) and pool.num_free == 1
    pool.release([block_id])
    assert pool.num_free == 2 and pool.lookup(0, key(0)) == block_id


def test_releasing_twice_is_noticed() -> None:
    pool = BlockPool(2, 16)
    held = pool.acquire((), 1)
    assert held is not None
    pool.release(held)
    with pytest.raises(AssertionError, match="released more often than acquired"):
        pool.release(held)


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4, 16)
    pool.release(fill(pool, 2))
    assert pool.acquire((), 2) is not None
    assert pool.num_evictions == 0 and pool.num_cached == 2


def test_eviction_takes_the_tail_of_the_least_recently_used_prefix() -> None:  # PFX-09
    pool = BlockPool(6, 16)
    first, second = fill(pool, 3, 0), fill(pool, 3, 10)
    pool.release(first)
    pool.release(second)
    pool.release(pool.acquire(first, 0) or first)  # used again
    gone = []
    for _ in range(6):
        (block_id,) = pool.acquire((), 1) or (-1,)
        gone.append(block_id)
    assert gone == [*reversed(second), *reversed(first)]
    assert pool.num_evictions == 6


def test_an_evicted_block_no_longer_answers_for_its_old_prefix() -> None:  # PFX-08
    pool = BlockPool(2, 16)
    pool.release(fill(pool, 2))
    held = pool.acquire((), 2)
    assert held is not None
    assert pool.lookup(0, key(0)) is None and pool.lookup(0, key(1)) is None
    assert pool.publish(0, key(7), held[0]), "the block is free to hold another prefix"
    pool.check([holder(held)])


def test_the_first_block_of_a_prefix_stays_its_only_one() -> None:
    pool = BlockPool(3, 16)
    (first,) = fill(pool, 1)
    second, third = pool.acquire((), 2) or (-1, -1)
    assert not pool.publish(0, key(0), second), "known already"
    assert pool.publish(1, key(0), third), "another group's layers are another block"
    assert not pool.publish(0, key(5), third), "a block holds one prefix"
    assert pool.lookup(0, key(0)) == first and pool.lookup(1, key(0)) == third


def test_reset_forgets_every_prefix_but_leaves_holders_their_blocks() -> None:
    pool = BlockPool(4, 16)
    held, cached = fill(pool, 1, 0), fill(pool, 2, 10)
    pool.release(cached)
    assert not pool.reset_prefix_cache(), "one block is still held"
    assert pool.lookup(0, key(0)) is None and pool.lookup(0, key(10)) is None
    assert pool.num_cached == 0 and pool.num_free == 3
    pool.check([holder(held)])
    pool.release(held)
    assert pool.reset_prefix_cache() and pool.num_free == 4


@pytest.mark.parametrize(
    "break_it",
    [
        lambda pool: pool._ref_counts.__setitem__(0, 2),
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(0),
        lambda pool: pool._block_of.clear(),
        lambda pool: pool._key_of.pop(1),
        lambda pool: (pool._free.append(next(iter(pool._cached))), pool._cached.popitem()),
    ],
    ids=["reference", "lost block", "used and free", "map", "inverse", "free with a prefix"],
)
def test_check_notices_broken_invariants(break_it) -> None:
    pool = BlockPool(5, 16)
    held, cached = fill(pool, 1), fill(pool, 2, 10)
    pool.release(cached)
    pool.check([holder(held)])
    break_it(pool)
    with pytest.raises(AssertionError):
        pool.check([holder(held)])


def test_random_traffic_keeps_every_invariant() -> None:
    rng = random.Random(0)
    pool = BlockPool(24, 4)
    live: list[Request] = []
    for _ in range(3000):
        if live and rng.random() < 0.45:
            request = live.pop(rng.randrange(len(live)))
            pool.release(request.block_ids[0])
        else:
            chain = rng.randrange(4) * 1000
            hit = []
            while (block_id := pool.lookup(0, key(chain + len(hit)))) is not None and rng.random() < 0.9:
                hit.append(block_id)
            fresh = pool.acquire(hit, rng.randint(0, 6))
            if fresh is None:
                continue
            live.append(holder([*hit, *fresh]))
            for i, block_id in enumerate(fresh[: rng.randint(0, 6)]):
                pool.publish(0, key(chain + len(hit) + i), block_id)
        pool.check(live)
    assert pool.num_evictions > 100
