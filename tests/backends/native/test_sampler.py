"""The extension's sampling equals NumPy's bit for bit: on every instruction set, for any threads and company."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from octavo import _native
from octavo.backends.native.cpu import detect_cpu
from octavo.backends.native.sampler import NativeSampler
from octavo.backends.sampler import ROW_OPTIONS, Described, Ragged, RowEdits, SampleBatch, Sampled
from octavo.request import SamplingParams
from octavo.sampling.columns import RowSampling
from octavo.sampling.numpy_kernels import NumpyKernels
from octavo.sampling.sampler import LogprobsMode, Sampler

TEAMS = {count: _native.Team(count) for count in (1, 2, 3)}
WAYS = tuple(itertools.product(detect_cpu().isas, TEAMS))


def native(vocab_size: int, isa: str = "auto", threads: int = 2, mode: LogprobsMode = "raw") -> Sampler:
    return Sampler(vocab_size, mode, NativeSampler(TEAMS[threads], vocab_size, isa=isa))


def random_logits(random: np.random.Generator, num_rows: int, vocab_size: int) -> np.ndarray:
    """Rows as models and as adversaries make them, with padding that nothing may look at."""
    values = random.standard_normal((num_rows, vocab_size + 5)) * random.choice([1e-4, 1, 3, 10])
    kind = random.integers(5)
    if kind == 0:
        values = np.round(values)
    elif kind == 1:
        values[:, random.integers(vocab_size)] += 25
    elif kind == 2:
        values[:, random.integers(vocab_size, size=max(1, vocab_size // 3))] = -np.inf
    elif kind == 3:
        values[random.integers(num_rows), random.integers(vocab_size)] = random.choice([np.nan, np.inf, -np.inf])
    values[:, vocab_size:] = random.choice([np.nan, 99])
    return values.astype(np.float32)


def random_row(random: np.random.Generator, vocab_size: int) -> RowSampling:
    def one_of(*values: float) -> float:
        return float(random.choice(values))

    options: dict[str, object] = {
        "temperature": one_of(0, 0.3, 0.7, 1, 1, 2.5, 50),
        "top_k": min(int(one_of(0, 0, 0, 1, 5, 50, 500, 1000)), vocab_size),
        "top_p": one_of(0, 1e-9, 0.5, 0.9, 0.95, 0.999999, 1, 1),
        "min_p": one_of(0, 0, 0, 1e-4, 0.1, 1),
    }
    if random.random() < 0.3:
        penalties = {
            "repetition_penalty": one_of(0.7, 1.3),
            "presence_penalty": one_of(0, -2),
            "frequency_penalty": 0.3,
        }
        options.update(penalties)
    if random.random() < 0.2:
        options["logit_bias"] = {3: 4.0, vocab_size - 1: -100.0}
    if random.random() < 0.1:
        options["allowed_token_ids"] = tuple(random.integers(0, vocab_size, int(one_of(1, 3, 40))).tolist())
    if random.random() < 0.2:
        options |= {"min_tokens": 40, "stop_token_ids": (1, 2)}
    if random.random() < 0.4:
        options["logprobs"] = min(int(one_of(0, 1, 5, 20, 300)), vocab_size)
    output = random.integers(0, vocab_size, 30).tolist()
    return RowSampling(
        SamplingParams(seed=int(random.integers(2**40)), max_tokens=1000, **options),
        prompt_token_ids=random.integers(0, vocab_size, 20).tolist(),
        output_token_ids=output,
        choice=int(random.integers(3)),
        eos_token_ids=(4,),
        vocab_size=vocab_size,
        bad_words_token_ids=((5,), (*output[-1:], 6)) if random.random() < 0.2 else (),
    )


def random_mask(random: np.random.Generator, vocab_size: int) -> np.ndarray | None:
    words = random.integers(0, 2**32, (2, -(-vocab_size // 32)), dtype=np.uint32)
    return None if random.random() < 0.5 else words[0] & words[1]


@pytest.mark.parametrize("vocab_size", [8, 63, 1000, 1024, 1025, 5003])
def test_random_rows_sample_what_numpy_samples(vocab_size: int) -> None:
    for case in range(25):
        random = np.random.default_rng([vocab_size, case])
        num_rows = int(random.choice([1, 2, 3, 4, 7]))
        logits = random_logits(random, num_rows, vocab_size)
        rows = [random_row(random, vocab_size) for _ in range(num_rows)]
        sources = random.integers(0, num_rows, num_rows).tolist()
        masks = [random_mask(random, vocab_size) for _ in rows] if random.random() < 0.3 else None
        mode: LogprobsMode = "raw" if case % 2 else "processed"
        expected = Sampler(vocab_size, mode).sample(logits, rows, sources=sources, token_masks=masks)
        for isa, threads in WAYS:
            sampler = native(vocab_size, isa, threads, mode)
            assert sampler.sample(logits, rows, sources=sources, token_masks=masks) == expected, (case, isa, threads)


@pytest.mark.parametrize(
    "options", [{"top_p": 0.95}, {"top_p": 0.95, "temperature": 30.0}, {"top_k": 50}, {"top_k": 9000}]
)
def test_real_vocabularies_sample_what_numpy_samples(options: dict[str, float]) -> None:
    for vocab_size in (49_152, 262_144):
        random = np.random.default_rng(vocab_size)
        logits = (random.standard_normal((2, vocab_size)) * 3).astype(np.float32)
        rows = [
            RowSampling(SamplingParams(seed=seed, logprobs=5, **options), prompt_token_ids=(1,), vocab_size=vocab_size)
            for seed in range(2)
        ]
        expected = Sampler(vocab_size).sample(logits, rows)
        for isa, threads in WAYS:
            assert native(vocab_size, isa, threads).sample(logits, rows) == expected, (isa, threads)


def test_many_equal_logits_are_cut_at_the_lowest_ids() -> None:
    size = 3000
    for logits in (np.zeros((1, size), np.float32), np.tile(np.float32([0.0, -0.0, 1e-40]), size // 3)[None]):
        for options in ({"top_k": 700}, {"top_p": 0.25}):
            for seed in range(20):
                params = SamplingParams(seed=seed, **options)
                row = RowSampling(params, prompt_token_ids=(1,), vocab_size=size)
                token_id = native(size).sample(logits, [row]).token_ids[0]
                assert token_id < 750
                zeros = np.zeros((1, size), np.float32)  # a subnormal counts as zero
                assert Sampler(size).sample(zeros, [row]).token_ids == [token_id]


def test_scores_of_given_tokens_equal_numpys() -> None:
    size = 2500
    random = np.random.default_rng(7)
    logits = (random.standard_normal((9, size)) * 4).astype(np.float32)
    targets = random.integers(0, size, 9).tolist()
    for num_top in (0, 1, 20, size + 1):
        expected = Sampler(size).score(logits, targets, num_top)
        for isa, threads in WAYS:
            assert native(size, isa, threads).score(logits, targets, num_top) == expected


def test_a_row_is_the_same_alone_and_among_many() -> None:
    size = 20_000
    random = np.random.default_rng(3)
    logits = (random.standard_normal((12, size)) * 3).astype(np.float32)
    rows = [random_row(random, size) for _ in range(12)]
    together = native(size).sample(logits, rows)
    for i, row in enumerate(rows):
        alone = native(size, threads=3).sample(logits[i : i + 1], [row])
        assert alone.token_ids == [together.token_ids[i]]
        assert alone.logprobs.get(0) == together.logprobs.get(i)


def test_rows_of_a_wider_array_are_read_where_they_lie() -> None:
    wide = np.random.default_rng(5).standard_normal((6, 4, 300)).astype(np.float32)
    row = RowSampling(SamplingParams(seed=1), prompt_token_ids=(1,), vocab_size=100)
    logits = wide[:, 1, 50:170]
    assert not logits.flags.c_contiguous
    expected = Sampler(100).sample(np.ascontiguousarray(logits), [row] * 6)
    assert native(100).sample(logits, [row] * 6) == expected


def make_batch(**changes: object) -> SampleBatch:
    fields: dict[str, object] = {
        "logits": np.zeros((2, 40), np.float32),
        "options": np.zeros(2, ROW_OPTIONS),
        "positions": np.zeros(2, np.int64),
        "sources": np.arange(2, dtype=np.int32),
        "max_logprobs": 0,
    }
    return SampleBatch(**(fields | changes))  # type: ignore[arg-type]


def edits(**changes: object) -> RowEdits:
    nothing = Ragged(np.zeros(2, np.int64), np.empty(0, np.int32))
    fields: dict[str, object] = {
        "edit_of_row": np.array([0, -1], np.int32),
        **dict.fromkeys(("allowed", "banned", "biased", "seen"), nothing),
        "biases": np.empty(0, np.float32),
        "counts": np.empty(0, np.int32),
    }
    return RowEdits(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"sources": np.array([0, 2], np.int32)}, ValueError, "source is out of range"),
        ({"sources": np.array([-1, 0], np.int32)}, ValueError, "source is out of range"),
        ({"logits": np.zeros((2, 39), np.float32)}, ValueError, "too narrow"),
        ({"positions": np.zeros(3, np.int64)}, ValueError, "differ in length"),
        ({"given_ids": np.array([0, 40], np.int32)}, ValueError, "given token"),
        ({"edits": edits(edit_of_row=np.array([1, 0], np.int32))}, ValueError, "edit is out of range"),
        (
            {"edits": edits(banned=Ragged(np.array([0, 1]), np.array([40], np.int32)))},
            IndexError,
            "token id is out of range",
        ),
        ({"edits": edits(seen=Ragged(np.array([0, 2]), np.array([1], np.int32)))}, ValueError, "starts"),
        ({"positions": np.zeros(2, np.int32)}, TypeError, "incompatible function arguments"),
        ({"edits": edits(edit_of_row=np.array([0, -1]))}, TypeError, "another type"),
        ({"edits": edits(biased=Ragged(np.array([0, 1]), np.array([1], np.int32)))}, ValueError, "biases"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes: dict[str, object], error: type[Exception], message: str) -> None:
    sampler = NativeSampler(TEAMS[1], 40)
    assert sampler.sample(make_batch(edits=edits())).token_ids.tolist() == [0, 0]
    with pytest.raises(error, match=message):
        sampler.sample(make_batch(**changes))


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="'mmx' is not usable"):
        NativeSampler(TEAMS[1], 40, isa="mmx")


def test_both_kernels_fill_the_same_arrays() -> None:
    batch = make_batch(logits=np.random.default_rng(0).standard_normal((2, 40)).astype(np.float32), max_logprobs=3)
    batch.options["num_logprobs"] = 3
    filled: list[Sampled] = [NumpyKernels(40).sample(batch), NativeSampler(TEAMS[2], 40).sample(batch)]
    for one, other in itertools.pairwise(filled):
        assert np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.statuses, other.statuses)
        assert one.described is not None and other.described is not None
        for name in Described.__slots__:
            assert np.array_equal(getattr(one.described, name), getattr(other.described, name)), name
