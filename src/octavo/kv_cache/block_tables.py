"""The block tables of live requests, over one pool: match, admit, grow, share, advance, free.

A request's table has an entry per block of the tokens it has been given room for, the same number in every
group: -1 where a group's window has passed. Only `advance` publishes and trims, with committed progress, so
neither a draft nor a step still in flight can reach the prefix map, and no block leaves the window before it
was published.
"""

from __future__ import annotations

from itertools import zip_longest

from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.cache_spec import KvCacheSpec, first_visible_block, num_blocks, window_blocks
from octavo.kv_cache.prefix_cache import PrefixHit, block_key, match_prefix
from octavo.request import Request

BlockCopies = tuple[tuple[int, int], ...]  # (source, destination)


class BlockTables:
    """Keeps `Request.block_ids` and `Request.block_hashes`; nobody else writes them."""

    def __init__(self, spec: KvCacheSpec, pool: BlockPool, *, max_chunk: int, enable_prefix_caching: bool) -> None:
        assert spec.block_size == pool.block_size, (spec.block_size, pool.block_size)
        self._pool = pool
        self._block_size = spec.block_size
        self._max_chunk = max_chunk
        self._windows = tuple(group.window for group in spec.groups)
        self._groups_of_window = tuple(
            (window, tuple(g for g, other in enumerate(self._windows) if other == window))
            for window in dict.fromkeys(self._windows)
            if window is not None
        )
        self._enable_prefix_caching = enable_prefix_caching
        self._frozen: dict[int, tuple[tuple[int, ...], ...]] = {}  # by request id, until the table changes
        self.num_window_frees = 0

    @property
    def num_groups(self) -> int:
        return len(self._windows)

    def match(self, request: Request, root: bytes) -> PrefixHit:
        """The cached prefix of `request`, short of its last known token, which is always computed."""
        limit = (len(request.token_ids) - 1) // self._block_size
        self._extend_keys(request, root, limit)
        return match_prefix(request.block_hashes[:limit], self._windows, self._block_size, self._pool.lookup)

    def no_match(self) -> PrefixHit:
        return PrefixHit(0, tuple([] for _ in self._windows))

    def admit(self, request: Request, hit: PrefixHit, *, end: int, num_known: int, headroom: int) -> bool:
        """Give a request without blocks its prefix hit and room up to `end`, or change nothing.

        Refuses unless all `num_known` tokens would fit now and `headroom` blocks stay free beside them:
        whoever is let in should not be thrown out, or throw others out, in the next step.
        """
        assert not request.block_ids, "only a request without blocks is admitted"
        cached = [block_id for table in hit.block_ids for block_id in table if block_id >= 0]
        wanted = sum(self._num_new_blocks(group, hit, num_known) for group in range(self.num_groups))
        if not self._pool.can_acquire(cached, wanted + headroom):
            return False
        request.block_ids = [list(table) for table in hit.block_ids]
        num_new = num_blocks(end, self._block_size) - hit.num_blocks
        fresh = self._pool.acquire(cached, num_new * self.num_groups)
        assert fresh is not None, "a step needs no more than all known tokens"
        self._append(request, fresh, num_new)
        return True

    def grow(self, request: Request, start: int, end: int) -> BlockCopies | None:
        """Make room to write tokens [start, end), or change nothing and return None.

        A partly filled block that forks share must not be written by two of them: whoever comes first gets
        a copy, and the last keeps the original. Returns the copies, to be made before the step.
        """
        index, offset = divmod(start, self._block_size)
        # Forks share or copy a block in all groups at once, so one group answers for all.
        is_shared = offset > 0 and self._pool.is_shared(request.block_ids[0][index])
        num_new = num_blocks(end, self._block_size) - len(request.block_ids[0])
        if num_new <= 0 and not is_shared:
            return ()
        num_new = max(num_new, 0)
        fresh = self._pool.acquire((), (num_new + is_shared) * self.num_groups)
        if fresh is None:
            return None
        copies = []
        if is_shared:
            for table in request.block_ids:
                copies.append((table[index], fresh.pop()))
                table[index] = copies[-1][1]
            self._pool.release([source for source, _ in copies])
        self._append(request, fresh, num_new)
        return tuple(copies)

    def share(self, leader: Request, sibling: Request) -> None:
        """Give `sibling` references on all blocks of `leader`."""
        assert not sibling.block_ids, "a sibling has no blocks before its fork"
        self._pool.acquire([block_id for table in leader.block_ids for block_id in table if block_id >= 0], 0)
        sibling.block_ids = [list(table) for table in leader.block_ids]
        sibling.block_hashes = list(leader.block_hashes)

    def advance(self, request: Request, root: bytes, num_computed: int) -> None:
        """Record that the KV of the first `num_computed` tokens is committed: publish full blocks, trim windows."""
        old, size = request.num_computed_tokens, self._block_size
        request.num_computed_tokens = num_computed
        first, end = old // size, num_computed // size
        if end > first and self._enable_prefix_caching:
            self._extend_keys(request, root, end)
            for group, table in enumerate(request.block_ids):
                for index in range(first, end):
                    if table[index] >= 0:
                        self._pool.publish(group, request.block_hashes[index], table[index])
        for window, groups in self._groups_of_window:
            first = first_visible_block(old, window, size)
            end = first_visible_block(num_computed, window, size)
            if end > first:
                for group in groups:
                    self._trim(request, group, first, end)

    def free(self, request: Request) -> None:
        """Give up all blocks of `request`. What it published stays cached until it is evicted."""
        columns = zip_longest(*request.block_ids, fillvalue=-1)
        self._pool.release([block_id for column in columns for block_id in column if block_id >= 0])
        request.block_ids = []
        self._frozen.pop(request.request_id, None)

    def forget_keys(self, request: Request) -> None:
        """The root of a request without blocks has changed, and so does the key of each block to come."""
        assert not request.block_ids, "blocks published under one root may not go on under another"
        request.block_hashes = []

    def frozen(self, request: Request) -> tuple[tuple[int, ...], ...]:
        """The table as a value, for a batch."""
        table = self._frozen.get(request.request_id)
        if table is None:
            table = self._frozen[request.request_id] = tuple(map(tuple, request.block_ids))
        return table

    def _num_new_blocks(self, group: int, hit: PrefixHit, num_known: int) -> int:
        """Fresh blocks that `group` needs to compute all known tokens behind `hit`."""
        num_new = num_blocks(num_known, self._block_size) - hit.num_blocks
        window = self._windows[group]
        if window is None:
            return num_new
        num_hit = sum(block_id >= 0 for block_id in hit.block_ids[group])
        return min(num_new, window_blocks(window, self._max_chunk, self._block_size) - num_hit)

    def _append(self, request: Request, fresh: list[int], num_new: int) -> None:
        for group, table in enumerate(request.block_ids):
            table.extend(fresh[group * num_new : (group + 1) * num_new])
        self._frozen.pop(request.request_id, None)

    def _trim(self, request: Request, group: int, first: int, end: int) -> None:
        table = request.block_ids[group]
        self._pool.release(table[first:end])
        self.num_window_frees += end - first
        table[first:end] = [-1] * (end - first)
        self._frozen.pop(request.request_id, None)

    def _extend_keys(self, request: Request, root: bytes, num_keys: int) -> None:
        keys, size = request.block_hashes, self._block_size
        for index in range(len(keys), num_keys):
            parent = keys[-1] if keys else root
            keys.append(block_key(parent, request.token_ids[index * size : (index + 1) * size]))
