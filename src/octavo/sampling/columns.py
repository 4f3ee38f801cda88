"""The sampling state of a request, and that of a step's rows column by column.

A `RowSampling` lives on its request's row from start to end. It is a function of the request's parameters
and token ids alone, so a row rebuilt from token ids samples what the incremental one would have. A step of rows
that edit no logits costs a few list comprehensions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from octavo.backends.sampler import ROW_OPTIONS, Ragged, RowEdits, TokenMasks
from octavo.request import SamplingParams

_NO_IDS = np.empty(0, np.int32)


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
        "edits",
        "is_plain",
        "num_logprobs",
        "num_output_tokens",
        "num_tokens",
        "options",
        "params",
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
        self.num_logprobs = -1 if params.logprobs is None else min(params.logprobs, vocab_size)
        self.options = _options(params, choice, vocab_size, self.num_logprobs).tobytes()  # one ROW_OPTIONS
        self.allowed_ids = np.unique(np.array(params.allowed_token_ids or (), np.int32))  # empty: all
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int32, len(params.logit_bias))
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
        self._never_edited = (
            self._seen is None and not params.logit_bias and params.allowed_token_ids is None and not bad_words
        )
        self._see_min_tokens()
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
        if self.num_output_tokens == self._min_tokens:
            self._see_min_tokens()

    def _see_min_tokens(self) -> None:
        bans_ends = bool(self._stop_ids) and self.num_output_tokens < self._min_tokens
        # Whether the logits of the next token are changed before its choice.
        self.edits: bool = bans_ends or not self._never_edited
        # The next token is the argmax of the logits as they are, and nobody asks for logprobs.
        self.is_plain: bool = self.params.is_greedy and self.num_logprobs < 0 and not self.edits

    @property
    def banned_ids(self) -> list[int]:
        """Ids that may not come next: ends of bad words, then EOS and stop ids while below min_tokens.

        The last token of a bad word is banned when the word's other tokens are the last *output* tokens,
        as in vLLM: a prompt that ends in the beginning of a bad word does not count.
        """
        if not self._bad_prefixes and self.num_output_tokens >= self._min_tokens:
            return self._banned_always
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


def collect_options(rows: Sequence[RowSampling]) -> np.ndarray:
    """[N] ROW_OPTIONS"""
    return np.frombuffer(b"".join([row.options for row in rows]), ROW_OPTIONS)


def collect_edits(rows: Sequence[RowSampling]) -> RowEdits | None:
    """The edits of the rows that have any, as they are now; None where no row has."""
    edited = [row for row in rows if row.edits]
    if not edited:
        return None
    edit_of_row = np.full(len(rows), -1, np.int32)
    edit_of_row[[i for i, row in enumerate(rows) if row.edits]] = np.arange(len(edited))
    return RowEdits(
        edit_of_row,
        allowed=_ragged([row.allowed_ids for row in edited], np.int32),
        banned=_ragged([row.banned_ids for row in edited], np.int32),
        biased=_ragged([row.bias_ids for row in edited], np.int32),
        biases=_ragged([row.bias_values for row in edited], np.float32).values,
        seen=_ragged([row.seen_ids for row in edited], np.int32),
        counts=_ragged([row.seen_counts for row in edited], np.int32).values,
    )


def collect_masks(token_masks: Sequence[np.ndarray | None], vocab_size: int) -> TokenMasks | None:
    """Masks of the rows that have one; None where no row has."""
    given = [mask for mask in token_masks if mask is not None]
    if not given:
        return None
    num_words = -(-vocab_size // 32)
    shortest = min(len(mask) for mask in given)
    assert shortest >= num_words, f"a token mask of {shortest} words for {vocab_size} tokens"
    words = np.stack([mask[:num_words].view(np.uint32) for mask in given])
    mask_of_row = np.full(len(token_masks), -1, np.int32)
    mask_of_row[[i for i, mask in enumerate(token_masks) if mask is not None]] = np.arange(len(given))
    return TokenMasks(mask_of_row, words)


def _ragged(lists: Sequence[np.ndarray | list[int]], dtype: type[np.number]) -> Ragged:
    lengths = [len(ids) for ids in lists]
    starts = np.zeros(len(lists) + 1, np.int64)
    if not any(lengths):
        return Ragged(starts, np.empty(0, dtype))
    np.cumsum(lengths, out=starts[1:])
    return Ragged(starts, np.concatenate(lists, dtype=dtype, casting="unsafe"))


class _SeenTokens:
    """Distinct token ids with their number of occurrences in the output, counted in constant time per token."""

    __slots__ = ("_all_counts", "_all_ids", "_slots", "counts", "ids")

    def __init__(self, prompt: Sequence[int], vocab_size: int) -> None:
        ids = np.unique(np.array(prompt, np.int32))
        self.ids = self._all_ids = ids[ids < vocab_size]
        self.counts = self._all_counts = np.zeros(len(self.ids), np.int32)
        self._slots = {token_id: slot for slot, token_id in enumerate(self.ids.tolist())}

    def count(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self.ids):
            if slot == len(self._all_ids):
                room = np.zeros(max(64, slot), np.int32)
                self._all_ids = np.concatenate([self._all_ids, room])
                self._all_counts = np.concatenate([self._all_counts, room])
            self.ids, self.counts = self._all_ids[: slot + 1], self._all_counts[: slot + 1]
            self.ids[slot] = token_id
        self.counts[slot] += 1


def _options(params: SamplingParams, choice: int, vocab_size: int, num_logprobs: int) -> np.ndarray:
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    takes_best = params.top_p == 0 or params.min_p == 1
    assert params.seed is not None
    return np.array(
        (
            0.0 if params.is_greedy else params.temperature,
            1 if takes_best else top_k,
            params.top_p,
            params.repetition_penalty,
            params.frequency_penalty,
            params.presence_penalty,
            params.seed % 2**64,
            choice,
            num_logprobs,
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
        ),
        ROW_OPTIONS,
    )
