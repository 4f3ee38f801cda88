"""One token per row from its logits. The order of operations is vLLM's.

    token mask (grammar)                                 -> raw logprobs are taken here
    allowed ids, bad words, min_tokens, logit_bias, repetition, frequency, presence penalty
    temperature 0: argmax, lowest id on ties
    temperature, top_k, min_p, top_p, draw               -> processed logprobs are taken before the draw

Each row is computed alone, from its own logits and its own columns: with the backend's kernels, or with NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from octavo.backends.sampler import ROW_OPTIONS, SampleBatch, SamplerKernels, SampleStatus
from octavo.batch import TokenLogprobs
from octavo.errors import RequestFailed
from octavo.sampling.columns import RowSampling, collect_edits, collect_masks, collect_options
from octavo.sampling.filters import Floats
from octavo.sampling.logprobs import token_logprobs
from octavo.sampling.numpy_kernels import NumpyKernels

LogprobsMode = Literal["raw", "processed"]

NOT_FINITE = "The model produced logits that are not finite (NaN or infinity); no token can be sampled from them."
NOTHING_LEFT = (
    "No token is left to sample: the grammar, allowed_token_ids, bad_words and min_tokens together exclude every one."
)
_REASONS = {SampleStatus.NOT_FINITE: NOT_FINITE, SampleStatus.NOTHING_LEFT: NOTHING_LEFT}


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What each row sampled. A failed row has token id -1 and no logprobs; the others are unaffected."""

    token_ids: list[int]  # [N]
    logprobs: dict[int, TokenLogprobs]  # row -> what it asked for
    failed: dict[int, str]  # row -> why this row alone cannot go on


class Sampler:
    """Samples on the host, for one thread at a time.

    `vocab_size` is the number of ids that may be sampled; columns of logits beyond it (padding of the
    output layer) are never looked at. `logprobs_mode` raw: of the model's own distribution. Processed: of
    the distribution that is drawn from, after penalties, temperature and filters (without temperature and
    filters for greedy rows). `kernels`: the backend's, for this vocabulary; NumPy without.
    """

    def __init__(
        self, vocab_size: int, logprobs_mode: LogprobsMode = "raw", kernels: SamplerKernels | None = None
    ) -> None:
        self.vocab_size = vocab_size
        self._processed = logprobs_mode == "processed"
        self._kernels: SamplerKernels = kernels or NumpyKernels(vocab_size)

    def wants_only_argmax(self, rows: Sequence[RowSampling]) -> bool:
        """Whether the lowest id of each row's highest logit is all that sampling would take from the logits.

        False as soon as one row samples, edits its logits or wants logprobs. Token masks are the caller's to know.
        """
        return all(row.is_plain for row in rows)

    def accept_argmax(self, best: np.ndarray, sources: Sequence[int]) -> SampleOutput | None:
        """What rows that want only the argmax sample: row i the token best[sources[i]].

        `best` [M] int32 is of all columns of the logits, -1 where that is no finite number. None where a row has no
        best column, or padding of the output layer came out best: the logits must be looked at.
        """
        chosen: list[int] = best.tolist()
        if min(chosen) < 0 or max(chosen) >= self.vocab_size:
            return None
        return SampleOutput([chosen[source] for source in sources], {}, {})

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
        if not rows:
            return SampleOutput([], {}, {})
        if sources is None:
            assert len(logits) == len(rows), (len(logits), len(rows))
            sources = range(len(rows))
        sampled = self._kernels.sample(
            SampleBatch(
                logits,
                collect_options(rows),
                positions=np.array([row.num_tokens for row in rows], np.int64),
                sources=np.array(sources, np.int32),
                max_logprobs=max([row.num_logprobs for row in rows]),
                edits=collect_edits(rows),
                masks=None if token_masks is None else collect_masks(token_masks, self.vocab_size),
                describes_processed=self._processed,
            )
        )
        token_ids: list[int] = sampled.token_ids.tolist()
        failed: dict[int, str] = {}
        if sampled.statuses.any():
            for i in np.flatnonzero(sampled.statuses).tolist():
                failed[i] = _REASONS[SampleStatus(sampled.statuses[i])]
        logprobs: dict[int, TokenLogprobs] = {}
        if sampled.described is not None:
            asking = [i for i, row in enumerate(rows) if row.num_logprobs >= 0 and i not in failed]
            logprobs = dict(zip(asking, token_logprobs(sampled.described, asking, token_ids), strict=True))
        return SampleOutput(token_ids, logprobs, failed)

    def score(self, logits: Floats, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """Logprobs of given tokens [M] under raw logits [M, V]: row i is for the token that followed it.

        The caller bounds M, the rows of logits that exist at once. Raises RequestFailed when a row holds NaN or
        infinity.
        """
        given_ids = np.array(token_ids, np.int32)
        num_rows, num_top = len(given_ids), min(num_top, self.vocab_size)
        assert len(logits) == num_rows, (len(logits), num_rows)
        options = np.zeros(num_rows, ROW_OPTIONS)
        options["num_logprobs"] = num_top
        sampled = self._kernels.sample(
            SampleBatch(
                logits,
                options,
                positions=np.zeros(num_rows, np.int64),
                sources=np.arange(num_rows, dtype=np.int32),
                max_logprobs=num_top,
                given_ids=given_ids,
            )
        )
        if sampled.statuses.any():
            raise RequestFailed(NOT_FINITE)
        assert sampled.described is not None
        return token_logprobs(sampled.described, range(num_rows), given_ids.tolist())
