"""The one place where an error becomes an answer: an OpenAI error object and its status, never a traceback."""

from __future__ import annotations

import logging
import math
import traceback
from typing import Any, ClassVar

from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server.wire import JsonResponse, event, json_bytes

logger = logging.getLogger(__name__)

_DEFAULT_RETRY_AFTER_S = 1.0


class MethodNotAllowed(RequestError):
    status: ClassVar[int] = 405
    type: ClassVar[str] = "invalid_request_error"
    default_code: ClassVar[str | None] = "method_not_allowed"


class RequestTimeout(RequestError):
    """The client was too slow to send its request."""

    status: ClassVar[int] = 408
    type: ClassVar[str] = "invalid_request_error"
    default_code: ClassVar[str | None] = "request_timeout"


class HeadTooLarge(RequestError):
    status: ClassVar[int] = 431
    type: ClassVar[str] = "invalid_request_error"
    default_code: ClassVar[str | None] = "request_header_fields_too_large"


def error_object(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_event(error: RequestError) -> bytes:
    """How a stream that has begun tells of an error; it is the last event before [DONE]."""
    return event(json_bytes(error_object(error)))


def error_response(error: RequestError) -> Response:
    headers: dict[str, str] = {}
    if error.status in (429, 503):
        seconds = _DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:
        headers["Connection"] = "close"
    return JsonResponse(error_object(error), status_code=error.status, headers=headers)


def internal_error(error: BaseException) -> RequestError:
    """What a client is told of a bug; the log gets where it happened, without values that may hold a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.error("unexpected %s while answering a request\n%s", type(error).__name__, frames)
    return RequestError("The server failed on this request; its log says where. Other requests are not affected.")
