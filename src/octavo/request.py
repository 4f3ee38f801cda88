"""What a request is: how it samples, where it stands, how it ended.

`SamplingParams` is validated once, at the edge, and frozen; the engine only ever sees this type, so no
unchecked client value reaches the loop. `Request` is the scheduler's mutable record. A feature that needs
more state keeps its own table keyed by `request_id`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import InvalidRequest

GREEDY_TEMPERATURE = 1e-5  # below it, sampling is exact argmax
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_TOKEN_LIST = 4096  # entries of stop_token_ids and bad_words
MAX_LOGIT_BIAS = 4096
SEED_LIMIT = 2**63
MAX_INT = 2**63 - 1  # what every integer of a request must fit: it travels between processes


class FinishReason(enum.StrEnum):
    """Why a choice ended; the value is what the OpenAI API calls it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of a request are chosen and when it ends. Semantics and order follow vLLM.

    Raises `InvalidRequest` naming the field. What depends on the model (ids within the vocabulary, room
    in the context, caps chosen by the operator) is checked where the model is known.
    """

    n: int = 1
    max_tokens: int | None = 16  # None: the room that is left in the context
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives beside the sampled token; 0 is a value
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_tuple("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is None:
            object.__setattr__(self, "logit_bias", {})
        elif not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}.", param="logit_bias"
            )
        _check_int("n", self.n, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 0)
            if self.min_tokens > self.max_tokens:
                raise InvalidRequest(
                    f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}. Lower min_tokens.",
                    param="min_tokens",
                )
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, 1e6)
        if self.repetition_penalty == 0.0:
            raise InvalidRequest(
                "repetition_penalty is 0; it must be above 0 (1 turns it off).", param="repetition_penalty"
            )
        if self.seed is not None:
            _check_int("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0)
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequest(f"{name} must be true or false, got {getattr(self, name)!r}.", param=name)
        _check_strings("stop", self.stop, MAX_STOP_STRINGS)
        _check_strings("bad_words", self.bad_words, MAX_TOKEN_LIST)
        _check_ids("stop_token_ids", self.stop_token_ids, MAX_TOKEN_LIST)
        if self.allowed_token_ids is not None:
            _check_ids("allowed_token_ids", self.allowed_token_ids, None)
            if not self.allowed_token_ids:
                raise InvalidRequest(
                    "allowed_token_ids is empty: no token could be sampled.", param="allowed_token_ids"
                )
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest(
                f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}.", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias", token_id, 0)
            _check_float("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def max_token_id(self) -> int:
        """The largest token id named anywhere, -1 if none: compare it with the vocabulary."""
        ids = [*self.stop_token_ids, *self.logit_bias, *(self.allowed_token_ids or ())]
        return max(ids, default=-1)


def _as_tuple(name: str, value: object) -> tuple[Any, ...]:
    """A list of a request, which may be None or one string."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise InvalidRequest(f"{name} must be a list, got {value!r}.", param=name)
    return tuple(value)


def _check_int(name: str, value: object, low: int, high: int = MAX_INT) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, got {value!r}.", param=name)
    if not low <= value <= high:
        bound = f"at least {low}" if value < low and high == MAX_INT else f"between {low} and {high}"
        raise InvalidRequest(f"{name} is {value}; it must be {bound}.", param=name)


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name} must be a number, got {value!r}.", param=name)
    if not low <= value <= high:  # NaN is in no range
        raise InvalidRequest(f"{name} is {value}; it must be between {low:g} and {high:g}.", param=name)


def _check_strings(name: str, values: Sequence[object], limit: int) -> None:
    if len(values) > limit:
        raise InvalidRequest(f"{name} has {len(values)} entries; the limit is {limit}.", param=name)
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidRequest(f"{name} must hold non-empty strings, got {value!r}.", param=name)
        if len(value) > MAX_STOP_STRING_CHARS:
            raise InvalidRequest(
                f"{name} has an entry of {len(value)} characters; the limit is {MAX_STOP_STRING_CHARS}.", param=name
            )


def _check_ids(name: str, values: Sequence[object], limit: int | None) -> None:
    if limit is not None and len(values) > limit:
        raise InvalidRequest(f"{name} has {len(values)} entries; the limit is {limit}.", param=name)
    for value in values:
        _check_int(name, value, 0)


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # holds no blocks; new, or preempted
    RUNNING = "running"  # holds blocks
    FINISHED = "finished"  # terminal; holds no blocks


@dataclass(eq=False, slots=True)
class Request:
    """One choice of one client request, as the scheduler sees it: token ids, never text.

    [0, num_computed_tokens)            KV is valid and committed; published when a block fills
    + num_in_flight_tokens              written by the step in flight, if any
    len(token_ids) - num_prompt_tokens  output tokens committed so far
    """

    request_id: int  # unique for the life of the engine, never reused
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams  # seed is always set here, n is 1 for all but the leader of a fork
    max_tokens: int  # resolved: never beyond the context
    arrival_s: float  # time.monotonic()
    choice: int = 0
    priority: int = 0  # lower runs first, as in vLLM
    cache_salt: str = ""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    status: RequestStatus = RequestStatus.WAITING
    token_ids: list[int] = field(default_factory=list)  # prompt + output
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens that the first admission did not have to compute
    num_preemptions: int = 0
    block_ids: list[list[int]] = field(default_factory=list)  # [G][blocks]; -1 where the window has passed
    block_hashes: list[bytes] = field(default_factory=list)  # one per full block of token_ids
    draft_token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
