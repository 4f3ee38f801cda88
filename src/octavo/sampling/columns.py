"""The sampling state of a request, and that of a step's rows column by column.

A `RowSampling` lives on its request's row from start to end. It is a function of the request's parameters
and token ids alone, so a row rebuilt from token ids samples what the incremental one would have. The
columns are all that a sampler needs beside logits; a sampler in another language takes the same ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.request import SamplingParams

# The fixed part of a row's columns, laid out as a C struct. Options that are off have their neutral value.
SCALARS = np.dtype(
    [
        ("temperature", np.float32),  # 0: greedy
        ("top_k", np.int32),  # 0: all
        ("top_p", np.float64),  # 1: all
        ("min_p", np.float64),  # 0: all
        ("repetition_penalty", np.float64),  # 1: none
        ("frequency_penalty", np.float64),  # 0: none
        ("presence_penalty", np.float64),  # 0: none
        ("seed", np.uint64),
        ("choice", np.uint32),
        ("num_logprobs", np.int32),  # alternatives beside the sampled token; -1: no logprobs
    ],
    align=True,
)

_NO_IDS = np.empty(0, np.int64)


class RowSampling:
    """What the sampler must know of one choice of one request.

    `vocab_size` is the number of ids that may be sampled; every id that `params` names is below it.
    EOS ids, bad words and prompt tokens at or above it are dropped: nothing there can be sampled.
    """

    __slots__ = (
        "_bad_prefixes",
        "_bad_tail",
        "_banned_always",
        "_min_tokens",
        "_never_edited",
        "_seen",
        "_stop_ids",
        "allowed_ids",
        "bias_ids",
        "bias_values",
        "num_output_tokens",
        "num_tokens",
        "params",
        "scalars",
        "wants_logprobs",
    )

    def __init__(
        self,
        params: SamplingParams,
        *,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int] = (),
        choice: int = 0,
        eos_token_ids: Sequence[int] = (),
        vocab_size: int,
        bad_words_token_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        assert params.seed is not None, "the engine gives every request a seed"
        assert params.max_token_id < vocab_size, f"token id {params.max_token_id} of {vocab_size}"
        self.params = params
        self.num_tokens = len(prompt_token_ids)
        self.num_output_tokens = 0
        self.wants_logprobs = params.logprobs is not None
        self.scalars = _scalars(params, choice, vocab_size).tobytes()
        allowed_ids = params.allowed_token_ids
        self.allowed_ids = None if allowed_ids is None else np.unique(np.array(allowed_ids, np.int64))
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self.bias_values = np.fromiter(params.logit_bias.values(), np.float32, len(params.logit_bias))
        self._min_tokens = params.min_tokens
        self._stop_ids = [token_id for token_id in (*eos_token_ids, *params.stop_token_ids) if token_id < vocab_size]

        bad_words = [tuple(word) for word in bad_words_token_ids if word and word[-1] < vocab_size]
        self._banned_always = [word[-1] for word in bad_words if len(word) == 1]
        self._bad_prefixes: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for word in bad_words:
            if len(word) > 1:
                self._bad_prefixes.setdefault(len(word) - 1, {}).setdefault(word[:-1], []).append(word[-1])
        self._bad_tail: deque[int] = deque(maxlen=max(self._bad_prefixes, default=0))

        penalised = params.repetition_penalty != 1 or params.frequency_penalty != 0 or params.presence_penalty != 0
        self._seen: _SeenTokens | None = None
        if penalised:
            # Frequency and presence count output tokens only, so the prompt matters to repetition alone.
            prompt = prompt_token_ids if params.repetition_penalty != 1 else ()
            self._seen = _SeenTokens(prompt, vocab_size)
        self._never_edited = self._seen is None and not params.logit_bias and self.allowed_ids is None and not bad_words
        for token_id in output_token_ids:
            self.append(token_id)

    def append(self, token_id: int) -> None:
        """Record the next output token, sampled or given."""
        self.num_tokens += 1
        self.num_output_tokens += 1
        if self._bad_prefixes:
            self._bad_tail.append(token_id)
        if self._seen is not None:
            self._seen.count(token_id)

    @property
    def is_plain(self) -> bool:
        """The next token is the argmax of the logits as they are, and nobody asks for logprobs."""
        return self.params.is_greedy and not self.wants_logprobs and not self.edits

    @property
    def edits(self) -> bool:
        """Whether the logits of the next token are changed before its choice."""
        return not self._never_edited or bool(self._stop_ids and self.num_output_tokens < self._min_tokens)

    @property
    def banned_ids(self) -> list[int]:
        """Ids that may not come next: ends of bad words, then EOS and stop ids while below min_tokens.

        The last token of a bad word is banned when the word's other tokens are the last *output* tokens,
        as in vLLM: a prompt that ends in the beginning of a bad word does not count.
        """
        banned = list(self._banned_always)
        if self._bad_prefixes:
            tail = tuple(self._bad_tail)
            for length, prefixes in self._bad_prefixes.items():
                if length <= len(tail):
                    banned += prefixes.get(tail[-length:], ())
        if self.num_output_tokens < self._min_tokens:
            banned += self._stop_ids
        return banned

    @property
    def seen_ids(self) -> np.ndarray:
        """Distinct ids that penalties concern: of the output, and of the prompt if repetition_penalty is on."""
        return self._seen.ids if self._seen is not None else _NO_IDS

    @property
    def seen_counts(self) -> np.ndarray:
        """How often each of `seen_ids` stands in the output; 0 for those of the prompt alone."""
        return self._seen.counts if self._seen is not None else _NO_IDS


@dataclass(frozen=True, slots=True, eq=False)
class SamplingColumns:
    """Row i samples the token at index positions[i] of its sequence.

    Ragged columns hold one array per row, views of the rows' own: valid until a row is appended to. All ids
    are below the number of ids that may be sampled, and distinct within a row except `banned_ids`.
    """

    scalars: np.ndarray  # [N] SCALARS
    positions: np.ndarray  # [N] uint64
    allowed_ids: tuple[np.ndarray | None, ...]  # all other ids are masked; None: all ids may come
    banned_ids: tuple[list[int], ...]  # masked
    bias_ids: tuple[np.ndarray, ...]
    bias_values: tuple[np.ndarray, ...]  # float32
    seen_ids: tuple[np.ndarray, ...]  # what penalties concern
    seen_counts: tuple[np.ndarray, ...]  # occurrences in the output

    @classmethod
    def of(cls, rows: Sequence[RowSampling]) -> SamplingColumns:
        return cls(
            scalars=np.frombuffer(b"".join([row.scalars for row in rows]), SCALARS),
            positions=np.fromiter([row.num_tokens for row in rows], np.uint64, len(rows)),
            allowed_ids=tuple([row.allowed_ids for row in rows]),
            banned_ids=tuple([row.banned_ids for row in rows]),
            bias_ids=tuple([row.bias_ids for row in rows]),
            bias_values=tuple([row.bias_values for row in rows]),
            seen_ids=tuple([row.seen_ids for row in rows]),
            seen_counts=tuple([row.seen_counts for row in rows]),
        )


class _SeenTokens:
    """Distinct token ids with their number of occurrences in the output, counted in constant time per token."""

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        ids = np.unique(np.array(prompt, np.int64))
        self._ids = ids[ids < vocab_size]
        self._counts = np.zeros(len(self._ids), np.int64)
        self._slots = {token_id: slot for slot, token_id in enumerate(self._ids.tolist())}

    def count(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            room = np.zeros(max(64, slot), np.int64)
            self._ids = np.concatenate([self._ids, room])
            self._counts = np.concatenate([self._counts, room])
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        return self._counts[: len(self._slots)]


def _scalars(params: SamplingParams, choice: int, vocab_size: int) -> np.ndarray:
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    num_logprobs = -1 if params.logprobs is None else min(params.logprobs, vocab_size)
    assert params.seed is not None
    return np.array(
        (
            0.0 if params.is_greedy else params.temperature,
            top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            params.seed % 2**64,
            choice,
            num_logprobs,
        ),
        SCALARS,
    )
