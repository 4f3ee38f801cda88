"""The index arrays of a step, against a plain construction, and the rows that they come from."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.backends.ops import ForwardBatch
from octavo.batch import NewRow, ScheduledRequest
from octavo.request import SamplingParams
from octavo.worker.forward_batch import build_forward_batch
from octavo.worker.request_table import RequestTable


def make_table(*tokens_of_rows: tuple[int, ...]) -> RequestTable:
    table = RequestTable(vocab_size=100, eos_token_ids=(1,))
    for request_id, token_ids in enumerate(tokens_of_rows):
        table.add(NewRow(request_id, token_ids, len(token_ids), SamplingParams(seed=1)))
    return table


def build(requests: list[ScheduledRequest], table: RequestTable) -> ForwardBatch:
    return build_forward_batch(requests, table.rows_of(requests), table)


def test_chunks_decodes_and_drafts_are_packed_in_order() -> None:
    table = make_table(tuple(range(10, 20)), (30, 31, 32), tuple(range(40, 46)))
    requests = [
        ScheduledRequest(0, 4, 5, ((0, 1, 2),), False, rope_variant=1),
        ScheduledRequest(1, 2, 1, ((3,),), True),
        ScheduledRequest(2, 5, 3, ((4, 5),), True, draft_token_ids=(8, 9)),
    ]
    batch = build(requests, table)
    assert batch.token_ids.tolist() == [14, 15, 16, 17, 18, 32, 45, 8, 9]
    assert batch.positions.tolist() == [4, 5, 6, 7, 8, 2, 5, 6, 7]
    assert batch.query_starts.tolist() == [0, 5, 6, 9]
    assert batch.context_lens.tolist() == [9, 3, 8]
    assert batch.rope_variants.tolist() == [1] * 5 + [0] * 4
    assert batch.logits_rows.tolist() == [5, 8]
    assert batch.block_tables[0].tolist() == [[0, 1, 2], [3, -1, -1], [4, 5, -1]]
    for array in (batch.token_ids, batch.positions, batch.query_starts, batch.context_lens, batch.logits_rows):
        assert array.dtype == np.int32
    assert batch.rope_variants.dtype == batch.block_tables[0].dtype == np.int32


def test_a_step_of_decodes_takes_each_rows_token_at_its_start() -> None:
    table = make_table((5, 6, 7), (8, 9))
    table[1].append(50)
    requests = [ScheduledRequest(1, 2, 1, ((7,),), True), ScheduledRequest(0, 1, 1, ((2,),), False)]
    batch = build(requests, table)
    assert batch.token_ids.tolist() == [50, 6]
    assert batch.positions.tolist() == [2, 1]
    assert batch.query_starts.tolist() == [0, 1, 2]
    assert batch.context_lens.tolist() == [3, 2]
    assert batch.logits_rows.tolist() == [0]


def test_block_tables_follow_growth_trimming_and_reuse_of_rows() -> None:
    random = np.random.default_rng(0)
    table = RequestTable(vocab_size=100, eos_token_ids=())
    blocks: dict[int, tuple[tuple[int, ...], ...]] = {}
    next_id = 0
    for _ in range(300):
        if len(blocks) < 90 and random.random() < 0.6:
            table.add(NewRow(next_id, (1, 2), 2, SamplingParams(seed=1)))
            blocks[next_id] = ((next_id,), (-1,))
            next_id += 1
        elif blocks and random.random() < 0.2:
            gone = int(random.choice(list(blocks)))
            table.free((gone,))
            del blocks[gone]
        for request_id, (full, window) in list(blocks.items()):
            if random.random() < 0.3:  # a new value, as the scheduler makes one when a table has changed
                new = tuple(random.integers(0, 1000, random.integers(1, 4)).tolist())
                trimmed = tuple(-1 if random.random() < 0.5 else block for block in window)
                blocks[request_id] = (full + new, trimmed + new)
        if not blocks:
            continue
        chosen = random.permutation(list(blocks))[: random.integers(1, len(blocks) + 1)].tolist()
        requests = [ScheduledRequest(request_id, 1, 1, blocks[request_id], True) for request_id in chosen]
        tables = build(requests, table).block_tables
        assert len(tables) == 2
        for group, array in enumerate(tables):
            assert array.shape[1] == max(len(blocks[request_id][group]) for request_id in chosen)
            assert array.flags.c_contiguous
            for line, request_id in zip(array.tolist(), chosen, strict=True):
                ids = blocks[request_id][group]
                assert tuple(line) == ids + (-1,) * (len(line) - len(ids))
    assert next_id > 100


def test_a_row_gives_only_tokens_that_it_knows() -> None:
    row = make_table((1, 2, 3))[0]
    assert row.tokens(1, 3).tolist() == [2, 3]
    for token_id in range(600):
        row.append(token_id)
    assert row.num_tokens == 603 and row.tokens(600, 603).tolist() == [597, 598, 599]
    with pytest.raises(AssertionError, match=r"tokens \[602, 604\) of a row that knows 603"):
        row.tokens(602, 604)


def test_a_request_has_one_row_until_it_is_freed() -> None:
    table = make_table((1,), (2,))
    with pytest.raises(AssertionError, match="request 1 has a row already"):
        table.add(NewRow(1, (2,), 1, SamplingParams(seed=1)))
    table.free((1, 7))
    assert len(table) == 1
    table.add(NewRow(1, (2,), 1, SamplingParams(seed=1)))
    assert len(table) == 2
