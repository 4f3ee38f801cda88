"""Executes one scheduled batch: rows, block copies, the forward pass, sampling.

The executor calls it step by step, in order. It holds the model, the KV arena and the rows, and decides
nothing: which requests, how many tokens and which blocks is the batch's to say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.backends.ops import ForwardBatch, KvCache, Tensor
from octavo.batch import ScheduledBatch, ScheduledRequest, StepOutput, TokenLogprobs
from octavo.errors import RequestFailed
from octavo.models.decoder import Decoder
from octavo.sampling.columns import RowSampling
from octavo.sampling.sampler import SampleOutput, Sampler
from octavo.worker.forward_batch import build_forward_batch
from octavo.worker.request_table import RequestTable, Row

# Logits of this many prompt positions exist at once when a request asks for prompt logprobs.
_PROMPT_LOGPROBS_CHUNK = 64


class ModelRunner:
    """One model on one backend."""

    def __init__(self, decoder: Decoder, cache: KvCache, sampler: Sampler, table: RequestTable) -> None:
        self._decoder = decoder
        self._cache = cache
        self._sampler = sampler
        self._table = table

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        table = self._table
        table.free(batch.freed_request_ids)
        for new_row in batch.new_rows:
            table.add(new_row)
        if batch.block_copies:
            self._cache.copy_blocks(batch.block_copies)
        if not batch.requests:
            return StepOutput(batch.step_id)
        output = StepOutput(batch.step_id)
        rows = table.rows_of(batch.requests)
        has_sampled = False
        try:
            forward = build_forward_batch(batch.requests, rows, table)
            hidden = self._decoder.forward(forward, self._cache)
            self._sample(batch.requests, rows, forward, hidden, output)
            has_sampled = not output.failed
            self._score_prompts(batch.requests, rows, forward, hidden, output)
        finally:
            if not has_sampled:
                self._fill_rows(batch.requests)
        return output

    def _fill_rows(self, requests: Sequence[ScheduledRequest]) -> None:
        """Give the rows that failed to sample a token all the same.

        A batch that was planned ahead counts on it; what it computes from it is thrown away.
        """
        for request in requests:
            if request.samples:
                for request_id in (request.request_id, *request.fork_ids):
                    row = self._table[request_id]
                    if row.num_tokens == request.start + request.num_tokens:
                        row.append(0)

    def _sample(
        self,
        requests: Sequence[ScheduledRequest],
        rows: Sequence[Row],
        forward: ForwardBatch,
        hidden: Tensor,
        output: StepOutput,
    ) -> None:
        """Sample one token for every request that reaches its end, and for each of its forks."""
        ids: list[int] = []
        sampling_rows: list[Row] = []
        sources: list[int] = []  # forks sample from their leader's logits
        source = 0
        for request, row in zip(requests, rows, strict=True):
            if not request.samples:
                continue
            assert not request.draft_token_ids, "this runner verifies no drafts"
            ids.append(request.request_id)
            sampling_rows.append(row)
            sources.append(source)
            for fork_id in request.fork_ids:
                ids.append(fork_id)
                sampling_rows.append(self._table[fork_id])
                sources.append(source)
            source += 1
        if not ids:
            return
        sampled = self._sample_rows([row.sampling for row in sampling_rows], sources, forward, hidden)
        for i, (request_id, row, token_id) in enumerate(zip(ids, sampling_rows, sampled.token_ids, strict=True)):
            if i in sampled.failed:
                output.failed[request_id] = sampled.failed[i]
                continue
            row.append(token_id)
            output.token_ids[request_id] = (token_id,)
        for i, logprobs in sampled.logprobs.items():
            output.logprobs[ids[i]] = (logprobs,)

    def _sample_rows(
        self, rows: Sequence[RowSampling], sources: Sequence[int], forward: ForwardBatch, hidden: Tensor
    ) -> SampleOutput:
        """From the logits, or from where they are largest if that is all the rows want."""
        if self._sampler.wants_only_argmax(rows):
            best = self._decoder.argmax(hidden, forward.logits_rows)
            sampled = self._sampler.accept_argmax(best, sources)
            if sampled is not None:
                return sampled
        logits = self._decoder.logits(hidden, forward.logits_rows)
        return self._sampler.sample(logits, rows, sources=sources)

    def _score_prompts(
        self,
        requests: Sequence[ScheduledRequest],
        rows: Sequence[Row],
        forward: ForwardBatch,
        hidden: Tensor,
        output: StepOutput,
    ) -> None:
        """Log-probabilities of the prompt tokens that follow the positions of this step, where asked for."""
        for i, row in enumerate(rows):
            count = row.sampling.params.prompt_logprobs
            if count is None:
                continue
            request = requests[i]
            end = min(request.start + request.num_tokens, row.num_prompt_tokens - 1)
            if request.start >= end:
                continue
            first_row = int(forward.query_starts[i])
            try:
                output.prompt_logprobs[request.request_id] = self._score(
                    hidden, row, request.start, end, first_row, count
                )
            except RequestFailed as error:
                output.failed[request.request_id] = error.message

    def _score(
        self, hidden: Tensor, row: Row, start: int, end: int, first_row: int, count: int
    ) -> tuple[TokenLogprobs, ...]:
        """Of prompt tokens (start, end], from the hidden rows that begin at `first_row` with position `start`."""
        entries: list[TokenLogprobs] = []
        for position in range(start, end, _PROMPT_LOGPROBS_CHUNK):
            stop = min(position + _PROMPT_LOGPROBS_CHUNK, end)
            rows = np.arange(position - start, stop - start, dtype=np.int32) + first_row
            targets = row.tokens(position + 1, stop + 1).tolist()
            entries += self._sampler.score(self._decoder.logits(hidden, rows), targets, count)
        return tuple(entries)
