"""Chooses the best instruction set whose kernels give the portable kernels' bits on this very processor.

All instruction sets promise the same bits, and tiles serve many rows where other instructions serve few: a processor
that rounds otherwise would make an answer depend on its batch. A few products show it in milliseconds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo.backends.native.graph import Buffer, View
from octavo.backends.native.ops import NativeOps
from octavo.backends.ops import AttentionParams, ForwardBatch

log = logging.getLogger(__name__)

# What is widely used and was compared on many processors is not compared at every start.
TRUSTED = ("portable", "avx2")

NUM_ROWS, WIDTH, NUM_OUTPUTS, HEAD_DIM = 40, 160, 48, 32

Probe = Callable[[str], list[NDArray[np.float32]]]


def best_isa(usable: Sequence[str], probe: Probe) -> str:
    """The last of `usable` (best last) that agrees with the portable kernels; tells of those that do not."""
    expected: list[NDArray[np.float32]] | None = None
    for isa in reversed(usable):
        if isa in TRUSTED:
            return isa
        if expected is None:
            expected = probe("portable")
        found = probe(isa)
        if all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in zip(found, expected, strict=True)):
            return isa
        log.warning("The %s kernels do not give the expected results on this processor: they are not used.", isa)
    return usable[0]


def probe(isa: str) -> list[NDArray[np.float32]]:
    """What the kernels of `isa` compute for fixed numbers: products in every class of weights, and attention."""
    rng = np.random.default_rng(0)
    x = _rounded(rng.normal(size=(NUM_ROWS, WIDTH)))
    matrix = rng.normal(size=(NUM_OUTPUTS, WIDTH)).astype(np.float32)
    results = []
    for quantization in ("none", "int8", "int4"):
        ops = NativeOps(dtype="bfloat16", num_threads=1, isa=isa, quantization=quantization, quantizes_activations=True)
        weight = ops.weight([matrix], kind="linear")
        results += [ops.to_numpy(ops.linear(_view(x[:rows]), weight)) for rows in (1, NUM_ROWS)]
    q, k, v = (_view(_rounded(rng.normal(size=(NUM_ROWS, heads * HEAD_DIM))), heads) for heads in (2, 1, 1))
    cache = ops.kv_cache(num_blocks=3, block_size=16, layers_per_block=1, num_kv_heads=1, head_dim=HEAD_DIM)
    attended = ops.attend(
        q, k, v, cache, _one_request(NUM_ROWS), AttentionParams(2, 1, HEAD_DIM, 0.2), group=0, layer_in_block=0
    )
    return [*results, ops.to_numpy(attended)]


def _rounded(x: NDArray[np.float64]) -> NDArray[np.float32]:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def _view(values: NDArray[np.float32], heads: int | None = None) -> View:
    width = values.shape[1]
    return View(Buffer(width, "tokens", np.ascontiguousarray(values)), 0, width, heads)


def _one_request(num_tokens: int) -> ForwardBatch:
    blocks = np.arange(-(-num_tokens // 16), dtype=np.int32)[None]
    return ForwardBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=np.arange(num_tokens, dtype=np.int32),
        query_starts=np.array([0, num_tokens], np.int32),
        context_lens=np.array([num_tokens], np.int32),
        block_tables=(blocks,),
        rope_variants=np.zeros(num_tokens, np.int32),
        logits_rows=np.empty(0, np.int32),
    )
