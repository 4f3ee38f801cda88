"""SHA-256 of large files, in parallel, remembered for files that did not change."""

from __future__ import annotations

import hashlib
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

CHUNK_BYTES = 32 * 1024 * 1024
SETTLED_S = 2.0  # a file changed more recently could change again within its timestamp's resolution


def file_identity(path: Path) -> str:
    """Changes whenever the file is written or replaced."""
    stat = path.stat()
    return f"{path.resolve()}\0{stat.st_size}\0{stat.st_dev}\0{stat.st_ino}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"


def has_settled(path: Path) -> bool:
    """Whether another change would change the file's identity."""
    stat = path.stat()
    return time.time() - max(stat.st_mtime, stat.st_ctime) > SETTLED_S


def file_digest(path: Path, *, cache: Path | None = None) -> bytes:
    """SHA-256 over the file's size and the SHA-256 of each of its 32 MiB chunks.

    `cache` is a folder of results keyed by path, size, inode and modification time; None computes always.
    """
    entry = cache / hashlib.sha256(file_identity(path).encode()).hexdigest() if cache is not None else None
    if entry is not None and entry.is_file():
        known = entry.read_bytes()
        if len(known) == hashlib.sha256().digest_size:
            return known
    digest = _digest(path, path.stat().st_size)
    if entry is not None and has_settled(path):
        with suppress(OSError):  # a read-only or full cache only costs the time to compute it again
            entry.parent.mkdir(parents=True, exist_ok=True)
            draft = entry.with_name(f"{entry.name}.{os.getpid()}")
            draft.write_bytes(digest)
            draft.replace(entry)
    return digest


def _digest(path: Path, size: int) -> bytes:
    def chunk(offset: int) -> bytes:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            part, left = hashlib.sha256(), min(CHUNK_BYTES, size - offset)
            while left > 0:
                data = file.read(min(left, 1024 * 1024))
                if not data:
                    break
                part.update(data)
                left -= len(data)
            return part.digest()

    total = hashlib.sha256(size.to_bytes(8, "little"))
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        for part in pool.map(chunk, range(0, size, CHUNK_BYTES)):
            total.update(part)
    return total.digest()
