"""How messages reach an engine loop and leave it: a ZeroMQ pair between processes, queues within one."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol

import zmq

from octavo.engine.messages import FromEngine, ToEngine, decode_to_engine, encode


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
    """For an engine in a process of its own."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)

    def receive(self, *, wait: bool) -> list[ToEngine]:
        messages = [decode_to_engine(self._socket.recv())] if wait else []
        while True:
            try:
                messages.append(decode_to_engine(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages

    def send(self, message: FromEngine) -> None:
        self._socket.send(encode(message))

    def close(self) -> None:
        self._socket.close()
