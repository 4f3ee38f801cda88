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
from octavo.sampling.sampler import Sampler
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
        try:
            forward = build_forward_batch(batch.requests, table)
            hidden = self._decoder.forward(forward, self._cache)
            self._sample(batch.requests, forward, hidden, output)
            self._score_prompts(batch.requests, forward, hidden, output)
        finally:
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
        self, requests: Sequence[ScheduledRequest], forward: ForwardBatch, hidden: Tensor, output: StepOutput
    ) -> None:
        """Sample one token for every request that reaches its end, and for each of its forks."""
        ids: list[int] = []
        sources: list[int] = []  # forks sample from their leader's logits
        for source, request in enumerate(request for request in requests if request.samples):
            assert not request.draft_token_ids, "this runner verifies no drafts"
            ids += (request.request_id, *request.fork_ids)
            sources += [source] * (1 + len(request.fork_ids))
        if not ids:
            return
        logits = self._decoder.logits(hidden, forward.logits_rows)
        rows = [self._table[request_id] for request_id in ids]
        sampled = self._sampler.sample(logits, [row.sampling for row in rows], sources=sources)
        for i, (request_id, row) in enumerate(zip(ids, rows, strict=True)):
            if (why := sampled.failed.get(i)) is not None:
                output.failed[request_id] = why
                continue
            token_id = sampled.token_ids[i]
            row.append(token_id)
            output.token_ids[request_id] = (token_id,)
            if (logprobs := sampled.logprobs.get(i)) is not None:
                output.logprobs[request_id] = (logprobs,)

    def _score_prompts(
        self, requests: Sequence[ScheduledRequest], forward: ForwardBatch, hidden: Tensor, output: StepOutput
    ) -> None:
        """Log-probabilities of the prompt tokens that follow the positions of this step, where asked for."""
        for i, request in enumerate(requests):
            row = self._table[request.request_id]
            count = row.sampling.params.prompt_logprobs
            end = min(request.start + request.num_tokens, row.num_prompt_tokens - 1)
            if count is None or request.start >= end:
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
