"""One token per row from its logits. The order of operations is vLLM's.

    token mask (grammar)                                 -> raw logprobs are taken here
    allowed ids, bad words, min_tokens, logit_bias, repetition, frequency, presence penalty
    temperature 0: argmax, lowest id on ties
    temperature, min_p, top_k, top_p, draw               -> processed logprobs are taken before the draw

Each row is computed alone, from its own logits and its own columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.batch import TokenLogprobs
from octavo.errors import RequestFailed
from octavo.sampling.columns import RowSampling, SamplingColumns
from octavo.sampling.filters import Floats, Indices, draw, largest, likeliest, scale, weigh
from octavo.sampling.logprobs import describe
from octavo.sampling.philox import uniforms

LogprobsMode = Literal["raw", "processed"]

NOT_FINITE = "The model produced logits that are not finite (NaN or infinity); no token can be sampled from them."
NOTHING_LEFT = (
    "No token is left to sample: the grammar, allowed_token_ids, bad_words and min_tokens together exclude every one."
)

_FLOAT32_MAX = float(np.finfo(np.float32).max)
# Entry b holds the limits of 8 tokens whose mask is byte b, lowest bit first: allowed +inf, masked -inf.
_MASK_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What each row sampled. A failed row has token id -1 and no logprobs; the others are unaffected."""

    token_ids: list[int]  # [N]
    logprobs: dict[int, TokenLogprobs]  # row -> what it asked for
    failed: dict[int, str]  # row -> why this row alone cannot go on


class Sampler:
    """Samples on the host, for one thread at a time: it owns scratch rows.

    `vocab_size` is the number of ids that may be sampled; columns of logits beyond it (padding of the
    output layer) are never looked at. `logprobs_mode` raw: of the model's own distribution. Processed: of
    the distribution that is drawn from, after penalties, temperature and filters (without temperature and
    filters for greedy rows).
    """

    def __init__(self, vocab_size: int, logprobs_mode: LogprobsMode = "raw") -> None:
        self.vocab_size = vocab_size
        self._processed = logprobs_mode == "processed"
        self._masked = np.empty(vocab_size, np.float32)
        self._edited = np.empty(vocab_size, np.float32)

    def sample(
        self,
        logits: Floats,
        rows: Sequence[RowSampling],
        *,
        sources: Sequence[int] | None = None,
        token_masks: Sequence[np.ndarray | None] | None = None,
    ) -> SampleOutput:
        """Sample the next token of every row; neither logits nor rows are changed.

        `logits` [M, V] float32. Row i reads logits[sources[i]], logits[i] without `sources`: choices that
        fork share one row of logits. `token_masks[i]` [at least vocab_size / 32] 32-bit words has bit t
        (t % 32 of word t // 32) set when token t may come; None lets all come.
        """
        assert logits.dtype == np.float32 and logits.shape[1] >= self.vocab_size, (logits.dtype, logits.shape)
        if sources is None:
            assert len(logits) == len(rows), (len(logits), len(rows))
            sources = range(len(rows))
        best = self._argmax(logits)
        # The maximum is NaN if any logit is, +inf if any is, and -inf if all are.
        finite = np.isfinite(logits[np.arange(len(logits)), best]).tolist()
        failed = {row: NOT_FINITE for row, source in enumerate(sources) if not finite[source]}
        token_ids = best[np.asarray(sources)].tolist() if rows else []
        output = SampleOutput(token_ids, {}, failed)
        if token_masks is not None or not all(row.is_plain for row in rows):
            with np.errstate(over="ignore", under="ignore"):
                self._choose(logits, rows, sources, token_masks, output)
        for row in failed:
            token_ids[row] = -1
        return output

    def score(self, logits: Floats, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Logprobs of given tokens [M] under raw logits [M, V]: row i is for the token that followed it.

        Works row by row in O(V) memory; the caller bounds M, the rows of logits that exist at once.
        Raises RequestFailed when a row holds NaN or infinity.
        """
        described = []
        with np.errstate(over="ignore", under="ignore"):
            for row, token_id in zip(logits, token_ids, strict=True):
                values = row[: self.vocab_size]
                if not np.isfinite(values.max()):
                    raise RequestFailed(NOT_FINITE)
                described.append(describe(values, int(token_id), num_top))
        return described

    def _argmax(self, logits: Floats) -> Indices:
        """The lowest id of the highest logit of each row. A NaN counts as highest."""
        best: Indices = logits.argmax(axis=1)
        for row in np.flatnonzero(best >= self.vocab_size):
            best[row] = logits[row, : self.vocab_size].argmax()
        return best

    def _choose(
        self,
        logits: Floats,
        rows: Sequence[RowSampling],
        sources: Sequence[int],
        token_masks: Sequence[np.ndarray | None] | None,
        output: SampleOutput,
    ) -> None:
        """Replace the argmax of every row that has not failed by the token that its request asks for."""
        step = _Step(SamplingColumns.of(rows))
        for row, source in enumerate(sources):
            if row in output.failed:
                continue
            mask = token_masks[row] if token_masks is not None else None
            sampled = self._sample_row(step, row, logits[source, : self.vocab_size], output.token_ids[row], mask)
            if sampled is None:
                output.failed[row] = NOTHING_LEFT
                continue
            output.token_ids[row], logprobs = sampled
            if logprobs is not None:
                output.logprobs[row] = logprobs

    def _sample_row(
        self, step: _Step, row: int, values: Floats, best: int, mask: np.ndarray | None
    ) -> tuple[int, TokenLogprobs | None] | None:
        """Token and logprobs of one row; None when every token is excluded."""
        if mask is not None:
            values = self._apply_mask(values, mask)
            best = int(values.argmax())
        raw = values
        if step.edits(row):
            values = self._edited
            np.copyto(values, raw)
            _edit(values, step.columns, row)
            best = int(values.argmax())
        peak = float(values[best])
        if peak == -math.inf:
            return None

        kept: Indices | None = None
        index = best
        if step.temperatures[row] > 0:
            values, kept, index = self._draw(step, row, values, best, peak)
        token_id = index if kept is None else int(kept[index])
        num_logprobs = step.num_logprobs[row]
        if num_logprobs < 0:
            return token_id, None
        if self._processed:
            return token_id, describe(values, index, num_logprobs, kept)
        return token_id, describe(raw, token_id, num_logprobs)

    def _apply_mask(self, values: Floats, mask: np.ndarray) -> Floats:
        words = mask.view(np.uint8)[: -(-self.vocab_size // 8)]
        assert len(words) * 8 >= self.vocab_size, f"a token mask of {len(mask)} words for {self.vocab_size} tokens"
        limits = _MASK_LIMITS[words].reshape(-1)[: self.vocab_size]
        return np.minimum(values, limits, out=self._masked)

    def _draw(
        self, step: _Step, row: int, values: Floats, best: int, peak: float
    ) -> tuple[Floats, Indices | None, int]:
        """The filtered distribution and what was drawn from it.

        Returns (scaled logits of the tokens that are kept, their ids or None for all, index of the drawn one).
        """
        temperature, top_k = step.temperatures[row], step.top_ks[row]
        top_p, min_p = step.top_ps[row], step.min_ps[row]
        if top_k == 1 or top_p == 0 or min_p == 1:
            return np.zeros(1, np.float32), np.array([best]), 0

        kept = largest(values, top_k) if top_k else None
        if kept is not None:
            values = values[kept]
        scaled = scale(values, peak, temperature)
        if min_p > 0:
            chosen = np.flatnonzero(scaled >= np.float32(math.log(min_p)))
            kept = chosen if kept is None else kept[chosen]
            values, scaled = values[chosen], scaled[chosen]
        weights = weigh(scaled, self.vocab_size)
        if top_p < 1:
            mass = top_p * float(weights.sum(dtype=np.float64))
            chosen = likeliest(values, mass, peak, temperature, self.vocab_size)
            kept = chosen if kept is None else kept[chosen]
            scaled, weights = scaled[chosen], weights[chosen]
        return scaled, kept, draw(weights, step.uniforms[row])


class _Step:
    """The columns of a step as Python values, which rows are read from one by one."""

    def __init__(self, columns: SamplingColumns) -> None:
        self.columns = columns
        scalars = columns.scalars
        self.temperatures: list[float] = scalars["temperature"].tolist()
        self.top_ks: list[int] = scalars["top_k"].tolist()
        self.top_ps: list[float] = scalars["top_p"].tolist()
        self.min_ps: list[float] = scalars["min_p"].tolist()
        self.num_logprobs: list[int] = scalars["num_logprobs"].tolist()
        self.uniforms: list[float] = []
        if any(self.temperatures):
            self.uniforms = uniforms(scalars["seed"], scalars["choice"], columns.positions).tolist()

    def edits(self, row: int) -> bool:
        columns = self.columns
        return bool(
            columns.allowed_ids[row] is not None
            or columns.banned_ids[row]
            or len(columns.bias_ids[row])
            or len(columns.seen_ids[row])
        )


def _edit(values: Floats, columns: SamplingColumns, row: int) -> None:
    """Masks, bias and penalties of one row, in place. Masked logits are -inf and stay so."""
    allowed_ids = columns.allowed_ids[row]
    if allowed_ids is not None:
        kept = values[allowed_ids]
        values.fill(-np.inf)
        values[allowed_ids] = kept
    if columns.banned_ids[row]:
        values[columns.banned_ids[row]] = -np.inf
    if len(columns.bias_ids[row]):
        values[columns.bias_ids[row]] += columns.bias_values[row]
    ids, counts = columns.seen_ids[row], columns.seen_counts[row]
    if not len(ids):
        return
    scalars = columns.scalars[row]
    before = values[ids].astype(np.float64)
    after = np.where(before > 0, before / scalars["repetition_penalty"], before * scalars["repetition_penalty"])
    after -= scalars["frequency_penalty"] * counts
    after -= scalars["presence_penalty"] * (counts > 0)
    # An extreme penalty may leave float32: it must neither become +inf nor mask a token.
    values[ids] = np.where(before == -np.inf, -np.inf, np.clip(after, -_FLOAT32_MAX, _FLOAT32_MAX))
