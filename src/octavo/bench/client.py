"""One client of an OpenAI-compatible server: sends a streaming request and notes when its tokens came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.bench.http_client import ConnectionBroken, HttpClient
from octavo.bench.workload import BenchRequest

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_MAX_ERROR_CHARS = 500


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


@dataclass(slots=True)
class Record:
    """What one request did. Times are of time.perf_counter."""

    prompt_len: int | None  # tokens, as the data set counts them
    start_s: float = 0.0
    times_s: list[float] = field(default_factory=list)  # arrival of each piece of text
    texts: list[str] = field(default_factory=list)
    end_s: float = 0.0  # of the last event with a choice
    output_tokens: int | None = None  # these three as the server's usage says
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    status: int = 0  # of HTTP; 0: none came
    error: str = ""

    @property
    def has_succeeded(self) -> bool:
        return not self.error

    @property
    def ttft_s(self) -> float:
        """From the sending to the first text; of an answer without any text, to its end."""
        return (self.times_s[0] if self.times_s else self.end_s) - self.start_s

    @property
    def latency_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def itls_s(self) -> list[float]:
        """The gaps between pieces of text."""
        times = self.times_s
        return [later - earlier for earlier, later in zip(times, times[1:], strict=False)]


class EventReader:
    """Takes a response's bytes as they come, finds the events in them, and writes them into a record."""

    __slots__ = ("_body", "_rest", "has_ended", "record")

    _decode = msgspec.json.Decoder(_Event).decode

    def __init__(self, record: Record) -> None:
        self.record = record
        self.has_ended = False
        self._rest = b""
        self._body: list[bytes] = []  # of what has no events: an error's JSON

    def feed(self, data: bytes, now_s: float) -> None:
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)
            elif line and not line.startswith((b":", b"\r", b"event:", b"id:", b"retry:")):
                self._body.append(line)

    @property
    def plain_text(self) -> str:
        """What came beside events."""
        return b"\n".join([*self._body, self._rest]).decode("utf-8", "replace").strip()

    def _take(self, data: bytes, now_s: float) -> None:
        record = self.record
        if data == b"[DONE]":
            self.has_ended = True
            return
        try:
            event = self._decode(data)
        except msgspec.DecodeError as error:  # of the JSON, or of a field's type
            record.error = record.error or f"an event is not as the API has it: {error}: {data[:100]!r}"
            return
        if event.error is not None:
            record.error = record.error or f"error event: {_message(event.error)}"
        if event.choices:
            choice = event.choices[0]
            delta = choice.delta
            text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
            if text:
                record.times_s.append(now_s)
                record.texts.append(text)
            record.end_s = now_s
        if event.usage is not None:
            record.output_tokens = event.usage.completion_tokens
            record.prompt_tokens = event.usage.prompt_tokens
            details = event.usage.prompt_tokens_details
            if details is not None:
                record.cached_tokens = details.cached_tokens


class Client:
    """Sends requests to `endpoint` with the fields that all of them have."""

    def __init__(
        self, http: HttpClient, endpoint: str, *, is_chat: bool, fields: Mapping[str, Any], timeout_s: float
    ) -> None:
        self._http = http
        self._endpoint = endpoint
        self._is_chat = is_chat
        self._fields = dict(fields)
        self._timeout_s = timeout_s

    def build(self, request: BenchRequest) -> bytes:
        asked: dict[str, Any] = (
            {"messages": [{"role": "user", "content": request.prompt}]} if self._is_chat else {"prompt": request.prompt}
        )
        body = {"max_tokens": request.output_len, "stream": True, "stream_options": {"include_usage": True}}
        return self._http.build("POST", self._endpoint, asked | body | self._fields)

    async def run(self, data: bytes, prompt_len: int | None) -> Record:
        """Send what `build` made, and see it to its end. A failure is in the record, never raised."""
        record = Record(prompt_len)
        reader = EventReader(record)
        record.start_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s):
                status = await self._http.send(data, reader.feed)
        except ConnectionBroken as error:
            record.error = f"connection: {error}"
        except TimeoutError:
            record.error = f"no answer within {self._timeout_s:g} s (--request-timeout-sec)"
        else:
            record.status = status
            if status != 200:
                record.error = f"status {status}: {_reason(reader.plain_text)}"
            elif not record.error and not reader.has_ended and not record.end_s:
                record.error = f"no events came: {reader.plain_text[:_MAX_ERROR_CHARS] or 'an empty body'}"
        if not record.end_s:
            record.end_s = time.perf_counter()
        return record


def _reason(body: str) -> str:
    try:
        return _message(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:_MAX_ERROR_CHARS] or "an empty body"


def _message(error: Any) -> str:
    message = error.get("message") if isinstance(error, dict) else None
    return str(message or error)[:_MAX_ERROR_CHARS]
