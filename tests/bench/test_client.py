"""The load client: what it sends, how it reads streams, and what each kind of failure is called."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.bench.fake_server import FakeServer, Reply, fake_server

from octavo.bench.client import CHAT, COMPLETIONS, Client, EventReader, Record
from octavo.bench.http_client import Address, HttpClient
from octavo.bench.workload import BenchRequest
from octavo.errors import ConfigError

REQUEST = BenchRequest("Once upon", 2, 3)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(piece: str) -> bytes:
    return event(choices=[{"index": 0, "text": piece, "logprobs": None, "finish_reason": None}])


def read(*pieces: tuple[bytes, float]) -> Record:
    record = Record(None)
    reader = EventReader(record)
    for data, now_s in pieces:
        reader.feed(data, now_s)
    return record


def test_every_piece_of_text_has_the_time_at_which_its_bytes_came() -> None:
    record = read((text("a"), 1.0), (text("b") + text("c"), 1.5), (b"data: [DONE]\n\n", 1.6))
    assert record.times_s == [1.0, 1.5, 1.5]
    assert record.texts == ["a", "b", "c"]
    assert record.end_s == 1.5


def test_events_may_be_cut_anywhere() -> None:
    stream = text("a") + b": a comment\r\n\r\nevent: message\nid: 3\n" + text("ü") + b"data:[DONE]\r\n\r\n"
    whole = read((stream, 1.0))
    for cut in range(len(stream)):
        record = read((stream[:cut], 1.0), (stream[cut:], 1.0))
        assert (record.texts, record.times_s, record.error) == (whole.texts, whole.times_s, "")
    assert whole.texts == ["a", "ü"]


def test_an_event_without_text_is_no_token_but_moves_the_end() -> None:
    role = event(choices=[{"delta": {"role": "assistant", "content": ""}}])
    thought = event(choices=[{"delta": {"reasoning_content": "hm"}}])
    end = event(choices=[{"delta": {}, "finish_reason": "stop"}])
    record = read((role, 1.0), (thought, 2.0), (end, 3.0))
    assert record.times_s == [2.0]
    assert (record.ttft_s, record.end_s) == (2.0, 3.0)


def test_usage_is_read_wherever_it_comes() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
    record = read((event(choices=[], usage=usage), 1.0))
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (9, 4, 8)
    record = read((event(choices=[{"text": "a"}], usage={"completion_tokens": 1, "prompt_tokens": 2}), 1.0))
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (2, 1, None)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (event(error={"message": "out of memory", "code": 500}), "error event: out of memory"),
        (event(error="gone"), "error event: gone"),
        (b"data: {nonsense\n\n", "an event is not as the API has it"),
        (event(choices=[{"text": 5}]), "an event is not as the API has it"),
    ],
)
def test_a_broken_event_is_an_error_of_the_request(data: bytes, error: str) -> None:
    record = read((text("a"), 1.0), (data, 2.0))
    assert record.error.startswith(error)
    assert not record.has_succeeded


def client(
    server: FakeServer, *, keeps: bool = True, timeout_s: float = 10, chat: bool = False, **fields: Any
) -> Client:
    http = HttpClient(Address.parse(server.url, "--base-url"), {"X-Name": "värld"}, keeps_connections=keeps)
    return Client(http, CHAT if chat else COMPLETIONS, is_chat=chat, fields=fields, timeout_s=timeout_s)


async def ask(made: Client, request: BenchRequest = REQUEST) -> Record:
    return await made.run(made.build(request), request.prompt_len)


async def test_a_completion_is_asked_for_as_the_api_has_it() -> None:
    async with fake_server() as server:
        record = await ask(client(server, temperature=0.5))
    (seen,) = server.seen
    assert (seen.method, seen.path) == ("POST", COMPLETIONS)
    assert seen.headers["content-type"] == "application/json"
    assert seen.body == {
        "prompt": "Once upon",
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
    }
    assert ("".join(record.texts), record.output_tokens, record.error) == ("abc", 3, "")


async def test_a_chat_is_one_message_of_the_user() -> None:
    async with fake_server() as server:
        record = await ask(client(server, chat=True))
    assert server.seen[0].path == CHAT
    assert server.seen[0].body["messages"] == [{"role": "user", "content": "Once upon"}]
    assert len(record.times_s) == 3  # the first event, with the role alone, is no token


async def test_times_are_those_of_the_server() -> None:
    async with fake_server(Reply(first_s=0.08, gap_s=0.04)) as server:
        record = await ask(client(server))
    assert 0.08 <= record.ttft_s < 2
    assert all(0.03 <= gap < 2 for gap in record.itls_s)
    assert len(record.itls_s) == 2
    assert record.latency_s == pytest.approx(record.ttft_s + sum(record.itls_s))


async def test_pooled_connections_are_used_again_and_fresh_ones_are_not() -> None:
    async with fake_server() as server:
        made = client(server)
        for _ in range(3):
            assert (await ask(made)).has_succeeded
        assert [seen.connection for seen in server.seen] == [1, 1, 1]
        made = client(server, keeps=False)
        for _ in range(2):
            assert (await ask(made)).has_succeeded
    assert [seen.connection for seen in server.seen[3:]] == [2, 3]
    assert server.seen[3].headers["connection"] == "close"


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    async with fake_server(Reply(keeps_alive=False)) as server:  # closes without having said so
        made = client(server)
        for _ in range(3):
            assert (await ask(made)).error == ""
            await asyncio.sleep(0.01)
    assert server.num_connections == 3


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
async def test_a_body_may_end_with_the_connection(line_end: str) -> None:
    async with fake_server(Reply(framing="close", line_end=line_end)) as server:
        record = await ask(client(server))
    assert ("".join(record.texts), record.error) == ("abc", "")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(status=400, error="max_tokens is too large"), "status 400: max_tokens is too large"),
        (Reply(status=500, body=b"<html>oops</html>"), "status 500: <html>oops</html>"),
        (Reply(status=503, body=b""), "status 503: an empty body"),
        (Reply(error="the engine died"), "error event: the engine died"),
        (Reply(breaks_after=1), "connection: the server closed the connection before the response was complete"),
        (Reply(breaks_after=0), "connection: the server closed the connection before the response was complete"),
        (Reply(body=b'{"choices": []}'), 'no events came: {"choices": []}'),
    ],
)
async def test_a_failure_is_recorded_with_its_reason(reply: Reply, error: str) -> None:
    async with fake_server(reply) as server:
        record = await ask(client(server))
    assert record.error == error
    assert record.status == (0 if error.startswith("connection") else reply.status)


async def test_an_answer_that_takes_too_long_is_given_up_and_its_connection_closed() -> None:
    async with fake_server(Reply(first_s=30)) as server:
        made = client(server, timeout_s=0.05)
        record = await ask(made)
        assert record.error == "no answer within 0.05 s (--request-timeout-sec)"
        assert not made._http._idle


async def test_a_server_that_is_not_there_is_a_failed_request() -> None:
    async with fake_server() as server:
        pass
    record = await ask(client(server))
    assert record.error == f"connection: {server.url} refuses connections"


async def test_proxies_of_the_environment_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with fake_server() as server:
        assert (await ask(client(server))).has_succeeded


async def test_localhost_is_reached_at_whichever_address_is_served() -> None:
    async with fake_server() as server:
        http = HttpClient(Address.parse(f"localhost:{server.port}", "--base-url"), {}, keeps_connections=True)
        status, body = await http.get("/v1/models")
        http.close()
    assert status == 200 and b"fake" in body


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=x", "-days", "1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    try:
        port = server.sockets[0].getsockname()[1]
        http = HttpClient(Address.parse(f"https://127.0.0.1:{port}", "--base-url"), {}, keeps_connections=False)
        made = Client(http, COMPLETIONS, is_chat=False, fields={}, timeout_s=10)
        assert "certificate" in (await ask(made)).error
    finally:
        server.close()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://host", "http://host:80"),
        ("https://host/base/", "https://host:443/base"),
        ("host:81", "http://host:81"),
        ("http://[::1]:5", "http://[::1]:5"),
    ],
)
def test_addresses_are_read_from_urls(url: str, shown: str) -> None:
    assert str(Address.parse(url, "--base-url")) == shown


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--base-url is .*; it must be like http://127.0.0.1:8000"):
        Address.parse(url, "--base-url")


def test_a_header_cannot_smuggle_another() -> None:
    with pytest.raises(ConfigError, match="line break"):
        HttpClient(Address.parse("http://host", "--base-url"), {"X-A": "1\r\nX-B: 2"}, keeps_connections=True)
