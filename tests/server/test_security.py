"""Keys on every route, bounded heads and bodies, nothing private in a log."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.harness import FakeEngine, Running, configured, running

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError
from octavo.server.app import create_app
from octavo.server.middleware import ApiKeyGuard

KEYS = ("first-secret-key", "second-secret-key")
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = {"model": "tiny", "prompt": "a", "content": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Running]:
    config = configured(api_key=KEYS)
    with running(config, lambda: FakeEngine(tokenizer, config)) as it:
        yield it


@pytest.fixture(scope="module")
def limited(tokenizer: Tokenizer) -> Iterator[Running]:
    config = configured(max_body_bytes=100_000, max_header_bytes=8192, body_timeout_s=0.4)
    with running(config, lambda: FakeEngine(tokenizer, config)) as it:
        yield it


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def receive_all(connection: socket.socket) -> bytes:
    raw = b""
    try:
        while part := connection.recv(1 << 16):
            raw += part
    except ConnectionResetError:
        pass
    return raw


def ask_raw(url: str, target: str, *lines: str, method: str = "GET", content: bytes = b"") -> tuple[int, bytes]:
    """Status and body of a request whose target no client library has tidied up."""
    head = [f"{method} {target} HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(content)}", *lines]
    with connect(url) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + content)
        raw = receive_all(connection)
    return int(raw.split(b" ", 2)[1]), raw.partition(b"\r\n\r\n")[2]


WRONG = [
    "",
    "Bearer",
    "Bearer wrong",
    "Basic Og==",
    "Basic first-secret-key",
    "first-secret-key",
    "Bearer first-secret-ke",
    "Bearer first-secret-key1",
    "Bearer FIRST-SECRET-KEY",
    "Bearer first-secret-key second-secret-key",
]


def test_every_route_needs_the_key(guarded: Running) -> None:
    """SEC-01: the routes are enumerated, so that a new one cannot be forgotten."""
    app = create_app(guarded.engine, configured(api_key=KEYS))
    routes = [(method, route.path) for route in app.routes for method in route.methods]
    assert ("POST", "/v1/chat/completions") in routes and ("GET", "/openapi.json") in routes and len(routes) > 15
    with guarded.client() as client:
        for method, path in routes:
            path = path.replace("{model_id:path}", "tiny").replace("{request_id}", "r")
            expected = 200 if path == "/health" else 401
            for key in WRONG:
                headers = {"Authorization": key} if key else {}
                response = client.request(method, path, headers=headers, json=BODY if method == "POST" else None)
                assert response.status_code == expected, (method, path, key)
                if expected == 401 and method != "HEAD":
                    error = response.json()["error"]
                    assert error["code"] == "invalid_api_key" and error["type"] == "authentication_error"
                    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "target",
    "//v1/models /V1/models /%76%31/models /v1%2fmodels /v1/../v1/models /./v1/models /v1//models /health/ //health "
    "/%68ealth /HEALTH /health/../v1/models /health%2f..%2fv1/models /v1/models/health /v1/models?x=/health "
    "/invocations /inference/v1/generate /nope / http://x/v1/models /docs".split(),
)
def test_no_spelling_of_a_path_gets_around_the_key(guarded: Running, target: str) -> None:
    """SEC-01"""
    for method in ("GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "TRACE"):
        status, _ = ask_raw(guarded.url, target, "Content-Type: application/json", method=method)
        assert status == 401, (method, target, status)


def test_an_empty_key_is_refused_at_the_start(guarded: Running) -> None:
    with pytest.raises(ConfigError, match="empty"):
        create_app(guarded.engine, configured(api_key=("secret", "")))


def test_websockets_are_refused_too(guarded: Running) -> None:
    """SEC-01"""
    upgrade = ["Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="]
    assert ask_raw(guarded.url, "/v1/models", *upgrade)[0] == 401
    sent: list[dict[str, Any]] = []

    async def application(*_: Any) -> None:
        raise AssertionError("the application must not be reached")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    guard = ApiKeyGuard(application, KEYS)
    scope = {"type": "websocket", "path": "/health", "raw_path": b"/health", "headers": []}
    asyncio.run(guard(scope, receive, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_any_of_the_keys_opens_the_routes(guarded: Running, scheme: str, key: str) -> None:
    with guarded.client(headers={"Authorization": f"{scheme} {key}"}) as client:
        assert client.get("/v1/models").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert client.get("/nope").status_code == 404


def test_two_authorization_headers_are_no_key(guarded: Running) -> None:
    lines = [f"Authorization: Bearer {KEYS[0]}", "Authorization: Bearer wrong"]
    assert ask_raw(guarded.url, "/v1/models", *lines)[0] == 401


def test_logs_hold_neither_keys_nor_text(
    tokenizer: Tokenizer, guarded: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        for headers in ({"Authorization": f"Bearer {KEYS[0]}"}, {"Authorization": "Bearer wrong-secret-key"}, {}):
            with guarded.client(headers=headers) as client:
                for body in ({"prompt": "CANARY"}, {"prompt": "CANARY", "temperature": "CANARY"}, {"CANARY": 1}):
                    client.post("/v1/completions?key=CANARY", json=body)
                client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "CANARY"}]})
            ask_raw(guarded.url, "/v1/%0aINFO%20forged")
        ours = [record for record in caplog.records if not record.name.startswith("http")]
    text = "\n".join(record.getMessage() for record in ours)
    assert "POST /v1/completions 200" in text and "POST /v1/completions 401" in text
    assert "secret-key" not in text and "CANARY" not in text
    assert "GET /v1/%0aINFO%20forged 401" in text


def test_browsers_may_call_only_from_allowed_origins(tokenizer: Tokenizer, server: Running) -> None:
    preflight = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    with server.client() as client:
        assert "access-control-allow-origin" not in client.get("/health", headers=preflight).headers
    config = configured(allowed_origins=("https://app.example",), api_key=KEYS)
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        allowed = client.options("/v1/completions", headers=preflight)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-origin"] == "https://app.example"
        refused = client.options("/v1/completions", headers={**preflight, "Origin": "https://evil.example"})
        assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
        unauthorized = client.post("/v1/completions", headers={"Origin": "https://app.example"}, json={"prompt": "a"})
        assert unauthorized.status_code == 401 and "access-control-allow-origin" in unauthorized.headers


def test_request_ids_are_returned_if_they_are_harmless(client: httpx.Client) -> None:
    assert client.get("/health", headers={"X-Request-Id": "trace-1.a:b_c"}).headers["x-request-id"] == "trace-1.a:b_c"
    for hostile in ("a" * 65, "a b", "<script>", "-a", "é"):
        returned = client.get("/health", headers={"X-Request-Id": hostile.encode()}).headers["x-request-id"]
        assert returned != hostile and len(returned) == 32
    first, second = (
        client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "shared"}) for _ in range(2)
    )
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "shared"
    assert first.json()["id"].startswith("cmpl-shared-") and first.json()["id"] != second.json()["id"]


def test_a_body_beyond_the_limit_is_413(limited: Running) -> None:
    """SEC-07"""
    with limited.client(headers={"Content-Type": "application/json"}) as client:

        def chunks(count: int) -> Iterator[bytes]:
            for _ in range(count):
                yield b" " * 1000

        fits = json.dumps({"prompt": "a"}).encode().ljust(100_000)
        assert client.post("/v1/completions", content=fits).status_code == 200
        for content in (fits + b" ", b" " * 5_000_000, chunks(101), chunks(5000)):
            response = client.post("/v1/completions", content=content)
            assert response.status_code == 413, response.text
            assert response.json()["error"]["code"] == "payload_too_large" and "100000" in response.text
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_a_false_length_is_refused_before_the_body_comes(limited: Running) -> None:
    with connect(limited.url) as connection:
        connection.sendall(POST + b"Content-Length: 2000000000\r\n\r\n{")
        assert b" 413 " in connection.recv(4096)


def test_compressed_bodies_are_refused(limited: Running) -> None:
    """SEC-07: a gzip bomb is never unpacked."""
    bomb = gzip.compress(b" " * 50_000_000)
    with limited.client(headers={"Content-Type": "application/json", "Content-Encoding": "gzip"}) as client:
        response = client.post("/v1/completions", content=bomb)
        assert response.status_code == 400 and response.json()["error"]["code"] == "invalid_encoding"


def test_a_head_beyond_the_limit_is_431(limited: Running) -> None:
    """SEC-07"""
    cases = {
        "one header": [f"X-Big: {'b' * 9000}"],
        "many headers": [f"X-{i}: bbbbbbbbbbbbbbbb" for i in range(1000)],
        "huge header": [f"X-Big: {'b' * 5_000_000}"],
    }
    for name, lines in cases.items():
        status, body = ask_raw(limited.url, "/v1/models", *lines)
        assert status == 431, name
        assert json.loads(body)["error"]["code"] == "request_header_fields_too_large"
    assert ask_raw(limited.url, "/v1/models?" + "q" * 9000)[0] == 431
    assert ask_raw(limited.url, "/v1/models", f"X-Fits: {'b' * 7000}")[0] == 200


def test_an_endless_head_is_cut_off(limited: Running) -> None:
    with connect(limited.url) as connection:
        connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Big: ")
        try:
            for _ in range(2000):
                connection.sendall(b"b" * 100_000)
            raise AssertionError("200 MB of a head were accepted")
        except OSError:
            pass
    assert ask_raw(limited.url, "/v1/models")[0] == 200


def test_garbage_is_a_400_in_json(limited: Running) -> None:
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 100):
        with connect(limited.url) as connection:
            connection.sendall(garbage)
            raw = receive_all(connection)
        assert raw.startswith(b"HTTP/1.1 400 "), raw
        assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (b"GET /v1/models HTTP/1.1\r\nHost:", b"HTTP/1.1 408 "),
        (POST + b"Content-Length: 90\r\n\r\n{", b"HTTP/1.1 408 "),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{", b"HTTP/1.1 408 "),
    ],
    ids=["nothing", "half a head", "half a body", "half a chunked body"],
)
def test_slow_clients_are_cut_off(limited: Running, sent: bytes, answer: bytes) -> None:
    """SEC-07"""
    started = time.monotonic()
    with connect(limited.url) as connection:
        connection.sendall(sent)
        raw = receive_all(connection)
    assert raw.startswith(answer) and (raw == b"") == (answer == b"")
    assert 0.3 < time.monotonic() - started < 5
    if answer:
        assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_slow_bodies_block_nobody(server: Running) -> None:
    """SEC-07"""
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n{"
    )
    slow = [connect(server.url) for _ in range(30)]
    try:
        for connection in slow:
            connection.sendall(head)
        with server.client() as client:
            for _ in range(3):
                started = time.monotonic()
                assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
                assert client.get("/v1/models").status_code == 200
                assert time.monotonic() - started < 2
    finally:
        for connection in slow:
            connection.close()


def test_an_unwanted_body_leaves_the_connection_usable(server: Running) -> None:
    """A client that sends the rest of a refused body may go on."""
    with connect(server.url) as connection:
        connection.sendall(b"POST /nope HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n")
        assert b" 404 " in connection.recv(4096)
        connection.sendall(b"x" * 200_000)
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b" 200 " in connection.recv(4096)


def test_an_endless_unwanted_body_is_cut_off(server: Running) -> None:
    with connect(server.url) as connection:
        connection.sendall(b"POST /nope HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert b" 404 " in connection.recv(4096)
        started = time.monotonic()
        try:
            while time.monotonic() - started < 10:
                connection.sendall(b"1\r\nx\r\n")
                time.sleep(0.02)
        except OSError:
            pass
        assert time.monotonic() - started < 6
