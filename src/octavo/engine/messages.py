"""What an engine and its client say to each other, and how it is packed (MessagePack).

One client owns an engine. It numbers the choices of its requests (`first_request_id` + choice), never
reusing a number, so that an update needs no translation on its way back.
"""

from __future__ import annotations

import msgspec

from octavo.batch import RequestUpdate
from octavo.engine.events import EngineInfo
from octavo.engine.startup import Phase
from octavo.request import SamplingParams


class AddRequest(msgspec.Struct, frozen=True, tag="add", array_like=True):
    """`sampling.n` choices of one prompt; the choices' ids are first_request_id, first_request_id + 1 ..."""

    first_request_id: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str = ""
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


class AbortRequests(msgspec.Struct, frozen=True, tag="abort", array_like=True):
    request_ids: tuple[int, ...]


class ResetPrefixCache(msgspec.Struct, frozen=True, tag="reset_prefix_cache", array_like=True):
    call_no: int


class Vocabulary(msgspec.Struct, frozen=True, tag="vocabulary", array_like=True):
    """What an engine must know of the model's tokenizer, which its client loads: said once, while it starts."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True):
    """End the loop once the step in flight has been committed."""


ToEngine = AddRequest | AbortRequests | ResetPrefixCache | Vocabulary | Stop


class Loading(msgspec.Struct, frozen=True, tag="loading", array_like=True):
    phase: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag="ready", array_like=True):
    info: EngineInfo
    phases: tuple[Phase, ...] = ()  # of the engine process' start


class StartFailed(msgspec.Struct, frozen=True, tag="start_failed", array_like=True):
    message: str


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges after a step, and counters since the engine started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of blocks that live requests hold
    num_preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    padding_tokens: int = 0  # rows that had ended while their static batch went on


class StepReport(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """One message a step, for all requests."""

    updates: tuple[RequestUpdate, ...]
    first_scheduled: tuple[int, ...]  # request ids that got their first step
    planned_s: float  # time.monotonic() when the step was planned
    num_tokens: int  # computed by the step; 0 when only an abort is reported
    stats: EngineStats


class Reply(msgspec.Struct, frozen=True, tag="reply", array_like=True):
    call_no: int
    ok: bool


FromEngine = Loading | Ready | StartFailed | StepReport | Reply

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    return _to_engine.decode(data)


def decode_from_engine(data: bytes) -> FromEngine:
    return _from_engine.decode(data)
