"""Log-probabilities against a float64 softmax, raw and processed."""

import numpy as np
import pytest

from octavo.batch import TokenLogprobs
from octavo.request import SamplingParams
from octavo.sampling.columns import RowSampling

VOCAB = 3000


def log_softmax(values: np.ndarray) -> np.ndarray:
    values = values.astype(np.float64)
    shifted = values - values.max()
    return shifted - np.log(np.exp(shifted).sum())


def check(described: TokenLogprobs, expected: np.ndarray, num_top: int) -> None:
    token_id = described.token_id
    assert described.logprob == pytest.approx(expected[token_id], abs=1e-5)
    assert described.rank == 1 + (expected > expected[token_id]).sum()
    order = np.argsort(-expected, kind="stable")[:num_top]
    order = order[expected[order] > -np.inf]
    assert list(described.top_token_ids) == order.tolist()
    assert list(described.top_logprobs) == pytest.approx(expected[order].tolist(), abs=1e-5)


def make_row(**params) -> RowSampling:
    return RowSampling(
        SamplingParams(**{"seed": 3} | params), prompt_token_ids=(1, 2), output_token_ids=(5, 6), vocab_size=VOCAB
    )


@pytest.fixture
def logits() -> np.ndarray:
    values = np.random.default_rng(0).standard_normal((6, VOCAB)).astype(np.float32) * 3
    values[0, [7, 9, 900]] = 40.0  # equals at the top
    values[1] = np.round(values[1])
    values[2] *= 30
    return values


CHANGES = {
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.8,
    "presence_penalty": 2.0,
    "logit_bias": {11: 50.0},
    "allowed_token_ids": tuple(range(5, 40)),
}


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_raw_logprobs_are_of_the_model_whatever_the_sampling_options(make_sampler, logits, num_top):
    for options in ({}, {"temperature": 0.0}, CHANGES):
        rows = [make_row(logprobs=num_top, **options) for _ in logits]
        output = make_sampler(VOCAB).sample(logits, rows)
        assert sorted(output.logprobs) == list(range(6))
        for values, token_id, described in zip(logits, output.token_ids, output.logprobs.values(), strict=True):
            assert described.token_id == token_id
            check(described, log_softmax(values), num_top)


def test_asking_for_logprobs_does_not_change_what_is_sampled(make_sampler, logits):
    for options in ({}, {"temperature": 0.0}, CHANGES):
        plain = make_sampler(VOCAB).sample(logits, [make_row(**options) for _ in logits])
        for mode in ("raw", "processed"):
            asked = make_sampler(VOCAB, mode).sample(logits, [make_row(logprobs=3, **options) for _ in logits])
            assert asked.token_ids == plain.token_ids
        assert plain.logprobs == {}


def test_raw_logprobs_under_a_grammar_are_taken_after_its_mask(make_sampler, logits):
    mask = np.zeros(94, np.uint32)
    mask[10] = 0xFF
    output = make_sampler(VOCAB).sample(logits[:1], [make_row(logprobs=20)], token_masks=[mask])
    allowed = np.full(VOCAB, -np.inf)
    allowed[320:328] = logits[0, 320:328]
    check(output.logprobs[0], log_softmax(allowed), 20)
    assert len(output.logprobs[0].top_token_ids) == 8


def test_processed_logprobs_are_of_the_distribution_that_is_drawn_from(make_sampler, logits):
    sampler = make_sampler(VOCAB, "processed")
    described = sampler.sample(logits[3:4], [make_row(temperature=0.5, logprobs=9)]).logprobs[0]
    check(described, log_softmax(logits[3] / np.float32(0.5)), 9)

    described = sampler.sample(logits[3:4], [make_row(temperature=0.5, top_k=4, logprobs=9)]).logprobs[0]
    kept = np.full(VOCAB, -np.inf)
    best = np.argsort(-logits[3])[:4]
    kept[best] = logits[3, best] / np.float32(0.5)
    check(described, log_softmax(kept), 9)
    assert len(described.top_token_ids) == 4

    described = sampler.sample(logits[3:4], [make_row(top_p=0.0, logprobs=9)]).logprobs[0]
    assert (described.logprob, described.rank, described.top_token_ids) == (0.0, 1, (int(best[0]),))


def test_processed_logprobs_of_a_greedy_row_are_after_penalties_alone(make_sampler, logits):
    row = make_row(temperature=0.0, top_k=2, presence_penalty=1.5, logprobs=20)
    described = make_sampler(VOCAB, "processed").sample(logits[4:5], [row]).logprobs[0]
    expected = logits[4].copy()
    expected[[5, 6]] -= 1.5
    check(described, log_softmax(expected), 20)


def test_scores_of_given_tokens_equal_teacher_forcing(make_sampler, logits):
    targets = np.array([9, 0, 17, VOCAB - 1, 4, 4], np.int32)
    padded = np.concatenate([logits, np.full((6, 72), 99, np.float32)], axis=1)
    for num_top in (0, 3):
        scored = make_sampler(VOCAB).score(padded, targets, num_top)
        assert [described.token_id for described in scored] == targets.tolist()
        for values, described in zip(logits, scored, strict=True):
            check(described, log_softmax(values), num_top)


def test_more_alternatives_than_tokens_are_all_tokens(make_sampler):
    row = RowSampling(SamplingParams(seed=1, logprobs=50), prompt_token_ids=(0,), vocab_size=4)
    described = make_sampler(4).sample(np.array([[1, 4, 2, 3]], np.float32), [row]).logprobs[0]
    assert described.top_token_ids == (1, 3, 2, 0)
