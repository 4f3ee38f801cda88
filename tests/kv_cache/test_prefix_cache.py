from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from octavo.kv_cache.prefix_cache import (
    KEY_BYTES,
    PrefixHit,
    adapter_identity,
    block_key,
    cache_key,
    match_prefix,
    model_identity,
    root_key,
)

IDENTITY = model_identity(weights=b"weights", kv_dtype="bfloat16", rope="default/10000")


def test_a_key_is_cryptographic_and_wide() -> None:  # PFX-01
    assert KEY_BYTES * 8 >= 128
    assert len(block_key(root_key(IDENTITY, rope_variant=0, salt=""), [1, 2])) == KEY_BYTES


def test_keys_are_the_same_in_every_process() -> None:
    key = block_key(root_key(IDENTITY, rope_variant=0, salt=""), (1, 2, 3))
    assert key.hex() == "f847bd4a33be2e2289984139a1e1780dc002e5994fa8e71568065b464ebf8e79"
    assert key == block_key(root_key(IDENTITY, rope_variant=0, salt=""), [1, 2, 3])


def test_any_changed_input_changes_the_key() -> None:  # PFX-03, PFX-04, PFX-14
    adapter = adapter_identity(b"content", 1.0)
    roots = [
        root_key(IDENTITY, rope_variant=0, salt=""),
        root_key(model_identity(weights=b"others", kv_dtype="bfloat16", rope="default/10000"), rope_variant=0, salt=""),
        root_key(model_identity(weights=b"weights", kv_dtype="int8", rope="default/10000"), rope_variant=0, salt=""),
        root_key(model_identity(weights=b"weights", kv_dtype="bfloat16", rope="yarn/4"), rope_variant=0, salt=""),
        root_key(IDENTITY, rope_variant=1, salt=""),
        root_key(IDENTITY, rope_variant=0, salt="tenant"),
        root_key(IDENTITY, rope_variant=0, salt="", extra=adapter),
        root_key(IDENTITY, rope_variant=0, salt="", extra=adapter_identity(b"content", 0.5)),
        root_key(IDENTITY, rope_variant=0, salt="", extra=adapter_identity(b"reloaded", 1.0)),
        root_key(IDENTITY, rope_variant=0, salt="", extra=cache_key("image", b"pixels", 30, 150)),
        root_key(IDENTITY, rope_variant=0, salt="", extra=cache_key("image", b"pixels", 150, 30)),
    ]
    assert len(set(roots)) == len(roots)
    keys = [block_key(root, tokens) for root in roots for tokens in ([1, 2], [2, 1], [1, 2, 0], [1])]
    assert len(set(keys)) == len(keys)


def test_fields_are_typed_and_do_not_run_into_each_other() -> None:
    alike = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), (b"ab", b"c"), (1, 2), ([1, 2],), ([1], [2]), (1.0, 2.0)]
    keys = {cache_key("domain", *fields) for fields in alike}
    assert len(keys) == len(alike)
    assert cache_key("a", "b") != cache_key("b", "a") != cache_key("ab")


def test_large_ids_and_salts_are_taken_whole() -> None:
    assert block_key(b"", [2**31]) != block_key(b"", [0])
    assert root_key(IDENTITY, rope_variant=0, salt="é" * 5000) != root_key(IDENTITY, rope_variant=0, salt="é" * 4999)


# -- matching ----------------------------------------------------------------------------------------------


def match(present: Sequence[Sequence[int]], windows: Sequence[int | None], size: int, num_keys: int) -> PrefixHit:
    """`present[g]` are the indices of the blocks that group g still holds."""

    def lookup(group: int, key: bytes) -> int | None:
        index = int.from_bytes(key, "little")
        return 100 * group + index if index in present[group] else None

    return match_prefix([i.to_bytes(32, "little") for i in range(num_keys)], windows, size, lookup)


def test_a_hit_ends_at_the_first_missing_block() -> None:  # PFX-09
    assert match([[0, 2, 3]], [None], 16, 4) == PrefixHit(1, ([0],))
    assert match([[1, 2, 3]], [None], 16, 4) == PrefixHit(0, ([],))


def test_a_window_needs_only_the_blocks_that_the_next_query_sees() -> None:
    hit = match([[0, 1, 2, 3], [2, 3]], [None, 5], 4, 4)
    assert hit == PrefixHit(4, ([0, 1, 2, 3], [-1, -1, -1, 103]))
    hit = match([[0, 1, 2, 3], [2, 3]], [None, 6], 4, 4)
    assert hit == PrefixHit(4, ([0, 1, 2, 3], [-1, -1, 102, 103]))


def test_a_window_of_one_needs_nothing() -> None:
    assert match([[0, 1], []], [None, 1], 4, 2) == PrefixHit(2, ([0, 1], [-1, -1]))


def test_groups_are_asked_until_they_agree() -> None:
    # Group 1 allows 5 or 2 blocks, group 2 allows 4 or 2: the first answer of neither holds for the other.
    hit = match([range(6), [1, 4], [1, 3]], [None, 4, 4], 4, 6)
    assert hit.num_blocks == 2


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("windows", [[None], [3], [None, 1], [None, 5], [2, 9], [None, 4, 7]])
def test_matching_agrees_with_trying_every_length(size: int, windows: list[int | None]) -> None:
    rng = random.Random(0)
    for _ in range(200):
        num_keys = rng.randint(0, 9)
        present = [{i for i in range(num_keys) if rng.random() < 0.7} for _ in windows]

        def works(length: int, present: list[set[int]] = present) -> bool:
            return all(
                position // size in present[group]
                for group, window in enumerate(windows)
                for position in range(length * size)
                if window is None or position > length * size - window
            )

        hit = match([list(p) for p in present], windows, size, num_keys)
        assert hit.num_blocks == max(length for length in range(num_keys + 1) if works(length))
        for group, table in enumerate(hit.block_ids):
            assert len(table) == hit.num_blocks
            seen = {
                p // size for p in range(hit.num_blocks * size) if p > hit.num_blocks * size - (windows[group] or 99)
            }
            assert {i for i, block_id in enumerate(table) if block_id >= 0} == seen


def test_groups_differ_in_their_blocks() -> None:
    hit = match([[0, 1], [0, 1]], [None, None], 4, 2)
    assert len(set(itertools.chain(*hit.block_ids))) == 4
