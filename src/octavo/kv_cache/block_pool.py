"""The pool of KV blocks: who holds each, and which hold a prefix that a later request may reuse.

Every block is in exactly one state:

    used     one or more references; may be published
    cached   no reference, published: a prefix hit revives it, and it is evicted least recently used first
    free     no reference, unpublished

Only the scheduler calls it, through `BlockTables`. The prefix map and its inverse change together.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from octavo.request import Request

PrefixKey = tuple[int, bytes]  # (group, block key)


class BlockPool:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._ref_counts = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._block_of: dict[PrefixKey, int] = {}
        self._key_of: dict[int, PrefixKey] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `acquire` can hand out, evicting what is cached."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def usage(self) -> float:
        """The share of blocks that requests hold."""
        return 1.0 - self.num_free / self.num_blocks if self.num_blocks else 0.0

    def lookup(self, group: int, key: bytes) -> int | None:
        """The block that holds this prefix block now; it stays valid until the next `acquire`."""
        return self._block_of.get((group, key))

    def is_shared(self, block_id: int) -> bool:
        return self._ref_counts[block_id] > 1

    def can_acquire(self, cached: Sequence[int], num_new: int) -> bool:
        revived = sum(self._ref_counts[block_id] == 0 for block_id in cached)
        return self.num_free - revived >= num_new

    def acquire(self, cached: Sequence[int], num_new: int) -> list[int] | None:
        """Take a reference on every `cached` block and `num_new` fresh ones, or change nothing.

        Returns the fresh block ids, or None when fewer than `num_new` would be left beside `cached`. Free
        blocks go first, then the least recently used cached ones, whose prefix is forgotten.
        """
        if not self.can_acquire(cached, num_new):
            return None
        for block_id in cached:
            if self._ref_counts[block_id] == 0:
                del self._cached[block_id]
            self._ref_counts[block_id] += 1
        fresh = []
        for _ in range(num_new):
            block_id = self._free.pop() if self._free else self._evict()
            self._ref_counts[block_id] = 1
            fresh.append(block_id)
        return fresh

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference of each. Give a prefix first block first: its tail is then evicted before its head."""
        for block_id in reversed(block_ids):
            self._ref_counts[block_id] -= 1
            assert self._ref_counts[block_id] >= 0, f"block {block_id} released more often than acquired"
            if self._ref_counts[block_id] == 0:
                if block_id in self._key_of:
                    self._cached[block_id] = None
                else:
                    self._free.append(block_id)

    def publish(self, group: int, key: bytes, block_id: int) -> bool:
        """Offer a used block, full of committed tokens, for reuse. False when that prefix or block is known already."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} published without a holder"
        if (group, key) in self._block_of or block_id in self._key_of:
            return False
        self._block_of[group, key] = block_id
        self._key_of[block_id] = (group, key)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget every published block. False when requests hold some: those stay valid for their holders alone."""
        none_held = len(self._key_of) == len(self._cached)
        self._free.extend(self._cached)
        self._cached.clear()
        self._block_of.clear()
        self._key_of.clear()
        return none_held

    def check(self, live: Iterable[Request]) -> None:
        """Assert every invariant, given all requests that hold blocks."""
        held = [0] * self.num_blocks
        for request in live:
            for table in request.block_ids:
                for block_id in table:
                    if block_id >= 0:
                        held[block_id] += 1
        assert held == self._ref_counts, "reference counts drifted from the block tables"
        num_used = sum(count > 0 for count in held)
        assert len(self._free) + len(self._cached) + num_used == self.num_blocks, "a block is lost or counted twice"
        unused = {*self._free, *self._cached}
        assert len(unused) == self.num_free, "a block is free twice"
        assert all((held[block_id] == 0) == (block_id in unused) for block_id in range(self.num_blocks))
        assert {key: block_id for block_id, key in self._key_of.items()} == self._block_of, (
            "the prefix map lost its pair"
        )
        assert all(block_id in self._key_of for block_id in self._cached), "a cached block has no prefix"
        assert not any(block_id in self._key_of for block_id in self._free), "a free block still has a prefix"

    def _evict(self) -> int:
        block_id, _ = self._cached.popitem(last=False)
        del self._block_of[self._key_of.pop(block_id)]
        self.num_evictions += 1
        return block_id
