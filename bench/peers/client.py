"""A load client for completions that streams: one connection a request, raw asyncio, nothing parsed while it is timed.

It shares the cores with the server that it measures, so it only notes when each piece of a response came; the pieces
are read as events once all requests have ended.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

HOST = "127.0.0.1"
MODEL_NAME = "model"  # what every server is told to call its model


class RequestFailed(Exception):
    """The server refused a request, broke it off, or gave another number of tokens than it was asked for."""


@dataclass
class Stream:
    """What one request saw. Times are of the events that carried tokens."""

    start_s: float
    times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    text: str = ""

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False)]


def encode_request(prompt: str | Sequence[int], max_tokens: int) -> bytes:
    """The bytes of a greedy completion that runs to `max_tokens`."""
    fields = {
        "model": MODEL_NAME,
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def send(port: int, request: bytes, max_tokens: int) -> Stream:
    """Send one request and read its stream to the end. Raises RequestFailed."""
    start_s = time.perf_counter()
    pieces: list[tuple[float, bytes]] = []
    try:
        reader, writer = await asyncio.open_connection(HOST, port, limit=2**20)
        try:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            is_chunked = b"transfer-encoding: chunked" in head.lower()
            while piece := await (_read_chunk(reader) if is_chunked else reader.read(2**16)):
                pieces.append((time.perf_counter(), piece))
        finally:
            writer.close()
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise RequestFailed(f"the connection broke: {type(error).__name__}: {error}") from error
    status = head.split(b" ", 2)[1].decode()
    if status != "200":
        said = b"".join(piece for _, piece in pieces)[:500].decode(errors="replace")
        raise RequestFailed(f"status {status}: {said}")
    stream = _read_events(start_s, pieces)
    if stream.num_tokens != max_tokens:
        raise RequestFailed(
            f"{stream.num_tokens} tokens came, {max_tokens} were asked for; text: {stream.text[:200]!r}"
        )
    return stream


async def _read_chunk(reader: asyncio.StreamReader) -> bytes:
    size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
    return (await reader.readexactly(size + 2))[:-2]


def _read_events(start_s: float, pieces: Sequence[tuple[float, bytes]]) -> Stream:
    """An event counts from when its last byte came."""
    stream = Stream(start_s, end_s=pieces[-1][0] if pieces else start_s)
    texts: list[str] = []
    pending = b""
    for time_s, piece in pieces:
        *lines, pending = (pending + piece).split(b"\n")
        for line in lines:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            event = json.loads(line[5:])
            if event.get("error"):
                raise RequestFailed(f"the stream brought an error: {event['error']}")
            for choice in event.get("choices") or ():
                text = choice.get("text") or ""
                # Some servers end with an event that has a reason but no token.
                if text or choice.get("finish_reason") is None or not stream.times_s:
                    stream.times_s.append(time_s)
                texts.append(text)
            if usage := event.get("usage"):
                stream.num_prompt_tokens, stream.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    if not stream.times_s:
        raise RequestFailed("the stream ended without a token")
    stream.text = "".join(texts)
    return stream


async def run_load(
    port: int, requests: Sequence[bytes], max_tokens: int, concurrency: int
) -> tuple[list[Stream], float]:
    """All requests, `concurrency` at a time, each as soon as another ends; returns them and the seconds it took.

    Raises the RequestFailed of the first that fails, after the others were given up.
    """
    queue = iter(requests)
    streams: list[Stream] = []

    async def work() -> None:
        for request in queue:
            streams.append(await send(port, request, max_tokens))

    start_s = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work())
    except* RequestFailed as failures:
        raise failures.exceptions[0] from None
    return streams, time.perf_counter() - start_s
