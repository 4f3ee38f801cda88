"""Random text that a tokenizer turns into a known number of tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from octavo.engine.tokenizer import Tokenizer

_WORD = re.compile(r" [a-z]{2,}")
_ENOUGH = 256  # different tokens, for prompts that share nothing by chance
_SAMPLE = 2000
_ATTEMPTS = 16


class PromptMaker:
    """Draws token ids and writes them as text.

    The ids are those of whole words with their space, which every tokenizer reads back as they were; where a
    tokenizer has few of them, any printable tokens, and each text is read back and mended until its length is right.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.num_special = len(tokenizer.encode(""))  # BOS and the like, which the server adds as well

    def draw(self, count: int, rng: np.random.Generator) -> list[int]:
        ids: list[int] = rng.choice(self._pool, count).tolist()
        return ids

    def text(self, token_ids: Sequence[int], rng: np.random.Generator) -> str:
        """A text of as many tokens as `token_ids`, special tokens not counted; the same tokens where possible."""
        if self._is_faithful:
            return self._join(token_ids)
        text = self._tokenizer.decode(token_ids)
        count = len(token_ids)
        for _ in range(_ATTEMPTS):
            read = self._read(text)
            if len(read) == count:
                break
            text = self._tokenizer.decode(
                read[:count] if len(read) > count else [*read, *self.draw(count - len(read), rng)]
            )
        return text

    def count(self, text: str) -> int:
        """Tokens of `text` as a prompt, special tokens included."""
        return len(self._tokenizer.encode(text))

    @cached_property
    def _pool(self) -> np.ndarray:
        tokenizer = self._tokenizer
        ordinary = [i for i in range(tokenizer.vocab_size) if not tokenizer.is_special(i)]
        words = [i for i in ordinary if _WORD.fullmatch(tokenizer.token_text(i))]
        if len(words) < _ENOUGH:
            words = [i for i in ordinary if (text := tokenizer.token_text(i)).isascii() and text.isprintable() and text]
        return np.array(words or ordinary)

    @cached_property
    def _texts(self) -> dict[int, str]:
        return {i: self._tokenizer.token_text(i) for i in self._pool.tolist()}

    @cached_property
    def _is_faithful(self) -> bool:
        """Whether tokens of the pool, one after the other, are read back as they were."""
        sample = self.draw(_SAMPLE, np.random.default_rng(0))
        return self._read(self._join(sample)) == sample

    def _join(self, token_ids: Sequence[int]) -> str:
        """As `Tokenizer.decode`, for tokens of the pool, and many times faster: traces have millions of them."""
        text = "".join(map(self._texts.__getitem__, token_ids))
        return text[1:] if self._tokenizer.strips_leading_space and text.startswith(" ") else text

    def _read(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
