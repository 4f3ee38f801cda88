"""Parameters in the packed formats of csrc/ops/linear.h.

A `WeightStore` takes a model's parameters one by one, in the order in which the decoder loads them, and packs them
with all threads; with a cache it finds them packed, and reads nothing of the checkpoint. What a format keeps of a
block type is defined in csrc/weights/pack.h: with quantization 'auto' every one is kept bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.backends.native.pack_cache import Bytes, Entry, PackCache, PackFile, PackMemory, SegmentEntry
from octavo.backends.ops import DType, HostTensor, WeightKind
from octavo.errors import CheckpointError

log = logging.getLogger(__name__)

Quantization = Literal["auto", "none", "int8", "int4"]
Source = HostTensor | np.ndarray
Vector = NDArray[np.float32]

FORMATS: dict[DType, str] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
PLAIN_TYPES = {np.dtype(np.float32): "F32", np.dtype(ml_dtypes.bfloat16): "BF16", np.dtype(np.float16): "F16"}
LARGEST_F16 = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class PackedSegment:
    """Consecutive rows of a parameter in one format."""

    matrix: _native.PackedMatrix

    @property
    def format(self) -> str:
        return self.matrix.format

    @property
    def n(self) -> int:
        return self.matrix.n

    @property
    def k(self) -> int:
        return self.matrix.k

    @property
    def padded_k(self) -> int:
        return self.matrix.padded_k

    @property
    def group(self) -> int:
        """Values of a row that share a scale; 0 for float formats."""
        return self.matrix.group

    @property
    def has_min(self) -> bool:
        return self.matrix.has_min

    @property
    def gated(self) -> bool:
        return self.matrix.gated

    @property
    def is_integer(self) -> bool:
        return self.matrix.group != 0

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    @property
    def description(self) -> str:
        """'bf16', 'int8 per row', 'int4 g32 + min' ..."""
        if not self.is_integer:
            return self.format
        group = "per row" if self.group == self.padded_k else f"g{self.group}"
        return f"{self.format} {group}{' + min' if self.has_min else ''}"


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A parameter [n, k]: the rows of its segments, one after the other.

    `gated`: one segment, whose panels of gate (the first half of the rows) and of what it gates alternate.
    """

    segments: tuple[PackedSegment, ...]

    @property
    def n(self) -> int:
        return sum(segment.n for segment in self.segments)

    @property
    def k(self) -> int:
        return self.segments[0].k

    @property
    def gated(self) -> bool:
        return self.segments[0].gated

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments)

    @property
    def description(self) -> str:
        return " | ".join(dict.fromkeys(segment.description for segment in self.segments))


@dataclass(frozen=True, slots=True)
class _Form:
    """What rows are packed into, and how: their values, their blocks as they are, or the nearest integers."""

    how: Literal["values", "blocks", "nearest"]
    format: str
    group: int = 0  # of integers; 0: a row
    has_min: bool = False
    scale_format: str = "f32"


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Rows of the checkpoint as the extension reads them."""

    label: str  # the checkpoint's name of their type
    type_name: str
    data: Bytes  # [n, bytes of a row]
    k: int

    @classmethod
    def of(cls, source: Source) -> _Rows:
        label = _type_name(source)
        if not isinstance(source, np.ndarray) and _native.integer_form(source.type_name) is not None:
            blocks = source.stored_blocks()
            if blocks is not None:
                return cls(label, label, blocks, source.shape[-1])
        values = source if isinstance(source, np.ndarray) else source.numpy()
        if values.dtype not in PLAIN_TYPES:
            values = values.astype(np.float32)
        type_name = PLAIN_TYPES[values.dtype]
        values = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
        return cls(label, type_name, values.view(np.uint8), values.shape[-1])

    @property
    def is_block(self) -> bool:
        return self.type_name not in PLAIN_TYPES.values()

    @property
    def native(self) -> _native.RowBytes:
        return self.type_name, self.data


@dataclass(slots=True, eq=False)
class _Parameter:
    """What was packed in this process, for the cache."""

    source: str
    losses: list[str] = field(default_factory=list)
    segments: list[tuple[_native.PackedMatrix, Bytes]] = field(default_factory=list)
    vector: Bytes | None = None

    def entry(self, memory: PackMemory) -> Entry:
        if self.vector is not None:
            return Entry(self.source, self.losses, [], memory.offset(self.vector), self.vector.nbytes)
        segments = [
            SegmentEntry(
                format=matrix.format,
                n=matrix.n,
                k=matrix.k,
                group=matrix.group,
                scale_format=matrix.scale_format,
                has_min=matrix.has_min,
                gated=matrix.gated,
                offset=memory.offset(region),
                size=region.nbytes,
            )
            for matrix, region in self.segments
        ]
        return Entry(self.source, self.losses, segments)


@dataclass(frozen=True, slots=True)
class _Place:
    cache: PackCache
    path: Path


class WeightStore:
    """Packs a model's parameters, or finds them packed in the folder `cache`, which keeps up to `cache_bytes`.

    `quantization`: auto keeps the integers of block types and stores plain types in `dtype` (or narrower, where
    that is exact: a bfloat16 checkpoint served in float32 stays bfloat16 in memory); none stores everything so; int8
    rounds to one scale a row, int4 to groups of 32 with minima, embeddings to int8. `identity` is the content of the
    checkpoint; without it nothing is cached.
    """

    def __init__(
        self,
        *,
        dtype: DType,
        team: _native.Team,
        quantization: Quantization = "auto",
        cache: Path | None = None,
        cache_bytes: int = 16 << 30,
        identity: bytes | None = None,
    ) -> None:
        self._dtype: DType = dtype
        self._team = team
        self._quantization = quantization
        self._place: _Place | None = None  # None: nothing is written
        self._file: PackFile | None = None
        if cache is not None and identity is not None:
            folder = PackCache(cache, cache_bytes)
            self._place = _Place(folder, folder.path(identity, dtype, quantization))
            self._file = folder.open(self._place.path)
        self._memory = PackMemory()
        self._packed: list[_Parameter] = []  # empty while `_file` serves
        self._num_parameters = 0
        self._num_bytes: Counter[str] = Counter()
        self._losses: Counter[str] = Counter()
        self._pack_s = 0.0
        self._saving: threading.Thread | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether every parameter so far came packed from the cache."""
        return self._file is not None

    def pack(self, parts: Sequence[Source], kind: WeightKind) -> PackedWeight | Vector:
        """A parameter whose `parts` follow each other along the first dimension; float32 [n] for a vector.

        Parts of different block types become segments. Of kind gated, the first half of the rows is the gate.
        """
        source = _identity(parts, kind)
        weight = self._find(source)
        if weight is None:
            start = time.perf_counter()
            parameter = _Parameter(source)
            weight = self._pack_vector(parts, parameter) if kind == "vector" else self._pack(parts, kind, parameter)
            self._packed.append(parameter)
            self._losses.update(parameter.losses)
            self._pack_s += time.perf_counter() - start
        self._num_parameters += 1
        if isinstance(weight, PackedWeight):
            for segment in weight.segments:
                self._num_bytes[segment.description] += segment.nbytes
        else:
            self._num_bytes["float32 vectors"] += weight.nbytes
        return weight

    def finish(self) -> None:
        """All parameters are packed: write them to the cache, in the background."""
        if self._file is not None or self._place is None:
            return
        entries = [parameter.entry(self._memory) for parameter in self._packed]
        arguments = (self._place.path, self._memory, entries)
        save = self._place.cache.save
        self._saving = threading.Thread(target=save, args=arguments, name="packed-weights", daemon=True)
        self._saving.start()

    def wait(self) -> None:
        """Until the cache is written."""
        if self._saving is not None:
            self._saving.join()

    def report(self) -> list[str]:
        """Lines for the log: formats and sizes, then what is not exactly the checkpoint's."""
        formats = ", ".join(f"{name} {_mib(size)}" for name, size in self._num_bytes.most_common())
        where = f"packed in {self._pack_s:.1f} s" if self._file is None else f"mapped from {self._file.path}"
        lines = [f"weights: {_mib(self._num_bytes.total())} ({formats}), {where}"]
        lines += [f"weights: {loss} ({_count(number, 'parameter')})" for loss, number in sorted(self._losses.items())]
        return lines

    # -- from the cache --------------------------------------------------------------------------------
    def _find(self, source: str) -> PackedWeight | Vector | None:
        if self._file is None:
            return None
        index = self._num_parameters
        entry = self._file.entries[index] if index < len(self._file.entries) else None
        if entry is None or entry.source != source:
            # Written by another version of the models. What was served so far is right: each entry is compared.
            log.warning(
                "%s holds other parameters: this start packs the checkpoint, the next renews it.", self._file.path
            )
            assert self._place is not None
            self._place.cache.remove(self._file.path)
            self._file = self._place = None
            return None
        self._losses.update(entry.losses)
        if not entry.segments:
            return self._file.region(entry.offset, entry.size).view(np.float32)
        return PackedWeight(tuple(_segment_of(each, self._file) for each in entry.segments))

    # -- packing ---------------------------------------------------------------------------------------
    def _pack_vector(self, parts: Sequence[Source], parameter: _Parameter) -> Vector:
        values = [np.asarray(part if isinstance(part, np.ndarray) else part.numpy()).ravel() for part in parts]
        parameter.vector = self._memory.take(4 * sum(len(each) for each in values))
        vector = parameter.vector.view(np.float32)
        np.concatenate([each.astype(np.float32) for each in values], out=vector)
        return vector

    def _pack(self, parts: Sequence[Source], kind: WeightKind, parameter: _Parameter) -> PackedWeight:
        rows = [_Rows.of(part) for part in parts]
        widths = {each.k for each in rows}
        if len(widths) != 1:
            raise CheckpointError(f"the parts of a parameter have rows of {sorted(widths)} values; they must be alike.")
        forms = self._forms(rows, kind)
        runs = [
            (form, [each for each, _ in run])
            for form, run in itertools.groupby(zip(rows, forms, strict=True), key=lambda pair: pair[1])
        ]
        gated = kind == "gated" and len(runs) == 1
        segments = tuple(self._pack_segment(form, run, gated, parameter) for form, run in runs)
        return PackedWeight(segments)

    def _forms(self, rows: Sequence[_Rows], kind: WeightKind) -> list[_Form]:
        if self._quantization == "auto":
            forms = [_block_form(each) or self._float_form([each]) for each in rows]
            if len({form for form in forms if form.how == "values"}) > 1:
                wide = _Form("values", FORMATS[self._dtype])
                forms = [wide if form.how == "values" else form for form in forms]
            return forms
        if self._quantization == "none":
            return [self._float_form(rows)] * len(rows)
        if self._quantization == "int4" and kind not in ("embedding", "head"):
            return [_Form("nearest", "int4", 32, has_min=True, scale_format="f16")] * len(rows)
        return [_Form("nearest", "int8")] * len(rows)

    def _float_form(self, rows: Sequence[_Rows]) -> _Form:
        types = {each.type_name for each in rows}
        if self._dtype != "float32":
            return _Form("values", FORMATS[self._dtype])
        if types == {"F16"}:
            return _Form("values", "f16")
        if types == {"BF16"} or _native.values_fit("bf16", [each.native for each in rows], rows[0].k, self._team):
            return _Form("values", "bf16")
        return _Form("values", "f32")

    def _pack_segment(self, form: _Form, rows: Sequence[_Rows], gated: bool, parameter: _Parameter) -> PackedSegment:
        native = [each.native for each in rows]
        k = rows[0].k
        if form.how == "blocks" and _native.scales_fit_f16(native, k):
            form = replace(form, scale_format="f16")
        n = sum(len(each.data) for each in rows)
        shape = (form.format, n, k, form.group, form.scale_format, form.has_min, gated)
        region = self._memory.take(_native.packed_bytes(*shape))
        matrix = _native.PackedMatrix(region, *shape)
        labels = ", ".join(dict.fromkeys(each.label for each in rows))
        if form.how == "blocks":
            _native.pack_blocks(matrix, region, native, self._team)
        elif form.how == "values":
            overflows = _native.pack_values(matrix, region, native, self._team)
            parameter.losses += self._float_losses(form, rows, labels, overflows)
        else:
            largest = _native.quantize_values(matrix, region, native, self._team)
            if not math.isfinite(largest):
                raise CheckpointError(
                    f"weights [{n}, {k}] of type {labels} hold infinity or NaN, which {form.format} cannot: the "
                    "checkpoint may be damaged. --quantization none serves it as it is."
                )
            if form.scale_format == "f16" and largest > LARGEST_F16:
                return self._pack_segment(replace(form, scale_format="f32"), rows, gated, parameter)
            again = any(each.is_block for each in rows)
            parameter.losses.append(
                f"{labels} rounded to the nearest {form.format}"
                + (
                    ": quantized a second time, which costs quality; --quantization auto keeps it exact"
                    if again
                    else ""
                )
            )
        parameter.segments.append((matrix, region))
        return PackedSegment(matrix)

    def _float_losses(self, form: _Form, rows: Sequence[_Rows], labels: str, overflows: int) -> list[str]:
        losses = []
        native = [each.native for each in rows if PLAIN_FORMATS.get(each.type_name) != form.format]
        if form.format != "f32" and native and not _native.values_fit(form.format, native, rows[0].k, self._team):
            losses.append(f"{labels} rounded to {self._dtype}")
        if overflows:
            losses.append(f"{labels} exceeds the range of {self._dtype}, and became infinite")
        return losses


PLAIN_FORMATS = {"F32": "f32", "BF16": "bf16", "F16": "f16"}


def _block_form(rows: _Rows) -> _Form | None:
    found = _native.integer_form(rows.type_name)
    return None if found is None else _Form("blocks", found[0], found[1], found[2])


def _segment_of(entry: SegmentEntry, file: PackFile) -> PackedSegment:
    return PackedSegment(
        _native.PackedMatrix(
            file.region(entry.offset, entry.size),
            entry.format,
            entry.n,
            entry.k,
            entry.group,
            entry.scale_format,
            entry.has_min,
            entry.gated,
        )
    )


def _type_name(source: Source) -> str:
    return str(source.dtype) if isinstance(source, np.ndarray) else source.type_name


def _identity(parts: Iterable[Source], kind: WeightKind) -> str:
    """Of a parameter within its checkpoint. Reads arrays only: tensors have a name."""
    described = [
        ("array", hashlib.sha256(np.ascontiguousarray(part).tobytes()).hexdigest(), _type_name(part), part.shape)
        if isinstance(part, np.ndarray)
        else ("tensor", part.identity, part.type_name, part.shape)
        for part in parts
    ]
    return hashlib.sha256(msgspec.json.encode([kind, described])).hexdigest()


def _mib(size: int) -> str:
    return f"{size / (1024 * 1024):.1f} MiB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
