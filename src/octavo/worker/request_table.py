"""The worker's memory of each request: a row from the batch that first names it until it is freed.

Rows are never moved or swapped. A row appends the tokens that the worker samples itself, so a batch may be
planned before the previous one has run. Block tables of all rows lie in one array per group, which changes only
where a batch brings a table that differs from the last one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from octavo.batch import NewRow, ScheduledRequest
from octavo.sampling.columns import RowSampling

_FIRST_SLOTS = 64


class Row:
    """Token ids and sampling state of one request, and the place of its block tables."""

    __slots__ = ("_tokens", "block_ids", "num_prompt_tokens", "sampling", "slot")

    def __init__(self, sampling: RowSampling, token_ids: Sequence[int], num_prompt_tokens: int, slot: int) -> None:
        self.sampling = sampling
        self.num_prompt_tokens = num_prompt_tokens
        self.slot = slot
        self.block_ids: tuple[tuple[int, ...], ...] = ()  # [G][blocks], as in the arrays of the table
        self._tokens = array("i", token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def token(self, index: int) -> int:
        return self._tokens[index]

    def tokens(self, start: int, end: int) -> np.ndarray:
        assert end <= len(self._tokens), f"tokens [{start}, {end}) of a row that knows {len(self._tokens)}"
        return np.frombuffer(self._tokens[start:end], np.int32)

    def append(self, token_id: int) -> None:
        self._tokens.append(token_id)
        self.sampling.append(token_id)


class RequestTable:
    """Rows by request id."""

    def __init__(self, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._rows: dict[int, Row] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._block_tables: list[np.ndarray] = []  # G of [slots, blocks] int32; behind a row's own blocks is anything

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, request_id: int) -> Row:
        return self._rows[request_id]

    def add(self, new: NewRow) -> None:
        assert new.request_id not in self._rows, f"request {new.request_id} has a row already"
        sampling = RowSampling(
            new.sampling,
            prompt_token_ids=new.token_ids[: new.num_prompt_tokens],
            output_token_ids=new.token_ids[new.num_prompt_tokens :],
            choice=new.choice,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
            bad_words_token_ids=new.bad_words_token_ids,
        )
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._num_slots
            self._num_slots += 1
        self._rows[new.request_id] = Row(sampling, new.token_ids, new.num_prompt_tokens, slot)

    def free(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            row = self._rows.pop(request_id, None)
            if row is not None:
                self._free_slots.append(row.slot)

    def rows_of(self, requests: Iterable[ScheduledRequest]) -> list[Row]:
        rows = self._rows
        return [rows[request.request_id] for request in requests]

    def block_tables(self, requests: Sequence[ScheduledRequest], rows: Sequence[Row]) -> tuple[np.ndarray, ...]:
        """Of every group [R, max_blocks] int32: -1 where nothing may be read."""
        for request, row in zip(requests, rows, strict=True):
            if row.block_ids is not request.block_ids:
                self._set_blocks(row, request.block_ids)
        slots = np.array([row.slot for row in rows], np.int32)
        # A request's tables have one length in every group.
        lengths = np.array([len(request.block_ids[0]) for request in requests], np.int32)
        width = int(lengths.max())
        beyond = np.arange(width, dtype=np.int32) >= lengths[:, None] if int(lengths.min()) < width else None
        tables = []
        for block_table in self._block_tables:
            gathered = block_table[:, :width].take(slots, axis=0)
            if beyond is not None:
                gathered[beyond] = -1
            tables.append(gathered)
        return tuple(tables)

    def _set_blocks(self, row: Row, block_ids: tuple[tuple[int, ...], ...]) -> None:
        if not self._block_tables:
            self._block_tables = [np.empty((0, 0), np.int32) for _ in block_ids]
        for group, ids in enumerate(block_ids):
            num_slots, width = self._block_tables[group].shape
            if row.slot >= num_slots or len(ids) > width:
                self._grow(group, max(_FIRST_SLOTS, num_slots, 2 * row.slot), max(width, 2 * len(ids)))
            self._block_tables[group][row.slot, : len(ids)] = ids
        row.block_ids = block_ids

    def _grow(self, group: int, num_slots: int, width: int) -> None:
        old = self._block_tables[group]
        self._block_tables[group] = np.full((num_slots, width), -1, np.int32)
        self._block_tables[group][: old.shape[0], : old.shape[1]] = old
