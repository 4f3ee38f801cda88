"""Admission: full queues are refused at once, counts are bounded, hard work delays nobody."""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tests.server.harness import FakeEngine, configured, running, wait_until
from tests.server.serve_fake import serving

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import Unavailable
from octavo.server import service

PATH = "/v1/completions"
BODY = {"prompt": "Hi", "max_tokens": 3, "ignore_eos": True}


def test_a_full_queue_refuses_at_once(tokenizer: Tokenizer) -> None:
    """SCH-06"""
    config = configured(max_queued_requests=8)
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, ThreadPoolExecutor(40) as pool:
        it.engine.steps = asyncio.Semaphore(0)
        with it.client(limits=httpx.Limits(max_connections=100)) as client:
            answers = [pool.submit(client.post, PATH, json=BODY) for _ in range(40)]
            assert wait_until(lambda: sum(answer.done() for answer in answers) == 32, 20)
            assert it.engine.num_queued == 8
            for answer in answers:
                if answer.done():
                    response = answer.result()
                    assert response.status_code == 503 and response.headers["retry-after"] == "1"
                    assert response.json()["error"]["code"] == "queue_full"
            it.call(lambda: it.engine.allow(100))
            statuses = sorted(answer.result(10).status_code for answer in answers)
            assert statuses == [200] * 8 + [503] * 32
            assert client.post(PATH, json=BODY).status_code == 200
            refused = [line for line in client.get("/metrics").text.splitlines() if "queue_full" in line]
            assert refused and refused[0].endswith(" 32.0")


def test_n_and_prompts_count_as_many_requests(tokenizer: Tokenizer) -> None:
    """SCH-06"""
    config = configured(max_queued_requests=8)
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        it.engine.steps = asyncio.Semaphore(0)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(client.post, PATH, json={**BODY, "n": 5})
            assert wait_until(lambda: it.engine.num_queued == 5)
            assert client.post(PATH, json={**BODY, "n": 4}).status_code == 503
            assert client.post(PATH, json={**BODY, "n": 2, "prompt": ["a", "b"], "stream": True}).status_code == 503
            too_many = client.post(PATH, json={**BODY, "n": 9})
            assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"
            it.call(lambda: it.engine.allow(100))
            assert first.result(10).status_code == 200


def test_a_race_for_the_last_place_has_one_winner(tokenizer: Tokenizer) -> None:
    """Large prompts leave the loop to be tokenized: the queue is checked again when they come back."""
    config = configured(max_queued_requests=2)
    with (
        running(config, lambda: FakeEngine(tokenizer, config, max_model_len=50_000)) as it,
        ThreadPoolExecutor(8) as pool,
    ):
        it.engine.steps = asyncio.Semaphore(0)
        with it.client() as client:
            body = {**BODY, "prompt": "the sea and the light " * 1000}
            answers = [pool.submit(client.post, PATH, json={**body, "stream": i % 2 == 0}) for i in range(8)]
            assert wait_until(lambda: sum(answer.done() for answer in answers) == 6, 20)
            it.call(lambda: it.engine.allow(100))
            assert sorted(answer.result(10).status_code for answer in answers) == [200] * 2 + [503] * 6


HOSTILE: list[dict[str, Any]] = [
    {"n": 5_000_000},
    {"logprobs": 10**9},
    {"best_of": 10**9},
    {"prompt": ["a"] * 1_000_000},
    {"prompt": [[1]] * 1_000_000},
    {"prompt": [1] * 2_000_000},
    {"prompt": "a" * 7_000_000},
    {"prompt": "a" * 7_000_000, "truncate_prompt_tokens": 4},
    {"stop": ["a"] * 500_000},
    {"logit_bias": {str(i): "x" for i in range(300_000)}},
    {"stop_token_ids": [1] * 2_000_000},
    {"stop_token_ids": ["a"] * 1_000_000},
    {f"field{i}": 1 for i in range(200_000)},
    {"metadata": [[]] * 1_000_000},
]


def test_hostile_requests_are_refused_cheaply() -> None:
    """SEC-02: bounded before anything of that size is made. What the process spends is what others wait for."""
    headers = {"Content-Type": "application/json"}
    with serving({}) as (url, process), httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
        assert client.post(PATH, json=BODY).status_code == 200
        before_kib = peak_rss_kib(process.pid)
        for fields in HOSTILE:
            content = msgspec.json.encode({**BODY, **fields})
            before_s = cpu_s(process.pid)
            response = client.post(PATH, content=content, headers=headers)
            assert response.status_code == 400 or "x-octavo-warnings" in response.headers, response.text[:200]
            assert cpu_s(process.pid) - before_s < 0.8, content[:60]
        assert peak_rss_kib(process.pid) - before_kib < 300 * 1024
        assert client.post(PATH, json=BODY).status_code == 200


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_rss_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1])


@pytest.mark.parametrize("state", ["starting", "draining", "dead"])
def test_requests_are_refused_while_the_engine_is_not_ready(tokenizer: Tokenizer, state: str) -> None:
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        it.engine.state, it.engine.state_reason = state, "loading weights (40%)"
        for body in ({**BODY}, {**BODY, "stream": True}):
            response = client.post(PATH, json=body)
            assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
            assert "loading weights (40%)" in response.json()["error"]["message"]
        health = client.get("/health")
        assert health.status_code == (200 if state == "draining" else 503) and health.json()["state"] == state
        assert client.get("/ready").status_code == 503
        assert client.get("/v1/models").status_code == (503 if state == "starting" else 200)
        assert client.get("/metrics").status_code == 200
        it.engine.state = "ready"
        assert client.post(PATH, json=BODY).status_code == 200
        assert client.get("/ready").json() == {"ready": True}


async def test_work_that_does_not_end_fails_its_request_only(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_THREAD_TIMEOUT_S", 0.05)
    config, release = configured(), threading.Event()
    it = service.Service(FakeEngine(tokenizer, config), config)
    try:
        for _ in range(3):  # more than there are places
            with pytest.raises(Unavailable, match="more than 0.05 seconds"):
                await it.compute(lambda: release.wait(10), is_large=True)
        assert await it.compute(lambda: 7, is_large=False) == 7
    finally:
        release.set()
