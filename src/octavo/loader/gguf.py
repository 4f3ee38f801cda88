"""Reader of GGUF files, version 2 and 3, whole or split: metadata parsed, tensors mapped.

Every count, length, offset and product of dimensions is checked against the file's size before it is used, so a
damaged or hostile file ends in a CheckpointError at once. Nothing here knows an architecture: see `gguf_names` and
`gguf_config`. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.loader.split_names import split_files
from octavo.quantization.gguf_blocks import GGUF_TYPES, TYPES_BY_NAME, GgufType, dequantize

MAX_HEADER_BYTES = 256 * 1024 * 1024  # metadata and tensor table
MAX_KEYS = 65536
MAX_TENSORS = 131072
MAX_NAME_BYTES = 65535
MAX_ARRAY_DEPTH = 4
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 65536
MIN_KEY_BYTES = 13  # name length, type and one byte of value
MIN_TENSOR_BYTES = 32  # name length, one dimension, type and offset

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}

PLAIN_DTYPES: dict[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16,
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """A tensor in a mapped file. Dimensions in NumPy's order: the last one is contiguous.

    Two conventions of GGUF are undone on the way out. `interleaved_heads`: the rows of each of that many heads
    alternate between the head's two halves; they come out as halves again. `shift` is added to the values.
    """

    path: Path
    name: str
    type: GgufType
    shape: tuple[int, ...]
    blocks: npt.NDArray[np.uint8]  # [rows, bytes of a row] as in the file
    interleaved_heads: int | None = None
    shift: float = 0.0

    @property
    def type_name(self) -> str:
        return self.type.name

    @property
    def raw(self) -> npt.NDArray[np.uint8]:
        """[rows, bytes of a row], the stored blocks with the rows in the order of `shape`. Knows no `shift`."""
        if self.interleaved_heads is None:
            return self.blocks
        return self.blocks[np.arange(len(self.blocks)).reshape(self.interleaved_heads, -1, 2).swapaxes(1, 2).ravel()]

    @property
    def identity(self) -> str:
        return f"{self.name} heads={self.interleaved_heads} shift={self.shift}"

    def stored_blocks(self) -> npt.NDArray[np.uint8] | None:
        return self.raw if self.type.is_block and self.shift == 0 else None

    def numpy(self) -> np.ndarray:
        if self.type.is_block:
            values = dequantize(self.type.name, self.raw)
        else:
            dtype = np.dtype(PLAIN_DTYPES[self.type.name])
            raw = self.raw
            values = (raw if raw.ctypes.data % dtype.itemsize == 0 else raw.copy()).view(dtype)
        values = values.reshape(self.shape)
        return values if self.shift == 0 else np.add(values, self.shift, dtype=np.float32)

    def with_interleaved_heads(self, num_heads: int) -> GgufTensor:
        """The same tensor, whose rows are known to be interleaved within each of `num_heads` heads."""
        if self.shape[0] % (2 * num_heads) or (len(self.shape) == 1 and self.type.is_block):
            raise CheckpointError(
                f"{self.path}: {self.name} {list(self.shape)} of type {self.type.name} cannot be cut into "
                f"{num_heads} heads of an even size."
            )
        return dataclasses.replace(self, blocks=self.blocks.reshape(self.shape[0], -1), interleaved_heads=num_heads)

    def with_shift(self, shift: float) -> GgufTensor:
        """The same tensor with `shift` added to its values, which become float32."""
        return dataclasses.replace(self, shift=shift, type=self.type if self.type.is_block else TYPES_BY_NAME["F32"])


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """A GGUF model: `metadata` of its first file, tensors of all its files by their GGUF name.

    Metadata values are int, float, bool, str; arrays are NumPy arrays of the declared type, or lists of str or of
    arrays. A string in an array that is not UTF-8 keeps its bytes through 'surrogateescape'.
    """

    path: Path
    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Map the file and, if it is part of a split model, its siblings. Any part may be given."""
        files = split_files(path)
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            if len(files) == 1:
                raise CheckpointError(f"there is no file {path}.")
            raise CheckpointError(f"{path} is one of {len(files)} files; missing beside it: {', '.join(missing)}.")
        metadata: dict[str, Any] = {}
        tensors: dict[str, GgufTensor] = {}
        for index, file in enumerate(files):
            part_metadata, part_tensors = _Reader(file).read()
            metadata = metadata or part_metadata
            found = part_metadata.get("split.no", 0), part_metadata.get("split.count", 1)
            if found != (index, len(files)) and (found != (0, 0) or len(files) > 1):
                raise CheckpointError(
                    f"{file} says it is part {found[0]} (from 0) of {found[1]}; its name makes it part {index} of "
                    f"{len(files)}. Split files must keep the names that llama-gguf-split gave them."
                )
            for name in part_tensors.keys() & tensors.keys():
                raise CheckpointError(f"{file} holds {name}, which {tensors[name].path.name} holds too.")
            tensors |= part_tensors
        expected = metadata.get("split.tensors.count", len(tensors))
        if expected != len(tensors):
            raise CheckpointError(f"{path}: the {len(files)} files hold {len(tensors)} tensors of {expected}.")
        return cls(files[0], files, metadata, tensors)


class _Reader:
    """Reads one file front to back; `at` never passes `end`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.at = 0
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size < 24:
                    raise CheckpointError(f"{path} has {self.size} bytes; a GGUF header has at least 24.")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
        self.end = min(self.size, MAX_HEADER_BYTES)

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        self.check_magic()
        num_tensors, num_keys = self.u64(), self.u64()
        self.check_count("tensors", num_tensors, MAX_TENSORS, MIN_TENSOR_BYTES)
        self.check_count("metadata keys", num_keys, MAX_KEYS, MIN_KEY_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.name("metadata key")
            if key in metadata:
                self.fail(f"metadata key {key!r} occurs twice")
            metadata[key] = self.value(self.u32(), key)
        table = [self.tensor_entry() for _ in range(num_tensors)]
        return metadata, self.tensors(table, self.alignment(metadata))

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is not a sound GGUF file: {problem} (at byte {self.at} of {self.size}).")

    def check_magic(self) -> None:
        magic, version = bytes(self.map[:4]), U32.unpack_from(self.map, 4)[0]
        if magic != b"GGUF":
            self.fail(f"it begins with {magic!r} instead of b'GGUF'")
        if version & 0xFFFF == 0:
            self.fail("it is big-endian; convert it with gguf-py's gguf_convert_endian")
        if version not in (2, 3):
            self.fail(f"its version is {version}; versions 2 and 3 are read")
        self.at = 8

    def check_count(self, what: str, count: int, limit: int, min_bytes: int) -> None:
        if count > limit or count * min_bytes > self.end - self.at:
            self.fail(f"it declares {count} {what}; {self.end - self.at} bytes follow, and the limit is {limit}")

    def advance(self, num_bytes: int) -> int:
        """Pass over bytes that must exist; returns where they start."""
        start = self.at
        if num_bytes > self.end - start:
            reason = "the file ends" if self.end == self.size else f"the header passes {MAX_HEADER_BYTES} bytes"
            self.fail(f"{num_bytes} bytes are needed where {reason} after {self.end - start}")
        self.at = start + num_bytes
        return start

    def u32(self) -> int:
        return int(U32.unpack_from(self.map, self.advance(4))[0])

    def u64(self) -> int:
        return int(U64.unpack_from(self.map, self.advance(8))[0])

    def name(self, what: str) -> str:
        length = self.u64()
        if length > MAX_NAME_BYTES:
            self.fail(f"a {what} is {length} bytes long; the limit is {MAX_NAME_BYTES}")
        return self.text(length, what)

    def text(self, length: int, what: str) -> str:
        start = self.advance(length)
        try:
            return self.map[start : self.at].decode()
        except UnicodeDecodeError:
            self.fail(f"{what} is not UTF-8")

    def value(self, code: int, key: str, depth: int = 0) -> Any:
        if code == STRING:
            return self.text(self.u64(), key)
        if code == ARRAY:
            return self.array(key, depth + 1)
        return self.numbers(code, 1, key)[0].item()

    def array(self, key: str, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"{key} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        code, count = self.u32(), self.u64()
        if code == STRING:
            self.check_count(f"strings in {key}", count, self.end, 8)
            return self.strings(count)
        if code == ARRAY:
            self.check_count(f"arrays in {key}", count, self.end, 12)
            return [self.array(key, depth + 1) for _ in range(count)]
        return self.numbers(code, count, key)

    def numbers(self, code: int, count: int, key: str) -> npt.NDArray[Any]:
        if code not in SCALARS:
            self.fail(f"{key} has the unknown value type {code}")
        dtype = np.dtype(SCALARS[code])
        start = self.advance(count * dtype.itemsize)
        if dtype == np.bool_:
            return np.frombuffer(self.map, np.uint8, count, start).astype(np.bool_)
        return np.frombuffer(self.map, dtype, count, start).copy()

    def strings(self, count: int) -> list[str]:
        data, length_at, end, at = self.map, U64.unpack_from, self.end, self.at
        result: list[str] = []
        for _ in range(count):
            start = at + 8
            at = start + length_at(data, at)[0] if start <= end else end + 1
            if at > end:
                self.fail(f"string {len(result)} of {count} lies beyond the end")
            result.append(data[start:at].decode("utf-8", "surrogateescape"))
        self.at = at
        return result

    def tensor_entry(self) -> tuple[str, GgufType, tuple[int, ...], int]:
        name = self.name("tensor name")
        num_dims = self.u32()
        if not 1 <= num_dims <= MAX_DIMENSIONS:
            self.fail(f"tensor {name} has {num_dims} dimensions; 1 to {MAX_DIMENSIONS} are possible")
        shape = tuple(self.u64() for _ in range(num_dims))[::-1]
        code, offset = self.u32(), self.u64()
        type_ = GGUF_TYPES.get(code)
        if type_ is None or not type_.is_supported:
            label = f"type {code}" if type_ is None else type_.name
            readable = ", ".join(t.name for t in GGUF_TYPES.values() if t.is_supported)
            raise UnsupportedModel(
                f"{self.path}: tensor {name} is stored as {label}, which Octavo does not read. Readable: {readable}."
            )
        return name, type_, shape, offset

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        is_power = isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0
        if not is_power or not 8 <= alignment <= MAX_ALIGNMENT:
            self.fail(f"general.alignment is {alignment!r}; it must be a power of two from 8 to {MAX_ALIGNMENT}")
        return int(alignment)

    def tensors(self, table: list[tuple[str, GgufType, tuple[int, ...], int]], alignment: int) -> dict[str, GgufTensor]:
        data_start = -(-self.at // alignment) * alignment
        data = np.frombuffer(self.map, np.uint8)
        tensors: dict[str, GgufTensor] = {}
        previous_name, previous_end = "", 0
        for name, type_, shape, offset in sorted(table, key=lambda entry: entry[3]):
            if name in tensors:
                self.fail(f"tensor {name} occurs twice")
            if min(shape) == 0 or shape[-1] % type_.block_size:
                self.fail(f"tensor {name} has shape {list(shape)}; {type_.name} packs {type_.block_size} values")
            num_rows, row_bytes = math.prod(shape[:-1]), shape[-1] // type_.block_size * type_.block_bytes
            size = num_rows * row_bytes
            if offset % alignment or data_start + offset + size > self.size:
                self.fail(
                    f"tensor {name} {list(shape)} of {size} bytes lies at offset {offset} of {self.size - data_start} "
                    f"bytes of data, alignment {alignment}: the file is cut off or damaged"
                )
            if offset < previous_end:
                self.fail(f"tensors {previous_name} and {name} overlap")
            previous_name, previous_end = name, offset + size
            blocks = data[data_start + offset : data_start + previous_end].reshape(num_rows, row_bytes)
            tensors[name] = GgufTensor(self.path, name, type_, shape, blocks)
        return {name: tensors[name] for name, *_ in table}
