"""What is asked of every engine: the same token ids, in the same order, from the same number of clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

CONTEXT = 2048  # prompt and output of every workload fit
BASE_SLOTS = 8  # streams that a server must be ready for; more where a workload has more
_WORD = re.compile(r" [a-z]{2,}")


@dataclass(frozen=True)
class Workload:
    """`concurrency` clients send `num_requests` prompts of `prompt_tokens` (lowest, highest) and want `max_tokens`.

    Of each prompt the first `shared_tokens` are the same, and come on top of `prompt_tokens`.
    """

    name: str
    concurrency: int
    num_requests: int
    prompt_tokens: tuple[int, int]
    max_tokens: int
    shared_tokens: int = 0

    @property
    def num_slots(self) -> int:
        return max(self.concurrency, BASE_SLOTS)

    @property
    def description(self) -> str:
        low, high = self.prompt_tokens
        length = str(low) if low == high else f"{low}-{high}"
        shared = f"{self.shared_tokens} shared + " if self.shared_tokens else ""
        streams = "1 stream" if self.concurrency == 1 else f"{self.concurrency} streams"
        return f"{streams}, {shared}{length} in, {self.max_tokens} out, {self.num_requests} requests"

    def scaled(self, scale: float) -> Workload:
        """With fewer or more requests, but never fewer than streams."""
        return replace(self, num_requests=max(self.concurrency, round(self.num_requests * scale)))


NAMED = (
    Workload("W1", 1, 5, (512, 512), 128),
    Workload("W2", 8, 40, (64, 512), 128),
    Workload("W3", 32, 96, (64, 512), 128),
    Workload("W4", 8, 40, (64, 64), 32, shared_tokens=1024),
    Workload("W5", 1, 5, (1900, 1900), 1),
)
SWEEP = tuple(Workload(f"C{n}", n, max(4, 2 * n), (128, 128), 64) for n in (1, 2, 4, 8, 16, 32, 64))
WORKLOADS = {workload.name: workload for workload in (*NAMED, *SWEEP)}
GROUPS = {"all": tuple(w.name for w in NAMED), "sweep": tuple(w.name for w in SWEEP)}


def choose(names: Sequence[str], scale: float) -> list[Workload]:
    """Workloads by their names or a group's, without repetition, in the order of this file."""
    wanted = {single for name in names for single in GROUPS.get(name, (name,))}
    if unknown := wanted - WORKLOADS.keys():
        raise ValueError(f"there is no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}, sweep")
    return [workload.scaled(scale) for workload in WORKLOADS.values() if workload.name in wanted]


class PromptSource:
    """Draws prompts for one model: its first tokens (BOS, where it has one), then random whole words."""

    def __init__(self, tokenizer_json: Path) -> None:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
        self._start = tokenizer.encode("").ids
        special = set(tokenizer.get_added_tokens_decoder())
        ids = [i for i in range(tokenizer.get_vocab_size()) if i not in special]
        texts = tokenizer.decode_batch([[i, i] for i in ids])  # twice: a decoder may strip the first space of a text
        pool = [i for i, text in zip(ids, texts, strict=True) if _WORD.fullmatch(text[len(text) // 2 :])]
        self._pool = np.array(pool)
        assert len(pool) > 1000, f"{tokenizer_json} has {len(pool)} tokens that are whole words"

    def prompts(self, workload: Workload, seed: int) -> list[list[int]]:
        rng = np.random.default_rng([seed, *workload.name.encode()])
        prefix = self._draw(workload.shared_tokens, rng)
        low, high = workload.prompt_tokens
        lengths = rng.integers(low, high + 1, workload.num_requests)
        return [self._prompt(prefix, int(length), rng) for length in lengths]

    def warm_up(self, num_prompts: int, max_tokens: int) -> list[list[int]]:
        """Prompts of all lengths up to 512, which share nothing with those that are measured."""
        rng = np.random.default_rng([0, 999, num_prompts, max_tokens])
        return [self._prompt([], int(length), rng) for length in rng.integers(64, 513, num_prompts)]

    def _prompt(self, prefix: list[int], length: int, rng: np.random.Generator) -> list[int]:
        return [*self._start, *prefix, *self._draw(length - len(self._start), rng)]

    def _draw(self, count: int, rng: np.random.Generator) -> list[int]:
        return rng.choice(self._pool, count).tolist()
