"""Everything that can go wrong, one class per meaning.

    OctavoError
    ├── RequestError              the client's mistake or the server's state; carries an HTTP status
    │   ├── InvalidRequest            400  a field has a wrong type or value
    │   │   ├── ContextLengthExceeded     prompt (+ max_tokens) does not fit the context
    │   │   └── UnsupportedFeature        known to the API, not offered here
    │   ├── AuthenticationFailed      401
    │   ├── NotFound                  404  unknown model, adapter, route or id
    │   ├── PayloadTooLarge           413
    │   ├── RateLimited               429  a limit that belongs to the caller
    │   ├── RequestFailed             500  this one request failed inside the engine (non-finite logits)
    │   └── Unavailable               503  full queue, draining, loading, or a dead engine
    └── StartError                the operator's mistake; ends the command with one message, exit code 2
        ├── ConfigError               a flag, environment variable or config file
        └── LoadError                 a model source
            ├── CheckpointError           corrupt, truncated, hostile or incomplete weights
            ├── UnsupportedModel          an architecture or option that is not implemented
            └── TokenizerError            a tokenizer or chat template that cannot be used

A message names the value, the limit and the way out. The server maps `status` in one place.
"""

from __future__ import annotations

from typing import ClassVar


class OctavoError(Exception):
    """Base of every error that Octavo raises on purpose."""


class RequestError(OctavoError):
    """An error that ends one request. `param` names the offending field of the request, if one does."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code
        self.retry_after_s = retry_after_s


class InvalidRequest(RequestError):
    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    default_code = "context_length_exceeded"


class UnsupportedFeature(InvalidRequest):
    default_code = "unsupported"


class AuthenticationFailed(RequestError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class NotFound(RequestError):
    status = 404
    type = "not_found_error"
    default_code = "not_found"


class PayloadTooLarge(RequestError):
    status = 413
    type = "invalid_request_error"
    default_code = "payload_too_large"


class RateLimited(RequestError):
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class RequestFailed(RequestError):
    status = 500
    type = "internal_error"


class Unavailable(RequestError):
    status = 503
    type = "service_unavailable_error"
    default_code = "service_unavailable"


class StartError(OctavoError):
    """An error that ends the command; the CLI prints the message alone and exits with 2."""


class ConfigError(StartError):
    pass


class LoadError(StartError):
    pass


class CheckpointError(LoadError):
    pass


class UnsupportedModel(LoadError):
    pass


class TokenizerError(LoadError):
    pass
