"""JSON as it goes over the wire: the one encoder, and server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_encode = msgspec.json.Encoder().encode

DONE_EVENT = b"data: [DONE]\n\n"
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"


def json_bytes(value: Any) -> bytes:
    """Compact UTF-8 JSON that no reader of a stream can break, not even one that uses str.splitlines()."""
    encoded = _encode(value)
    if encoded.isascii():
        return encoded
    return (
        encoded.replace(b"\xc2\x85", b"\\u0085")
        .replace(b"\xe2\x80\xa8", b"\\u2028")
        .replace(b"\xe2\x80\xa9", b"\\u2029")
    )


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json_bytes(content)
