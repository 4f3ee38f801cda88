from __future__ import annotations

import pytest

from octavo.errors import ConfigError, UnsupportedModel
from octavo.kv_cache.cache_spec import (
    MAX_GROUPS,
    KvCacheSpec,
    LayerKv,
    first_visible_block,
    make_cache_spec,
    num_blocks,
    window_blocks,
)


def spec_of(windows: list[int | None], *, block_size: int = 16) -> KvCacheSpec:
    return make_cache_spec([LayerKv(2, 64, window) for window in windows], block_size=block_size, dtype_bytes=2)


def pattern(num_sliding: int, num_full: int, window: int = 512) -> list[int | None]:
    return [window] * num_sliding + [None] * num_full


def test_full_attention_is_one_group_of_all_layers() -> None:
    spec = spec_of([None] * 30)
    assert spec.layers_per_block == 30
    assert [group.window for group in spec.groups] == [None]
    assert spec.places[7] == (0, 7)
    # 2 (key and value) * layers * heads * head size * bytes
    assert spec.bytes_per_token == 2 * 30 * 2 * 64 * 2
    assert spec.bytes_per_block == 16 * spec.bytes_per_token


@pytest.mark.parametrize(
    ("windows", "layers_per_block", "num_groups"),
    [
        (pattern(15, 3), 3, 6),  # Gemma 3 270M
        (pattern(22, 4), 2, 13),  # Gemma 3 1B
        (pattern(12, 12), 12, 2),  # gpt-oss
        (pattern(29, 5), 5, 7),  # Gemma 3 4B: coprime, one padded layer beats 34 groups
        ([8, 8, 16, 16, None, None], 2, 3),
        ([8], 1, 1),
    ],
)
def test_layers_are_grouped_with_the_least_waste(
    windows: list[int | None], layers_per_block: int, num_groups: int
) -> None:
    spec = spec_of(windows)
    assert (spec.layers_per_block, len(spec.groups)) == (layers_per_block, num_groups)


@pytest.mark.parametrize("num_sliding", range(0, 40, 3))
@pytest.mark.parametrize("num_full", [1, 2, 5, 7])
def test_every_layer_has_one_place_and_no_choice_wastes_less(num_sliding: int, num_full: int) -> None:
    windows = pattern(num_sliding, num_full)
    spec = spec_of(windows)
    assert len(set(spec.places)) == len(windows) and len(spec.groups) <= MAX_GROUPS
    for layer, (group, index) in enumerate(spec.places):
        assert spec.groups[group].layers[index] == layer
        assert spec.groups[group].window == windows[layer]
        assert index < spec.layers_per_block
    for n in range(1, len(windows) + 1):
        groups = -(-num_sliding // n) + -(-num_full // n)
        if groups <= MAX_GROUPS:
            assert len(spec.groups) * spec.layers_per_block <= groups * n


def test_layers_of_different_shapes_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"\(1, 64\), \(2, 64\)"):
        make_cache_spec([LayerKv(1, 64), LayerKv(2, 64)], block_size=16, dtype_bytes=2)


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="--block-size is 0"):
        make_cache_spec([LayerKv(1, 64)], block_size=0, dtype_bytes=2)
    with pytest.raises(UnsupportedModel, match="layer 1 has an attention window of 0"):
        make_cache_spec([LayerKv(1, 64), LayerKv(1, 64, 0)], block_size=16, dtype_bytes=2)


def test_memory_becomes_whole_blocks() -> None:
    spec = spec_of([None] * 4)
    assert spec.num_blocks_for(spec.bytes_per_block * 5 - 1) == 4
    assert spec.num_blocks_for(spec.bytes_per_block * 5) == 5


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("window", [1, 2, 7, 8, 9])
def test_block_arithmetic_agrees_with_counting(block_size: int, window: int) -> None:  # ATT-05
    for position in range(4 * block_size + 2 * window):
        keys = range(max(0, position - window + 1), position + 1)
        assert len(keys) == min(window, position + 1)
        assert first_visible_block(position, window, block_size) == keys[0] // block_size
        assert first_visible_block(position, None, block_size) == 0
        assert num_blocks(position, block_size) == len({p // block_size for p in range(position)})
    for chunk in (1, 2, block_size, 3 * block_size + 1):
        most = max(
            (start + chunk - 1) // block_size - first_visible_block(start, window, block_size) + 1
            for start in range(window, window + 2 * block_size)
        )
        assert window_blocks(window, chunk, block_size) == most


def test_a_window_bounds_what_a_request_holds() -> None:
    hybrid = spec_of(pattern(15, 3))
    assert hybrid.max_blocks_per_request(8192, 64) == 8192 // 16 + 5 * window_blocks(512, 64, 16)
    assert hybrid.max_blocks_per_request(32, 64) == 6 * 2, "a short context needs no more than its tokens"
    assert spec_of([512]).max_blocks_per_request(10**6, 64) == window_blocks(512, 64, 16)
