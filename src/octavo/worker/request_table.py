"""The worker's memory of each request: a row from the batch that first names it until it is freed.

Rows are never moved or swapped. A row appends the tokens that the worker samples itself, so a batch may be
planned before the previous one has run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from octavo.batch import NewRow
from octavo.sampling.columns import RowSampling

_SPARE_TOKENS = 256


@dataclass(eq=False, slots=True)
class Row:
    """Token ids and sampling state of one request."""

    sampling: RowSampling
    num_prompt_tokens: int
    num_tokens: int
    _buffer: np.ndarray  # [capacity] int32, valid up to num_tokens

    def tokens(self, start: int, end: int) -> np.ndarray:
        assert end <= self.num_tokens, f"tokens [{start}, {end}) of a row that knows {self.num_tokens}"
        return self._buffer[start:end]

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros(len(self._buffer), np.int32)])
        self._buffer[self.num_tokens] = token_id
        self.num_tokens += 1
        self.sampling.append(token_id)


class RequestTable:
    """Rows by request id."""

    def __init__(self, *, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._rows: dict[int, Row] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, request_id: int) -> Row:
        return self._rows[request_id]

    def add(self, new: NewRow) -> None:
        assert new.request_id not in self._rows, f"request {new.request_id} has a row already"
        buffer = np.zeros(len(new.token_ids) + _SPARE_TOKENS, np.int32)
        buffer[: len(new.token_ids)] = new.token_ids
        sampling = RowSampling(
            new.sampling,
            prompt_token_ids=new.token_ids[: new.num_prompt_tokens],
            output_token_ids=new.token_ids[new.num_prompt_tokens :],
            choice=new.choice,
            eos_token_ids=self._eos_token_ids,
            vocab_size=self._vocab_size,
            bad_words_token_ids=new.bad_words_token_ids,
        )
        self._rows[new.request_id] = Row(sampling, new.num_prompt_tokens, len(new.token_ids), buffer)

    def free(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._rows.pop(request_id, None)
