"""A small HTTP/1.1 client that costs next to nothing: asyncio's transports under the httptools parser.

It shares the cores with the server that it measures, so a response's bytes are handed on as they come, with the
time at which they came, and nothing else is done. It speaks to one address, directly: no proxies, no redirects, no
compression.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

import httptools

from octavo.errors import ConfigError

OnBody = Callable[[bytes, float], None]  # what came, and when (time.perf_counter)

_CONNECT_TIMEOUT_S = 60.0


class ConnectionBroken(Exception):
    """The connection could not be made, or ended before the response did."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, as its URL says."""

    host: str
    port: int
    is_secure: bool
    path: str  # before every path of the API; empty or without a slash at its end

    @classmethod
    def parse(cls, url: str, flag: str) -> Address:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(f"{flag} is {url}; it must be like http://127.0.0.1:8000.")
        is_secure = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_secure else 80), is_secure, parts.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_secure else 'http'}://{host}:{self.port}{self.path}"


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._done: asyncio.Future[int] | None = None
        self._on_body: OnBody | None = None
        self._now_s = 0.0
        self._has_head = False
        self._ends_by_close = False  # the body has neither a length nor chunks
        self.has_heard = False  # any byte of the response

    async def exchange(self, request: bytes, on_body: OnBody) -> int:
        """Send `request`, pass the body on, and return the status when the response is complete."""
        self.is_reusable = self.has_heard = False
        if self._transport is None or self._transport.is_closing():
            raise ConnectionBroken("the server closed the connection")
        self._parser = httptools.HttpResponseParser(self)
        self._on_body = on_body
        self._has_head, self._ends_by_close = False, True
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._done = self._on_body = None

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.close()

    # -- asyncio.Protocol ------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not derived from it

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        self.has_heard = True
        if self._parser is None or self._done is None:  # bytes that nobody asked for
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the response is not HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_reusable = False
        if exc is None and self.has_heard and self._has_head and self._ends_by_close:
            self.on_message_complete()
            self.is_reusable = False
            return
        self._fail(str(exc) if exc else "the server closed the connection before the response was complete")

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionBroken(why))
        self.close()

    # -- httptools -------------------------------------------------------------------------------------
    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_by_close = False

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, data: bytes) -> None:
        if self._on_body is not None:
            self._on_body(data, self._now_s)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue
            return
        self.is_reusable = self._parser.should_keep_alive()
        if self._done is not None and not self._done.done():
            self._done.set_result(status)


class HttpClient:
    """Requests to one server, over connections that are kept or over a fresh one each."""

    def __init__(self, address: Address, headers: Mapping[str, str], *, keeps_connections: bool) -> None:
        self.address = address
        self.num_connections = 0  # that were made
        self._keeps = keeps_connections
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if address.is_secure else None
        self._resolved: tuple[str, int] | None = None
        host = str(Address(address.host, address.port, address.is_secure, "")).partition("//")[2]
        lines = {
            "Host": host,
            "User-Agent": "octavo-bench",
            "Accept-Encoding": "identity",
            "Connection": "keep-alive" if keeps_connections else "close",
            **headers,
        }
        for name, value in lines.items():
            if any(letter in name + value for letter in "\r\n\0"):
                raise ConfigError(f"header {name!r} holds a line break.")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode()

    def build(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The bytes of a request, made ahead of the time at which it is sent."""
        start = f"{method} {self.address.path}{path} HTTP/1.1\r\n".encode() + self._head
        if body is None:
            return start + b"\r\n"
        data = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        return b"%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (start, len(data), data)

    async def send(self, request: bytes, on_body: OnBody) -> int:
        """The response's status, after its end. Raises ConnectionBroken.

        A kept connection that the server has closed meanwhile is replaced, once, as nothing was answered on it.
        """
        connection = self._idle.pop() if self._idle else None
        if connection is not None:
            try:
                return await self._exchange(connection, request, on_body)
            except ConnectionBroken:
                if connection.has_heard:
                    raise
        return await self._exchange(await self._connect(), request, on_body)

    async def get(self, path: str) -> tuple[int, bytes]:
        body = bytearray()
        status = await self.send(self.build("GET", path), lambda data, now_s: body.extend(data))
        return status, bytes(body)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, connection: Connection, request: bytes, on_body: OnBody) -> int:
        is_done = False
        try:
            status = await connection.exchange(request, on_body)
            is_done = True
            return status
        finally:
            if is_done and self._keeps and connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        address = self.address
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                if self._resolved is None:  # once: the resolver would need a thread for each request
                    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
                    self._resolved = await self._first_that_answers([entry[4][:2] for entry in found])
                host, port = self._resolved
                server_name = address.host if self._tls is not None else None
                _, connection = await loop.create_connection(
                    Connection, host, port, ssl=self._tls, server_hostname=server_name
                )
        except TimeoutError:
            raise ConnectionBroken(f"no connection within {_CONNECT_TIMEOUT_S:g} s") from None
        except ConnectionRefusedError:
            raise ConnectionBroken(f"{address} refuses connections") from None
        except OSError as error:
            raise ConnectionBroken(str(error) or type(error).__name__) from None
        self.num_connections += 1
        return connection

    async def _first_that_answers(self, addresses: list[Any]) -> tuple[str, int]:
        """A name may stand for several addresses (localhost: ::1 and 127.0.0.1), of which one is served."""
        loop = asyncio.get_running_loop()
        for host, port in addresses[:-1]:
            try:
                transport, _ = await loop.create_connection(asyncio.Protocol, host, port)
            except OSError:
                continue
            transport.close()
            return host, port
        last: tuple[str, int] = addresses[-1]
        return last
