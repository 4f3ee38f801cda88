"""Memory for packed weights, and files of them that later starts only map.

A file belongs to one checkpoint, data type, quantization and version of the packed layouts; its name says so. It is
written under another name and renamed, never changed afterwards: processes that map it share its pages, and a reader
sees a whole file or none. Whatever is wrong with a file, or with the disk, costs the time to pack and nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import secrets
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo import _native

log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

FILE_VERSION = 1
MAGIC = b"OCTAVOPW"
HEADER = struct.Struct("<8sIIQQQ32s")  # magic, version, 0, index offset, index bytes, file bytes, digest of all that
HEADER_BYTES = PAGE = max(4096, mmap.PAGESIZE)
LINE = 64
CHUNK_BYTES = 64 * 1024 * 1024
HUGE_PAGE = 2 * 1024 * 1024
WRITE_BYTES = 8 * 1024 * 1024
MAX_INDEX_BYTES = 256 * 1024 * 1024
ABANDONED_S = 3600.0  # a draft that nobody holds and nobody wrote to for so long


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class PackMemory:
    """Zeroed memory that grows by chunks in huge pages; what is taken stays where it is, and is written once."""

    def __init__(self) -> None:
        self._chunks: list[_Chunk] = []
        self._open: _Chunk | None = None

    def take(self, size: int) -> Bytes:
        """At a multiple of 64, of a page when it is large."""
        alignment = PAGE if size >= 16 * PAGE else LINE
        if self._open is not None and self._open.fits(size, alignment):
            return self._open.take(size, alignment)
        chunk = _Chunk(max(CHUNK_BYTES, _round_up(size, HUGE_PAGE)))
        self._chunks.append(chunk)
        if size < CHUNK_BYTES // 2 or self._open is None:
            self._open = chunk
        return chunk.take(size, alignment)

    @property
    def chunks(self) -> list[Bytes]:
        """All that was taken, whole pages."""
        return [chunk.memory[: _round_up(chunk.used, PAGE)] for chunk in self._chunks]

    def offset(self, taken: Bytes) -> int:
        """Where `taken` begins when `chunks` follow each other."""
        before = 0
        for chunk in self.chunks:
            distance = taken.ctypes.data - chunk.ctypes.data
            if 0 <= distance < max(1, len(chunk)):
                return before + distance
            before += len(chunk)
        raise AssertionError("this memory was taken elsewhere")


class _Chunk:
    def __init__(self, size: int) -> None:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
        self.memory = np.frombuffer(pages, np.uint8)
        self.used = 0

    def fits(self, size: int, alignment: int) -> bool:
        return _round_up(self.used, alignment) + size <= len(self.memory)

    def take(self, size: int, alignment: int) -> Bytes:
        start = _round_up(self.used, alignment)
        self.used = start + size
        return self.memory[start : self.used]


class SegmentEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One packed matrix: what it is made with, and where it lies in the file."""

    format: str
    n: int
    k: int
    group: int
    scale_format: str
    has_min: bool
    gated: bool
    offset: int
    size: int

    def check(self, end: int) -> None:
        size = _native.packed_bytes(
            self.format, self.n, self.k, self.group, self.scale_format, self.has_min, self.gated
        )
        if size != self.size:
            raise ValueError(f"a matrix takes {size} bytes instead of {self.size}")
        _check_region(self.offset, self.size, end)


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One parameter: `segments`, or the `size` bytes of a float32 vector at `offset`."""

    source: str  # digest of the kind and of which values of the checkpoint these are
    losses: list[str]  # in what way the packed weights differ from the checkpoint's
    segments: list[SegmentEntry] = []
    offset: int = 0
    size: int = 0

    def check(self, end: int) -> None:
        for segment in self.segments:
            segment.check(end)
        if not self.segments:
            _check_region(self.offset, self.size, end)


def _check_region(offset: int, size: int, end: int) -> None:
    if offset < HEADER.size or offset % LINE or size < 0 or offset + size > end:
        raise ValueError(f"{size} bytes at {offset} of {end}")


@dataclass(frozen=True, slots=True, eq=False)
class PackFile:
    """A file of packed weights, mapped read-only."""

    path: Path
    entries: list[Entry]
    memory: Bytes

    @classmethod
    def open(cls, path: Path) -> Self | None:
        """None where there is no such file, or, with a warning, where it is damaged."""
        try:
            with path.open("rb") as file:
                entries = _read_index(file.fileno())
                pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
            log.warning("Packed weights in %s cannot be used (%s): the checkpoint is packed again.", path, error)
            return None
        with suppress(OSError):
            pages.madvise(mmap.MADV_WILLNEED)
        return cls(path, entries, np.frombuffer(pages, np.uint8))

    def region(self, offset: int, size: int) -> Bytes:
        return self.memory[offset : offset + size]


def _read_index(fd: int) -> list[Entry]:
    size = os.fstat(fd).st_size
    header = os.pread(fd, HEADER.size, 0)
    magic, version, _, index_at, index_bytes, file_bytes, digest = HEADER.unpack(header)
    if magic != MAGIC or version != FILE_VERSION:
        raise ValueError("it does not begin as such a file does")
    if file_bytes != size or index_at + index_bytes != size or index_bytes > MAX_INDEX_BYTES:
        raise ValueError(f"it has {size} bytes instead of {file_bytes}")
    index = os.pread(fd, index_bytes, index_at)
    if _digest(header, index) != digest:
        raise ValueError("its index is damaged")
    entries = msgspec.json.decode(index, type=list[Entry])
    for entry in entries:
        entry.check(index_at)
    return entries


def _digest(header: bytes, index: bytes) -> bytes:
    return hashlib.sha256(header[: -hashlib.sha256().digest_size] + index).digest()


@dataclass(frozen=True, slots=True)
class PackCache:
    """A folder of packed weights, of at most `max_bytes`: what was used last stays."""

    folder: Path
    max_bytes: int

    def path(self, identity: bytes, *settings: str) -> Path:
        """The file of checkpoint `identity` under `settings`."""
        parts = ["packed", str(_native.PACK_VERSION), str(FILE_VERSION), sys.byteorder, identity.hex(), *settings]
        return self.folder / f"{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()}.packed"

    def open(self, path: Path) -> PackFile | None:
        file = PackFile.open(path)
        if file is not None:
            with suppress(OSError):  # read-only: then nothing is ever removed either
                os.utime(path)
        return file

    def remove(self, path: Path) -> None:
        with suppress(OSError):
            path.unlink()

    def save(self, path: Path, memory: PackMemory, entries: Sequence[Entry]) -> bool:
        """Write `entries`, which lie in `memory`, and let `memory` share the file's pages. Returns whether it did.

        Offsets of `entries` count from the beginning of `memory.chunks`, one after the other.
        """
        chunks = memory.chunks
        size = sum(map(len, chunks))
        if size > self.max_bytes:
            log.info("%d MiB of packed weights are not kept: %d MiB is the limit.", size >> 20, self.max_bytes >> 20)
            return False
        draft = path.with_name(f".{path.stem}.{secrets.token_hex(4)}.draft")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_abandoned()
            fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            try:
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write(fd, chunks, entries)
                draft.rename(path)
                with suppress(OSError):  # then this process keeps pages of its own
                    _share_pages(fd, chunks)
            except BaseException:
                draft.unlink(missing_ok=True)
                raise
            finally:
                os.close(fd)
            self._remove_old(path)
        except OSError as error:
            log.warning("Packed weights are not kept in %s (%s): the next start packs again.", self.folder, error)
            return False
        return True

    def _remove_old(self, newest: Path) -> None:
        found = []
        for path in self.folder.glob("*.packed"):
            with suppress(OSError):
                stat = path.stat()
                found.append((path != newest, -stat.st_mtime, stat.st_size, path))
        total = 0
        for _, _, size, path in sorted(found):
            total += size
            if total > self.max_bytes and path != newest:
                self.remove(path)

    def _remove_abandoned(self) -> None:
        for path in self.folder.glob(".*.draft"):
            with suppress(OSError), path.open("rb") as file:
                if time.time() - os.fstat(file.fileno()).st_mtime > ABANDONED_S:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _write(fd: int, chunks: Sequence[Bytes], entries: Sequence[Entry]) -> None:
    offset = HEADER_BYTES
    for chunk in chunks:
        _write_at(fd, chunk.data, offset)
        offset += len(chunk)
    index = msgspec.json.encode([_moved(entry, HEADER_BYTES) for entry in entries])
    _write_at(fd, memoryview(index), offset)
    header = HEADER.pack(MAGIC, FILE_VERSION, 0, offset, len(index), offset + len(index), bytes(32))
    _write_at(fd, memoryview(header[:-32] + _digest(header, index)), 0)
    os.fsync(fd)


def _share_pages(fd: int, chunks: Sequence[Bytes]) -> None:
    offset = HEADER_BYTES
    for chunk in chunks:
        if len(chunk):
            _native.map_over(chunk, fd, offset)
        offset += len(chunk)


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done : done + WRITE_BYTES], offset + done)


def _moved(entry: Entry, by: int) -> Entry:
    segments = [msgspec.structs.replace(segment, offset=segment.offset + by) for segment in entry.segments]
    return msgspec.structs.replace(entry, segments=segments, offset=entry.offset + by)
