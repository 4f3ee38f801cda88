"""Reads a request body within its limits of size and time, as strict JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.errors import InvalidRequest, PayloadTooLarge
from octavo.server.failure import RequestTimeout

_MAX_FIELDS = 256

_decode = msgspec.json.Decoder().decode


async def read_json_object(request: Request, config: ServerConfig) -> dict[str, Any]:
    """The body of `request`, which must be one JSON object. Of repeated keys the last counts.

    Its size is left in `request.state.body_bytes`. Never holds more than --max-body-bytes. Raises InvalidRequest,
    PayloadTooLarge or RequestTimeout.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise InvalidRequest(f"Content-Type is {content_type!r}; send application/json.", code="invalid_content_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise InvalidRequest(
            f"Content-Encoding {encoding!r} is not accepted; send the body as it is.", code="invalid_encoding"
        )
    raw = await _read(request, config)
    request.state.body_bytes = len(raw)
    try:
        value = _decode(raw)
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply.", code="invalid_json") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.", code="invalid_json")
    if len(value) > _MAX_FIELDS:
        raise InvalidRequest(f"The body has {len(value)} fields; the limit is {_MAX_FIELDS}.")
    return value


async def _read(request: Request, config: ServerConfig) -> bytes:
    limit = config.max_body_bytes
    too_large = PayloadTooLarge(f"The body is larger than {limit} bytes (--max-body-bytes). Send less at once.")
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(config.body_timeout_s):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_large
                parts.append(part)
    except TimeoutError:
        raise RequestTimeout(
            f"The body did not arrive within {config.body_timeout_s:g} seconds (--body-timeout-s)."
        ) from None
    return b"".join(parts)
