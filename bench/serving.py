"""Shared by the scripts here: a server of our own, streaming clients, and how they are timed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import httpx

_WORDS = (
    "river stone garden window market bridge winter silver teacher morning forest engine letter mountain paper "
    "summer kitchen island doctor music harbour copper violin sparrow coffee orchard granite castle"
).split()


@contextlib.contextmanager
def server(*options: str, timeout_s: float = 300) -> Iterator[str]:
    """`octavo serve` with `options` on a free port; yields its base URL once it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "octavo.cli", "serve", "--port", str(port), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=sys.stderr, env=os.environ)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            if process.poll() is not None:
                raise SystemExit(f"the server ended with {process.returncode}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == 200:
                    break
            if time.monotonic() > deadline:
                raise SystemExit(f"the server was not ready within {timeout_s} s")
            time.sleep(0.1)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def words(count: int, seed: object) -> str:
    """About `count` tokens of plain English, different for each seed from its first word on."""
    rng = random.Random(str(seed))
    return " ".join(rng.choice(_WORDS) for _ in range(count))


@dataclass
class Stream:
    """What one streaming client saw."""

    start_s: float = 0.0
    times_s: list[float] = field(default_factory=list)  # arrival of each chunk that carried tokens
    num_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times_s[0] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)]


async def stream(client: httpx.AsyncClient, prompt: str | list[int], max_tokens: int, **fields: object) -> Stream:
    """One streamed completion that runs to `max_tokens`."""
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    seen = Stream(start_s=time.perf_counter())
    async with client.stream("POST", "/v1/completions", json=body, timeout=600) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("error"):
                raise RuntimeError(event["error"])
            if event["choices"]:
                seen.times_s.append(time.perf_counter())
            if event.get("usage"):
                seen.num_tokens = event["usage"]["completion_tokens"]
    return seen


async def concurrently(url: str, prompts: list[str], max_tokens: int, concurrency: int) -> tuple[list[Stream], float]:
    """Run all prompts, `concurrency` at a time; returns the streams and the seconds they took together."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, limits=limits, trust_env=False) as client:
        gate = asyncio.Semaphore(concurrency)

        async def one(prompt: str) -> Stream:
            async with gate:
                return await stream(client, prompt, max_tokens)

        start = time.perf_counter()
        streams = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return streams, time.perf_counter() - start
