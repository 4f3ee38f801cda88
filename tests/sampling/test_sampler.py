"""Which token a row samples: equal to the definition, distributed as asked, the same in any company."""

import copy
import itertools
import math

import numpy as np
import pytest

from octavo.errors import RequestFailed
from octavo.request import SamplingParams
from octavo.sampling import reference
from octavo.sampling.columns import RowSampling
from octavo.sampling.filters import draw
from octavo.sampling.sampler import NOT_FINITE, NOTHING_LEFT, Sampler

EOS = 7
PROMPT = (1, 2, 2)
OUTPUT = (0, 1, 1)
LOGITS = np.array([2.5, 2.4, 1.0, 0.5, 0.0, -1.0, 1.9, -0.5], np.float32)

# Each changes the distribution that the others leave, on LOGITS after PROMPT and OUTPUT.
OPTIONS = {
    "temperature": 0.6,
    "top_p": 0.83,
    "top_k": 5,
    "min_p": 0.06,
    "presence_penalty": 0.7,
    "frequency_penalty": 0.4,
    "repetition_penalty": 1.4,
    "logit_bias": {3: 2.0, 0: -1.5},
    "allowed_token_ids": (0, 1, 2, 3, 6, 7),
    "stop_token_ids": (6,),  # with min_tokens
    "bad_words": ((2,), (1, 6), (0, 3)),  # as token ids
    "token_mask": (0, 2, 3, 5, 6, 7),
}
COMBINATIONS = [(), *[(name,) for name in OPTIONS], *itertools.combinations(OPTIONS, 2)]


def make_row(
    prompt=PROMPT, output=OUTPUT, *, vocab_size=8, choice=0, eos=(EOS,), bad_words=(), **params
) -> RowSampling:
    return RowSampling(
        SamplingParams(**{"seed": 11, "max_tokens": 1000} | params),
        prompt_token_ids=prompt,
        output_token_ids=output,
        choice=choice,
        eos_token_ids=eos,
        vocab_size=vocab_size,
        bad_words_token_ids=bad_words,
    )


def at_positions(row: RowSampling, count: int) -> list[RowSampling]:
    """The row as it is, as if it stood at `count` consecutive positions."""
    rows = [copy.copy(row) for _ in range(count)]
    for offset, moved in enumerate(rows):
        moved.num_tokens += offset
    return rows


def bit_mask(token_ids, vocab_size: int) -> np.ndarray:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def parse(names) -> tuple[dict, tuple, np.ndarray | None]:
    """Parameters, bad words and token mask of a combination of OPTIONS."""
    params = {name: OPTIONS[name] for name in names if name not in ("bad_words", "token_mask")}
    if "stop_token_ids" in params:
        params["min_tokens"] = 4
    mask = bit_mask(OPTIONS["token_mask"], 8) if "token_mask" in names else None
    return params, OPTIONS["bad_words"] if "bad_words" in names else (), mask


def expected_probabilities(names) -> np.ndarray:
    """Written from the documented order in float64, on its own."""
    on = {name: OPTIONS[name] for name in names}
    values = LOGITS.astype(float)
    gone = np.zeros(8, bool)
    for name in ("token_mask", "allowed_token_ids"):
        if name in on:
            gone |= ~np.isin(np.arange(8), on[name])
    if "bad_words" in on:
        gone[[2, 6]] = True  # (2) always; (1, 6) since the output ends in 1; (0, 3) not
    if "stop_token_ids" in on:
        gone[[6, EOS]] = True
    for token_id, bias in on.get("logit_bias", {}).items():
        values[token_id] += bias
    for token_id in (0, 1, 2):  # of prompt and output
        p = on.get("repetition_penalty", 1.0)
        values[token_id] = values[token_id] / p if values[token_id] > 0 else values[token_id] * p
    for token_id, count in ((0, 1), (1, 2)):  # of the output
        values[token_id] -= count * on.get("frequency_penalty", 0.0) + on.get("presence_penalty", 0.0)
    values = np.where(gone, -math.inf, values / on.get("temperature", 1.0))
    probabilities = np.exp(values - values.max())
    probabilities[probabilities < on.get("min_p", 0.0) * probabilities.max()] = 0
    order = np.argsort(-probabilities, kind="stable")
    probabilities[order[on.get("top_k", 8) :]] = 0
    probabilities /= probabilities.sum()
    enough = int(np.argmax(np.cumsum(probabilities[order]) >= on.get("top_p", 1.0) - 1e-12))
    probabilities[order[enough + 1 :]] = 0
    return probabilities / probabilities.sum()


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Probability of a fit at least this bad. Tokens of probability 0 must not occur."""
    possible = probabilities > 0
    assert not counts[~possible].any(), (counts, probabilities)
    expected = counts.sum() * probabilities[possible]
    x = float(((counts[possible] - expected) ** 2 / expected).sum()) / 2
    freedom = int(possible.sum()) - 1
    if freedom == 0:
        return 1.0
    if freedom % 2 == 0:
        return math.exp(-x) * sum(x**i / math.factorial(i) for i in range(freedom // 2))
    odd = sum(x ** (i + 0.5) / math.gamma(i + 1.5) for i in range(freedom // 2))
    return math.erfc(math.sqrt(x)) + math.exp(-x) * odd


def test_the_chi_square_tail_is_that_of_the_tables():
    for freedom, critical in ((1, 10.828), (2, 13.816), (5, 20.515), (7, 24.322)):
        counts = np.full(freedom + 1, 1000.0)
        offset = math.sqrt(critical * 1000 / 2)
        counts[0] += offset
        counts[1] -= offset
        assert chi_square_p(counts, np.full(freedom + 1, 1 / (freedom + 1))) == pytest.approx(0.001, rel=1e-3)


@pytest.mark.parametrize("names", COMBINATIONS, ids="+".join)
def test_draws_of_every_option_and_pair_fit_the_distribution(make_sampler, names):  # SMP-11
    params, bad_words, mask = parse(names)
    if make_sampler is Sampler:  # row by row
        num_draws = 2_000 if len(names) < 2 else 500
    else:
        num_draws = 20_000 if len(names) < 2 else 4_000
    rows = at_positions(make_row(bad_words=bad_words, **params), num_draws)
    masks = None if mask is None else [mask] * len(rows)
    output = make_sampler(8).sample(LOGITS[None], rows, sources=[0] * len(rows), token_masks=masks)
    counts = np.bincount(output.token_ids, minlength=8)
    assert chi_square_p(counts, expected_probabilities(names)) > 1e-3


def test_every_option_changes_the_distribution():
    for name in OPTIONS:
        assert not np.allclose(expected_probabilities((name,)), expected_probabilities(()), atol=1e-3), name


def large_logits(kind: str, size: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = random.standard_normal(size) * 3
    if kind == "ties":
        values = np.round(values)
    elif kind == "peaked":
        values[random.integers(size)] += 25
    elif kind == "flat":
        values = values * 1e-4
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", ["normal", "ties", "peaked", "flat"])
def test_a_large_row_samples_what_the_full_sort_would(make_sampler, kind):
    size = 5003
    random = np.random.default_rng(5)
    sampler = make_sampler(size)
    for case in range(60):
        logits = large_logits(kind, size, case)
        prompt, generated = random.integers(0, size, 50).tolist(), random.integers(0, size, 30).tolist()
        params = SamplingParams(
            seed=case,
            temperature=float(random.choice([0, 1e-5, 0.3, 1.0, 3.0])),
            top_k=int(random.choice([-1, 1, 5, 40, 600, size - 1])),
            top_p=float(random.choice([0, 1e-9, 0.5, 0.95, 0.999999, 1])),
            min_p=float(random.choice([0, 1e-6, 0.1, 0.999, 1])),
            repetition_penalty=float(random.choice([1, 1.3, 0.7])),
            presence_penalty=float(random.choice([0, -2, 1.5])),
            logit_bias={3: 4.0, 17: -100.0},
            stop_token_ids=(9, 10),
            min_tokens=40,
            max_tokens=1000,
        )
        bad_words = ((11,), (*generated[-2:], 12))
        row = RowSampling(
            params,
            prompt_token_ids=prompt,
            output_token_ids=generated,
            choice=2,
            eos_token_ids=(4,),
            vocab_size=size,
            bad_words_token_ids=bad_words,
        )
        rows = at_positions(row, 8)
        sampled = sampler.sample(logits[None], rows, sources=[0] * 8).token_ids
        values = reference.process(logits, params, prompt, generated, eos_token_ids=(4,), bad_words_token_ids=bad_words)
        expected = [reference.sample(values, params, choice=2, position=80 + i) for i in range(8)]
        assert sampled == expected, (case, params)


def test_a_vocabulary_of_real_size_samples_what_the_full_sort_would(make_sampler):
    size = 151_000
    for case, options in enumerate(
        ({}, {"top_p": 0.9}, {"top_p": 0.9, "temperature": 50.0}, {"top_k": 50, "min_p": 0.01})
    ):
        logits = large_logits("normal", size, case)
        params = SamplingParams(seed=case, **options)
        rows = at_positions(RowSampling(params, prompt_token_ids=(1,), vocab_size=size), 5)
        sampled = make_sampler(size).sample(logits[None], rows, sources=[0] * 5).token_ids
        assert sampled == [reference.sample(logits, params, choice=0, position=1 + i) for i in range(5)]


# SMP-01
@pytest.mark.parametrize("scale_by", [1.0, 25.0, 1e4, 1e30])
def test_tiny_temperatures_are_greedy_whatever_the_size_of_the_logits(make_sampler, scale_by):
    logits = (LOGITS * scale_by).astype(np.float32)
    rows = [make_row(temperature=t) for t in (0, 1e-12, 1e-6, 9.9e-6, 1e-5, 1e-4, 1e-3)]
    companions = [make_row(temperature=1.0, seed=seed) for seed in range(3)]
    sampled = make_sampler(8).sample(np.tile(logits, (10, 1)), rows + companions).token_ids
    assert sampled[:7] == [0] * 7
    assert all(0 <= token_id < 8 for token_id in sampled)


def test_extremes_of_float32_give_a_token_and_finite_logprobs(make_sampler):
    top = np.finfo(np.float32).max
    for logits in ([top, -top, 0, top, -np.inf, 1, 2, 3], [-top, -top, -np.inf, -top, -top, -top, -top, -top]):
        row = make_row(
            output=(0, 0, 1),
            temperature=0.5,
            logprobs=3,
            repetition_penalty=1e-300,
            frequency_penalty=2.0,
            presence_penalty=-2.0,
            logit_bias={0: 100.0, 1: -100.0},
        )
        output = make_sampler(8).sample(np.array([logits], np.float32), [row])
        assert not output.failed
        assert logits[output.token_ids[0]] > -np.inf
        assert not math.isnan(output.logprobs[0].logprob) and output.logprobs[0].logprob <= 0


def test_greedy_takes_the_lowest_id_of_equals(make_sampler):
    logits = np.array([[1, 3, 3, 2, 3, 0, 0, 0]], np.float32)
    for options in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"top_p": 1e-9}):
        for seed in range(5):
            assert make_sampler(8).sample(logits, [make_row(seed=seed, **options)]).token_ids == [1], options


# SMP-08
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_edges_of_the_filters(make_sampler, temperature):
    def tokens(**options) -> list[int]:
        rows = [make_row(seed=seed, temperature=temperature, **options) for seed in range(300)]
        return make_sampler(8).sample(LOGITS[None], rows, sources=[0] * 300).token_ids

    free = tokens()
    assert len(set(free)) == 8
    for nothing in ({"top_p": 1.0}, {"top_k": -1}, {"top_k": 0}, {"top_k": 8}, {"top_k": 9}, {"min_p": 0.0}):
        assert tokens(**nothing) == free, nothing
    for best in ({"top_p": 0.0}, {"top_p": 1e-9}, {"top_k": 1}, {"min_p": 1.0}):
        assert set(tokens(**best)) == {0}, best


def test_top_p_keeps_the_fewest_tokens_whose_mass_reaches_it(make_sampler):
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]])).astype(np.float32)

    def support(top_p: float) -> set[int]:
        rows = at_positions(make_row(vocab_size=4, prompt=(1,), output=(), eos=(), top_p=top_p), 500)
        return set(make_sampler(4).sample(logits, rows, sources=[0] * 500).token_ids)

    assert support(0.49) == {0}
    assert support(0.51) == support(0.74) == {0, 1}
    assert support(0.76) == support(0.87) == {0, 1, 2}  # lowest id of the two equals
    assert support(0.88) == {0, 1, 2, 3}


# SMP-10
def test_padding_of_the_output_layer_is_never_sampled(make_sampler):
    logits = np.zeros((1, 128), np.float32)
    logits[:, 100:] = 50
    for options in (
        {"temperature": 0.0},
        {},
        {"top_p": 0.999999},
        {"top_k": 99},
        {"temperature": 100.0, "logprobs": 5},
    ):
        rows = at_positions(make_row(vocab_size=100, **options), 2000)
        output = make_sampler(100).sample(logits, rows, sources=[0] * 2000)
        assert max(output.token_ids) < 100
        for logprobs in output.logprobs.values():
            assert logprobs.logprob == pytest.approx(-math.log(100), abs=1e-6)
            assert logprobs.top_token_ids == (0, 1, 2, 3, 4)


def test_padding_that_is_not_finite_does_no_harm(make_sampler):
    logits = np.full((1, 12), np.nan, np.float32)
    logits[:, :8] = LOGITS
    assert make_sampler(8).sample(logits, [make_row(temperature=0.0)]).token_ids == [0]


def test_many_draws_from_a_flat_distribution_reach_the_whole_vocabulary_and_no_further():  # SMP-10
    weights = np.full(1000, 2.0**42, np.float32)
    uniforms = np.concatenate([np.random.default_rng(0).random(50_000), [1 - 2.0**-24, 1 - 2.0**-53]])
    counts = np.bincount([draw(weights, uniform) for uniform in uniforms.tolist()], minlength=1000)
    assert len(counts) == 1000 and counts.min() > 0 and counts[999] >= 2


# SMP-05, K5
def mixed_rows() -> list[RowSampling]:
    return [
        make_row(seed=1),
        make_row(seed=1, choice=1),
        make_row(seed=2, temperature=0.7, top_k=3, logprobs=2),
        make_row(seed=3, top_p=0.9, presence_penalty=1.0),
        make_row(seed=4, temperature=0.0, bad_words=((0,),)),
        make_row(seed=5, temperature=0.0),
        make_row(seed=6, min_p=0.1, allowed_token_ids=(3, 4, 5)),
        make_row(seed=-9, repetition_penalty=1.7, logit_bias={5: 3.0}, logprobs=0),
    ]


def test_a_row_samples_the_same_in_any_order_and_company(make_sampler):
    logits = large_logits("normal", 8, 3) + np.random.default_rng(4).standard_normal((8, 8)).astype(np.float32)
    rows = mixed_rows()
    masks = [bit_mask((0, 3, 5, 6), 8) if i % 3 == 0 else None for i in range(8)]
    sampler = make_sampler(8)
    together = sampler.sample(logits, rows, token_masks=masks)
    assert len(set(together.token_ids)) > 2
    random = np.random.default_rng(6)
    for _ in range(30):
        chosen = random.permutation(8)[: random.integers(1, 9)].tolist()
        output = sampler.sample(logits[chosen], [rows[i] for i in chosen], token_masks=[masks[i] for i in chosen])
        assert output.token_ids == [together.token_ids[i] for i in chosen]
        assert output.logprobs == {at: together.logprobs[i] for at, i in enumerate(chosen) if i in together.logprobs}


def test_choices_of_a_request_differ_and_are_reproducible_as_a_list(make_sampler):
    def four() -> list[list[int]]:
        rows = [make_row(seed=7, choice=choice) for choice in range(4)]
        texts: list[list[int]] = [[] for _ in rows]
        for _ in range(20):
            sampled = make_sampler(8).sample(LOGITS[None], rows, sources=[0] * 4).token_ids
            for row, text, token_id in zip(rows, texts, sampled, strict=True):
                row.append(token_id)
                text.append(token_id)
        return texts

    first, second = four(), four()
    assert first == second
    assert len({tuple(text) for text in first}) == 4


def test_seeds_decide_and_equal_seeds_agree(make_sampler):
    def run(seed: int) -> list[int]:
        return make_sampler(8).sample(LOGITS[None], at_positions(make_row(seed=seed), 50), sources=[0] * 50).token_ids

    assert run(5) == run(5)
    assert len({tuple(run(seed)) for seed in (0, 1, 2, 2**40, -1, 2**63 - 1)}) == 6


# SCH-01
def test_a_request_resumed_from_its_tokens_goes_on_as_if_nothing_had_happened(make_sampler):
    options = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.2,
        "top_p": 0.95,
        "min_tokens": 12,
        "bad_words": ((3, 3), (1, 2, 4)),
        "logprobs": 1,
    }
    random = np.random.default_rng(8)
    steps = random.standard_normal((40, 1, 8)).astype(np.float32)
    sampler = make_sampler(8)
    row = make_row(output=(), **options)
    generated: list[int] = []
    for logits in steps:
        resumed = make_row(output=generated, **options)
        expected = sampler.sample(logits, [row])
        assert sampler.sample(logits, [resumed]) == expected
        row.append(expected.token_ids[0])
        generated.append(expected.token_ids[0])
    assert len(set(generated)) > 3


def test_rows_that_want_only_the_argmax_take_it_from_elsewhere(make_sampler):
    sampler = make_sampler(8)
    plain = [make_row(temperature=0.0, seed=seed) for seed in range(3)]
    assert sampler.wants_only_argmax(plain) and sampler.wants_only_argmax([])
    for options in ({}, {"temperature": 0.0, "logprobs": 0}, {"temperature": 0.0, "presence_penalty": 0.1}):
        assert not sampler.wants_only_argmax([*plain, make_row(**options)]), options
    logits = np.stack([LOGITS, LOGITS[::-1], np.roll(LOGITS, 2)])
    assert sampler.accept_argmax(np.array([0, 7, 2], np.int32), [0, 1, 2]) == sampler.sample(logits, plain)
    assert sampler.accept_argmax(np.array([0, 7, -1], np.int32), [0, 1, 2]) is None  # NaN or infinity
    forks = sampler.accept_argmax(np.array([3, 4], np.int32), [0, 1, 1])
    assert forks.token_ids == [3, 4, 4]
    assert sampler.accept_argmax(np.array([3, 8], np.int32), [0, 1]) is None  # padding came out best


# ATT-11
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.nan])
def test_logits_that_are_not_finite_fail_their_row_alone(make_sampler, poison):
    logits = np.tile(LOGITS, (4, 1))
    logits[1, 5] = poison
    logits[3] = -np.inf
    for options in ({"temperature": 0.0}, {"temperature": 0.8, "logprobs": 1}, {"allowed_token_ids": (0, 1)}):
        output = make_sampler(8).sample(logits, [make_row(**options) for _ in range(4)])
        assert output.failed == {1: NOT_FINITE, 3: NOT_FINITE}
        assert output.token_ids[1] == output.token_ids[3] == -1
        assert output.token_ids[0] == output.token_ids[2] >= 0
        assert set(output.logprobs) == ({0, 2} if "logprobs" in options else set())


def test_a_single_negative_infinity_is_a_mask_and_no_error(make_sampler):
    logits = LOGITS[None].copy()
    logits[0, 0] = -np.inf
    output = make_sampler(8).sample(logits, [make_row(temperature=0.0, logprobs=8)])
    assert output.token_ids == [1] and not output.failed
    assert output.logprobs[0].top_token_ids == (1, 6, 2, 3, 4, 7, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": (EOS,), "min_tokens": 9},
        {"allowed_token_ids": (3,), "bad_words": ((3,),)},
        {"allowed_token_ids": (3,), "mask": (1, 2)},
        {"mask": ()},
    ],
)
def test_a_row_whose_options_exclude_every_token_fails_alone(make_sampler, options):
    options = dict(options)
    mask = options.pop("mask", None)
    masks = [None, None if mask is None else bit_mask(mask, 8)]
    for temperature in (0.0, 1.0):
        rows = [make_row(temperature=temperature), make_row(temperature=temperature, **options)]
        output = make_sampler(8).sample(np.tile(LOGITS, (2, 1)), rows, token_masks=masks)
        assert output.failed == {1: NOTHING_LEFT}
        assert output.token_ids[0] >= 0 and output.token_ids[1] == -1


def test_bias_does_not_bring_back_a_masked_token(make_sampler):
    row = make_row(temperature=0.0, allowed_token_ids=(4, 5), logit_bias={0: 100.0, 5: 10.0})
    assert make_sampler(8).sample(LOGITS[None], [row]).token_ids == [5]


# SMP-06
def test_penalties_follow_their_formulas(make_sampler):
    logits = np.array([[2.0, -1.0, 0.5, 3.0]], np.float32)

    def processed(**options) -> list[float]:
        row = make_row(prompt=(0, 1), output=(3, 1, 3), vocab_size=4, eos=(), temperature=0.0, logprobs=4, **options)
        described = make_sampler(4, "processed").sample(logits, [row]).logprobs[0]
        values = dict(zip(described.top_token_ids, described.top_logprobs, strict=True))
        return [values[token_id] - values[2] + 0.5 for token_id in range(4)]  # token 2 is never penalised

    assert processed(presence_penalty=0.5) == pytest.approx([2.0, -1.5, 0.5, 2.5], abs=1e-6)
    assert processed(frequency_penalty=0.5) == pytest.approx([2.0, -1.5, 0.5, 2.0], abs=1e-6)
    assert processed(repetition_penalty=2.0) == pytest.approx([1.0, -2.0, 0.5, 1.5], abs=1e-6)
    combined = processed(presence_penalty=0.25, frequency_penalty=0.5, repetition_penalty=2.0)
    assert combined == pytest.approx([1.0, -2.75, 0.5, 0.25], abs=1e-6)


def test_neither_logits_nor_rows_are_changed_by_sampling(make_sampler):
    logits = np.tile(LOGITS, (8, 1))
    logits.flags.writeable = False
    rows = mixed_rows()
    before = [(row.num_tokens, row.seen_ids.tolist(), row.seen_counts.tolist(), row.banned_ids) for row in rows]
    masks = [bit_mask(range(8), 8)] * 8
    assert make_sampler(8).sample(logits, rows, token_masks=masks) == make_sampler(8).sample(logits, rows)
    assert before == [(row.num_tokens, row.seen_ids.tolist(), row.seen_counts.tolist(), row.banned_ids) for row in rows]


def test_token_masks_reach_the_last_token_of_odd_vocabularies(make_sampler):
    for size in (1, 8, 31, 32, 33, 1000):
        logits = np.zeros((1, size), np.float32)
        for dtype in (np.uint32, np.int32):
            mask = bit_mask((size - 1,), size).view(dtype)
            row = make_row(prompt=(0,), output=(), eos=(), vocab_size=size, temperature=0.0)
            assert make_sampler(size).sample(logits, [row], token_masks=[mask]).token_ids == [size - 1]


def test_a_mask_that_is_too_short_is_refused(make_sampler):
    with pytest.raises(AssertionError, match="1 words for 40 tokens"):
        row = make_row(vocab_size=40)
        make_sampler(40).sample(np.zeros((1, 40), np.float32), [row], token_masks=[np.zeros(1, np.uint32)])


def test_a_step_without_rows_samples_nothing(make_sampler):
    output = make_sampler(8).sample(np.empty((0, 8), np.float32), [])
    assert output.token_ids == [] and not output.failed and not output.logprobs


def test_scoring_a_prompt_with_bad_logits_fails_that_request(make_sampler):
    logits = np.tile(LOGITS, (2, 1))
    logits[1, 0] = np.nan
    with pytest.raises(RequestFailed, match="not finite"):
        make_sampler(8).score(logits, [1, 2], 2)
