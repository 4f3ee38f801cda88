"""The number formats of GGUF: their sizes, and the float32 values of their blocks.

A block holds `block_size` consecutive values of a row in `block_bytes` bytes: packed integers and the scales that
they share. Multi-byte fields are little-endian. Values equal those of `gguf.quants.dequantize` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

SUPER = 256  # values in a block of the K types and IQ4_XS
CHUNK_BYTES = 1024 * 1024  # of blocks decoded at once: temporaries stay near the cache

# Four-bit codes that are indices of a table instead of integers.
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
FP4_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)  # twice E2M1


@dataclass(frozen=True, slots=True)
class GgufType:
    """A tensor type of GGUF. `is_block`: values are packed in blocks rather than stored one by one."""

    code: int
    name: str
    block_size: int
    block_bytes: int
    is_block: bool
    is_supported: bool = True


def _type_table() -> dict[int, GgufType]:
    plain = {"F32": (0, 4), "F16": (1, 2), "I8": (24, 1), "I16": (25, 2), "I32": (26, 4), "I64": (27, 8)}
    plain |= {"F64": (28, 8), "BF16": (30, 2)}
    blocks = {"Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24)}
    blocks |= {"Q8_0": (8, 32, 34), "Q2_K": (10, SUPER, 84), "Q3_K": (11, SUPER, 110), "Q4_K": (12, SUPER, 144)}
    blocks |= {"Q5_K": (13, SUPER, 176), "Q6_K": (14, SUPER, 210), "IQ4_NL": (20, 32, 18)}
    blocks |= {"IQ4_XS": (23, SUPER, 136), "MXFP4": (39, 32, 17)}
    refused = {"Q8_1": (9, 32, 36), "Q8_K": (15, SUPER, 292), "IQ2_XXS": (16, SUPER, 66), "IQ2_XS": (17, SUPER, 74)}
    refused |= {"IQ3_XXS": (18, SUPER, 98), "IQ1_S": (19, SUPER, 50), "IQ3_S": (21, SUPER, 110)}
    refused |= {"IQ2_S": (22, SUPER, 82), "IQ1_M": (29, SUPER, 56), "TQ1_0": (34, SUPER, 54)}
    refused |= {"TQ2_0": (35, SUPER, 66), "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18)}
    types = [GgufType(code, name, 1, size, False) for name, (code, size) in plain.items()]
    types += [GgufType(code, name, size, bytes_, True) for name, (code, size, bytes_) in blocks.items()]
    types += [GgufType(code, name, size, bytes_, True, False) for name, (code, size, bytes_) in refused.items()]
    return {type_.code: type_ for type_ in types}


GGUF_TYPES = _type_table()  # by code
TYPES_BY_NAME = {type_.name: type_ for type_ in GGUF_TYPES.values()}


def dequantize(type_name: str, raw: Bytes) -> Floats:
    """The values of rows of blocks.

    raw: [..., bytes of a row] uint8, a whole number of blocks a row. Returns [..., values of a row] float32.
    """
    type_ = TYPES_BY_NAME[type_name]
    num_blocks = raw.shape[-1] // type_.block_bytes
    assert raw.shape[-1] == num_blocks * type_.block_bytes, (
        f"rows of {raw.shape[-1]} bytes are not whole {type_name} blocks"
    )
    rows = raw.reshape(-1, raw.shape[-1])
    values = np.empty((len(rows), num_blocks * type_.block_size), np.float32)
    step = max(1, CHUNK_BYTES // max(1, raw.shape[-1]))
    decode = _DECODERS[type_name]
    for start in range(0, len(rows), step):
        blocks = np.ascontiguousarray(rows[start : start + step]).reshape(-1, type_.block_bytes)
        values[start : start + step] = decode(blocks).reshape(-1, values.shape[1])
    return values.reshape(*raw.shape[:-1], values.shape[1])


# n blocks in every shape below; the comments give the bytes of a block in order.


def _fields(packed: Bytes, bits: int) -> Bytes:
    """[..., k] bytes -> [..., 8 / bits, k]: the fields of each byte, lowest first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed[..., None, :] >> shifts) & np.uint8(2**bits - 1)


def _nibbles(packed: Bytes) -> Bytes:
    """[n, 16] bytes -> [n, 32]: the low nibbles, then the high ones."""
    return _fields(packed, 4).reshape(len(packed), 32)


def _signed(codes: Bytes, bias: int) -> Floats:
    """Unsigned integers minus `bias`, as float32."""
    return codes.astype(np.float32) - np.float32(bias)


def _half(blocks: Bytes, at: int) -> Floats:
    """[n, 1] float32: the float16 at a byte offset."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _fifth_bits(blocks: Bytes, at: int) -> Bytes:
    """[n, 32]: bit i of the 32-bit word at a byte offset is value i's fifth, worth 16."""
    return np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(blocks: Bytes) -> Floats:
    """scale f16 | 16 bytes of nibbles"""
    return _half(blocks, 0) * _signed(_nibbles(blocks[:, 2:]), 8)


def _q4_1(blocks: Bytes) -> Floats:
    """scale f16 | min f16 | 16 bytes of nibbles"""
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    """scale f16 | fifth bits u32 | 16 bytes of nibbles"""
    return _half(blocks, 0) * _signed(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks, 2), 16)


def _q5_1(blocks: Bytes) -> Floats:
    """scale f16 | min f16 | fifth bits u32 | 16 bytes of nibbles"""
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    """scale f16 | 32 int8"""
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def _iq4_nl(blocks: Bytes) -> Floats:
    """scale f16 | 16 bytes of table indices"""
    return _half(blocks, 0) * IQ4_VALUES[_nibbles(blocks[:, 2:])]


def _mxfp4(blocks: Bytes) -> Floats:
    """exponent E8M0 | 16 bytes of E2M1 codes. The table holds doubled values, so the scale is 2^(e - 128)."""
    exponent = blocks[:, :1].astype(np.uint32)
    bits = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - 1) << np.uint32(23))
    return bits.view(np.float32) * FP4_VALUES[_nibbles(blocks[:, 1:])]


def _q2_k(blocks: Bytes) -> Floats:
    """16 x (scale, min) nibbles | 64 bytes of 2-bit codes | scale f16 | min f16"""
    steps = _fields(blocks[:, :16], 4).astype(np.float32)  # [n, 2, 16]
    scales, mins = _half(blocks, 80) * steps[:, 0], _half(blocks, 82) * steps[:, 1]
    codes = _fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    return scales[..., None] * codes.astype(np.float32) - mins[..., None]


def _q3_k(blocks: Bytes) -> Floats:
    """32 bytes of third bits | 64 bytes of 2-bit codes | 12 bytes of 16 6-bit scales | scale f16"""
    low = _fields(blocks[:, 96:104], 4).reshape(-1, 16)
    high = _fields(blocks[:, 104:108], 2).reshape(-1, 16)
    scales = _half(blocks, 108) * _signed(low | (high << np.uint8(4)), 32)
    codes = _fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, SUPER)
    codes |= _fields(blocks[:, :32], 1).reshape(-1, SUPER) << np.uint8(2)
    return scales[..., None] * _signed(codes, 4).reshape(-1, 16, 16)


def _scales_and_mins(packed: Bytes) -> tuple[Floats, Floats]:
    """[n, 12] bytes -> two [n, 8] float32 of 6-bit integers.

    Bytes 0-3 hold scales 0-3 and, in their two top bits, those of scales 4-7; bytes 4-7 do so for the mins;
    bytes 8-11 hold the four low bits of scales 4-7 and, above, of mins 4-7.
    """
    scales, mins, both = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    high = np.uint8(0x30)
    late_scales = (both & np.uint8(15)) | ((scales >> np.uint8(2)) & high)
    late_mins = (both >> np.uint8(4)) | ((mins >> np.uint8(2)) & high)
    six = np.uint8(63)
    return (
        np.concatenate([scales & six, late_scales], axis=1).astype(np.float32),
        np.concatenate([mins & six, late_mins], axis=1).astype(np.float32),
    )


def _q4_k(blocks: Bytes) -> Floats:
    """scale f16 | min f16 | 12 bytes of 8 x (scale, min) | 128 bytes of nibbles"""
    return _k_with_mins(blocks, _fields(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    """scale f16 | min f16 | 12 bytes of 8 x (scale, min) | 32 bytes of fifth bits | 128 bytes of nibbles"""
    codes = _fields(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _k_with_mins(blocks, codes | (_fields(blocks[:, 16:48], 1) << np.uint8(4)))


def _k_with_mins(blocks: Bytes, codes: Bytes) -> Floats:
    steps, min_steps = _scales_and_mins(blocks[:, 4:16])
    scales, mins = _half(blocks, 0) * steps, _half(blocks, 2) * min_steps
    return scales[..., None] * codes.astype(np.float32) - mins[..., None]


def _q6_k(blocks: Bytes) -> Floats:
    """128 bytes of nibbles | 64 bytes of 2-bit tops | 16 int8 scales | scale f16"""
    codes = _fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, SUPER)
    codes |= _fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, SUPER) << np.uint8(4)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return scales[..., None] * _signed(codes, 32).reshape(-1, 16, 16)


def _iq4_xs(blocks: Bytes) -> Floats:
    """scale f16 | 8 x 2 top bits u16 | 4 bytes of 8 low nibbles | 128 bytes of table indices"""
    top = np.ascontiguousarray(_fields(blocks[:, 2:4], 2).swapaxes(1, 2)).reshape(-1, 8)
    low = np.ascontiguousarray(_fields(blocks[:, 4:8], 4).swapaxes(1, 2)).reshape(-1, 8)
    scales = _half(blocks, 0) * _signed(low | (top << np.uint8(4)), 32)
    return scales[..., None] * IQ4_VALUES[_fields(blocks[:, 8:].reshape(-1, 8, 16), 4).reshape(-1, 8, 32)]


_DECODERS: dict[str, Callable[[Bytes], Floats]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
