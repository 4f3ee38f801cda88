"""What every request passes first, written against ASGI itself so that no route or protocol can slip by.

`RequestContext` (outermost) gives an id and a log line, and turns what escapes everything else into a 500.
`ApiKeyGuard` refuses whatever does not carry a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import AuthenticationFailed
from octavo.server.failure import error_response, internal_error

logger = logging.getLogger("octavo.access")

REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,63}")

CLIENT_GONE_STATUS = 499  # for the log: nobody reads this answer

_OPEN_PATHS = (b"/health",)
_MAX_LOGGED_PATH = 200
_POLLED_PATHS = frozenset({"/health", "/ready", "/ping", "/load", "/metrics"})


class RequestContext:
    """Puts `request_id` and `arrival_s` into the scope's state, answers X-Request-Id, logs one line a request.

    The line holds method, path, status, time and id: no query, no header and no body ever reaches a log.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival_s = time.monotonic()
        request_id = _header(scope, b"x-request-id").decode("latin-1")
        if not REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"], state["arrival_s"] = request_id, arrival_s
        status = 0

        async def tagged_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, tagged_send)
        except ClientDisconnect:
            status = CLIENT_GONE_STATUS
        except Exception as error:
            failure = internal_error(error)
            if not status:
                await error_response(failure)(scope, receive, tagged_send)
            # Else it is too late for an answer: the server cuts the connection of a response without an end.
        finally:
            # As it was sent: percent-encoded, so that it cannot break the line.
            path = scope.get("raw_path", b"")[:_MAX_LOGGED_PATH].decode("latin-1")
            duration_ms = 1000 * (time.monotonic() - arrival_s)
            level = logging.DEBUG if path in _POLLED_PATHS else logging.INFO
            logger.log(level, "%s %s %d %.1f ms %s", scope["method"], path, status, duration_ms, request_id)


class ApiKeyGuard:
    """Answers 401 unless the request carries one of `keys` as a bearer token; only /health is open."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or self._allows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = AuthenticationFailed(
                "This route needs a valid API key: send the header 'Authorization: Bearer KEY'."
            )
            await error_response(refusal)(scope, receive, send)

    def _allows(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope.get("raw_path", b"") in _OPEN_PATHS and scope["path"] == "/health":
            return True
        scheme, _, token = _header(scope, b"authorization").partition(b" ")
        digest = _digest(token.strip())
        # Every key is compared, so that the time tells neither which one is near nor how many there are.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _header(scope: Scope, name: bytes) -> bytes:
    """The only header of that name, b"" if there is none or several."""
    values: list[bytes] = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else b""
