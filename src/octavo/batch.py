"""The whole contract between scheduler and worker: one frozen batch down, one frozen output up.

The worker keeps a row per request (its token ids, sampling state) from `NewRow` until the id appears in
`freed_request_ids`; it appends the tokens that it samples itself. So a batch may be planned while the one
before it still runs: a scheduled range may end in a token that the scheduler does not know yet.

What a step makes by the hundred is a `Struct`: a tenth of the time that a frozen dataclass takes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from octavo.request import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRow:
    """What the worker must know of a request, sent with the first batch that schedules it (or forks it).

    A preempted request keeps its row: it is not sent again.
    """

    request_id: int
    token_ids: tuple[int, ...]  # prompt + output known so far
    num_prompt_tokens: int
    sampling: SamplingParams
    choice: int = 0
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()


class ScheduledRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Compute the KV of tokens [start, start + num_tokens) of one request, and sample if that is its end.

    The tokens are those of the worker's row; the last `len(draft_token_ids)` of the range are the drafts.
    """

    request_id: int
    start: int
    num_tokens: int
    block_ids: tuple[tuple[int, ...], ...]  # [G][blocks]; -1 where no query of this step can look
    samples: bool  # the range reaches the end of the known tokens
    draft_token_ids: tuple[int, ...] = ()
    fork_ids: tuple[int, ...] = ()  # further choices that sample from this same last row of logits
    rope_variant: int = 0  # 0: as trained; 1: scaled, for requests beyond the native context


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Apply in this order: freed rows, new rows, block copies, then the forward."""

    step_id: int
    requests: tuple[ScheduledRequest, ...]
    new_rows: tuple[NewRow, ...] = ()
    freed_request_ids: tuple[int, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()  # (source, destination): copy-on-write of forks

    @property
    def num_tokens(self) -> int:
        return sum(request.num_tokens for request in self.requests)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities at one position, of the raw model distribution unless the server was told otherwise."""

    token_id: int  # the token that stands there
    logprob: float
    rank: int  # 1 is the likeliest
    top_token_ids: tuple[int, ...] = ()  # likeliest first, lowest id first on ties
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step produced, by request id. A scheduled request that does not sample has no entry."""

    step_id: int
    token_ids: dict[int, tuple[int, ...]] = field(default_factory=dict)  # accepted drafts, then the sampled token
    logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    # Entry i of a chunk [start, end) is for prompt token start + 1 + i; the prompt's first token has none.
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)  # request id -> why this request alone cannot go on


class RequestUpdate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a commit changed for one request, for whoever listens to it."""

    request_id: int
    choice: int
    new_token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None  # a FinishReason value
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: str | None = None
