"""Sampling in the extension: the tokens and bits of `sampling.numpy_kernels`, on every instruction set."""

from __future__ import annotations

import numpy as np

from octavo import _native
from octavo.backends.sampler import Described, RowEdits, SampleBatch, Sampled


class NativeSampler:
    """Its workspace is reserved once; memory is taken only for what sampling comes to touch."""

    def __init__(self, team: _native.Team, vocab_size: int, *, isa: str = "auto") -> None:
        self._native = _native.Sampler(isa, team, vocab_size)

    def sample(self, batch: SampleBatch) -> Sampled:
        num_rows, masks = len(batch.sources), batch.masks
        described = None if batch.max_logprobs < 0 else Described.room_for(num_rows, batch.max_logprobs)
        sampled = Sampled(np.empty(num_rows, np.int32), np.empty(num_rows, np.uint8), described)
        self._native.sample(
            batch.logits,
            batch.options.view(np.uint8).reshape(num_rows, -1),
            batch.positions,
            batch.sources,
            None if batch.edits is None else _arrays_of(batch.edits),
            None if masks is None else (masks.mask_of_row, masks.words),
            batch.given_ids,
            batch.describes_processed,
            sampled.token_ids,
            sampled.statuses,
            None if described is None else _room_of(described),
        )
        return sampled


def _arrays_of(edits: RowEdits) -> tuple[np.ndarray, ...]:
    return (
        edits.edit_of_row,
        edits.allowed.starts,
        edits.allowed.values,
        edits.banned.starts,
        edits.banned.values,
        edits.biased.starts,
        edits.biased.values,
        edits.seen.starts,
        edits.seen.values,
        edits.biases,
        edits.counts,
    )


def _room_of(d: Described) -> tuple[np.ndarray, ...]:
    return d.values, d.peaks, d.totals, d.ranks, d.num_top, d.top_ids, d.top_values
