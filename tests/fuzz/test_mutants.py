"""The fuzz is worth its time only if it catches bugs: each of these must make it fail within a few hundred runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.fuzz.driver import play

from octavo.batch import ScheduledBatch
from octavo.kv_cache import block_tables, prefix_cache
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.block_tables import BlockTables
from octavo.kv_cache.prefix_cache import PrefixHit
from octavo.request import FinishReason, Request
from octavo.scheduler import scheduler as scheduler_module
from octavo.scheduler.live import InFlight, Live, Step
from octavo.scheduler.scheduler import Scheduler

MAX_RUNS = 400
Patch = pytest.MonkeyPatch


def publish_drafts(patch: Patch) -> None:
    """Blocks are published when they are planned, drafts included."""
    original = Scheduler._schedule

    def schedule(self: Scheduler, live: Live, start: int, num_tokens: int, num_drafts: int, step: Step) -> None:
        request, size = live.request, self._spec.block_size
        token_ids = [*request.token_ids, *request.draft_token_ids[:num_drafts]]
        original(self, live, start, num_tokens, num_drafts, step)
        key = live.root
        for index in range(min(start + num_tokens, len(token_ids)) // size):
            key = prefix_cache.block_key(key, token_ids[index * size : (index + 1) * size])
            for group, table in enumerate(request.block_ids):
                if self._enable_prefix_caching and index >= start // size and table[index] >= 0:
                    self._pool.publish(group, key, table[index])

    patch.setattr(Scheduler, "_schedule", schedule)


def hits_are_not_pinned(patch: Patch) -> None:
    """Hit blocks stay evictable while fresh ones are taken, as when lookup and reference are two calls."""
    original = BlockPool.acquire

    def acquire(self: BlockPool, cached: Sequence[int], num_new: int) -> list[int] | None:
        fresh = original(self, (), num_new)
        if fresh is not None:
            for block_id in cached:
                if block_id not in fresh:
                    original(self, (block_id,), 0)
        return fresh

    patch.setattr(BlockPool, "acquire", acquire)


def hits_take_no_reference(patch: Patch) -> None:
    original = BlockPool.acquire

    def acquire(self: BlockPool, cached: Sequence[int], num_new: int) -> list[int] | None:
        return original(self, [b for b in cached if self._ref_counts[b] == 0], num_new)

    patch.setattr(BlockPool, "acquire", acquire)


def progress_survives_preemption(patch: Patch) -> None:
    """A preempted request goes on where it stood, with fresh blocks."""
    stale: dict[int, int] = {}
    drop, schedule = Scheduler._drop_kv, Scheduler._schedule

    def drop_kv(self: Scheduler, live: Live) -> None:
        stale[live.request.request_id] = live.request.num_computed_tokens
        drop(self, live)

    def resume(self: Scheduler, live: Live, start: int, num_tokens: int, num_drafts: int, step: Step) -> None:
        skipped = max(0, min(stale.pop(live.request.request_id, 0) - start, num_tokens - 1))
        live.request.num_computed_tokens += skipped
        schedule(self, live, start + skipped, num_tokens - skipped, num_drafts, step)

    patch.setattr(Scheduler, "_drop_kv", drop_kv)
    patch.setattr(Scheduler, "_schedule", resume)


def hit_survives_a_failed_attempt(patch: Patch) -> None:
    """SCH-09: the hit found by the first attempt is used by a later one."""
    original = BlockTables.match
    hits: dict[int, PrefixHit] = {}

    def match(self: BlockTables, request: Request, root: bytes) -> PrefixHit:
        return hits.setdefault(request.request_id, original(self, request, root))

    patch.setattr(BlockTables, "match", match)


def full_hit(patch: Patch) -> None:
    """PFX-05: a prompt that is cached whole leaves nothing to compute."""

    def match(self: BlockTables, request: Request, root: bytes) -> PrefixHit:
        limit = len(request.token_ids) // self._block_size
        self._extend_keys(request, root, limit)
        keys = request.block_hashes[:limit]
        return block_tables.match_prefix(keys, self._windows, self._block_size, self._pool.lookup)

    patch.setattr(BlockTables, "match", match)


def evicted_entry_is_kept(patch: Patch) -> None:
    """PFX-08: the hash of an evicted block still finds it."""

    def evict(self: BlockPool) -> int:
        block_id, _ = self._cached.popitem(last=False)
        del self._key_of[block_id]
        return block_id

    patch.setattr(BlockPool, "_evict", evict)


def no_copy_on_write(patch: Patch) -> None:
    patch.setattr(BlockPool, "is_shared", lambda self, block_id: False)


def forks_take_no_reference(patch: Patch) -> None:
    def share(self: BlockTables, leader: Request, sibling: Request) -> None:
        sibling.block_ids = [list(table) for table in leader.block_ids]

    patch.setattr(BlockTables, "share", share)


def window_is_freed_one_early(patch: Patch) -> None:
    original = block_tables.first_visible_block
    patch.setattr(
        block_tables, "first_visible_block", lambda position, window, size: original(position + 1, window, size)
    )


def window_hit_is_one_short(patch: Patch) -> None:
    original = prefix_cache.first_visible_block

    def first_visible_block(position: int, window: int | None, size: int) -> int:
        return original(position, None if window is None else max(1, window - 1), size)

    patch.setattr(prefix_cache, "first_visible_block", first_visible_block)
    patch.setattr(prefix_cache, "num_blocks", lambda num_tokens, size: -(-max(0, num_tokens - 1) // size))


def _without(**dropped: Any) -> Callable[[Patch], None]:
    """A root key that leaves something out."""

    def seed(patch: Patch) -> None:
        original = scheduler_module.root_key
        patch.setattr(
            scheduler_module, "root_key", lambda identity, **fields: original(identity, **{**fields, **dropped})
        )

    return seed


salt_is_ignored = _without(salt="")
adapter_is_ignored = _without(extra=b"")
rope_variant_is_ignored = _without(rope_variant=0)


def parent_is_not_in_the_key(patch: Patch) -> None:
    original = block_tables.block_key
    patch.setattr(block_tables, "block_key", lambda parent, token_ids: original(b"", token_ids))


def keys_of_four_bits(patch: Patch) -> None:
    """PFX-01: a key short enough to collide serves another prompt's KV."""
    original = block_tables.block_key
    patch.setattr(block_tables, "block_key", lambda parent, token_ids: bytes([original(parent, token_ids)[0] & 15]))


def stale_step_writes_progress(patch: Patch) -> None:
    """A step that was in flight when its request lost its KV still counts as computed."""
    original = Scheduler._drop_kv

    def drop_kv(self: Scheduler, live: Live) -> None:
        original(self, live)
        live.epoch -= 1

    patch.setattr(Scheduler, "_drop_kv", drop_kv)


def token_of_a_preempted_request_is_lost(patch: Patch) -> None:
    original = Scheduler._append_sampled

    def append(
        self: Scheduler, part: InFlight, sampled: tuple[int, ...]
    ) -> tuple[FinishReason | None, tuple[int, ...]]:
        return original(self, part, sampled if part.epoch == part.live.epoch else ())

    patch.setattr(Scheduler, "_append_sampled", append)


def tokens_behind_a_stop_are_delivered(patch: Patch) -> None:
    """SPC-01: drafts accepted behind the end of the text."""

    def append(
        self: Scheduler, part: InFlight, sampled: tuple[int, ...]
    ) -> tuple[FinishReason | None, tuple[int, ...]]:
        reasons = [part.live.append(token_id) for token_id in sampled]
        return next((reason for reason in reasons if reason), None), sampled

    patch.setattr(Scheduler, "_append_sampled", append)


def rows_are_not_freed(patch: Patch) -> None:
    original = Scheduler.plan

    def plan(self: Scheduler) -> ScheduledBatch | None:
        self._freed_ids = self._freed_ids[1:]
        return original(self)

    patch.setattr(Scheduler, "plan", plan)


def finished_blocks_are_kept(patch: Patch) -> None:
    patch.setattr(BlockTables, "free", lambda self, request: setattr(request, "block_ids", []))


MUTANTS = (
    publish_drafts,
    hits_are_not_pinned,
    hits_take_no_reference,
    progress_survives_preemption,
    hit_survives_a_failed_attempt,
    full_hit,
    evicted_entry_is_kept,
    no_copy_on_write,
    forks_take_no_reference,
    window_is_freed_one_early,
    window_hit_is_one_short,
    salt_is_ignored,
    adapter_is_ignored,
    rope_variant_is_ignored,
    parent_is_not_in_the_key,
    keys_of_four_bits,
    stale_step_writes_progress,
    token_of_a_preempted_request_is_lost,
    tokens_behind_a_stop_are_delivered,
    rows_are_not_freed,
    finished_blocks_are_kept,
)
NAMES = {
    salt_is_ignored: "salt_is_ignored",
    adapter_is_ignored: "adapter_is_ignored",
    rope_variant_is_ignored: "rope_variant_is_ignored",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: NAMES.get(mutant, mutant.__name__))
def test_a_seeded_bug_is_caught(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    for seed in range(MAX_RUNS):
        try:
            play(seed)
        except Exception as error:
            print(f"run {seed}: {type(error).__name__}: {str(error)[:100]}")
            return
    pytest.fail(f"{MAX_RUNS} runs passed")
