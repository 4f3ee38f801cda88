"""Sampling in the extension: the tokens and bits of `sampling.numpy_kernels`, on every instruction set."""

from __future__ import annotations

import numpy as np

from octavo import _native
from octavo.backends.sampler import Described, SampleBatch, Sampled


class NativeSampler:
    """Its workspace is reserved once; memory is taken only for what sampling comes to touch."""

    def __init__(self, team: _native.Team, vocab_size: int, *, isa: str = "auto") -> None:
        self._native = _native.Sampler(isa, team, vocab_size)

    def sample(self, batch: SampleBatch) -> Sampled:
        num_rows = len(batch.sources)
        described = None if batch.max_logprobs < 0 else Described.room_for(num_rows, batch.max_logprobs)
        sampled = Sampled(np.empty(num_rows, np.int32), np.empty(num_rows, np.uint8), described)
        edits, masks = batch.edits, batch.masks
        self._native.sample(
            batch.logits,
            batch.options.view(np.uint8).reshape(num_rows, -1),
            batch.positions,
            batch.sources,
            edits
            and (
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
            ),
            masks and (masks.mask_of_row, masks.words),
            batch.given_ids,
            batch.describes_processed,
            sampled.token_ids,
            sampled.statuses,
            described
            and (
                described.values,
                described.peaks,
                described.totals,
                described.ranks,
                described.num_top,
                described.top_ids,
                described.top_values,
            ),
        )
        return sampled
