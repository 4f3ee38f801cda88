"""State of one request: what is banned, counted and seeded, and that it can be rebuilt from token ids."""

import numpy as np
import pytest

from octavo.backends.sampler import ROW_OPTIONS
from octavo.errors import InvalidRequest
from octavo.request import SamplingParams
from octavo.sampling.columns import RowSampling, collect_edits, collect_masks, collect_options

VOCAB = 100


def make_row(prompt=(1, 2), output=(), *, choice=0, eos=(), bad_words=(), vocab_size=VOCAB, **params) -> RowSampling:
    return RowSampling(
        SamplingParams(**{"seed": 7, "max_tokens": 1000} | params),
        prompt_token_ids=prompt,
        output_token_ids=output,
        choice=choice,
        eos_token_ids=eos,
        vocab_size=vocab_size,
        bad_words_token_ids=bad_words,
    )


def seen(row: RowSampling) -> dict[int, int]:
    return dict(zip(row.seen_ids.tolist(), row.seen_counts.tolist(), strict=True))


# SMP-06: presence and frequency concern the output alone, repetition the prompt too, from the first step on.
def test_repetition_sees_the_prompt_and_the_other_penalties_do_not():
    assert seen(make_row(prompt=(5, 6, 5), repetition_penalty=1.5)) == {5: 0, 6: 0}
    assert seen(make_row(prompt=(5, 6, 5), presence_penalty=1.0)) == {}
    row = make_row(prompt=(5, 6, 5), repetition_penalty=1.5, frequency_penalty=0.5)
    for token_id in (6, 9, 9):
        row.append(token_id)
    assert seen(row) == {5: 0, 6: 1, 9: 2}
    row = make_row(prompt=(5, 6, 5), frequency_penalty=0.5)
    row.append(6)
    assert seen(row) == {6: 1}


def test_counts_stay_right_while_the_table_grows():
    output = np.random.default_rng(0).integers(0, 5000, 3000).tolist()
    row = make_row(prompt=range(100), vocab_size=5000, repetition_penalty=1.1)
    for token_id in output:
        row.append(token_id)
    expected = {token_id: output.count(token_id) for token_id in {*range(100), *output}}
    assert seen(row) == expected


# SCH-01: after a preemption, or in a fork, the state comes from the token ids.
def test_a_row_rebuilt_from_its_tokens_equals_the_incremental_one():
    options = {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "min_tokens": 20,
        "stop_token_ids": (8,),
        "eos": (2,),
        "bad_words": ((3,), (4, 5), (4, 4, 6)),
    }
    output = np.random.default_rng(1).integers(3, 9, 40).tolist()
    row = make_row(**options)
    for length, token_id in enumerate(output):
        rebuilt = make_row(output=output[:length], **options)
        assert rebuilt.banned_ids == row.banned_ids
        assert rebuilt.num_tokens == row.num_tokens == 2 + length
        assert np.array_equal(rebuilt.seen_ids, row.seen_ids)
        assert np.array_equal(rebuilt.seen_counts, row.seen_counts)
        row.append(token_id)


def test_eos_and_stop_ids_are_banned_until_min_tokens():
    row = make_row(min_tokens=2, eos=(2, 50), stop_token_ids=(7,))
    for banned in ([2, 50, 7], [2, 50, 7], []):
        assert row.banned_ids == banned
        assert row.edits is bool(banned)
        row.append(1)


def test_an_eos_id_beyond_the_vocabulary_needs_no_ban():
    assert make_row(min_tokens=1, eos=(2, VOCAB)).banned_ids == [2]


def test_a_bad_word_is_banned_where_the_output_ends_in_its_beginning():
    bad_words = ((9,), (1, 2), (1, 3), (1, 1, 4), (5, VOCAB))
    row = make_row(prompt=(1,), bad_words=bad_words)
    assert row.banned_ids == [9]  # the prompt's 1 does not count
    row.append(1)
    assert sorted(row.banned_ids) == [2, 3, 9]
    row.append(1)
    assert sorted(row.banned_ids) == [2, 3, 4, 9]
    row.append(6)
    assert row.banned_ids == [9]


def test_a_row_is_plain_while_its_token_is_the_argmax_of_the_logits():
    for options in ({}, {"temperature": 0.0, "logprobs": 0}, {"temperature": 0.0, "logit_bias": {1: 2.0}}):
        assert not make_row(**options).is_plain, options
    row = make_row(temperature=0.0, min_tokens=2, eos=(5,))
    for is_plain in (False, False, True, True):
        assert row.is_plain is is_plain
        row.append(1)
    assert make_row(temperature=0.0, min_tokens=2).is_plain  # there is no end to ban


def test_options_that_do_nothing_have_their_neutral_value():
    sizes = (0, -1, VOCAB, VOCAB + 1, VOCAB - 1)
    assert collect_options([make_row(top_k=k) for k in sizes])["top_k"].tolist() == [0, 0, 0, 0, VOCAB - 1]
    temperatures = collect_options([make_row(temperature=9e-6), make_row(temperature=1e-5)])["temperature"]
    assert temperatures.tolist() == [0.0, np.float32(1e-5)]
    best_only = collect_options([make_row(top_p=0.0), make_row(min_p=1.0), make_row(min_p=0.5)])
    assert best_only["top_k"].tolist() == [1, 1, 0]
    assert best_only["min_scaled"].tolist() == [-np.inf, 0.0, np.float32(np.log(0.5))]


def test_columns_hold_each_rows_own_values_in_order():
    rows = [
        make_row(prompt=(1,) * 5, seed=3, temperature=0.5, top_k=4, top_p=0.25, min_p=0.125, logprobs=2),
        make_row(
            choice=3,
            seed=-1,
            logit_bias={4: 2.0, 3: -1.0},
            allowed_token_ids=(9, 3, 9),
            presence_penalty=0.5,
            frequency_penalty=1.5,
            repetition_penalty=2.0,
        ),
        make_row(bad_words=((8,), (1, 2))),
    ]
    options = collect_options(rows)
    assert options.dtype == ROW_OPTIONS
    assert options[:2].tolist() == [
        (0.5, 4, 0.25, 1.0, 0.0, 0.0, 3, 0, 2, np.float32(np.log(0.125))),
        (1.0, 0, 1.0, 2.0, 1.5, 0.5, 2**64 - 1, 3, -1, -np.inf),
    ]
    assert [row.num_tokens for row in rows] == [5, 2, 2]
    edits = collect_edits(rows)
    assert edits.edit_of_row.tolist() == [-1, 0, 1]
    assert (edits.allowed.starts.tolist(), edits.allowed.values.tolist()) == ([0, 2, 2], [3, 9])
    assert (edits.banned.starts.tolist(), edits.banned.values.tolist()) == ([0, 0, 1], [8])
    assert (edits.biased.starts.tolist(), edits.biased.values.tolist()) == ([0, 2, 2], [4, 3])
    assert edits.biases.tolist() == [2.0, -1.0]
    assert (edits.seen.starts.tolist(), edits.seen.values.tolist()) == ([0, 2, 2], [1, 2])
    assert edits.counts.tolist() == [0, 0]
    assert collect_edits(rows[:1]) is None


def test_masks_are_gathered_from_the_rows_that_have_one():
    masks = collect_masks([None, np.arange(5, dtype=np.uint32), None, np.arange(4, 9, dtype=np.int32)], VOCAB)
    assert masks.mask_of_row.tolist() == [-1, 0, -1, 1]
    assert masks.words.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert collect_masks([None, None], VOCAB) is None


# SMP-03: what reaches a row has been checked at the edge; a slip there must not index past the logits.
@pytest.mark.parametrize("option", [{"logit_bias": {VOCAB: 1.0}}, {"allowed_token_ids": (VOCAB,)}])
def test_a_row_does_not_take_an_id_beyond_the_vocabulary(option):
    with pytest.raises(AssertionError, match=f"token id {VOCAB} of {VOCAB}"):
        make_row(**option)


@pytest.mark.parametrize("bias", [{"AI": 1}, {-1: 5}, {1: 1e9}, {1: 100.5}, {1: float("nan")}, {1: None}, {True: 1}])
def test_a_malformed_logit_bias_never_reaches_a_row(bias):  # SMP-03
    with pytest.raises(InvalidRequest, match="logit_bias"):
        make_row(logit_bias=bias)


def test_a_row_without_a_seed_is_refused():
    with pytest.raises(AssertionError, match="seed"):
        make_row(seed=None)
