"""The file of packed weights: the next start reads nothing of the checkpoint; a bad file or disk costs time only."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tests.backends.native.packed import Tensor, random_blocks, values

from octavo import _native
from octavo.backends.native import pack_cache
from octavo.backends.native.pack_cache import PackCache, PackMemory
from octavo.backends.native.weights import PackedWeight, WeightStore

TEAM = _native.Team(2)
GIB = 1 << 30


@pytest.fixture
def cache(tmp_path: Path) -> PackCache:
    return PackCache(tmp_path / "cache", GIB)


def checkpoint() -> list[tuple[list[Tensor], str]]:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((20, 256)).astype(ml_dtypes.bfloat16)
    return [
        ([Tensor.plain(plain, "embedding")], "embedding"),
        ([Tensor.plain(rng.standard_normal(77).astype(np.float32), "norm")], "vector"),
        ([random_blocks("Q4_K", 24, 256), random_blocks("Q6_K", 8, 256)], "linear"),
        ([random_blocks("Q4_1", 40, 256, 1), random_blocks("Q4_1", 40, 256, 2)], "gated"),
        ([Tensor.plain(rng.standard_normal((300, 256)).astype(np.float32), "down")], "linear"),
    ]


def store_in(cache: PackCache | None, identity: bytes | None, **options: str) -> WeightStore:
    place = {} if cache is None else {"cache": cache.folder, "cache_bytes": cache.max_bytes}
    return WeightStore(team=TEAM, identity=identity, **({"dtype": "float32"} | options), **place)


class Run:
    """A start: packs the checkpoint, or finds it packed."""

    def __init__(self, cache: PackCache | None, *, identity: bytes = b"model", waits: bool = True, **settings: str):
        self.parameters = settings.pop("parameters", None) or checkpoint()
        self.store = store_in(cache, identity, **settings)
        self.weights = [self.store.pack(parts, kind) for parts, kind in self.parameters]
        self.is_mapped = self.store.is_mapped
        self.store.finish()
        if waits:
            self.store.wait()

    @property
    def num_reads(self) -> int:
        return sum(tensor.num_reads for parts, _ in self.parameters for tensor in parts)

    def memory(self) -> list[bytes]:
        """Every byte of every parameter."""
        found = []
        for weight in self.weights:
            arrays = [each.matrix.memory for each in weight.segments] if isinstance(weight, PackedWeight) else [weight]
            found += [array.tobytes() for array in arrays]
        return found

    def forms(self) -> list[str]:
        return [f"{w.description} {w.n} {w.k} {w.gated}" for w in self.weights if isinstance(w, PackedWeight)]


def only_file(cache: PackCache) -> Path:
    (path,) = cache.folder.iterdir()
    return path


def mapping_of(array: np.ndarray) -> str:
    """The line of /proc/self/maps that holds an array."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= array.ctypes.data < end:
            return line
    raise AssertionError("not mapped")


def test_the_next_start_finds_every_byte_and_reads_nothing(cache: PackCache) -> None:
    first = Run(cache)
    assert not first.is_mapped and first.num_reads > 0
    second = Run(cache)
    assert second.is_mapped and second.num_reads == 0
    plain = Run(None)
    assert plain.memory() == first.memory() == second.memory()
    assert plain.forms() == first.forms() == second.forms()
    assert [path.suffix for path in cache.folder.iterdir()] == [".packed"]


def test_mapped_weights_are_those_of_the_checkpoint(cache: PackCache) -> None:
    Run(cache)
    run = Run(cache)
    for (parts, kind), weight in zip(checkpoint(), run.weights, strict=True):
        expected = np.concatenate([part.numpy().astype(np.float32) for part in parts])
        found = weight if kind == "vector" else values(weight)
        assert np.array_equal(found, expected)


def test_the_report_of_a_mapped_start_tells_the_same(cache: PackCache) -> None:
    first, second = (Run(cache, dtype="bfloat16", quantization="int4").store.report() for _ in range(2))
    assert first[1:] == second[1:] and len(first) > 1
    assert first[0].split("), ")[0] == second[0].split("), ")[0]
    assert "packed in" in first[0] and f"mapped from {only_file(cache)}" in second[0]


def test_processes_share_the_pages_of_the_file(cache: PackCache) -> None:
    for run in (Run(cache), Run(cache)):
        mapping = mapping_of(run.weights[0].segments[0].matrix.memory)
        assert mapping.split()[1] == "r--s" and mapping.endswith(str(only_file(cache)))


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"quantization": "none"}, {"quantization": "int8"}, {"identity": b"other"}]
)
def test_another_model_or_setting_has_its_own_file(cache: PackCache, other: dict) -> None:
    Run(cache)
    assert not Run(cache, **other).is_mapped
    assert Run(cache).is_mapped and Run(cache, **other).is_mapped
    assert len(list(cache.folder.iterdir())) == 2


def test_nothing_is_kept_without_an_identity_or_before_the_end(cache: PackCache) -> None:
    Run(cache, identity=None)
    store = store_in(cache, b"model")
    store.pack(*checkpoint()[0])
    assert not cache.folder.exists()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "short header": lambda path: path.write_bytes(path.read_bytes()[:40]),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"0"),
    "other magic": lambda path: flip(path, 0),
    "other version": lambda path: flip(path, 8),
    "other index offset": lambda path: flip(path, 17),
    "other digest": lambda path: flip(path, 50),
    "other index": lambda path: flip(path, len(path.read_bytes()) - 5),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_packed_anew(cache: PackCache, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = Run(cache).memory()
    path = only_file(cache)
    DAMAGE[damage](path)
    run = Run(cache)
    assert not run.is_mapped and run.memory() == expected
    assert f"Packed weights in {path} cannot be used" in caplog.text
    if damage != "a folder":
        assert Run(cache).is_mapped and only_file(cache) == path


def test_an_index_that_points_beyond_the_file_is_refused(cache: PackCache, monkeypatch: pytest.MonkeyPatch) -> None:
    moved = pack_cache._moved
    monkeypatch.setattr(pack_cache, "_moved", lambda entry, by: moved(entry, by + (1 << 30)))
    Run(cache)
    monkeypatch.undo()
    assert not Run(cache).is_mapped
    assert Run(cache).is_mapped


def test_other_parameters_than_the_file_holds_are_packed_and_the_file_is_renewed(
    cache: PackCache, caplog: pytest.LogCaptureFixture
) -> None:
    Run(cache)
    changed = checkpoint()
    changed[2], changed[3] = changed[3], changed[2]
    run = Run(cache, parameters=changed)
    assert "holds other parameters" in caplog.text and not run.is_mapped
    assert run.memory() == Run(None, parameters=changed).memory()
    assert not list(cache.folder.iterdir())
    Run(cache, parameters=changed)
    assert Run(cache, parameters=changed).is_mapped


def test_a_longer_model_than_the_file_holds_is_packed(cache: PackCache) -> None:
    Run(cache, parameters=checkpoint()[:2])
    run = Run(cache)
    assert not run.is_mapped and run.memory() == Run(None).memory()


def test_tensors_that_swapped_places_are_told_apart_by_name(cache: PackCache) -> None:
    a, b = (np.full((16, 32), value, np.float32) for value in (1, 2))
    Run(cache, parameters=[([Tensor.plain(a, "a")], "linear"), ([Tensor.plain(b, "b")], "linear")])
    swapped = Run(cache, parameters=[([Tensor.plain(b, "b")], "linear"), ([Tensor.plain(a, "a")], "linear")])
    assert not swapped.is_mapped and values(swapped.weights[0])[0, 0] == 2


def test_arrays_are_told_apart_by_their_values(cache: PackCache) -> None:
    for value in (1.0, 2.0):
        store = store_in(cache, b"model")
        weight = store.pack([np.full((4, 8), value, np.float32)], "linear")
        assert not store.is_mapped and values(weight)[0, 0] == value
        store.finish()
        store.wait()


def full_disk(fd: int, data: memoryview, offset: int) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_weights_in_memory(
    cache: PackCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pack_cache.os, "pwrite", full_disk)
    run = Run(cache)
    assert run.memory() == Run(None).memory()
    assert "No space left on device" in caplog.text and "the next start packs again" in caplog.text
    assert not list(cache.folder.iterdir())


def test_a_cache_that_cannot_be_written_leaves_the_weights_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("not a folder")
    run = Run(PackCache(tmp_path / "file" / "cache", GIB))
    assert run.memory() == Run(None).memory()
    assert "Packed weights are not kept" in caplog.text


def test_a_read_only_cache_still_serves_what_it_holds(cache: PackCache, monkeypatch: pytest.MonkeyPatch) -> None:
    Run(cache)

    def read_only(*args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(pack_cache.os, "utime", read_only)
    monkeypatch.setattr(pack_cache.os, "open", read_only)
    run = Run(cache)
    assert run.is_mapped and run.num_reads == 0


def test_a_short_write_is_continued(cache: PackCache, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(pack_cache.os, "pwrite", lambda fd, data, offset: write(fd, data[:5000], offset))
    expected = Run(cache).memory()
    monkeypatch.undo()
    run = Run(cache)
    assert run.is_mapped and run.memory() == expected


def test_the_weights_used_last_stay_within_the_limit(tmp_path: Path) -> None:
    cache = PackCache(tmp_path, GIB)
    for number in range(3):
        Run(cache, identity=b"%d" % number)
        path = cache.path(b"%d" % number, "float32", "auto")
        os.utime(path, (number, number))
    size = path.stat().st_size
    small = PackCache(tmp_path, 2 * size)
    assert Run(small, identity=b"0").is_mapped  # used again: now the newest
    Run(small, identity=b"new")
    kept = {identity for identity in (b"0", b"1", b"2", b"new") if cache.path(identity, "float32", "auto").exists()}
    assert kept == {b"0", b"new"}


def test_what_exceeds_the_limit_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Run(PackCache(tmp_path / "cache", 1000))
    assert "are not kept" in caplog.text and not (tmp_path / "cache").exists()


def test_drafts_of_ended_processes_are_removed_and_others_are_not(cache: PackCache) -> None:
    cache.folder.mkdir()
    left, written, recent = (cache.folder / f".{name}.draft" for name in ("left", "written", "recent"))
    for path in (left, written, recent):
        path.write_bytes(b"x")
    for path in (left, written):
        os.utime(path, (time.time() - 2 * pack_cache.ABANDONED_S,) * 2)
    with written.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Run(cache)
    assert not left.exists() and written.exists() and recent.exists()


def test_starts_at_the_same_time_leave_one_sound_file(cache: PackCache) -> None:
    runs: list[Run] = []
    threads = [threading.Thread(target=lambda: runs.append(Run(cache, waits=False))) for _ in range(2)]
    # One at a time packs, as a team has one caller; they write at the same time.
    for thread in threads:
        thread.start()
        thread.join()
    for run in runs:
        run.store.wait()
    expected = Run(None).memory()
    assert all(run.memory() == expected for run in runs)
    last = Run(cache)
    assert last.is_mapped and last.memory() == expected


CHILD = """
import sys
from pathlib import Path
from tests.backends.native.test_pack_cache import GIB, PackCache, Run, digest
run = Run(PackCache(Path(sys.argv[1]), GIB))
print(run.is_mapped, digest(run))
"""


def digest(run: Run) -> int:
    return sum(sum(data) for data in run.memory())


def test_processes_that_start_at_the_same_time_all_serve_the_same(cache: PackCache) -> None:
    command = [sys.executable, "-c", CHILD, str(cache.folder)]
    root = Path(__file__).parents[3]
    children = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {child.communicate(timeout=60)[0].split()[-1] for child in children}
    assert answers == {str(digest(Run(cache)))} and Run(cache).is_mapped
    assert all(child.returncode == 0 for child in children)
    assert len(list(cache.folder.iterdir())) == 1


def test_memory_grows_by_chunks_and_knows_where_each_piece_is() -> None:
    memory = PackMemory()
    sizes = [10, 70_000, 64, pack_cache.CHUNK_BYTES, 128, 200_000, pack_cache.CHUNK_BYTES // 2, 64]
    pieces = [memory.take(size) for size in sizes]
    for number, piece in enumerate(pieces, 1):
        assert piece.ctypes.data % (4096 if len(piece) >= 65536 else 64) == 0
        piece[:2], piece[-2:] = number, number
    whole = np.concatenate(memory.chunks)
    assert len(whole) < sum(sizes) + 8 * 4096
    for number, piece in enumerate(pieces, 1):
        start = memory.offset(piece)
        found = whole[start : start + len(piece)]
        assert (found[:2] == number).all() and (found[-2:] == number).all()
    with pytest.raises(AssertionError):
        memory.offset(np.zeros(64, np.uint8))


def test_weights_stay_good_where_pages_cannot_be_shared(cache: PackCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr(pack_cache._native, "map_over", fail)
    first = Run(cache)
    assert first.memory() == Run(None).memory() and Run(cache).is_mapped


def test_the_extension_says_why_it_cannot_map() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        _native.map_over(PackMemory().take(4096), -1, 0)
