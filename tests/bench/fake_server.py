"""An OpenAI-compatible server in the test's own process, which does what the test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "fake"


@dataclass
class Seen:
    """One request as it came."""

    connection: int
    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """How a completion is answered. Times are slept before each piece; the pieces are "a", "b", ..."""

    first_s: float = 0.0
    gap_s: float = 0.0
    pieces: int | None = None  # default: max_tokens of the request
    usage: dict[str, Any] | None = None  # default: as many tokens as pieces
    has_usage: bool = True
    status: int = 200
    error: str | None = None  # the body of another status, or an event after the first piece
    breaks_after: int | None = None  # closes the connection after so many pieces
    body: bytes | None = None  # a whole body instead of events
    framing: str = "chunked"  # or "close": the body ends with the connection
    keeps_alive: bool = True
    line_end: str = "\n"


@dataclass
class FakeServer:
    reply: Callable[[dict[str, Any]], Reply]
    models: list[dict[str, Any]] | None
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    most_open: int = 0  # completions in progress at once

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def completions(self) -> list[Seen]:
        return [request for request in self.seen if request.method == "POST"]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        connection = self.num_connections
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                start, *lines = head.strip().split("\r\n")
                method, path, _ = start.split(" ")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                body = json.loads(data) if data else None
                self.seen.append(Seen(connection, method, path, headers, body))
                if not await self.answer(method, body, writer) or headers.get("connection") == "close":
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, method: str, body: Any, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        if method == "GET":
            if self.models is None:
                self.plain(writer, 404, b'{"error": {"message": "no such route"}}')
            else:
                self.plain(writer, 200, json.dumps({"object": "list", "data": self.models}).encode())
            return True
        reply = self.reply(body)
        if reply.status != 200 or reply.body is not None:
            error = json.dumps({"error": {"message": reply.error}}).encode()
            self.plain(writer, reply.status, error if reply.body is None else reply.body)
            return reply.keeps_alive
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            return await self.stream(reply, body, writer)
        finally:
            self.num_open -= 1

    def plain(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    async def stream(self, reply: Reply, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        is_chunked = reply.framing == "chunked"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n" if is_chunked else b"Connection: close\r\n")
        writer.write(b"\r\n")

        def send(event: Any) -> None:
            text = event if isinstance(event, str) else json.dumps(event)
            data = f"data: {text}{reply.line_end * 2}".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(data), data) if is_chunked else data)

        is_chat = "messages" in body
        if is_chat:
            send({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        num_pieces = body["max_tokens"] if reply.pieces is None else reply.pieces
        for i in range(num_pieces):
            await asyncio.sleep(reply.gap_s if i else reply.first_s)
            if i == reply.breaks_after:
                return False
            piece = chr(ord("a") + i % 26)
            send({"choices": [{"delta": {"content": piece}} if is_chat else {"text": piece, "finish_reason": None}]})
            if reply.error is not None:
                send({"error": {"message": reply.error}})
                break
        if reply.has_usage:
            tokens = {"prompt_tokens": 7, "completion_tokens": num_pieces}
            send({"choices": [], "usage": tokens if reply.usage is None else reply.usage})
        send("[DONE]")
        if is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return is_chunked and reply.keeps_alive


@asynccontextmanager
async def fake_server(
    reply: Reply | Callable[[dict[str, Any]], Reply] | None = None,
    models: Sequence[dict[str, Any]] | None = ({"id": MODEL},),
) -> AsyncIterator[FakeServer]:
    """Listens on a free port. `models` is what /v1/models lists; None: the route is not there."""
    if isinstance(reply, Reply) or reply is None:
        constant = reply or Reply()
        made = FakeServer(lambda body: constant, None if models is None else list(models))
    else:
        made = FakeServer(reply, None if models is None else list(models))
    server = await asyncio.start_server(made.handle, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
