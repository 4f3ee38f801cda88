"""The reference backend: attention as it serves against its definition, and rows that do not notice each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.backends.definitions import Rows, make_batch

from octavo.backends.ops import AttentionParams, RopeTable
from octavo.backends.reference import attention
from octavo.backends.reference.ops import ReferenceOps
from octavo.backends.reference.weights import LinearWeight, padded_rows

# How a product rounds by its number of rows belongs to oneDNN and MKL; it was looked into on AVX2.
bits_are_known = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX2" or not torch.backends.mkl.is_available(),
    reason="bits of products are known for AVX2 with MKL",
)


@pytest.fixture
def ops() -> ReferenceOps:
    return ReferenceOps(dtype="float32", num_threads=1)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32))


class Arena:
    """A cache with `lengths` random requests in it, whose last tokens can be computed in any company."""

    def __init__(self, rng: np.random.Generator, params: AttentionParams, lengths: list[int], block_size: int = 16):
        counts = [-(-length // block_size) for length in lengths]
        ids = rng.permutation(sum(counts)).astype(np.int32)
        self.params, self.lengths = params, lengths
        self.tables = np.split(ids, np.cumsum(counts)[:-1])
        self.sizes = {
            "num_blocks": len(ids),
            "block_size": block_size,
            "layers_per_block": 1,
            "num_kv_heads": params.num_kv_heads,
            "head_dim": params.head_dim,
        }
        self.qkv = [
            [random(rng, length, heads, params.head_dim) for heads in (params.num_heads, *[params.num_kv_heads] * 2)]
            for length in lengths
        ]

    def run(self, ops: ReferenceOps, steps: list[list[tuple[int, int]]], sinks=None) -> list[torch.Tensor]:
        """Compute [(request, num_tokens)] step by step from the start; the outputs of each request, in order."""
        cache = ops.kv_cache(**self.sizes)
        done, outputs = [0] * len(self.lengths), [[] for _ in self.lengths]
        for step in steps:
            parts = [(r, done[r], done[r] + count) for r, count in step]
            batch = make_batch([Rows(end - first, end, self.tables[r][None]) for r, first, end in parts])
            q, k, v = (torch.cat([self.qkv[r][i][first:end] for r, first, end in parts]) for i in range(3))
            out = ops.attend(q, k, v, cache, batch, self.params, group=0, layer_in_block=0, sinks=sinks)
            for (r, _, end), part in zip(parts, out.split([count for _, count in step]), strict=True):
                outputs[r].append(part)
                done[r] = end
        return [torch.cat(parts) if parts else torch.empty(0) for parts in outputs]


PARAMS = [
    AttentionParams(4, 4, 32, 0.2),
    AttentionParams(9, 3, 64, 0.125),
    AttentionParams(4, 1, 16, 0.25, window=37),
    AttentionParams(6, 2, 96, 0.1, softcap=2.0),
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_serving_form_equals_the_definition(rng, params, has_sinks):
    arena = Arena(rng, params, [1, 40, 130, 300])
    sinks = random(rng, params.num_heads) if has_sinks else None
    steps = [[(0, 1), (1, 39), (2, 120), (3, 270)], [(1, 1), (2, 4), (3, 30)], [(2, 6)]]
    outputs = [
        arena.run(ReferenceOps(dtype="float32", num_threads=1, naive_attention=naive), steps, sinks)
        for naive in (False, True)
    ]
    for served, defined in zip(*outputs, strict=True):
        torch.testing.assert_close(served, defined, rtol=1e-5, atol=1e-6)


def test_requests_of_like_length_share_a_segment_and_long_chunks_are_cut(ops):
    cache = ops.kv_cache(num_blocks=200, block_size=16, layers_per_block=1, num_kv_heads=1, head_dim=16)
    table = np.arange(40)[None]
    batch = make_batch([Rows(1, n, table) for n in (1, 64, 65, 100, 129)] + [Rows(300, 600, table)])
    segments = attention.plan_segments(cache, batch, 0, None, 4)
    shapes = sorted((s.num_requests, s.num_tokens, s.bias.shape[-1]) for s in segments)
    assert shapes == [(1, 1, 192), (1, 44, 640), (1, 128, 448), (1, 128, 576), (2, 1, 64), (2, 1, 128)]


def test_a_window_bounds_what_is_read(ops):
    cache = ops.kv_cache(num_blocks=200, block_size=16, layers_per_block=1, num_kv_heads=1, head_dim=16)
    batch = make_batch([Rows(1, 1000, np.arange(63)[None])])
    (segment,) = attention.plan_segments(cache, batch, 0, 32, 4)
    assert segment.bias.shape[-1] == 64
    assert int((segment.bias == 0).sum()) == 32


@bits_are_known
@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_of_a_token_has_the_same_bits_in_any_company(rng, params, has_sinks):
    arena = Arena(rng, params, [150, 20, 1, 77, 129, 64])
    sinks = random(rng, params.num_heads) if has_sinks else None
    alone = [arena.run(ops_of(2), [[(r, length)]], sinks)[r] for r, length in enumerate(arena.lengths)]
    token_by_token = arena.run(
        ops_of(1), [[(r, 1) for r, n in enumerate(arena.lengths) if n > t] for t in range(150)], sinks
    )
    ragged = arena.run(ops_of(2), ragged_steps(rng, arena.lengths), sinks)
    for a, b, c in zip(alone, token_by_token, ragged, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def ops_of(num_threads: int) -> ReferenceOps:
    return ReferenceOps(dtype="float32", num_threads=num_threads)


def ragged_steps(rng: np.random.Generator, lengths: list[int]) -> list[list[tuple[int, int]]]:
    left, steps = list(lengths), []
    while any(left):
        step = [(r, min(n, int(rng.choice([1, 2, 3, 5, 7, 30, 140])))) for r, n in enumerate(left) if n]
        kept = [part for part in step if rng.random() < 0.7]
        for r, count in kept:
            left[r] -= count
        if kept:
            steps.append(kept)
    return steps


@bits_are_known
@pytest.mark.parametrize("in_size", [8, 64, 576, 1536])
@pytest.mark.parametrize("out_size", [8, 96, 960])
def test_a_row_of_a_product_has_the_same_bits_in_any_company(rng, in_size, out_size):
    weight = ops_of(1).weight([random(rng, out_size, in_size).numpy()], kind="linear")
    x = random(rng, 300, in_size)
    together = ops_of(2).linear(x, weight)
    for num_threads in (1, 2):
        ops = ops_of(num_threads)
        for num_rows in (*range(1, 34), 63, 64, 65, 127, 200):
            assert torch.equal(ops.linear(x[:num_rows], weight), together[:num_rows]), num_rows


@pytest.mark.parametrize("width", [8, 34, 576, 3072])
def test_other_operators_have_the_same_bits_in_any_company(ops, rng, width):
    x, y, weight = random(rng, 301, width), random(rng, 301, width), random(rng, width)
    head_rows = x.view(301, 2, width // 2)
    table = RopeTable(width // 4 * 2, (np.linspace(1, 0.01, width // 4).astype(np.float32),), (1.0,))
    functions = {
        "rms_norm": lambda rows: ops.rms_norm(x[rows], weight, eps=1e-6, offset=1.0),
        "layer_norm": lambda rows: ops.layer_norm(x[rows], weight, weight, eps=1e-6),
        "add": lambda rows: ops.add(x[rows], y[rows], scale=0.3),
        "rope": lambda rows: ops.rope(head_rows[rows], positions(range(301)[rows]), table),
    }
    for kind in ("silu", "gelu", "gelu_tanh", "relu"):
        functions[kind] = lambda rows, kind=kind: ops.activation(x[rows], kind)
        functions[f"gated {kind}"] = lambda rows, kind=kind: ops.gated_activation(x[rows], kind)
    for name, function in functions.items():
        together = function(slice(0, 301))
        for rows in (slice(0, 1), slice(5, 8), slice(17, 100), slice(300, 301)):
            assert torch.equal(function(rows), together[rows]), (name, rows)


def positions(each: range):
    return make_batch([Rows(1, position + 1, np.zeros((1, 1))) for position in each])


def test_products_have_few_sizes_and_a_padded_one_gives_each_row_its_own_bits() -> None:
    """The library under them compiles and keeps code for every number of rows, so a server would never stop growing."""
    assert [padded_rows(n) for n in (0, 1, 32, 33, 64, 65, 257, 513)] == [0, 1, 32, 48, 64, 80, 288, 576]
    assert all(n <= padded_rows(n) < n + max(16, n / 8) for n in range(5000))
    assert len({padded_rows(n) for n in range(1, 8193)}) < 90
    generator = torch.Generator().manual_seed(0)
    weight = LinearWeight(torch.randn(40, 64, generator=generator))
    x = torch.randn(130, 64, generator=generator)
    rows = torch.cat([weight.product(x[i : i + 1]) for i in range(len(x))])
    for num_rows in (31, 32, 33, 47, 49, 65, 127, 129, 130):
        y = weight.product(x[:num_rows])
        assert y.shape == (num_rows, 40) and torch.equal(y, rows[:num_rows]), num_rows
