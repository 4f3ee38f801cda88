"""HTTP/1.1 with limits that uvicorn's own protocol lacks: how large a request head is, and how long it takes.

Bodies are bounded where they are read (body.py). A body that nobody wants is discarded for a while, so that
the client gets its answer instead of a reset connection; then the connection is cut.
"""

from __future__ import annotations

import asyncio
import enum
from typing import Any, ClassVar

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from octavo.errors import InvalidRequest, RequestError
from octavo.server.failure import HeadTooLarge, RequestTimeout, error_object
from octavo.server.wire import json_bytes

_LINGER_S = 2.0
_LINGER_BYTES = 64 * 1024 * 1024


class _Phase(enum.Enum):
    IDLE = enum.auto()  # before the first byte of a message
    HEAD = enum.auto()
    BODY = enum.auto()


class BoundedProtocol(HttpToolsProtocol):
    max_head_bytes: ClassVar[int]
    head_timeout_s: ClassVar[float]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.access_log = False  # middleware.py logs, without queries
        self._phase = _Phase.IDLE
        self._head_bytes = 0
        self._discarded_bytes = 0
        self._refusal: RequestError | None = None
        self._timer: asyncio.TimerHandle | None = None  # of the head, or of a lingering end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer(self.head_timeout_s, self._on_head_timeout)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self._is_body_unwanted:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > _LINGER_BYTES:
                self.transport.close()
            if self._refusal is not None:
                return
        phase = self._phase
        super().data_received(data)
        if self._phase is _Phase.HEAD and phase is not _Phase.BODY:
            self._head_bytes += len(data)
            if self._head_bytes > self.max_head_bytes:
                self._refuse(self._head_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._head_bytes = self._discarded_bytes = 0
        if self._timer is None:
            self._set_timer(self.head_timeout_s, self._on_head_timeout)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._phase = _Phase.BODY
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_head_bytes:
            self._refuse(self._head_too_large())
            raise ValueError("request head too large")  # stops the parser, which then calls send_400_response
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._phase = _Phase.IDLE
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_body_unwanted and not self.transport.is_closing():
            self._set_timer(_LINGER_S, self.transport.close)

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for whatever its parser refuses."""
        if self._refusal is None:
            self._refuse(InvalidRequest("This is not a valid HTTP request."))

    @property
    def _is_body_unwanted(self) -> bool:
        return self._phase is _Phase.BODY and self.cycle is not None and self.cycle.response_complete

    def _on_head_timeout(self) -> None:
        self._timer = None
        if self._phase is _Phase.IDLE:
            self.transport.close()
        else:
            self._refuse(RequestTimeout(f"The request head did not arrive within {self.head_timeout_s:g} seconds."))

    def _refuse(self, error: RequestError) -> None:
        """Answer without the application, then cut the connection."""
        self._refusal = error
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()  # an answer is under way: nothing can be said beside it
            return
        body = json_bytes(error_object(error))
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._set_timer(_LINGER_S, self.transport.close)

    def _head_too_large(self) -> RequestError:
        return HeadTooLarge(f"The request head is larger than {self.max_head_bytes} bytes (--max-header-bytes).")

    def _set_timer(self, delay_s: float, action: Any) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(delay_s, action)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def bounded_protocol(max_head_bytes: int, head_timeout_s: float) -> type[BoundedProtocol]:
    """A protocol class for uvicorn's `http` option, with these limits."""
    limits = {"max_head_bytes": max_head_bytes, "head_timeout_s": head_timeout_s}
    return type("BoundedProtocol", (BoundedProtocol,), limits)
