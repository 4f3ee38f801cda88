"""One run over the input of `octavo run-batch`.

The requests go through the server's own application, without a socket, so they are read, refused and answered
exactly as over HTTP. Of a record either `error` is null and the request was answered, or it says why not; the
HTTP answer of a request that was refused stands in `response` as well.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp
from tqdm import tqdm

from octavo.cli.batch_file import BatchRequest, CustomIds, Line, Output, custom_id_of, parse_line, read_lines, record
from octavo.config import Config
from octavo.engine.async_engine import AsyncEngine
from octavo.errors import InvalidRequest
from octavo.server.app import create_app

_ATTEMPTS = 2  # of a request whose engine died under it

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


def batch_config(config: Config) -> Config:
    """`config` for a batch: the input is the queue, read only as fast as it is answered, so none is too long."""
    return replace(config, server=replace(config.server, max_queued_requests=sys.maxsize, api_key=()))


class Batch:
    """One run over the input: what has no record yet is answered, at most --max-num-seqs requests at once."""

    def __init__(self, source: Path, output: Output, config: Config, client: AsyncEngine) -> None:
        self._source = source
        self._output = output
        self._client = client
        self._app = create_app(client, config)
        self._max_line_bytes = config.server.max_body_bytes
        self._begun_s = time.monotonic()
        self.num_lines, self._num_to_do = self._count()
        self.num_answered = 0
        self.num_failed = output.num_failed_before
        self.num_output_tokens = 0

    async def run(self) -> None:
        """Answer everything. However it ends, the records of what was finished are in the output."""
        if not self._num_to_do:
            return
        try:
            await self._client.start()
            info = await self._client.wait_ready()
            await self._answer_all(self._lines_to_do(), info.max_num_seqs)
        finally:
            await self._client.close()

    def summary(self) -> str:
        seconds = time.monotonic() - self._begun_s
        return (
            f"{self.num_lines} requests: {self._output.num_done_before} done before, {self.num_answered} answered now, "
            f"{self.num_failed} failed in all. {self.num_output_tokens} tokens in {seconds:.1f} s, "
            f"{self.num_output_tokens / seconds:.1f} a second."
        )

    def _count(self) -> tuple[int, int]:
        """Requests in the input, and those without a record; also finds out that the output belongs to it."""
        num_lines = num_to_do = 0
        for line in read_lines(self._source, self._max_line_bytes):
            num_lines += 1
            num_to_do += not self._output.has(line)
        return num_lines, num_to_do

    def _lines_to_do(self) -> Iterator[tuple[Line, BatchRequest | InvalidRequest]]:
        """Each line without a record, with its request or what is wrong with it. One pass, a line at a time."""
        custom_ids = CustomIds()
        for line in read_lines(self._source, self._max_line_bytes):
            try:
                request: BatchRequest | InvalidRequest = parse_line(line, custom_ids, self._max_line_bytes)
            except InvalidRequest as error:
                request = error
            if not self._output.has(line):
                yield line, request

    async def _answer_all(self, lines: Iterator[tuple[Line, BatchRequest | InvalidRequest]], num_at_once: int) -> None:
        records: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(num_at_once)

        async def work() -> None:
            for line, request in lines:
                await records.put(await self._answer(line, request))

        try:
            async with asyncio.TaskGroup() as group:
                writer = group.create_task(self._write(records))
                await asyncio.wait([group.create_task(work()) for _ in range(min(num_at_once, self._num_to_do))])
                await records.put(None)
                await writer
        finally:
            self._output.append(_waiting(records))

    async def _write(self, records: asyncio.Queue[dict[str, Any] | None]) -> None:
        """Append records as they come, those of one engine step with one sync, until None."""
        total, done = self.num_lines, self._output.num_done_before
        with tqdm(desc="requests", total=total, initial=done, unit="", disable=not sys.stderr.isatty()) as progress:
            while (first := await records.get()) is not None:
                await asyncio.sleep(0)
                complete = [first, *_waiting(records)]
                self._output.append(complete)
                progress.update(len(complete))

    async def _answer(self, line: Line, request: BatchRequest | InvalidRequest) -> dict[str, Any]:
        if isinstance(request, InvalidRequest):
            self.num_failed += 1
            # The first line with an id owns it, so a record without one stands for a repetition.
            custom_id = None if request.code == "duplicate_custom_id" else custom_id_of(line)
            return record(line.record_id, custom_id, None, request.code, f"line {line.number}: {request.message}")
        for attempt in range(1, _ATTEMPTS + 1):
            status, headers, raw = await post(self._app, request.url, _encode(request.body))
            if status != HTTPStatus.SERVICE_UNAVAILABLE or attempt == _ATTEMPTS:
                break
            await self._client.wait_ready()
        body = _decode(raw)
        response = {"status_code": status, "request_id": headers.get("x-request-id"), "body": body}
        if status == HTTPStatus.OK:
            self.num_answered += 1
            self.num_output_tokens += body["usage"]["completion_tokens"]
            return record(line.record_id, request.custom_id, response, None, None)
        self.num_failed += 1
        error = body["error"]
        return record(line.record_id, request.custom_id, response, error["code"] or error["type"], error["message"])


def _waiting(records: asyncio.Queue[dict[str, Any] | None]) -> list[dict[str, Any]]:
    """What the queue holds now, up to its end."""
    found = []
    while not records.empty():
        if (item := records.get_nowait()) is None:
            records.put_nowait(None)
            break
        found.append(item)
    return found


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of the answer to a JSON request that is put to `app` without a socket."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"host", b"batch"),
    ]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    status, answer_headers, parts = 0, {}, []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        return await asyncio.Future()  # the client stays: it never disconnects

    async def send(message: MutableMapping[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            answer_headers.update({name.decode().lower(): value.decode() for name, value in message["headers"]})
        else:
            parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, answer_headers, b"".join(parts)
