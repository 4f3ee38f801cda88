"""Reader of safetensors files, single or sharded. The header is checked in full before anything is mapped.

The rules are those of the reference implementation: known types, sizes that follow from shapes, and tensors that
cover the data without gap or overlap. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError
from octavo.loader.checkpoint import Checkpoint
from octavo.loader.json_files import read_json, reject_duplicates

MAX_HEADER_BYTES = 100_000_000  # as in the reference implementation
MAX_INDEX_BYTES = 100_000_000
MAX_DIMENSIONS = 32
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES: dict[str, Any] = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "|b1",
}  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class SafetensorsTensor:
    """A tensor in a mapped file."""

    path: Path
    name: str
    type_name: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]  # its bytes, mapped

    def numpy(self) -> np.ndarray:
        dtype = np.dtype(DTYPES[self.type_name])
        if self.type_name == "BOOL":
            return self.data.astype(np.bool_).reshape(self.shape)
        data = self.data if self.data.ctypes.data % dtype.itemsize == 0 else self.data.copy()
        values: np.ndarray = data.view(dtype).reshape(self.shape)
        return values

    @property
    def identity(self) -> str:
        return self.name

    def stored_blocks(self) -> None:
        return None


def open_safetensors(folder: Path, *, digest_cache: Path | None = None) -> Checkpoint:
    """The model in `folder`: config.json beside model.safetensors, shards with their index, or one other file."""
    config = read_json(folder / "config.json", error=CheckpointError)
    generation_config = read_json(folder / "generation_config.json", error=CheckpointError, default={})
    files, listed = safetensors_files(folder)
    tensors: dict[str, SafetensorsTensor] = {}
    for file in files:
        for name, tensor in read_safetensors(file).items():
            if name in tensors:
                raise CheckpointError(f"{file} holds {name}, which {tensors[name].path.name} holds too.")
            tensors[name] = tensor
    absent = [name for name, file in listed.items() if name not in tensors or tensors[name].path.name != file]
    if absent:
        raise CheckpointError(
            f"{folder / INDEX_NAME} lists {len(absent)} tensors that their files do not hold: {_first(absent)}."
        )
    return Checkpoint("safetensors", config, generation_config, tensors, files, digest_cache)


def safetensors_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    """The files of the model in `folder`, and the index's map from tensor to file name ({} without an index).

    Order of choice as in transformers: model.safetensors, then the index, then the only file there is.
    """
    if (folder / SINGLE_NAME).is_file():
        return (folder / SINGLE_NAME,), {}
    if (folder / INDEX_NAME).is_file():
        return _indexed_files(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return (found[0],), {}
    if not found:
        raise CheckpointError(f"{folder} holds no *.safetensors file.")
    names = [file.name for file in found]
    raise CheckpointError(f"{folder} holds {len(found)} safetensors files and no {INDEX_NAME}: {_first(names)}.")


def _indexed_files(folder: Path) -> tuple[tuple[Path, ...], dict[str, str]]:
    index = folder / INDEX_NAME
    listed = read_json(index, error=CheckpointError, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index} has no 'weight_map' from tensor names to files.")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} puts {name} in {file!r}, which is not a safetensors file beside it.")
    files = sorted(set(listed.values()))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        lost = [name for name, file in listed.items() if file in set(missing)]
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of {len(files)} weight files: {_first(missing)}; "
            f"with them {len(lost)} tensors: {_first(lost)}. Download them again."
        )
    return tuple(folder / file for file in files), listed


def read_safetensors(path: Path) -> dict[str, SafetensorsTensor]:
    """Map one file. Raises CheckpointError on anything but a sound header over exactly this file's bytes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 10:
                _fail(path, f"it has {size} bytes, less than the smallest header")
            file.seek(0)
            header_bytes = int.from_bytes(file.read(8), "little")
            if header_bytes > min(MAX_HEADER_BYTES, size - 8):
                _fail(
                    path,
                    f"its header claims {header_bytes} bytes; {size - 8} follow, and {MAX_HEADER_BYTES} is the limit",
                )
            entries = _parse_header(path, file.read(header_bytes))
            data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[8 + header_bytes :]
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    tensors: dict[str, SafetensorsTensor] = {}
    position = 0
    for begin, end, name, type_name, shape in sorted(entries):
        if begin != position:
            _fail(path, f"{name} begins at byte {begin} of the data instead of {position}")
        if end > len(data):
            _fail(path, f"{name} ends at byte {end} of {len(data)}: the file is cut off, download it again")
        tensors[name] = SafetensorsTensor(path, name, type_name, shape, data[begin:end])
        position = end
    if position != len(data):
        _fail(path, f"{len(data) - position} bytes follow the last tensor")
    return tensors


Entry = tuple[int, int, str, str, tuple[int, ...]]  # begin, end, name, type, shape


def _parse_header(path: Path, header: bytes) -> list[Entry]:
    if not header.startswith(b"{"):
        _fail(path, "its header does not begin with '{'")
    try:
        parsed = json.loads(header.decode(), object_pairs_hook=reject_duplicates)
    except (ValueError, RecursionError) as error:
        _fail(path, f"its header is not JSON ({error})")
    metadata = parsed.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _fail(path, "__metadata__ is not a map of strings")
    return [_entry(path, name, info) for name, info in parsed.items()]


def _entry(path: Path, name: str, info: Any) -> Entry:
    if not isinstance(info, dict) or info.keys() != {"dtype", "shape", "data_offsets"}:
        _fail(path, f"the entry of {name} has not just dtype, shape and data_offsets")
    type_name, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
    if not isinstance(type_name, str) or type_name not in DTYPES:
        _fail(path, f"{name} has type {type_name!r}; readable are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS or not _are_sizes(offsets) or len(offsets) != 2:
        _fail(path, f"the shape or offsets of {name} are not lists of sizes")
    num_bytes = math.prod(shape) * np.dtype(DTYPES[type_name]).itemsize
    if offsets[1] - offsets[0] != num_bytes:
        _fail(path, f"{name} {shape} takes {num_bytes} bytes as {type_name}; its offsets are {offsets}")
    return offsets[0], offsets[1], name, type_name, tuple(shape)


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _fail(path: Path, problem: str) -> NoReturn:
    raise CheckpointError(f"{path} is not a sound safetensors file: {problem}.")


def _first(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
