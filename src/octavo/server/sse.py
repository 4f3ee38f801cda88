"""Delivery: a stream of server-sent events or one JSON body, from the same deltas, aborted when the client goes.

Two tasks make a stream. One takes deltas as they come and turns them into bytes; the other writes whatever has
piled up, so that all that one engine step made for a client leaves in one write. A third waits for the
client's departure: it is an event, never polled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.engine.events import ChoiceDelta
from octavo.engine.wakeup import Wakeup
from octavo.errors import RequestError, Unavailable
from octavo.server.failure import error_event, internal_error
from octavo.server.middleware import CLIENT_GONE_STATUS
from octavo.server.service import Service
from octavo.server.wire import DONE_EVENT, KEEP_ALIVE_COMMENT

_MAX_PENDING_BYTES = 32 * 1024 * 1024


class ChunkWriter(Protocol):
    """Turns deltas into the events of one API."""

    def write(self, delta: ChoiceDelta) -> bytes:
        """The events of one delta; b"" if it shows nothing."""
        ...

    def end(self) -> bytes:
        """The events after the last delta, without [DONE]."""
        ...


class EventStream(Response):
    """Streams `deltas` through `writer`.

    The status goes out with the first event: a request that fails before it gets a proper status. When that
    takes longer than the keep-alive interval, the stream begins with a comment. An error after the start is an
    error event, then [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        service: Service,
        deltas: AsyncGenerator[ChoiceDelta, None],
        writer: ChunkWriter,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._service = service
        self._deltas = deltas
        self._writer = writer
        self._keep_alive_s = service.config.server.sse_keep_alive_s
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._changed = Wakeup()
        self._error: RequestError | None = None
        self._has_begun = False
        self._last_write_s = 0.0
        self._pump: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._pump = asyncio.create_task(self._take())
        self._pump.add_done_callback(lambda _: self._changed.set())
        departure = asyncio.create_task(client_departed(receive))
        departure.add_done_callback(lambda _: self._stop())
        keep_alive = asyncio.create_task(self._keep_alive()) if self._keep_alive_s > 0 else None
        tasks = [task for task in (self._pump, departure, keep_alive) if task is not None]
        try:
            with self._service.live(self._fail):
                await self._write(send, departure)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self) -> None:
        """Turn deltas into bytes until they end or fail."""
        try:
            async with aclosing(self._deltas) as deltas:
                async for delta in deltas:
                    if data := self._writer.write(delta):
                        self._pending.append(data)
                        self._pending_bytes += len(data)
                        self._changed.set()
                        if self._pending_bytes > _MAX_PENDING_BYTES:
                            raise Unavailable("The client reads its stream too slowly.", code="client_too_slow")
            self._pending.append(self._writer.end())
        except RequestError as error:
            self._error = error
        except Exception as error:
            self._error = internal_error(error)

    async def _write(self, send: Send, departure: asyncio.Task[None]) -> None:
        assert self._pump is not None
        while True:
            await self._changed.wait()
            self._changed.clear()
            has_ended = self._pump.done()
            if departure.done():
                return
            if has_ended:
                if self._error is not None:
                    if not self._has_begun and not self._pending:
                        raise self._error
                    self._pending.append(error_event(self._error))
                self._pending.append(DONE_EVENT)
            elif not self._pending:
                continue
            data = b"".join(self._pending)
            self._pending.clear()
            self._pending_bytes = 0
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": data, "more_body": not has_ended})
            if has_ended:
                return
            self._last_write_s = asyncio.get_running_loop().time()

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        self._last_write_s = loop.time()
        while True:
            silent_s = loop.time() - self._last_write_s
            if silent_s < self._keep_alive_s:
                await asyncio.sleep(self._keep_alive_s - silent_s)
                continue
            self._pending.append(KEEP_ALIVE_COMMENT)
            self._last_write_s = loop.time()
            self._changed.set()

    def _fail(self, error: RequestError) -> None:
        if self._pump is not None and not self._pump.done():
            self._error = error
            self._pump.cancel()

    def _stop(self) -> None:
        if self._pump is not None:
            self._pump.cancel()


async def until_departure(request: Request, service: Service, work: Coroutine[None, None, Response]) -> Response:
    """The answer that `work` makes, unless the client goes first: then `work` is cancelled."""
    task = asyncio.create_task(work)
    departure = asyncio.create_task(client_departed(request.receive))
    departure.add_done_callback(lambda _: task.cancel())
    failure: RequestError | None = None

    def fail(error: RequestError) -> None:
        nonlocal failure
        if not task.done():
            failure = error
            task.cancel()

    try:
        with service.live(fail):
            await asyncio.wait((task,))
    finally:
        task.cancel()
        departure.cancel()
        await asyncio.gather(task, departure, return_exceptions=True)
    if failure is not None:
        raise failure
    return Response(status_code=CLIENT_GONE_STATUS) if task.cancelled() else task.result()


async def client_departed(receive: Receive) -> None:
    """Return when the client has closed its connection. Its request body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
