"""Turns a scheduled batch into the index arrays that the operators read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.backends.ops import ForwardBatch
from octavo.batch import ScheduledRequest
from octavo.worker.request_table import RequestTable, Row


def build_forward_batch(requests: Sequence[ScheduledRequest], rows: Sequence[Row], table: RequestTable) -> ForwardBatch:
    """Pack the tokens of `requests`, whose rows are `rows`, in order.

    `logits_rows` holds each sampling request's last token.
    """
    starts = np.array([request.start for request in requests], np.int32)
    nums_tokens = [request.num_tokens for request in requests]
    variants = np.array([request.rope_variant for request in requests], np.int32)
    if max(nums_tokens) == 1:  # nothing but decodes: one token each
        ids = [row.token(request.start) for request, row in zip(requests, rows, strict=True)]
        token_ids, positions, context_lens = np.array(ids, np.int32), starts, starts + 1
        query_starts = np.arange(len(requests) + 1, dtype=np.int32)
    else:
        num_tokens = np.array(nums_tokens, np.int32)
        query_starts = np.zeros(len(requests) + 1, np.int32)
        np.cumsum(num_tokens, out=query_starts[1:])
        token_ids = np.concatenate([_tokens(request, row) for request, row in zip(requests, rows, strict=True)])
        positions = np.arange(len(token_ids), dtype=np.int32) - np.repeat(query_starts[:-1] - starts, num_tokens)
        context_lens = starts + num_tokens
        variants = np.repeat(variants, num_tokens)
    samples = [request.samples for request in requests]
    last_rows = query_starts[1:] - 1
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        context_lens=context_lens,
        block_tables=table.block_tables(requests, rows),
        rope_variants=variants,
        logits_rows=last_rows if all(samples) else last_rows[samples],
    )


def _tokens(request: ScheduledRequest, row: Row) -> np.ndarray:
    if not request.draft_token_ids:
        return row.tokens(request.start, request.start + request.num_tokens)
    num_known = request.num_tokens - len(request.draft_token_ids)
    known = row.tokens(request.start, request.start + num_known)
    return np.concatenate([known, np.array(request.draft_token_ids, np.int32)])
