"""What the scheduler remembers of a live request beside `Request`, and of each step in flight."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.batch import NewRow, ScheduledRequest
from octavo.request import FinishReason, Request
from octavo.scheduler.policy import Rank


@dataclass(eq=False, slots=True)
class Live:
    """A request between `add` and its end.

    Two things outrun the committed tokens. `num_pending_tokens` have been sampled, or will be, by steps in
    flight: the worker's row has them, so ranges may be planned beyond what we know. `epoch` grows whenever
    the KV is dropped: a step planned under an older epoch still delivers its tokens, but no KV.
    """

    request: Request
    rank: Rank
    cache_extra: bytes
    end: int  # KV of tokens at and beyond this position is never needed
    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    root: bytes = b""  # parent of its first block's key; empty before the first admission
    rope_variant: int = 0
    epoch: int = 0
    num_pending_tokens: int = 0
    num_draft_steps: int = 0  # steps in flight that verify drafts: how many tokens they yield is unknown
    num_prompt_logprobs: int = 0  # prompt tokens whose logprobs were delivered, or are a leader's to deliver
    has_row: bool = False
    is_counted: bool = False  # the prefix-cache counters know of it
    leader: Live | None = None  # computes the prompt for it
    siblings: list[Live] = field(default_factory=list)  # wait for this leader's prompt

    @property
    def num_known_tokens(self) -> int:
        """Tokens that the worker's row holds once the steps in flight have run, drafts aside."""
        return len(self.request.token_ids) + self.num_pending_tokens

    def new_row(self) -> NewRow:
        request = self.request
        return NewRow(
            request.request_id,
            tuple(request.token_ids),
            request.num_prompt_tokens,
            request.sampling,
            request.choice,
            request.bad_words_token_ids,
        )

    def append(self, token_id: int) -> FinishReason | None:
        """Take one sampled token; the reason if it ends the request. The ending token is part of the output.

        At the limit the reason is the limit, even if the last token would have ended the answer: as in vLLM.
        """
        request = self.request
        request.token_ids.append(token_id)
        num_output = len(request.token_ids) - len(request.prompt_token_ids)
        if num_output >= request.max_tokens:
            return FinishReason.LENGTH
        if num_output >= request.sampling.min_tokens:
            if token_id in self.eos_token_ids:
                return FinishReason.STOP
            if token_id in self.stop_token_ids:
                request.stop_reason = token_id
                return FinishReason.STOP
        return None


@dataclass(eq=False, slots=True)
class InFlight:
    """One request's part of a step that was planned and not committed."""

    live: Live
    epoch: int
    start: int
    end: int
    num_drafts: int  # the last tokens of [start, end)
    samples: bool
    leader_id: int | None = None  # of a fork: whose logits it samples from


@dataclass(eq=False, slots=True)
class Step:
    """A step being planned."""

    budget: int
    requests: list[ScheduledRequest] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    in_flight: list[InFlight] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class StepStats:
    """What the last planned step holds. A decode computes one known token, plus drafts, behind the prompt."""

    num_requests: int = 0
    num_prefill_tokens: int = 0  # of prompts, and of whatever is computed again
    num_decode_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens
