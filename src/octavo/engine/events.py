"""What a client of the engine receives: one stream of events per request, text included.

The non-streaming answer is the fold of these events; there is no second path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from octavo.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request as the engine's client takes it: validated, tokenized, one prompt, `sampling.n` choices."""

    request_id: str  # the client's id, or one that the server made; unique among live requests
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    prompt_text: str | None = None
    arrival_s: float = 0.0  # time.monotonic() when the server had read the first byte of it
    priority: int = 0
    cache_salt: str = ""


class TopToken(msgspec.Struct, frozen=True, gc=False):
    """One alternative at a position."""

    token_id: int
    text: str  # U+FFFD where the token holds part of a character
    bytes: bytes
    logprob: float


class TokenDetail(msgspec.Struct, frozen=True, gc=False):
    """One token with its log-probability and where its text stands."""

    token_id: int
    text: str
    bytes: bytes
    logprob: float | None  # None only for the first token of a prompt
    rank: int
    text_offset: int  # characters of the choice's text before this token (prompt included for prompt tokens)
    top: tuple[TopToken, ...] = ()


class ChoiceDelta(msgspec.Struct, frozen=True, gc=False):
    """What is new for one choice. Deltas of a choice come in order; the one with a finish reason is its last.

    Concatenated `text` is the choice's text: stop strings are cut, what could begin one is held back until
    it is decided, half characters wait for their other half.
    """

    choice: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenDetail, ...] = ()  # one per token id when the request asked for logprobs
    prompt_logprobs: tuple[TokenDetail, ...] = ()  # whole prompt, with the first delta of choice 0, when asked for
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None
    num_output_tokens: int = 0  # of this choice so far
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    error: str | None = None  # with finish_reason "error"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What the API process must know of a ready engine."""

    model: str  # as the operator named it
    served_model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int  # ids below it can be looked up and sampled
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float | int] = field(default_factory=dict)  # from generation_config.json
    max_num_seqs: int = 0
    block_size: int = 0
    num_blocks: int = 0
    kv_bytes_per_token: int = 0
    kv_cache_bytes: int = 0
    max_concurrency: float = 0.0  # requests of max_model_len tokens that the KV cache holds at once
    backend: str = ""
    dtype: str = ""
    decisions: tuple[tuple[str, str, str], ...] = ()  # (field, value, why) of resolve()
    notes: tuple[str, ...] = ()  # lines about the weights: their formats, and what is not exactly the checkpoint's
    created_s: int = 0  # unix time
