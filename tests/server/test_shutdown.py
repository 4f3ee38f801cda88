"""SCH-07: the first signal drains, the second aborts, and every client is told how it ends."""

from __future__ import annotations

import json
import signal
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.server.harness import configured, wait_until
from tests.server.reading import Stream, parse_stream
from tests.server.serve_fake import serving

from octavo.errors import ConfigError
from octavo.server.run import listening_socket

PATH = "/v1/completions"
BODY = {"prompt": "Hi", "max_tokens": 400, "ignore_eos": True}
SLOW_STEPS = {"step_s": 0.05}  # 400 tokens take 20 s


def start_streams(pool: ThreadPoolExecutor, client: httpx.Client, count: int, **body: Any) -> list[Future[Stream]]:
    def run() -> Stream:
        response = client.post(PATH, json={**BODY, **body, "stream": True})
        assert response.status_code == 200, response.text
        return parse_stream(response.content)

    streams = [pool.submit(run) for _ in range(count)]
    assert wait_until(lambda: client.get("/load").json() == {"server_load": count, "queued": 0})
    return streams


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_lets_running_requests_finish(number: signal.Signals) -> None:
    with serving({"step_s": 0.02}) as (url, process), httpx.Client(base_url=url, trust_env=False) as client:
        with ThreadPoolExecutor(9) as pool:
            streams = start_streams(pool, client, 8, max_tokens=40)
            process.send_signal(number)
            assert wait_until(lambda: client.get("/ready").status_code == 503)
            refused = client.post(PATH, json=BODY)
            assert refused.status_code == 503 and "retry-after" in refused.headers
            assert client.get("/health").json()["state"] == "draining"
            for stream in streams:
                assert stream.result(20).finish_reasons() == ["length"] and stream.result().is_done
        assert process.wait(10) == 0
        with pytest.raises(httpx.ConnectError):
            client.get("/health")


def test_the_second_signal_ends_requests_with_an_error_event() -> None:
    with serving(SLOW_STEPS) as (url, process), httpx.Client(base_url=url, trust_env=False) as client:
        with ThreadPoolExecutor(9) as pool:
            streams = start_streams(pool, client, 6)
            plain = pool.submit(client.post, PATH, json=BODY)
            assert wait_until(lambda: client.get("/load").json()["server_load"] == 7)
            process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: client.get("/ready").status_code == 503)
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            for stream in streams:
                got = stream.result(10)
                assert got.is_done and not got.finish_reasons()
                assert got.events[-1]["error"]["code"] == "shutting_down"
            assert plain.result(10).status_code == 503
            assert plain.result().json()["error"]["code"] == "shutting_down"
        assert process.wait(10) == 1
        assert time.monotonic() - started < 5


def test_what_does_not_finish_in_time_ends_with_an_error_event() -> None:
    with serving(SLOW_STEPS, drain_timeout_s=0.5) as (url, process):
        with httpx.Client(base_url=url, trust_env=False) as client, ThreadPoolExecutor(3) as pool:
            [stream] = start_streams(pool, client, 1)
            started = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert stream.result(10).events[-1]["error"]["code"] == "shutting_down"
            assert process.wait(10) == 0
            assert 0.5 <= time.monotonic() - started < 5


def test_a_client_that_does_not_read_cannot_hold_up_the_end() -> None:
    with serving({"max_model_len": 100_000}, drain_timeout_s=0.3) as (url, process):
        host, port = url.removeprefix("http://").split(":")
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((host, int(port)))
            content = json.dumps({**BODY, "max_tokens": 90_000, "logprobs": 5, "stream": True}).encode()
            head = (
                f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
            )
            connection.sendall(head.encode() + b"\r\n\r\n" + content)
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0


def test_an_idle_server_ends_at_once() -> None:
    with serving({}) as (url, process), httpx.Client(base_url=url, trust_env=False) as client:
        assert client.get("/ready").status_code == 200  # and the connection stays open
        started = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0 and time.monotonic() - started < 3


def test_an_address_that_is_taken_is_the_operators_mistake() -> None:
    with listening_socket(configured(host="127.0.0.1").server) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--port"):
            listening_socket(configured(port=port).server)
    with pytest.raises(ConfigError, match="cannot listen on no.such.host.invalid"):
        listening_socket(configured(host="no.such.host.invalid").server)
