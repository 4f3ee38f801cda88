"""Sampling with NumPy, row by row: the definition of `SamplerKernels`, and what serves backends without any."""

from __future__ import annotations

import math

import numpy as np

from octavo.backends.sampler import Described, Ragged, RowEdits, SampleBatch, Sampled, SampleStatus
from octavo.sampling.filters import Floats, Indices, draw, largest, likeliest, scale, weigh
from octavo.sampling.logprobs import describe
from octavo.sampling.philox import uniforms

_FLOAT32_MAX = float(np.finfo(np.float32).max)
# Entry b holds the limits of 8 tokens whose mask is byte b, lowest bit first: allowed +inf, masked -inf.
_MASK_LIMITS = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, -np.inf
).astype(np.float32)


class NumpyKernels:
    """Samples on the host, for one thread at a time: it owns scratch rows."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._masked = np.empty(vocab_size, np.float32)
        self._edited = np.empty(vocab_size, np.float32)

    def sample(self, batch: SampleBatch) -> Sampled:
        logits, sources = batch.logits, batch.sources
        best = self._argmax(logits)
        # The maximum is NaN if any logit is, +inf if any is, and -inf if all are.
        finite = np.isfinite(logits[np.arange(len(logits)), best])[sources]
        token_ids = np.where(finite, best[sources], -1).astype(np.int32)
        statuses = np.where(finite, SampleStatus.SAMPLED, SampleStatus.NOT_FINITE).astype(np.uint8)
        described = None if batch.max_logprobs < 0 else Described.room_for(len(sources), batch.max_logprobs)
        sampled = Sampled(token_ids, statuses, described)
        if batch.edits is not None or batch.masks is not None or described or batch.options["temperature"].any():
            step = _Step(batch)
            with np.errstate(over="ignore", under="ignore"):
                for row in np.flatnonzero(finite).tolist():
                    values = logits[sources[row], : self._vocab_size]
                    token_id = self._sample_row(step, row, values, int(token_ids[row]), described)
                    token_ids[row] = token_id
                    if token_id < 0:
                        statuses[row] = SampleStatus.NOTHING_LEFT
        return sampled

    def _argmax(self, logits: Floats) -> Indices:
        """The lowest id of the highest logit of each row. A NaN counts as highest."""
        best: Indices = logits.argmax(axis=1)
        for row in np.flatnonzero(best >= self._vocab_size):
            best[row] = logits[row, : self._vocab_size].argmax()
        return best

    def _sample_row(self, step: _Step, row: int, values: Floats, best: int, described: Described | None) -> int:
        """The token of one row, -1 when every token is excluded; notes its log-probabilities if it wants any."""
        mask = step.mask(row)
        if mask is not None:
            limits = _MASK_LIMITS[mask.view(np.uint8)[: -(-self._vocab_size // 8)]].reshape(-1)[: self._vocab_size]
            values = np.minimum(values, limits, out=self._masked)
            best = int(values.argmax())
        raw = values
        edit = step.edit_of_row[row]
        if edit >= 0 and step.edits is not None:
            values = self._edited
            np.copyto(values, raw)
            _edit(values, step.edits, edit, step.options[row])
            best = int(values.argmax())
        peak = float(values[best])
        if peak == -math.inf:
            return -1

        kept: Indices | None = None
        index = best
        if step.given_ids is not None:
            index = step.given_ids[row]
        elif step.temperatures[row] > 0:
            values, kept, index = self._draw(step, row, values, best, peak)
        token_id = index if kept is None else int(kept[index])
        num_logprobs = step.num_logprobs[row]
        if num_logprobs >= 0:
            assert described is not None, "max_logprobs is the largest num_logprobs"
            if step.describes_processed:
                describe(described, row, values, index, num_logprobs, self._vocab_size, kept)
            else:
                describe(described, row, raw, token_id, num_logprobs, self._vocab_size)
        return token_id

    def _draw(
        self, step: _Step, row: int, values: Floats, best: int, peak: float
    ) -> tuple[Floats, Indices | None, int]:
        """The filtered distribution and what was drawn from it.

        Returns (scaled logits of the tokens that are kept, their ids or None for all, index of the drawn one).
        """
        temperature, top_k = step.temperatures[row], step.top_ks[row]
        top_p, min_scaled = step.top_ps[row], step.min_scaled[row]
        if top_k == 1:
            return np.zeros(1, np.float32), np.array([best]), 0

        kept = largest(values, top_k) if top_k else None
        if kept is not None:
            values = values[kept]
        scaled = scale(values, peak, temperature)
        if min_scaled > -math.inf:
            chosen = np.flatnonzero(scaled >= np.float32(min_scaled))
            kept = chosen if kept is None else kept[chosen]
            values, scaled = values[chosen], scaled[chosen]
        weights = weigh(scaled, self._vocab_size)
        if top_p < 1:
            mass = top_p * float(weights.sum(dtype=np.float64))
            chosen = likeliest(values, mass, peak, temperature, self._vocab_size)
            kept = chosen if kept is None else kept[chosen]
            scaled, weights = scaled[chosen], weights[chosen]
        return scaled, kept, draw(weights, step.uniforms[row])


class _Step:
    """A batch as Python values, which rows are read from one by one."""

    def __init__(self, batch: SampleBatch) -> None:
        self.options = options = batch.options
        self.edits = batch.edits
        self.edit_of_row: list[int] = [-1] * len(options) if batch.edits is None else batch.edits.edit_of_row.tolist()
        self.masks = batch.masks
        self.describes_processed = batch.describes_processed
        self.given_ids: list[int] | None = None if batch.given_ids is None else batch.given_ids.tolist()
        self.temperatures: list[float] = options["temperature"].tolist()
        self.top_ks: list[int] = options["top_k"].tolist()
        self.top_ps: list[float] = options["top_p"].tolist()
        self.min_scaled: list[float] = options["min_scaled"].tolist()
        self.num_logprobs: list[int] = options["num_logprobs"].tolist()
        self.uniforms: list[float] = []
        if any(self.temperatures):
            self.uniforms = uniforms(options["seed"], options["choice"], batch.positions).tolist()

    def mask(self, row: int) -> np.ndarray | None:
        if self.masks is None or self.masks.mask_of_row[row] < 0:
            return None
        words: np.ndarray = self.masks.words[self.masks.mask_of_row[row]]
        return words


def _edit(values: Floats, edits: RowEdits, edit: int, options: np.void) -> None:
    """Masks, bias and penalties of one row, in place. Masked logits are -inf and stay so."""
    allowed_ids = _of(edits.allowed, edit)
    if len(allowed_ids):
        kept = values[allowed_ids]
        values.fill(-np.inf)
        values[allowed_ids] = kept
    values[_of(edits.banned, edit)] = -np.inf
    biased_ids = _of(edits.biased, edit)
    if len(biased_ids):
        values[biased_ids] += _of(Ragged(edits.biased.starts, edits.biases), edit)
    ids, counts = _of(edits.seen, edit), _of(Ragged(edits.seen.starts, edits.counts), edit)
    if not len(ids):
        return
    before = values[ids].astype(np.float64)
    after = np.where(before > 0, before / options["repetition_penalty"], before * options["repetition_penalty"])
    after -= options["frequency_penalty"] * counts
    after -= options["presence_penalty"] * (counts > 0)
    # An extreme penalty may leave float32: it must neither become +inf nor mask a token.
    values[ids] = np.where(before == -np.inf, -np.inf, np.clip(after, -_FLOAT32_MAX, _FLOAT32_MAX))


def _of(ragged: Ragged, edit: int) -> np.ndarray:
    return ragged.values[ragged.starts[edit] : ragged.starts[edit + 1]]
