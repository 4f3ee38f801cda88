"""Drives a decoder with paged blocks and no scheduler: greedy generation along any path of chunks and batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from octavo.backends.ops import ForwardBatch, Ops
from octavo.kv_cache.cache_spec import LayerKv, first_visible_block, make_cache_spec, num_blocks
from octavo.loader.checkpoint import Ledger
from octavo.loader.source import open_checkpoint, resolve_source
from octavo.models.decoder import Decoder
from octavo.models.registry import build_spec

ChunkSize = Callable[[int], int]  # tokens that a request could compute now -> tokens that it does


@dataclass(eq=False)
class PagedSequence:
    token_ids: list[int]
    num_prompt_tokens: int
    rope_variant: int
    tables: list[list[int]]  # by group; -1 where the window has passed
    num_computed: int = 0
    logits: list[np.ndarray] = field(default_factory=list)  # behind the last prompt token and each generated one

    @property
    def generated(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


class PagedRunner:
    """A decoder with a small pool of blocks, handed out in random order and reused once a window has passed."""

    def __init__(self, path: Path, ops: Ops, *, max_model_len: int, block_size: int, seed: int = 0) -> None:
        checkpoint = open_checkpoint(resolve_source(str(path), cache=path))
        self.spec = build_spec(checkpoint.config)
        layers = [
            LayerKv(a.num_kv_heads, a.head_dim, a.window) for a in (layer.attention for layer in self.spec.layers)
        ]
        self.cache_spec = make_cache_spec(layers, block_size=block_size, dtype_bytes=4)
        self.decoder = Decoder(
            self.spec,
            ops,
            Ledger(checkpoint, ignore=self.spec.ignored_prefixes),
            max_model_len=max_model_len,
            kv_places=self.cache_spec.places,
        )
        total = 3 * len(self.cache_spec.groups) * num_blocks(max_model_len, block_size)
        self.cache = ops.kv_cache(
            num_blocks=total,
            block_size=block_size,
            layers_per_block=self.cache_spec.layers_per_block,
            num_kv_heads=self.cache_spec.num_kv_heads,
            head_dim=self.cache_spec.head_dim,
        )
        self._rng = np.random.default_rng(seed)
        self._free = self._rng.permutation(total).tolist()

    def generate(
        self, prompts: Sequence[list[int]], num_tokens: int, chunk_size: ChunkSize = lambda left: left
    ) -> list[PagedSequence]:
        """Greedy continuations of all prompts, computed together; a request with chunk size 0 sits a step out."""
        sequences = [self._start(prompt, num_tokens) for prompt in prompts]
        while running := [s for s in sequences if len(s.generated) < num_tokens]:
            step = [(s, chunk_size(len(s.token_ids) - s.num_computed)) for s in running]
            if step := [(s, count) for s, count in step if count]:
                self._step(step)
        for sequence in sequences:
            self._free += [block for table in sequence.tables for block in table if block >= 0]
        return sequences

    def _start(self, prompt: list[int], num_tokens: int) -> PagedSequence:
        native = self.spec.native_context
        is_beyond = native is not None and len(prompt) + num_tokens > native
        return PagedSequence(list(prompt), len(prompt), int(is_beyond), [[] for _ in self.cache_spec.groups])

    def _step(self, step: list[tuple[PagedSequence, int]]) -> None:
        for sequence, count in step:
            self._make_room(sequence, count)
        batch = self._batch(step)
        hidden = self.decoder.forward(batch, self.cache)
        logits = iter(self.decoder.logits(hidden, batch.logits_rows).copy())
        for sequence, count in step:
            sequence.num_computed += count
            if sequence.num_computed == len(sequence.token_ids):
                sequence.logits.append(next(logits))
                sequence.token_ids.append(int(sequence.logits[-1].argmax()))

    def _make_room(self, sequence: PagedSequence, count: int) -> None:
        block_size = self.cache_spec.block_size
        for group, table in zip(self.cache_spec.groups, sequence.tables, strict=True):
            for i in range(first_visible_block(sequence.num_computed, group.window, block_size)):
                if table[i] >= 0:
                    self._free.insert(0, table[i])
                    table[i] = -1
            while len(table) < num_blocks(sequence.num_computed + count, block_size):
                table.append(self._free.pop())

    def _batch(self, step: list[tuple[PagedSequence, int]]) -> ForwardBatch:
        counts = [count for _, count in step]
        ends = np.array([s.num_computed + count for s, count in step], np.int32)
        starts = np.cumsum([0, *counts]).astype(np.int32)
        tables = []
        for group in range(len(self.cache_spec.groups)):
            rows = [s.tables[group] for s, _ in step]
            table = np.full((len(rows), max(map(len, rows))), -1, np.int32)
            for row, ids in zip(table, rows, strict=True):
                row[: len(ids)] = ids
            tables.append(table)
        return ForwardBatch(
            token_ids=np.concatenate([s.token_ids[s.num_computed :][:count] for s, count in step]).astype(np.int32),
            positions=np.concatenate([np.arange(s.num_computed, s.num_computed + n) for s, n in step]).astype(np.int32),
            query_starts=starts,
            context_lens=ends,
            block_tables=tuple(tables),
            rope_variants=np.repeat(np.array([s.rope_variant for s, _ in step], np.int32), counts),
            logits_rows=np.array(
                [starts[i + 1] - 1 for i, (s, n) in enumerate(step) if s.num_computed + n == len(s.token_ids)], np.int32
            ),
        )
