"""Turns a scheduled batch into the index arrays that the operators read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.backends.ops import ForwardBatch
from octavo.batch import ScheduledRequest
from octavo.worker.request_table import RequestTable


def build_forward_batch(requests: Sequence[ScheduledRequest], table: RequestTable) -> ForwardBatch:
    """Pack the tokens of `requests` in order. `logits_rows` holds each sampling request's last token."""
    num_tokens = np.array([request.num_tokens for request in requests], np.int32)
    starts = np.array([request.start for request in requests], np.int32)
    query_starts = np.zeros(len(requests) + 1, np.int32)
    np.cumsum(num_tokens, out=query_starts[1:])
    token_ids = np.concatenate([_tokens(request, table) for request in requests])
    positions = np.arange(len(token_ids), dtype=np.int32) - np.repeat(query_starts[:-1] - starts, num_tokens)
    variants = np.array([request.rope_variant for request in requests], np.int32)
    num_groups = len(requests[0].block_ids)
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        query_starts=query_starts,
        context_lens=starts + num_tokens,
        block_tables=tuple(_block_table([request.block_ids[g] for request in requests]) for g in range(num_groups)),
        rope_variants=np.repeat(variants, num_tokens),
        logits_rows=np.array(
            [query_starts[i + 1] - 1 for i, request in enumerate(requests) if request.samples], np.int32
        ),
    )


def _tokens(request: ScheduledRequest, table: RequestTable) -> np.ndarray:
    row = table[request.request_id]
    if not request.draft_token_ids:
        return row.tokens(request.start, request.start + request.num_tokens)
    num_known = request.num_tokens - len(request.draft_token_ids)
    known = row.tokens(request.start, request.start + num_known)
    return np.concatenate([known, np.array(request.draft_token_ids, np.int32)])


def _block_table(block_ids: Sequence[tuple[int, ...]]) -> np.ndarray:
    table = np.full((len(block_ids), max(len(ids) for ids in block_ids)), -1, np.int32)
    for row, ids in zip(table, block_ids, strict=True):
        row[: len(ids)] = ids
    return table
