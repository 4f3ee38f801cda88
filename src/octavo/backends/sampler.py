"""What sampling asks of a backend: a step's rows as arrays in, tokens and log-probabilities as arrays out.

A backend may bring kernels for it (`Ops.sampler_kernels`); `sampling.numpy_kernels` does the same with NumPy and is
the definition: same tokens, same bits. Letters: N rows, M rows of logits, V vocabulary, E edited rows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# The options of a row, laid out as a C struct. Options that are off have their neutral value.
ROW_OPTIONS = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy
        ("top_k", np.int32),  # 0: all
        ("top_p", np.float64),  # 1: all
        ("repetition_penalty", np.float64),  # 1: none
        ("frequency_penalty", np.float64),  # 0: none
        ("presence_penalty", np.float64),  # 0: none
        ("seed", np.uint64),
        ("choice", np.uint32),
        ("num_logprobs", np.int32),  # alternatives beside the token; -1: no log-probabilities
        ("min_scaled", np.float32),  # log(min_p), which scaled logits must reach; -inf: all
    ],
    align=True,
)


class SampleStatus(enum.IntEnum):
    SAMPLED = 0
    NOT_FINITE = 1  # a logit is NaN or infinity, or all are -infinity
    NOTHING_LEFT = 2  # masks and bans exclude every token


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Values of edited row e: values[starts[e]:starts[e + 1]]."""

    starts: np.ndarray  # [E + 1] int64
    values: np.ndarray  # int32 token ids below V, or what goes with them


@dataclass(frozen=True, slots=True, eq=False)
class RowEdits:
    """What changes the logits of some rows before a token is chosen, in this order."""

    edit_of_row: np.ndarray  # [N] int32, the row's place e in the lists, or -1
    allowed: Ragged  # distinct ids, all others are excluded; none: nothing is
    banned: Ragged
    biased: Ragged  # distinct ids
    biases: np.ndarray  # float32, one per id of `biased`
    seen: Ragged  # distinct ids that penalties concern
    counts: np.ndarray  # int32, how often each id of `seen` stands in the output


@dataclass(frozen=True, slots=True, eq=False)
class TokenMasks:
    mask_of_row: np.ndarray  # [N] int32, row of `words`, or -1: all tokens may come
    words: np.ndarray  # [masks, at least V / 32] uint32: bit t % 32 of word t // 32 is set when token t may come


@dataclass(frozen=True, slots=True, eq=False)
class SampleBatch:
    """Row i samples the token at index positions[i] of its sequence from logits[sources[i]]."""

    logits: np.ndarray  # [M, at least V] float32; what lies beyond V is not looked at
    options: np.ndarray  # [N] ROW_OPTIONS
    positions: np.ndarray  # [N] int64
    sources: np.ndarray  # [N] int32
    max_logprobs: int  # the largest num_logprobs; -1: nobody wants any
    edits: RowEdits | None = None
    masks: TokenMasks | None = None
    given_ids: np.ndarray | None = None  # [N] int32: nothing is sampled, the log-probabilities are of these tokens
    describes_processed: bool = False  # log-probabilities of what is drawn from, not of the model (after its mask)


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """Log-probabilities: value - peak - log(total). Rows that want none hold anything."""

    values: np.ndarray  # [N] float32, of the token
    peaks: np.ndarray  # [N] float32
    totals: np.ndarray  # [N] float64
    ranks: np.ndarray  # [N] int32, 1 + how many tokens are likelier
    num_top: np.ndarray  # [N] int32, at most num_logprobs: tokens of probability 0 are left out
    top_ids: np.ndarray  # [N, max_logprobs] int32, likeliest first, lowest id first among equals
    top_values: np.ndarray  # [N, max_logprobs] float32

    @classmethod
    def room_for(cls, num_rows: int, max_logprobs: int) -> Described:
        return cls(
            values=np.empty(num_rows, np.float32),
            peaks=np.empty(num_rows, np.float32),
            totals=np.empty(num_rows, np.float64),
            ranks=np.empty(num_rows, np.int32),
            num_top=np.empty(num_rows, np.int32),
            top_ids=np.empty((num_rows, max_logprobs), np.int32),
            top_values=np.empty((num_rows, max_logprobs), np.float32),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    token_ids: np.ndarray  # [N] int32, -1 where nothing was sampled
    statuses: np.ndarray  # [N] uint8, SampleStatus
    described: Described | None  # where max_logprobs is not -1


class SamplerKernels(Protocol):
    """Samples rows of one vocabulary; for one thread at a time."""

    def sample(self, batch: SampleBatch) -> Sampled: ...
