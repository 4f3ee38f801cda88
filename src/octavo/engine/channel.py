"""How messages reach an engine loop and leave it: a socket between processes, queues within one."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from octavo.engine.framing import FrameReader, framed
from octavo.engine.messages import FromEngine, Stop, ToEngine, decode_to_engine, encode

_READ_BYTES = 256 * 1024


class EngineChannel(Protocol):
    """The loop's end."""

    def receive(self, *, wait: bool) -> list[ToEngine]:
        """All messages that have arrived; with `wait`, block until there is at least one."""
        ...

    def send(self, message: FromEngine) -> None: ...


class QueueChannel:
    """For an engine in a thread of its client's process."""

    def __init__(self, deliver: Callable[[FromEngine], None]) -> None:
        """`deliver` is called in the loop's thread."""
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._deliver = deliver

    def post(self, message: ToEngine) -> None:
        """The client's end."""
        self._inbox.put(message)

    def receive(self, *, wait: bool) -> list[ToEngine]:
        messages = [self._inbox.get()] if wait else []
        while True:
            try:
                messages.append(self._inbox.get_nowait())
            except queue.Empty:
                return messages

    def send(self, message: FromEngine) -> None:
        self._deliver(message)


class SocketChannel:
    """For an engine in a process of its own, over its end of a socket pair.

    A client that does not read holds the engine up once the socket's buffer is full. One that has closed its end
    is taken for one that said stop.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = FrameReader()

    def receive(self, *, wait: bool) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except ConnectionError:
                data = b""
            if not data:
                return [*messages, Stop()]
            messages += map(decode_to_engine, self._frames.feed(data))

    def send(self, message: FromEngine) -> None:
        with suppress(ConnectionError):  # the next `receive` tells
            self._socket.sendall(framed(encode(message)))

    def close(self) -> None:
        self._socket.close()
