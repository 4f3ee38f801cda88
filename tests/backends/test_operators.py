"""Every operator of every backend that runs here, against its definition in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.backends import definitions as define
from tests.backends.definitions import EPS, Rows, assert_close, heads, make_batch, poison, rounded, tensor

from octavo.backends.ops import Activation, AttentionParams, Ops, RopeTable
from octavo.backends.registry import BACKENDS, backend_info, create_ops

USABLE = [name for name in BACKENDS if backend_info(name).available]


@pytest.fixture(params=[(name, dtype) for name in USABLE for dtype in ("float32", "bfloat16", "float16")], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Ops:
    name, dtype = request.param
    return create_ops(name, dtype=dtype, num_threads=1)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_embedding_picks_rows_and_scales_by_the_rounded_scale(ops, rng):
    table = rng.normal(size=(37, 19)).astype(np.float32)
    token_ids = np.array([36, 0, 5, 5], np.int32)
    batch = make_batch([Rows(4, 4, np.zeros((1, 1)))], token_ids=token_ids)
    weight = ops.weight([table[:20], table[20:]], kind="embedding")
    expected = rounded(table, ops.dtype)[token_ids]
    assert_close(ops.to_numpy(ops.embedding(batch, weight)), expected, ops.dtype)
    scale = float(rounded(np.array(640**0.5), ops.dtype))
    assert_close(ops.to_numpy(ops.embedding(batch, weight, scale=640**0.5)), expected * scale, ops.dtype)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64, ml_dtypes.float8_e4m3fn])
def test_weights_of_any_plain_type_are_rounded_once_to_the_backends_type(ops, rng, stored):
    matrix = rng.normal(size=(7, 11)).astype(np.float32).astype(stored)
    batch = make_batch([Rows(7, 7, np.zeros((1, 1)))], token_ids=np.arange(7, dtype=np.int32))
    got = ops.to_numpy(ops.embedding(batch, ops.weight([matrix], kind="embedding")))
    assert (got == rounded(matrix, ops.dtype)).all()


@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (3, 33), (17, 576), (5, 4097)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(ops, rng, shape, offset):
    x, weight = 3 * rng.normal(size=shape), rng.normal(size=shape[1]).astype(np.float32)
    got = ops.rms_norm(tensor(ops, x), ops.weight([weight], kind="vector"), eps=1e-5, offset=offset)
    expected = define.rms_norm(rounded(x, ops.dtype), weight.astype(np.float64), 1e-5, offset)
    assert_close(ops.to_numpy(got), expected, ops.dtype)


def test_rms_norm_of_each_head(ops, rng):
    x, weight = rng.normal(size=(5, 3, 16)), rng.normal(size=16).astype(np.float32)
    got = ops.rms_norm(heads(ops, x), ops.weight([weight], kind="vector"), eps=1e-6)
    expected = define.rms_norm(rounded(x, ops.dtype), weight.astype(np.float64), 1e-6, 0.0)
    assert_close(ops.to_numpy(got), expected, ops.dtype)


# ATT-11: squares of what bfloat16 and float32 hold, and of what float16 holds, fit the norm's float32.
def test_rms_norm_survives_values_whose_squares_overflow_the_type(ops, rng):
    x = np.full((2, 64), 60000.0)
    got = ops.rms_norm(tensor(ops, x), ops.weight([np.ones(64, np.float32)], kind="vector"), eps=1e-6)
    assert_close(ops.to_numpy(got), np.ones((2, 64)), ops.dtype)


@pytest.mark.parametrize("shape", [(1, 8), (3, 33), (9, 576)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_layer_norm(ops, rng, shape, has_bias):
    x = 2 + 3 * rng.normal(size=shape)
    weight, bias = rng.normal(size=(2, shape[1])).astype(np.float32)
    shift = ops.weight([bias], kind="vector") if has_bias else None
    got = ops.layer_norm(tensor(ops, x), ops.weight([weight], kind="vector"), shift, eps=1e-5)
    wide = (weight.astype(np.float64), bias.astype(np.float64) if has_bias else None)
    assert_close(ops.to_numpy(got), define.layer_norm(rounded(x, ops.dtype), *wide, 1e-5), ops.dtype, terms=4)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 8, 13, 64, 131])
@pytest.mark.parametrize("sizes", [((1,), 1), ((5, 3, 3), 17), ((96, 32, 32), 64), ((577,), 130)])
def test_linear_concatenates_its_parts_and_adds_the_bias(ops, rng, num_rows, sizes):
    out_sizes, in_size = sizes
    x = rng.normal(size=(num_rows, in_size))
    parts = [rng.normal(size=(size, in_size)).astype(np.float32) for size in out_sizes]
    biases = [rng.normal(size=size).astype(np.float32) for size in out_sizes]
    weight, bias = ops.weight(parts, kind="linear"), ops.weight(biases, kind="vector")
    product = rounded(x, ops.dtype) @ rounded(np.concatenate(parts), ops.dtype).T
    y = tensor(ops, x)
    assert_close(ops.to_numpy(ops.linear(y, weight)), product, ops.dtype, terms=in_size)
    shifted = product + np.concatenate(biases).astype(np.float64)
    assert_close(ops.to_numpy(ops.linear(y, weight, bias)), shifted, ops.dtype, terms=in_size)


def test_split_cuts_the_last_dimension(ops, rng):
    x = rng.normal(size=(3, 12))
    pieces = ops.split(tensor(ops, x), (6, 2, 4))
    expected = np.split(rounded(x, ops.dtype), [6, 8], axis=1)
    for piece, values in zip(pieces, expected, strict=True):
        assert (ops.to_numpy(piece) == values).all()


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (7, 1536)])
def test_activations(ops, rng, kind: Activation, shape):
    x = 4 * rng.normal(size=shape)
    values = rounded(x, ops.dtype)
    got = ops.to_numpy(ops.activation(tensor(ops, x), kind))
    assert_close(got, define.activation(values, kind), ops.dtype)
    gate, up = np.split(values, 2, axis=1)
    got = ops.to_numpy(ops.gated_activation(tensor(ops, x), kind))
    assert_close(got, define.activation(gate, kind) * up, ops.dtype, terms=4)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations_of_extreme_values_are_finite(ops, kind: Activation):
    x = np.array([[-60000.0, -100.0, -0.0, 0.0, 100.0, 60000.0]])
    got = ops.to_numpy(ops.activation(tensor(ops, x), kind))
    assert_close(got, np.maximum(rounded(x, ops.dtype), 0), ops.dtype)


def test_add_scales_its_second_operand(ops, rng):
    x, y = rng.normal(size=(2, 5, 33))
    got = ops.to_numpy(ops.add(tensor(ops, x), tensor(ops, y), scale=0.22))
    assert_close(got, rounded(x, ops.dtype) + 0.22 * rounded(y, ops.dtype), ops.dtype)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("rows", [[], [4], [6, 0, 0]])
def test_logits_of_chosen_rows_are_float32_scaled_and_capped(ops, rng, is_tied, rows):
    x, matrix = rng.normal(size=(7, 48)), rng.normal(size=(101, 48)).astype(np.float32)
    head = ops.weight([matrix], kind="embedding" if is_tied else "linear")
    got = ops.to_numpy(ops.logits(ops.rows(tensor(ops, x), np.array(rows, np.int32)), head, scale=1 / 3, softcap=5.0))
    product = rounded(x, ops.dtype)[rows] @ rounded(matrix, ops.dtype).T / 3
    assert got.dtype == np.float32
    assert_close(got, 5.0 * np.tanh(product / 5.0), "float32", terms=64)


@pytest.mark.parametrize("rotary_dim", [2, 24, 32])
def test_rope_rotates_each_token_in_its_variant_and_passes_the_rest_through(ops, rng, rotary_dim):
    inv_freq = tuple((base ** -np.linspace(0, 1, rotary_dim // 2)).astype(np.float32) for base in (1e4, 1e6))
    table = RopeTable(rotary_dim, inv_freq, (1.0, 1.19))
    table_of_one = RopeTable(rotary_dim, inv_freq[:1], (0.8,))
    x = rng.normal(size=(5, 3, 32))
    requests = [Rows(2, 2, np.zeros((1, 1))), Rows(3, 90001, np.zeros((1, 1)), rope_variant=1)]
    batch = make_batch(requests)
    for each in (table, table_of_one):
        got = ops.to_numpy(ops.rope(heads(ops, x), batch, each))
        expected = define.rope(rounded(x, ops.dtype), batch.positions, batch.rope_variants, each)
        assert_close(got, expected, ops.dtype, terms=4)


# -- attention ---------------------------------------------------------------------------------------------

SHAPES = [  # query heads, KV heads, head size
    (1, 1, 32), (4, 4, 64), (9, 3, 64), (8, 1, 80), (4, 2, 96),
    (6, 2, 112), (4, 1, 128), (3, 3, 192), (4, 1, 256), (5, 1, 16),
]  # fmt: skip
# (tokens, context after the step) of each request: decodes, drafts, chunks at odd places, a prompt from nothing.
MIXES = {
    "one decode": [(1, 1)],
    "decodes": [(1, 1), (1, 63), (1, 64), (1, 65), (1, 200), (1, 7)],
    "chunks": [(7, 7), (5, 70), (33, 129), (150, 290)],
    "mixed": [(1, 40), (12, 12), (1, 3), (4, 90), (4, 17), (40, 77), (1, 130)],
}


class Sequences:
    """Random queries, keys and values of several requests, written to a poisoned cache step by step."""

    def __init__(self, ops: Ops, rng: np.random.Generator, params: AttentionParams, lengths, block_size: int) -> None:
        self.ops, self.params, self.block_size = ops, params, block_size
        counts = [-(-length // block_size) for length in lengths]
        free = rng.permutation(sum(counts) + 3)[3:].astype(np.int32)
        self.tables = np.split(free, np.cumsum(counts)[:-1])
        self.cache = ops.kv_cache(
            num_blocks=len(free) + 3,
            block_size=block_size,
            layers_per_block=2,
            num_kv_heads=params.num_kv_heads,
            head_dim=params.head_dim,
        )
        plain = AttentionParams(params.num_heads, params.num_kv_heads, params.head_dim, params.scale)
        poison(ops, self.cache, plain, layers=2)
        sizes = [params.num_heads, params.num_kv_heads, params.num_kv_heads]
        self.qkv = [[rng.normal(size=(length, size, params.head_dim)) for size in sizes] for length in lengths]

    def step(self, parts, *, layer: int = 1, sinks: np.ndarray | None = None) -> None:
        """Compute [(request, first, end)] and compare with the definition."""
        ops, params = self.ops, self.params
        rows = [Rows(end - first, end, self._visible_table(r, first)[None]) for r, first, end in parts]
        q, k, v = (np.concatenate([self.qkv[r][i][first:end] for r, first, end in parts]) for i in range(3))
        sink_weight = None if sinks is None else ops.weight([sinks.astype(np.float32)], kind="vector")
        got = ops.to_numpy(
            ops.attend(
                heads(ops, q), heads(ops, k), heads(ops, v), self.cache, make_batch(rows), params,
                group=0, layer_in_block=layer, sinks=sink_weight,
            )
        )  # fmt: skip
        expected = []
        for r, first, end in parts:
            values = [rounded(x, ops.dtype) for x in self.qkv[r]]
            wide_sinks = None if sinks is None else sinks.astype(np.float32).astype(np.float64)
            expected.append(define.attend(values[0][first:end], values[1][:end], values[2][:end], params, wide_sinks))
        assert got.shape == (len(q), params.num_heads * params.head_dim)
        # An error of a score is a relative error of its weight.
        terms = round(64 * max(1.0, params.scale * params.head_dim) ** 2)
        # A backend may round the weights to bfloat16 before they meet the values, as `transformers` does.
        largest = max(np.abs(values[2]).max() for values in self.qkv)
        slack = EPS["bfloat16"] * largest if ops.dtype == "bfloat16" else 0.0
        assert_close(got, np.concatenate(expected).reshape(got.shape), ops.dtype, terms=terms, slack=slack)

    def _visible_table(self, request: int, first: int) -> np.ndarray:
        """The block table with -1 for what no query from `first` on sees."""
        table = self.tables[request].copy()
        if self.params.window is not None:
            table[: max(0, first - self.params.window + 1) // self.block_size] = -1
        return table


def run_mix(ops, rng, params, mix, block_size, sinks=None):
    sequences = Sequences(ops, rng, params, [end for _, end in mix], block_size)
    history = [(r, 0, end - count) for r, (count, end) in enumerate(mix) if end > count]
    if history:
        sequences.step(history, sinks=sinks)
    sequences.step([(r, end - count, end) for r, (count, end) in enumerate(mix)], sinks=sinks)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_attention_of_ragged_batches_through_shuffled_blocks(ops, rng, mix, block_size):
    run_mix(ops, rng, AttentionParams(6, 2, 32, 0.2), mix, block_size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_every_head_count_and_size(ops, rng, shape):
    run_mix(ops, rng, AttentionParams(*shape, scale=shape[2] ** -0.5), [(1, 70), (9, 20), (1, 5)], 16)


# ATT-05: exactly `window` keys, itself included, in prefill, chunks and decode.
@pytest.mark.parametrize("window", [1, 2, 16, 17, 64, 100])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_attention_within_a_window_never_reads_what_lies_before_it(ops, rng, window, mix):
    run_mix(ops, rng, AttentionParams(4, 2, 32, 0.2, window=window), mix, 4)


@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
def test_attention_with_soft_cap_and_sinks(ops, rng, mix):
    sinks = np.array([-30.0, 0.0, 1.5, 40.0])
    run_mix(ops, rng, AttentionParams(4, 2, 32, 0.5, softcap=2.0), mix, 16)
    run_mix(ops, rng, AttentionParams(4, 2, 32, 0.5), mix, 16, sinks)
    run_mix(ops, rng, AttentionParams(4, 2, 32, 0.5, window=20, softcap=3.0), mix, 16, sinks)


def test_attention_of_large_scores_does_not_overflow(ops, rng):
    run_mix(ops, rng, AttentionParams(2, 1, 32, 100.0), MIXES["mixed"], 16)


def test_layers_of_a_block_are_apart(ops, rng):
    sequences = Sequences(ops, rng, AttentionParams(2, 1, 32, 0.2), [40], 16)
    sequences.step([(0, 0, 40)], layer=0)
    other = Sequences(ops, rng, AttentionParams(2, 1, 32, 0.2), [40], 16)
    other.cache, other.tables = sequences.cache, sequences.tables
    other.step([(0, 0, 39)], layer=1)
    sequences.step([(0, 39, 40)], layer=0)
    other.step([(0, 39, 40)], layer=1)


def test_copied_blocks_hold_the_same_keys_in_every_layer(ops, rng):
    sequences = Sequences(ops, rng, AttentionParams(2, 2, 32, 0.2), [20], 8)
    for layer in (0, 1):
        sequences.step([(0, 0, 18)], layer=layer)
    unused = sorted(set(range(sequences.cache.num_blocks)) - set(sequences.tables[0].tolist()))
    last = int(sequences.tables[0][2])
    sequences.cache.copy_blocks([(last, unused[0]), (unused[0], unused[1])])
    sequences.tables[0][2] = unused[1]
    for layer in (0, 1):
        sequences.step([(0, 18, 20)], layer=layer)


# The failed request's NaN stay its own: in its rows, and in no block that is used again.
def test_a_request_with_nan_leaves_its_neighbours_alone(ops, rng):
    params = AttentionParams(4, 2, 32, 0.2)
    q, k, v = (rng.normal(size=(3, size, 32)) for size in (4, 2, 2))
    k[1] = np.nan
    cache = ops.kv_cache(num_blocks=3, block_size=4, layers_per_block=1, num_kv_heads=2, head_dim=32)
    batch = make_batch([Rows(1, 1, np.array([[block]])) for block in range(3)])
    got = ops.to_numpy(
        ops.attend(heads(ops, q), heads(ops, k), heads(ops, v), cache, batch, params, group=0, layer_in_block=0)
    )
    assert np.isnan(got[1]).all()
    assert_close(got[[0, 2]], rounded(v, ops.dtype)[[0, 2]].repeat(2, axis=1).reshape(2, -1), ops.dtype, terms=4)
