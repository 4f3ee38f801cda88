"""From the fields of a body to what the engine and the answer need: checked, bounded, every default filled in."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, fields

from starlette.requests import Request

from octavo.config import ServerConfig
from octavo.engine.events import EngineInfo
from octavo.errors import InvalidRequest, UnsupportedFeature
from octavo.request import MAX_INT, SamplingParams
from octavo.server.middleware import REQUEST_ID
from octavo.server.openai.fields import show
from octavo.server.openai.schema import TRUNCATION_SIDES, GenerationBody
from octavo.server.service import Service

_MAX_SALT_CHARS = 256

_OWN = frozenset({"max_tokens", "logprobs", "prompt_logprobs", "logit_bias"})  # mapped by hand below
_SAME_NAME = tuple(field.name for field in fields(SamplingParams) if field.name not in _OWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both endpoints read from a body beside the prompt."""

    request_id: str
    model: str
    fingerprint: str
    arrival_s: float
    sampling: SamplingParams  # max_tokens is None when the client left it open
    default_max_tokens: int | None  # the most that an open max_tokens becomes; None: all the room that is left
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None  # alternatives per token in the answer
    prompt_logprobs: int | None
    return_token_ids: bool
    tokens_as_ids: bool
    truncate_to: int | None  # -1: what fits beside max_tokens
    truncates_left: bool
    priority: int
    cache_salt: str
    shows_cached_tokens: bool


def parse_options(
    body: GenerationBody,
    request: Request,
    service: Service,
    info: EngineInfo,
    *,
    max_tokens: int | None,
    default_max_tokens: int | None,
    logprobs: int | None,
    scores_prompt: bool = False,
) -> Options:
    """`max_tokens` and `logprobs` are the endpoint's reading of its own fields; `scores_prompt` asks for the
    prompt's logprobs too. Raises InvalidRequest naming the field."""
    config = service.config.server
    model = service.served_model(body.model, info)
    _check_at_most("n", body.n, config.max_n, "--max-n")
    check_alternatives("prompt_logprobs", body.prompt_logprobs, config)
    stream_options = body.stream_options
    if stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream: true.", param="stream_options")
    include_usage = continuous_usage = False
    if stream_options is not None:
        continuous_usage = stream_options.continuous_usage_stats is True
        include_usage = continuous_usage if stream_options.include_usage is None else stream_options.include_usage
        if continuous_usage and not include_usage:
            raise InvalidRequest(
                "continuous_usage_stats needs include_usage.", param="stream_options.continuous_usage_stats"
            )
    if body.priority is not None and abs(body.priority) > MAX_INT:
        raise InvalidRequest(f"priority must be between {-MAX_INT} and {MAX_INT}.", param="priority")
    if body.priority and service.config.scheduler.scheduling_policy != "priority":
        raise UnsupportedFeature(
            "priority is not heeded by this server: it runs without --scheduling-policy priority. Leave it out.",
            param="priority",
        )
    return Options(
        request_id=_request_id(body, request),
        model=model,
        fingerprint=service.fingerprint(info),
        arrival_s=request.state.arrival_s,
        sampling=_sampling(body, info, max_tokens, logprobs, scores_prompt),
        default_max_tokens=_default_max_tokens(info, default_max_tokens),
        stream=body.stream is True,
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        return_token_ids=body.return_token_ids is True,
        tokens_as_ids=body.return_tokens_as_token_ids is True,
        truncate_to=_truncation(body, info),
        truncates_left=body.truncation_side != "right",
        priority=body.priority or 0,
        cache_salt=_cache_salt(body),
        shows_cached_tokens=config.enable_prompt_tokens_details,
    )


def _sampling(
    body: GenerationBody, info: EngineInfo, max_tokens: int | None, logprobs: int | None, scores_prompt: bool
) -> SamplingParams:
    values: dict[str, object] = {
        name: info.default_sampling[name] for name in _SAME_NAME if name in info.default_sampling
    }
    for name in _SAME_NAME:
        if (value := getattr(body, name)) is not None:
            values[name] = value
    prompt_logprobs = body.prompt_logprobs
    if scores_prompt and logprobs is not None:
        prompt_logprobs = max(logprobs, prompt_logprobs or 0)
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        logit_bias=_logit_bias(body.logit_bias or {}),
        **values,  # type: ignore[arg-type]
    )


def _default_max_tokens(info: EngineInfo, default: int | None) -> int | None:
    of_model = info.default_sampling.get("max_tokens")
    return default if of_model is None else int(of_model)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) < 12 and str(int(key)) == key):
            raise InvalidRequest(
                f"logit_bias has the key {key[:40]!r}; keys are token ids, such as '42'.", param="logit_bias"
            )
    return {int(key): float(bias) for key, bias in given.items()}


def _request_id(body: GenerationBody, request: Request) -> str:
    if body.request_id is None:
        # X-Request-Id may be shared by several requests of one operation: the id of each is made unique.
        return f"{request.state.request_id}-{uuid.uuid4().hex[:8]}"
    if not REQUEST_ID.fullmatch(body.request_id):
        raise InvalidRequest(
            "request_id must be 1 to 64 letters, digits, and . _ : - inside, beginning with a letter or digit.",
            param="request_id",
        )
    return body.request_id


def _cache_salt(body: GenerationBody) -> str:
    if body.cache_salt is None:
        return ""
    if not 0 < len(body.cache_salt) <= _MAX_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(body.cache_salt)} characters; it must have 1 to {_MAX_SALT_CHARS}.",
            param="cache_salt",
        )
    return body.cache_salt


def _truncation(body: GenerationBody, info: EngineInfo) -> int | None:
    if body.truncation_side not in (None, *TRUNCATION_SIDES):
        raise InvalidRequest(
            f"truncation_side must be 'left' or 'right', got {show(body.truncation_side)}.",
            param="truncation_side",
            code="invalid_type",
        )
    size = body.truncate_prompt_tokens
    if size is None:
        if body.truncation_side is not None:
            raise InvalidRequest("truncation_side needs truncate_prompt_tokens.", param="truncation_side")
    elif size != -1 and not 1 <= size <= info.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {size}; it must be between 1 and {info.max_model_len}, or -1 for what fits.",
            param="truncate_prompt_tokens",
        )
    return size


def _check_at_most(name: str, value: int | None, limit: int, flag: str) -> None:
    if value is not None and value > limit:
        raise InvalidRequest(f"{name} is {value}; this server allows at most {limit} ({flag}).", param=name)


def check_alternatives(name: str, value: int | None, config: ServerConfig) -> None:
    """Bound a number of logprob alternatives, under the name that its endpoint gives it."""
    if value is not None and value < 0:
        raise InvalidRequest(f"{name} is {value}; it must be at least 0.", param=name)
    _check_at_most(name, value, config.max_logprobs, "--max-logprobs")
