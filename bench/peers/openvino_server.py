"""OpenVINO GenAI's continuous-batching pipeline behind the completions API of OpenAI.

    python bench/peers/openvino_server.py MODEL_FOLDER --port 8000

Runs in the environment of OpenVINO and imports nothing of this project. The pipeline steps in a process of its own,
because a step would hold up the event loop that writes the streams; the two exchange token ids through a pipe. As
thin as it can be, so that what is measured is the pipeline: POST /v1/completions for one prompt, with and without
streaming, GET /health and /v1/models. A field that it does not know is refused.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIELDS = frozenset(
    "model prompt max_tokens temperature top_p top_k seed ignore_eos stream stream_options".split()
)  # fmt: skip
MAX_BODY_BYTES = 8 * 2**20
NOTHING_TO_DO_S = 0.5


@dataclass(frozen=True)
class Submission:
    """A request on its way to the pipeline's process."""

    number: int
    token_ids: list[int]
    max_tokens: int
    ignore_eos: bool
    temperature: float
    top_p: float
    top_k: int
    seed: int


@dataclass(frozen=True)
class Cancellation:
    number: int


@dataclass(frozen=True)
class Tokens:
    """New tokens of a request; `finish_reason` with the last ones, `error` when the request came to nothing."""

    number: int
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Settings:
    folder: str
    cache_gib: int
    max_batched_tokens: int
    max_requests: int
    properties: dict[str, Any]


# -- the pipeline's process ----------------------------------------------------------------------------------


def run_pipeline(settings: Settings, pipe: multiprocessing.connection.Connection) -> None:
    """Step while there are requests, until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import openvino as ov
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = settings.cache_gib
    scheduler.max_num_batched_tokens = settings.max_batched_tokens
    scheduler.max_num_seqs = settings.max_requests
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(
        settings.folder, scheduler_config=scheduler, device="CPU", properties=settings.properties
    )
    pipe.send("ready")
    handles: dict[int, Any] = {}

    def submit(submission: Submission) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = submission.max_tokens
        config.ignore_eos = submission.ignore_eos
        config.eos_token_id = pipeline.get_config().eos_token_id
        config.stop_token_ids = pipeline.get_config().stop_token_ids
        if submission.temperature > 0:
            config.do_sample = True
            config.temperature = submission.temperature
            config.top_p = submission.top_p
            config.rng_seed = submission.seed
            if submission.top_k > 0:
                config.top_k = submission.top_k
        ids = ov.Tensor(np_array(submission.token_ids))
        try:
            handles[submission.number] = pipeline.add_request(submission.number, ids, config)
        except Exception as error:  # the bindings raise RuntimeError and ValueError, at their discretion
            pipe.send([Tokens(submission.number, [], error=str(error))])

    while True:
        while pipe.poll(0 if pipeline.has_non_finished_requests() else NOTHING_TO_DO_S):
            try:
                message = pipe.recv()
            except EOFError:
                return
            if isinstance(message, Submission):
                submit(message)
            elif (handle := handles.pop(message.number, None)) is not None:
                handle.cancel()
        if not pipeline.has_non_finished_requests():
            continue
        pipeline.step()
        if news := _collect(handles, genai):
            pipe.send(news)


def np_array(token_ids: list[int]) -> Any:
    import numpy as np

    return np.array([token_ids], dtype=np.int64)


def _collect(handles: dict[int, Any], genai: Any) -> list[Tokens]:
    """What the last step produced; requests that have ended leave `handles`."""
    reasons = {genai.GenerationFinishReason.STOP: "stop", genai.GenerationFinishReason.LENGTH: "length"}
    news = []
    for number, handle in list(handles.items()):
        token_ids: list[int] = []
        reason = None
        while handle.can_read():
            (output,) = handle.read().values()
            token_ids += output.generated_ids
            reason = reasons.get(output.finish_reason, reason)
        status = handle.get_status()
        error = None
        if status != genai.GenerationStatus.RUNNING:
            del handles[number]
            if status != genai.GenerationStatus.FINISHED:
                error = f"the pipeline ended the request as {status}"
            reason = reason or "length"
        if token_ids or reason or error:
            news.append(Tokens(number, token_ids, reason, error))
    return news


# -- the server's process ------------------------------------------------------------------------------------


class BadRequest(Exception):
    pass


class Engine:
    """The other process, from this side: submits requests and hands out their tokens."""

    def __init__(self, settings: Settings) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_pipeline, args=(settings, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._streams: dict[int, asyncio.Queue[Tokens]] = {}
        self._numbers = itertools.count()
        if self._pipe.recv() != "ready":
            raise RuntimeError("the pipeline did not start")

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        threading.Thread(target=self._receive, args=(loop,), daemon=True).start()

    def _receive(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                news = self._pipe.recv()
            except (EOFError, OSError):
                os._exit(1)  # the pipeline is gone, and with it what this server is for
            loop.call_soon_threadsafe(self._deliver, news)

    def _deliver(self, news: list[Tokens]) -> None:
        for tokens in news:
            if (queue := self._streams.get(tokens.number)) is not None:
                queue.put_nowait(tokens)

    async def generate(self, **fields: Any) -> AsyncIterator[Tokens]:
        number = next(self._numbers)
        queue = self._streams[number] = asyncio.Queue()
        is_over = False
        try:
            self._pipe.send(Submission(number=number, **fields))
            while not is_over:
                tokens = await queue.get()
                is_over = tokens.finish_reason is not None or tokens.error is not None
                yield tokens
        finally:
            del self._streams[number]
            if not is_over:
                self._pipe.send(Cancellation(number))

    def close(self) -> None:
        self._pipe.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()


class Server:
    def __init__(self, engine: Engine, folder: Path, name: str) -> None:
        from tokenizers import Tokenizer

        self._engine = engine
        self._name = name
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request a connection."""
        try:
            method, path, body = await _read_request(reader)
            match method, path:
                case "GET", "/health":
                    _respond(writer, 200, {})
                case "GET", "/v1/models":
                    _respond(writer, 200, {"object": "list", "data": [{"id": self._name, "object": "model"}]})
                case "POST", "/v1/completions":
                    await self._complete(body, writer)
                case _:
                    _respond(writer, 404, _error(f"there is no {method} {path}"))
            await writer.drain()
        except BadRequest as error:
            _respond(writer, 400, _error(str(error)))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _complete(self, body: bytes, writer: asyncio.StreamWriter) -> None:
        request, fields = self._parse(body)
        num_prompt, num_output = len(fields["token_ids"]), 0
        stream = _TextStream(self._tokenizer)
        is_streaming = request.get("stream", False)
        texts: list[str] = []
        reason = error = None
        if is_streaming:
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n"
                b"Connection: close\r\n\r\n"
            )
        generated = self._engine.generate(**fields)
        try:
            async for tokens in generated:
                num_output += len(tokens.token_ids)
                text = "".join(stream.step(token_id) for token_id in tokens.token_ids)
                reason, error = tokens.finish_reason, tokens.error
                if error is None and is_streaming:
                    _send_event(writer, self._answer(text, reason))
                    await writer.drain()
                texts.append(text)
        finally:
            await generated.aclose()
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }
        if not is_streaming:
            answer = _error(error) if error else {**self._answer("".join(texts), reason), "usage": usage}
            _respond(writer, 500 if error else 200, answer)
            return
        if error:
            _send_event(writer, _error(error))
        elif (request.get("stream_options") or {}).get("include_usage"):
            _send_event(writer, {**self._answer("", None), "choices": [], "usage": usage})
        _send_chunk(writer, b"data: [DONE]\n\n")
        _send_chunk(writer, b"")

    def _parse(self, body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            request = json.loads(body)
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from None
        if not isinstance(request, dict):
            raise BadRequest("the body is not a JSON object")
        if unknown := request.keys() - FIELDS:
            raise BadRequest(f"this server does not know {', '.join(sorted(unknown))}")
        prompt = request.get("prompt")
        if isinstance(prompt, str):
            token_ids = self._tokenizer.encode(prompt).ids
        elif isinstance(prompt, list) and prompt and all(type(token_id) is int for token_id in prompt):
            token_ids = prompt
        else:
            raise BadRequest("prompt must be text, or a list of token ids")
        temperature = request.get("temperature", 1.0)
        return request, {
            "token_ids": token_ids,
            "max_tokens": request.get("max_tokens", 16),
            "ignore_eos": request.get("ignore_eos", False),
            "temperature": temperature,
            "top_p": request.get("top_p", 1.0),
            "top_k": request.get("top_k", 0),
            "seed": request.get("seed", 0),
        }

    def _answer(self, text: str, reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return {
            "id": "cmpl",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [choice],
        }


class _TextStream:
    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def step(self, token_id: int) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""


async def _read_request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ", 2)
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
    length = int(headers.get("content-length", "0"))
    if length > MAX_BODY_BYTES:
        raise BadRequest(f"the body has {length} bytes; the limit is {MAX_BODY_BYTES}")
    return method, path, await reader.readexactly(length)


def _respond(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any]) -> None:
    body = json.dumps(answer).encode()
    reason = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error"}[status]
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message}}


def _send_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    _send_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _send_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def serve(engine: Engine, folder: Path, host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    engine.listen(loop)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    server = Server(engine, folder, folder.name)
    listener = await asyncio.start_server(server.handle, host, port)
    await stopped.wait()
    listener.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model that optimum-cli exported")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--cache-gib", type=int, default=4, help="size of the KV cache")
    parser.add_argument("--max-batched-tokens", type=int, default=256, help="the pipeline's own default is 256")
    parser.add_argument("--max-requests", type=int, default=256, help="the pipeline's own default is 256")
    parser.add_argument(
        "--property", action="append", default=[], metavar="NAME=VALUE", help="of OpenVINO's CPU device"
    )
    arguments = parser.parse_args()
    properties = dict(entry.split("=", 1) for entry in arguments.property)
    settings = Settings(
        str(arguments.folder), arguments.cache_gib, arguments.max_batched_tokens, arguments.max_requests, properties
    )
    engine = Engine(settings)
    try:
        asyncio.run(serve(engine, arguments.folder, arguments.host, arguments.port))
    finally:
        engine.close()


if __name__ == "__main__":
    main()
