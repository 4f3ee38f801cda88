"""AMX in software: the tile instructions of the tile, int8 and bf16 sets, executed on this process' memory.

The emulated processor has no AMX and traps at each tile instruction; the emulator hands it to a TileUnit,
which holds what a thread holds on a real processor: the tile configuration and the eight tiles.
Arithmetic follows the operation sections of Intel's manual: int8 wraps in int32; bf16 sums the products of
even and of odd k in two float32 chains of fused multiply-adds, adds the two and then the tile, rounds to
nearest and flushes subnormals throughout. The payload of a NaN is not modelled.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

INVALID_OPCODE, GENERAL_PROTECTION = 6, 13
SMALLEST_NORMAL = 2.0**-126
# The largest magnitude that still rounds, with an unbounded exponent, to less than the smallest normal.
TINY = SMALLEST_NORMAL * (1 - 2.0**-25)
# (prefix, opcode) -> signedness of A and of B
INT8_PRODUCTS = {(3, 0x5E): ("i1", "i1"), (2, 0x5E): ("i1", "u1"), (1, 0x5E): ("u1", "i1"), (0, 0x5E): ("u1", "u1")}


class TileFault(Exception):
    def __init__(self, vector: int, detail: str) -> None:
        super().__init__(detail)
        self.vector = vector


@dataclass(frozen=True, slots=True)
class TileInstruction:
    """A three-byte VEX instruction of map 0F38; `prefix` is 0 none, 1 66, 2 F3, 3 F2."""

    length: int
    opcode: int
    prefix: int
    reg: int
    rm: int
    vvvv: int
    address: int | None  # of the memory operand without its index; None for a register operand
    step: int  # the scaled index register: the distance between rows


def decode(code: bytes, rip: int, register: Callable[[int], int]) -> TileInstruction | None:
    """The tile instruction `code` at `rip`, with its address computed; None for anything else."""
    if code[0] != 0xC4 or code[1] & 0x1F != 2 or code[2] & 0x84 or code[3] not in (0x49, 0x4B, 0x5C, 0x5E):
        return None
    extend_reg, extend_index, extend_base = (8 if not code[1] & bit else 0 for bit in (0x80, 0x40, 0x20))
    vvvv, prefix = ~code[2] >> 3 & 15, code[2] & 3
    mode, reg, rm = code[4] >> 6, code[4] >> 3 & 7, code[4] & 7
    if mode == 3:
        return TileInstruction(5, code[3], prefix, reg | extend_reg, rm | extend_base, vvvv, None, 0)
    length, step, base = 5, 0, rm | extend_base
    if rm == 4:
        index = code[5] >> 3 & 7 | extend_index
        step = register(index) << (code[5] >> 6) if index != 4 else 0
        length, base = 6, code[5] & 7 | extend_base
    is_absolute = mode == 0 and rm == 4 and base & 7 == 5
    is_relative = mode == 0 and rm == 5
    num_offset_bytes = (4 if is_absolute or is_relative else 0, 1, 4)[mode]
    address = int.from_bytes(code[length : length + num_offset_bytes], "little", signed=True)
    length += num_offset_bytes
    if is_relative:
        address += rip + length
    elif not is_absolute:
        address += register(base)
    return TileInstruction(length, code[3], prefix, reg | extend_reg, 0, vvvv, address, step)


class TileUnit:
    """`check(address, num_bytes, write)` raises where the memory may not be touched."""

    def __init__(self, check: Callable[[int, int, bool], None]) -> None:
        self._check = check
        self._release()

    def execute(self, code: bytes, rip: int, register: Callable[[int], int]) -> int | None:
        """Execute the tile instruction `code` at `rip`; returns its length, or None when it is none."""
        at = decode(code, rip, register)
        if at is None:
            return None
        memory = at.address is not None
        match at.opcode, at.prefix:
            case 0x49, 0 if memory and at.reg == 0:
                self._load_config(at.address or 0)
            case 0x49, 1 if memory and at.reg == 0:
                self._check(at.address or 0, 64, True)
                ctypes.memmove(at.address or 0, self._config, 64)
            case 0x49, 0 if not memory and at.reg == at.rm == 0:
                self._release()
            case 0x49, 3 if not memory and at.rm == 0:
                self._tiles[self._configured(at.reg)] = 0
            case 0x4B, (1 | 3) if memory:
                self._load(at)
            case 0x4B, 2 if memory:
                self._store(at)
            case 0x5C, 2 if not memory:
                self._multiply(at, self._bf16)
            case 0x5E, _ if not memory:
                self._multiply(at, self._int8)
            case _:
                return None
        return at.length

    def _release(self) -> None:
        self._config = bytes(64)
        self._rows: tuple[int, ...] = (0,) * 8
        self._column_bytes: tuple[int, ...] = (0,) * 8
        self._tiles = np.zeros((8, 16, 64), np.uint8)

    def _load_config(self, address: int) -> None:
        self._check(address, 64, False)
        config = ctypes.string_at(address, 64)
        self._release()
        if config[0] == 0:
            return
        column_bytes = tuple(int(n) for n in np.frombuffer(config, np.uint16, 8, 16))
        rows = tuple(config[48:56])
        problem = (
            config[0] != 1
            or any(config[2:16] + config[32:48] + config[56:])
            or any(r > 16 or c > 64 or (r == 0) != (c == 0) for r, c in zip(rows, column_bytes, strict=True))
        )
        if problem:
            raise TileFault(GENERAL_PROTECTION, f"invalid tile configuration {config.hex()}")
        if config[1]:
            raise TileFault(INVALID_OPCODE, f"start_row {config[1]} is not emulated, only 0")
        self._config, self._rows, self._column_bytes = config, rows, column_bytes

    def _configured(self, tile: int) -> int:
        if tile > 7 or not self._rows[tile]:
            raise TileFault(INVALID_OPCODE, f"tile {tile} is not configured")
        return tile

    def _load(self, at: TileInstruction) -> None:
        tile = self._configured(at.reg)
        rows, width = self._rows[tile], self._column_bytes[tile]
        starts = [(at.address or 0) + row * at.step & (1 << 64) - 1 for row in range(rows)]
        for start in starts:
            self._check(start, width, False)
        data = b"".join(ctypes.string_at(start, width) for start in starts)
        self._tiles[tile] = 0
        self._tiles[tile, :rows, :width] = np.frombuffer(data, np.uint8).reshape(rows, width)

    def _store(self, at: TileInstruction) -> None:
        tile = self._configured(at.reg)
        for row in range(self._rows[tile]):
            start = (at.address or 0) + row * at.step & (1 << 64) - 1
            width = self._column_bytes[tile]
            self._check(start, width, True)
            ctypes.memmove(start, self._tiles[tile, row].ctypes.data, width)

    def _multiply(self, at: TileInstruction, kernel: Callable[..., np.ndarray]) -> None:
        target, a, b = map(self._configured, (at.reg, at.rm, at.vvvv))
        shapes = [(self._rows[tile], self._column_bytes[tile]) for tile in (target, a, b)]
        (m, n), (rows_a, k), (rows_b, columns_b) = shapes
        if len({target, a, b}) < 3 or m != rows_a or n != columns_b or k != 4 * rows_b or (n | k) & 3:
            raise TileFault(INVALID_OPCODE, f"tiles {target}, {a}, {b} of shapes {shapes} cannot be multiplied")
        left, right = self._tiles[a, :m, :k], self._tiles[b, :rows_b, :n]
        result = kernel(at, self._tiles[target, :m, :n].copy(), left.copy(), right.copy())
        self._tiles[target] = 0
        self._tiles[target, :m, :n] = result.view(np.uint8)

    @staticmethod
    def _int8(at: TileInstruction, c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        type_a, type_b = INT8_PRODUCTS[at.prefix, at.opcode]
        columns = b.view(type_b).reshape(len(b), -1, 4).swapaxes(1, 2).reshape(a.shape[1], -1)
        return c.view(np.int32) + a.view(type_a).astype(np.int32) @ columns.astype(np.int32)

    @staticmethod
    def _bf16(at: TileInstruction, c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        # A product of two bf16 is exact in float64, and a float32 plus such a product or another float32,
        # rounded to float64 and then to float32, equals the sum rounded once.
        def flushed(values: np.ndarray, smallest: float = SMALLEST_NORMAL) -> np.ndarray:
            values *= np.abs(values) >= smallest
            return values

        def rounded(exact: np.ndarray) -> np.ndarray:
            return flushed(exact, TINY).astype(np.float32)

        def widened(bits: np.ndarray) -> np.ndarray:
            values = flushed((bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32))
            return values.astype(np.float64).reshape(len(bits), -1, 2)

        with np.errstate(all="ignore"):
            left, right = widened(a), widened(b)  # [m, k / 2, 2], [k / 2, n, 2]
            chains = np.zeros((len(left), right.shape[1], 2), np.float32)
            for k in range(len(right)):
                chains = rounded(left[:, k, None] * right[k] + chains)
            both = rounded(np.add(chains[..., 0], chains[..., 1], dtype=np.float64))
            return rounded(np.add(flushed(c.view(np.float32)), both, dtype=np.float64))
