"""`octavo serve` as its users meet it: two processes, a tiny random model, HTTP and the official client."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.conftest import Serve
from tests.tiny import save_tiny_llama

KEY = "test-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
FLAGS = (
    "--served-model-name", "tiny", "--api-key", KEY, "--threads", "1", "--max-model-len", "256",
    "--kv-cache-memory-bytes", "2MiB", "--max-num-seqs", "32", "--max-queued-requests", "64",
)  # fmt: skip


@pytest.fixture(scope="module")
def url(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serve(save_tiny_llama(tmp_path_factory.mktemp("tiny")), *FLAGS) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, headers=HEADERS, timeout=60, trust_env=False) as http:
        yield http


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end in [DONE]."""
    with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    assert data[-1] == "[DONE]" and "[DONE]" not in data[:-1]
    return [json.loads(text) for text in data[:-1]]


def folded(stream: list[dict[str, Any]], num_choices: int) -> list[tuple[str, str, Any, list[str]]]:
    """Text, finish reason, stop reason and logprob tokens of each choice."""
    found = []
    for index in range(num_choices):
        parts = [choice for event in stream for choice in event["choices"] if choice["index"] == index]
        assert [part["finish_reason"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        tokens = [token for part in parts for token in _logprob_tokens(part)]
        found.append(("".join(map(_text, parts)), parts[-1]["finish_reason"], parts[-1]["stop_reason"], tokens))
    return found


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return (choice.get("message") or choice.get("delta") or {}).get("content") or ""


def _logprob_tokens(choice: dict[str, Any]) -> list[str]:
    logprobs = choice.get("logprobs") or {}
    return logprobs.get("tokens") or [entry["token"] for entry in logprobs.get("content") or ()]


def gauges(client: httpx.Client) -> dict[str, float]:
    wanted = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    lines = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line.startswith(wanted)]
    return {name.partition("{")[0]: float(value) for name, value in lines}


def settle(client: httpx.Client, within_s: float = 5) -> None:
    deadline = time.monotonic() + within_s
    while any((found := gauges(client)).values()):
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
    assert len(found) == 3


def test_a_stream_folds_to_the_plain_answer_for_300_random_requests(client: httpx.Client) -> None:
    rng = random.Random(0)

    def one(seed: int) -> None:
        rng = random.Random(seed)
        n = rng.choice((1, 1, 2, 3))
        body: dict[str, Any] = {
            "model": "tiny",
            "seed": seed,
            "temperature": rng.choice((0, 0.8, 1.5)),
            "n": n,
            "max_tokens": rng.randint(1, 30),
        }
        if rng.random() < 0.4:
            body["stop"] = [rng.choice(("\ufffd", "a", "🦚", "日", "\x1b", "<|im_end|>", "0"))]
            body["include_stop_str_in_output"] = rng.random() < 0.3
        text = "".join(
            rng.choices(("🦚", "日本語", "ěšč", "👩\u200d👩\u200d👧", " the", "\n", "x"), k=rng.randint(1, 9))
        )
        if rng.random() < 0.5:
            path, body["prompt"], body["echo"] = "/v1/completions", text, rng.random() < 0.3
            body |= {"logprobs": rng.randint(0, 3)} if rng.random() < 0.4 else {}
        else:
            path, body["messages"] = "/v1/chat/completions", [{"role": "user", "content": text}]
            body |= {"logprobs": True, "top_logprobs": rng.randint(0, 3)} if rng.random() < 0.4 else {}
        plain = client.post(path, json=body)
        assert plain.status_code == 200, plain.text
        choices = plain.json()["choices"]
        stream = events(client, path, {**body, "stream_options": {"include_usage": True}})
        wanted = [(_text(c), c["finish_reason"], c["stop_reason"], _logprob_tokens(c)) for c in choices]
        assert folded(stream, n) == wanted, body
        usage = [plain.json()["usage"], stream[-1]["usage"]]
        assert len({(each["prompt_tokens"], each["completion_tokens"]) for each in usage}) == 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, [rng.randrange(10**6) for _ in range(300)]))
    settle(client)


def test_clients_that_hang_up_leave_nothing_behind(url: str, client: httpx.Client) -> None:
    """64 streaming clients at once, many of which leave at a random moment (SCH-02)."""
    seen = {"finished": 0, "left": 0}

    async def one(http: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        for _ in range(4):
            body = {
                "prompt": "🦚" * rng.randint(1, 20),
                "max_tokens": rng.randint(1, 100),
                "ignore_eos": True,
                "stream": True,
                "n": rng.choice((1, 1, 2)),
                **rng.choice(({}, {"min_tokens": 1}, {"logit_bias": {"5": 3}}, {"logprobs": 1}, {"seed": 1})),
            }
            leaves_after = rng.choice((None, 0, 1, 5, 20))
            num_lines = 0
            async with http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code == 503:  # the queue is full: told so, and told when to come back
                    assert int(response.headers["retry-after"]) >= 1
                    continue
                assert response.status_code == 200
                async for line in response.aiter_lines():
                    assert not line.startswith('data: {"error"'), line
                    num_lines += 1
                    if leaves_after is not None and num_lines > leaves_after:
                        seen["left"] += 1
                        break
                    if line == "data: [DONE]":
                        seen["finished"] += 1

    async def all_at_once() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=url, headers=HEADERS, limits=limits, timeout=60, trust_env=False) as http:
            await asyncio.gather(*(one(http, number) for number in range(64)))

    asyncio.run(all_at_once())
    assert seen["finished"] > 20 and seen["left"] > 20, seen
    settle(client)
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True}).status_code == 200


def test_an_engine_that_dies_is_replaced_and_its_requests_are_told(url: str, client: httpx.Client) -> None:
    body = {"prompt": "long", "max_tokens": 200, "ignore_eos": True}

    def stream() -> list[str]:
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            return list(response.iter_lines())

    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(stream)
        plain = pool.submit(client.post, "/v1/completions", json=body)
        while gauges(client)["vllm:num_requests_running"] < 2:
            time.sleep(0.01)
        os.kill(_engine_pid(url), signal.SIGKILL)
        lines = [line for line in running.result(30) if line]
        answer = plain.result(30)
    assert (
        json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "engine_dead" and lines[-1] == "data: [DONE]"
    )
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_dead"
    assert client.get("/health").status_code == 503
    deadline = time.monotonic() + 60
    while client.get("/ready").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert client.post("/v1/completions", json={**body, "max_tokens": 3}).status_code == 200
    settle(client)


def _engine_pid(url: str) -> int:
    """The child of the process that listens at `url`."""
    port = int(url.rsplit(":", 1)[1])
    listing = subprocess.run(
        ["ps", "-wweo", "pid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    server = next(line.split()[0] for line in listing if f"--port {port}" in line and "octavo.cli" in line)
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return int(children[0])


def test_the_official_client_gets_what_it_asks_for(url: str) -> None:
    ai = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in ai.models.list()] == ["tiny"]
    chat = ai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=12,
        n=2,
        seed=3,
        logprobs=True,
        top_logprobs=2,
    )
    again = ai.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=12,
        n=2,
        seed=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = ["", ""]
    usage = None
    for chunk in again:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in chat.choices] and texts[0] != texts[1]
    assert usage is not None and chat.usage is not None
    assert usage.completion_tokens == chat.usage.completion_tokens
    assert usage.prompt_tokens_details is not None and usage.prompt_tokens_details.cached_tokens > 0
    assert chat.choices[0].logprobs is not None and chat.choices[0].logprobs.content is not None
    assert all(len(entry.top_logprobs) == 2 for entry in chat.choices[0].logprobs.content)
    full = ai.completions.create(model="tiny", prompt="abc", max_tokens=20, temperature=0).choices[0].text
    stop = next(letter for letter in full if full.index(letter) > 3)
    cut = ai.completions.create(model="tiny", prompt="abc", max_tokens=20, temperature=0, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (full[: full.index(stop)], "stop")
    with pytest.raises(openai.NotFoundError):
        ai.completions.create(model="other", prompt="abc")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong", max_retries=0).models.list()


def test_metrics_agree_with_usage(client: httpx.Client) -> None:
    """MET-01, MET-03: what the server counts is what the client was told."""

    def counters() -> dict[str, float]:
        lines = [line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if not line.startswith("#")]
        found: dict[str, float] = {}
        for name, value in lines:
            found[name.partition("{")[0]] = found.get(name.partition("{")[0], 0.0) + float(value)
        return found

    before = counters()
    usages = []
    for i in range(6):
        body = {"prompt": f"metrics {i % 3} " * 6, "max_tokens": 8, "ignore_eos": True, "n": 1 + i % 2}
        usages.append(client.post("/v1/completions", json=body).json()["usage"])
    after = counters()
    grown = {name: after[name] - before.get(name, 0.0) for name in after}
    assert grown["vllm:prompt_tokens_total"] == sum(usage["prompt_tokens"] for usage in usages)
    assert grown["vllm:generation_tokens_total"] == sum(usage["completion_tokens"] for usage in usages)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown["vllm:prefix_cache_hits_total"] == cached > 0
    assert grown["vllm:prefix_cache_hits_total"] <= grown["vllm:prefix_cache_queries_total"]
    assert grown["vllm:time_to_first_token_seconds_count"] == len(usages)
    assert grown["vllm:request_success_total"] == len(usages)


def test_a_request_can_be_watched_and_ended(client: httpx.Client) -> None:
    with client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "watch me", "max_tokens": 240, "ignore_eos": True, "stream": True},
        headers={"X-Request-Id": "watched"},
    ) as response:
        lines = response.iter_lines()
        first = json.loads(next(line for line in lines if line.startswith("data: ")).removeprefix("data: "))
        request_id = first["id"]
        live = client.get(f"/v1/requests/{request_id}").json()
        assert live["num_prompt_tokens"] == 8 and live["finish_reason"] is None, live
        assert client.post(f"/v1/requests/{request_id}/abort").status_code == 200
        rest = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    assert rest[-1]["choices"][0]["finish_reason"] == "abort"
    settle(client)
    done = client.get(f"/v1/requests/{request_id}").json()
    assert done["finish_reason"] == "abort"


def test_a_terminated_server_finishes_what_runs_and_leaves_no_process(serve: Serve, tmp_path: Path) -> None:
    """SCH-07. Leaving `serve` sends SIGTERM and waits for exit code 0."""
    body = {"prompt": "drain", "max_tokens": 200, "n": 4, "ignore_eos": True}
    with ThreadPoolExecutor(8) as pool:
        with serve(save_tiny_llama(tmp_path / "tiny"), *FLAGS) as url:
            engine = _engine_pid(url)
            client = httpx.Client(base_url=url, headers=HEADERS, timeout=60, trust_env=False)
            running = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(8)]
            while gauges(client)["vllm:num_requests_running"] < 8:
                assert not all(future.done() for future in running), "all ended before they were seen together"
        answers = [future.result(60) for future in running]
        client.close()
    assert [answer.status_code for answer in answers] == [200] * 8
    assert all(answer.json()["usage"]["completion_tokens"] == 4 * 200 for answer in answers)
    assert not Path(f"/proc/{engine}").exists()


def test_a_request_of_several_prompts_is_ended_by_the_id_of_its_answer(client: httpx.Client) -> None:
    body = {"prompt": ["one", "two"], "max_tokens": 200, "ignore_eos": True, "request_id": "both"}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, "/v1/completions", json=body)
        deadline = time.monotonic() + 20
        while client.post("/v1/requests/cmpl-both/abort").status_code != 200:
            assert time.monotonic() < deadline and not running.done()
        answer = running.result(30).json()
    assert "abort" in [choice["finish_reason"] for choice in answer["choices"]]
    assert client.post("/v1/requests/cmpl-both/abort").status_code == 404
    settle(client)


def test_what_cannot_be_queued_does_not_count_as_queued(client: httpx.Client) -> None:
    for body in ({"bad_words": [" "], "n": 8}, {"top_k": 2**64 - 1, "n": 8}, {"allowed_token_ids": [5] * 999, "n": 8}):
        answers = [client.post("/v1/completions", json={"prompt": "a", **body}) for _ in range(10)]
        assert [answer.status_code for answer in answers] == [400] * 10, answers[0].text
    assert client.get("/load").json() == {"server_load": 0, "queued": 0}
