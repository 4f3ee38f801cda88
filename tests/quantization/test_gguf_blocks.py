import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from octavo.quantization.gguf_blocks import GGUF_TYPES, TYPES_BY_NAME, dequantize

BLOCK_TYPES = [t.name for t in GGUF_TYPES.values() if t.is_block and t.is_supported]
HALF_FIELDS = {  # byte offsets of the float16 scales in a block
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82], "Q3_K": [108],
    "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208], "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}  # fmt: skip


def random_blocks(type_name: str, num_blocks: int, seed: int = 0) -> np.ndarray:
    """Every byte random, scales finite: positive, negative and subnormal."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, TYPES_BY_NAME[type_name].block_bytes), dtype=np.uint8)
    for at in HALF_FIELDS[type_name]:
        bits = rng.integers(0, 0x7C00, num_blocks, dtype=np.uint16) | (rng.integers(0, 2, num_blocks) << 15).astype(
            np.uint16
        )
        blocks[:, at : at + 2] = bits.view(np.uint8).reshape(-1, 2)
    if type_name == "MXFP4":
        blocks[:254, 0] = np.arange(254)[:num_blocks]  # every finite exponent
        blocks[blocks[:, 0] > 252, 0] = 100
    return blocks


def test_sizes_of_all_types_equal_those_of_the_gguf_package():
    for type_, (block_size, block_bytes) in GGML_QUANT_SIZES.items():
        if type_.name == "Q8_1":  # the package counts two float32; the format has had two float16 since GGUF v2
            continue
        ours = GGUF_TYPES[type_.value]
        assert (ours.name, ours.block_size, ours.block_bytes) == (type_.name, block_size, block_bytes)


@pytest.mark.parametrize("type_name", BLOCK_TYPES)
def test_random_blocks_dequantize_bit_for_bit_as_in_the_gguf_package(type_name):
    blocks = random_blocks(type_name, 3 * 512)
    raw = blocks.reshape(512, -1)
    expected = gguf.quants.dequantize(raw, GGMLQuantizationType[type_name])
    actual = dequantize(type_name, raw)
    assert actual.shape == expected.shape == (512, 3 * TYPES_BY_NAME[type_name].block_size)
    assert actual.dtype == np.float32
    assert np.isfinite(expected).all()
    assert actual.view(np.uint32).tolist() == expected.astype(np.float32).view(np.uint32).tolist()


def test_rows_beyond_one_chunk_and_leading_dimensions_keep_their_place(monkeypatch):
    monkeypatch.setattr("octavo.quantization.gguf_blocks.CHUNK_BYTES", 100)
    raw = random_blocks("Q5_0", 60).reshape(2, 15, -1)
    rows = [dequantize("Q5_0", row) for row in raw.reshape(30, -1)]
    assert np.array_equal(dequantize("Q5_0", raw), np.stack(rows).reshape(2, 15, 64))


def test_a_row_that_is_not_whole_blocks_is_refused():
    with pytest.raises(AssertionError, match="35 bytes are not whole Q8_0 blocks"):
        dequantize("Q8_0", np.zeros((2, 35), np.uint8))
