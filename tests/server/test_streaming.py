"""Delivery: every chunk at once, errors told, silence bridged, and nobody generates for a client that has gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.harness import MODEL, FakeEngine, Running, configured, running, wait_until
from tests.server.reading import parse_stream, stream

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest, Unavailable
from octavo.server import sse
from octavo.server.wire import json_bytes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 30, "ignore_eos": True},
    COMPLETIONS: {"prompt": "Hi", "max_tokens": 30, "ignore_eos": True},
}


@contextlib.contextmanager
def failing(tokenizer: Tokenizer, **engine: Any) -> Iterator[tuple[Running, httpx.Client]]:
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config, **engine)) as it, it.client() as client:
        yield it, client


def send_raw(url: str, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request on a socket that buffers little, and read nothing."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    connection.settimeout(10)
    connection.connect((host, int(port)))
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize("path", BODIES)
def test_every_token_is_delivered_before_the_next_is_made(tokenizer: Tokenizer, path: str) -> None:
    """STR-03"""
    config = configured()
    letter = tokenizer.token_id("a")
    with running(config, lambda: FakeEngine(tokenizer, config, script=lambda *_: letter)) as it:
        it.engine.steps = asyncio.Semaphore(1)
        with it.client() as client, client.stream("POST", path, json={**BODIES[path], "stream": True}) as response:
            raw = b""
            num_read = 0
            for part in response.iter_raw():
                raw += part
                written = raw.count(b'"text":"a"') + raw.count(b'"content":"a"')
                while num_read < written:
                    num_read += 1
                    it.call(lambda: it.engine.allow(1))
        assert num_read == 30, "a step is only allowed when the token of the one before has been read"


def test_what_a_step_produced_leaves_in_one_write(tokenizer: Tokenizer) -> None:
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config)) as it:
        it.engine.steps = asyncio.Semaphore(0)
        connection = send_raw(it.url, COMPLETIONS, {**BODIES[COMPLETIONS], "n": 16, "stream": True, "max_tokens": 1})
        assert wait_until(lambda: len(it.engine.live) == 1)
        it.call(lambda: it.engine.allow(1))
        raw = b""
        while b"[DONE]" not in raw:
            raw += connection.recv(1 << 20)
        connection.close()
        body = raw.partition(b"\r\n\r\n")[2]
        assert int(body.partition(b"\r\n")[0], 16) > 16 * 100, "the first HTTP chunk holds all choices"


@pytest.mark.parametrize("path", BODIES)
def test_a_failure_in_mid_stream_is_an_error_event_and_then_done(tokenizer: Tokenizer, path: str) -> None:
    """STR-01"""
    with failing(tokenizer, fails_at=3) as (it, client):
        got = stream(client, path, BODIES[path])
        assert got.is_done and len(got.chunks) >= 3 and not got.finish_reasons()
        error = got.events[-1]["error"]
        assert set(error) == {"message", "type", "param", "code"} and "not finite" in error["message"]
        assert not any("error" in event for event in got.events[:-1])
        response = client.post(path, json=BODIES[path])
        assert response.status_code == 500 and response.json()["error"] == error
        it.engine.fails_at = None
        assert stream(client, path, BODIES[path]).finish_reasons() == ["length"]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [(Unavailable("The engine has died.", retry_after_s=2.5), 503), (InvalidRequest("Not so.", param="prompt"), 400)],
)
def test_a_failure_before_the_first_token_has_its_own_status(
    tokenizer: Tokenizer, is_stream: bool, failure: Exception, status: int
) -> None:
    with failing(tokenizer, fails_at=0, failure=failure) as (_, client):
        for path, body in BODIES.items():
            response = client.post(path, json={**body, "stream": is_stream})
            assert response.status_code == status and response.headers["content-type"] == "application/json"
            assert response.headers.get("retry-after") == ("3" if status == 503 else None)


@pytest.mark.parametrize("step", [0, 2])
def test_a_bug_is_a_500_without_details(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, step: int) -> None:
    """The log says where it happened, without the values, which may hold a prompt."""
    with failing(tokenizer, fails_at=step, failure=ValueError("CANARY")) as (_, client), caplog.at_level(logging.DEBUG):
        plain = client.post(COMPLETIONS, json=BODIES[COMPLETIONS])
        streamed = client.post(COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": True})
        assert plain.status_code == 500 and plain.json()["error"]["type"] == "internal_error"
        if step == 0:
            assert streamed.status_code == 500 and streamed.json()["error"]["type"] == "internal_error"
        else:
            got = parse_stream(streamed.content)
            assert got.is_done and got.events[-1]["error"]["type"] == "internal_error"
        assert "CANARY" not in plain.text + streamed.text and "Traceback" not in plain.text
        assert client.get("/health").status_code == 200
    assert "ValueError" in caplog.text and "CANARY" not in caplog.text


def test_silence_is_bridged_by_comments(tokenizer: Tokenizer) -> None:
    config = configured(sse_keep_alive_s=0.05)
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        it.engine.steps = asyncio.Semaphore(0)
        raw = b""
        with client.stream("POST", COMPLETIONS, json={**BODIES[COMPLETIONS], "stream": True}) as response:
            assert response.status_code == 200, "the stream begins although there is no token yet"
            for part in response.iter_raw():
                raw += part
                if raw.count(b": keep-alive") == 3:
                    it.call(lambda: it.engine.allow(40))
        got = parse_stream(raw)
        assert got.is_done and got.finish_reasons() == ["length"] and len(got.comments) >= 3


def test_no_comments_are_sent_when_they_are_turned_off(tokenizer: Tokenizer) -> None:
    config = configured(sse_keep_alive_s=0)
    with running(config, lambda: FakeEngine(tokenizer, config, step_s=0.01)) as it, it.client() as client:
        assert stream(client, COMPLETIONS, BODIES[COMPLETIONS]).comments == []


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("when", ["queued", "running"])
def test_a_client_that_goes_away_ends_its_request(tokenizer: Tokenizer, path: str, is_stream: bool, when: str) -> None:
    """SCH-02"""
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config)) as it:
        it.engine.steps = asyncio.Semaphore(0)
        body = {**BODIES[path], "stream": is_stream, "max_tokens": 200}
        connections = [send_raw(it.url, path, body) for _ in range(5)]
        assert wait_until(lambda: len(it.engine.live) == 5)
        if when == "running":
            it.call(lambda: it.engine.allow(5 * 3))
            assert wait_until(lambda: it.engine.num_queued == 0)
        for number, connection in enumerate(connections):
            if number % 2:  # a reset instead of an orderly end
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        assert wait_until(lambda: not it.engine.live), "requests of clients that have gone still run"
        assert it.engine.num_aborted == 5 and it.engine.num_queued == 0
        with it.client() as client:
            assert wait_until(lambda: client.get("/load").json()["server_load"] == 0)


def test_a_client_that_goes_away_ends_all_its_prompts(tokenizer: Tokenizer) -> None:
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config)) as it:
        it.engine.steps = asyncio.Semaphore(0)
        connection = send_raw(it.url, COMPLETIONS, {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 9})
        assert wait_until(lambda: len(it.engine.live) == 3)
        connection.close()
        assert wait_until(lambda: it.engine.num_aborted == 3)


def test_one_failing_prompt_ends_the_others(tokenizer: Tokenizer) -> None:
    with failing(tokenizer, fails_at=2) as (it, client):
        response = client.post(COMPLETIONS, json={"prompt": ["a", "b", "c"], "max_tokens": 99})
        assert response.status_code == 500
        assert wait_until(lambda: not it.engine.live) and it.engine.num_aborted == 3


def test_an_aborted_request_ends_with_what_it_has(tokenizer: Tokenizer) -> None:
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        it.engine.steps = asyncio.Semaphore(4)
        connection = send_raw(it.url, COMPLETIONS, {**BODIES[COMPLETIONS], "request_id": "job-1"})
        assert wait_until(lambda: "job-1" in it.engine.live)
        assert client.get("/v1/requests/cmpl-job-1").json()["request_id"] == "job-1"
        assert client.post("/v1/requests/cmpl-job-1/abort").json() == {"id": "job-1", "aborted": True}
        it.call(lambda: it.engine.allow(1))
        answer = json.loads(connection.recv(1 << 16).partition(b"\r\n\r\n")[2])
        connection.close()
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert client.post("/v1/requests/job-1/abort").status_code == 404
        assert client.get("/v1/requests/job-1").status_code == 404


def test_a_client_that_does_not_read_is_given_up(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits to be read is bounded."""
    monkeypatch.setattr(sse, "_MAX_PENDING_BYTES", 1_000_000)
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config, max_model_len=1_000_000)) as it:
        body = {"prompt": "Hi", "max_tokens": 900_000, "ignore_eos": True, "stream": True, "logprobs": 5}
        connection = send_raw(it.url, COMPLETIONS, body)
        assert wait_until(lambda: it.engine.num_aborted == 1, 30)
        connection.close()


def test_a_client_that_goes_while_it_sends_is_no_error(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "octavo"):
        host, port = server.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
        connection.sendall(head.encode() + b"{")
        time.sleep(0.1)
        connection.close()
        assert wait_until(lambda: f"POST {COMPLETIONS} 499" in caplog.text)
    assert "ERROR" not in caplog.text


def test_a_slow_reader_delays_nobody(tokenizer: Tokenizer) -> None:
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config, max_model_len=20_000)) as it, it.client() as client:
        body = {"prompt": "Hi", "max_tokens": 15_000, "ignore_eos": True, "stream": True, "logprobs": 5}
        connection = send_raw(it.url, COMPLETIONS, body)
        assert wait_until(lambda: len(it.engine.live) == 1)
        started = time.monotonic()
        assert client.post(COMPLETIONS, json=BODIES[COMPLETIONS]).status_code == 200
        assert time.monotonic() - started < 5
        connection.close()
        assert wait_until(lambda: not it.engine.live, 20)


def test_line_breaks_in_a_text_break_no_line() -> None:
    text = 'a\nb\r\n"c"\u2028d\u2029e\x85f\x0b\x0c\x1cg\x00\\ 🀄é'
    written = json_bytes(text)
    assert json.loads(written) == text
    assert len(written.decode().splitlines()) == 1


def test_the_end_of_a_text_cut_inside_a_character_is_valid(client: httpx.Client, tokenizer: Tokenizer) -> None:
    """DET-09"""
    part = tokenizer.encode("🀄")[0]
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 1, "logit_bias": {str(part): 100}, "ignore_eos": True}
    answer = client.post(COMPLETIONS, json=body)
    answer.content.decode("utf-8")
    assert answer.json()["choices"][0]["text"] == "\ufffd"
    assert stream(client, COMPLETIONS, body).text() == "\ufffd"
    chat = {**body, "messages": BODIES[CHAT]["messages"]}
    del chat["prompt"]
    assert stream(client, CHAT, chat).text() == "\ufffd"
