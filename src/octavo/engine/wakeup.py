"""Wakes the one task that waits for more: an `asyncio.Event` without its queue of waiters."""

from __future__ import annotations

import asyncio


class Wakeup:
    """Belongs to one event loop, and to one task that waits."""

    __slots__ = ("_is_set", "_waiter")

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def clear(self) -> None:
        self._is_set = False

    async def wait(self) -> None:
        """Return once it is set; whoever waits clears it before looking at what there is."""
        if self._is_set:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
