"""Every random number is a pure function of what it is for, and uniform."""

import numpy as np
import pytest

from octavo.sampling.philox import Purpose, philox4x32, uniforms

# Random123, tests/kat_vectors, lines "philox4x32 10": counter, key, output.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> np.ndarray:
    return np.array([[int(word, 16) for word in text.split()]], np.uint64)


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers_of_the_published_generator(counter, key, output):
    assert philox4x32(words(counter), words(key)).tolist() == words(output).tolist()


def test_many_blocks_at_once_equal_each_block_alone():
    counters = np.concatenate([words(counter) for counter, _, _ in KNOWN_ANSWERS])
    keys = np.concatenate([words(key) for _, key, _ in KNOWN_ANSWERS])
    expected = np.concatenate([words(output) for _, _, output in KNOWN_ANSWERS])
    assert np.array_equal(philox4x32(counters, keys), expected)


def number(seed: int = 1, choice: int = 0, position: int = 0, purpose: Purpose = Purpose.SAMPLE) -> float:
    return float(uniforms(np.array([seed], np.uint64), np.array([choice]), np.array([position]), purpose)[0])


def test_a_uniform_is_built_from_the_first_two_words():
    word0, word1, _, _ = philox4x32(np.array([[7, 2, 1, 0]]), np.array([[5, 9]]))[0].tolist()
    expected = ((word0 >> 5) * 2**26 + (word1 >> 6)) / 2**53
    assert number(seed=5 + (9 << 32), choice=2, position=7, purpose=Purpose.ACCEPT) == expected


def test_seed_choice_position_and_purpose_each_give_another_number():
    numbers = {
        number(),
        number(seed=2),
        number(seed=1 + 2**32),
        number(seed=2**64 - 1),
        number(choice=1),
        number(position=1),
        *(number(purpose=purpose) for purpose in Purpose),
    }
    assert len(numbers) == 8  # one of the purposes is the default


def test_numbers_are_uniform_over_positions_and_over_seeds():
    index = np.arange(100_000, dtype=np.uint64)
    zeros = np.zeros(len(index), np.uint64)
    for sample in (uniforms(zeros, zeros, index), uniforms(index, zeros, zeros), uniforms(zeros, index, zeros)):
        assert 0 <= sample.min() and sample.max() < 1
        counts = np.bincount((sample * 100).astype(int), minlength=100)
        chi_square = float(((counts - 1000.0) ** 2 / 1000).sum())
        assert chi_square < 148.2  # 99 degrees of freedom, p = 0.001
