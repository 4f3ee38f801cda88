from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli import pull
from octavo.cli.main import main
from octavo.loader.catalogue import CATALOGUE, model_path
from octavo.loader.source import LocalModel


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path


def pretend_pulled(name: str, cache: Path) -> Path:
    path = model_path(CATALOGUE[name], cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    return path


def test_without_a_name_the_catalogue_is_listed(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    pretend_pulled("gemma3-270m", cache)
    assert main(["pull"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert list(lines) == list(CATALOGUE)
    assert "pulled" in lines["gemma3-270m"] and "(Gemma Terms of Use)" in lines["gemma3-270m"]
    assert "pulled" not in lines["smollm2-135m-instruct"]


def test_what_is_here_is_only_named(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    path = pretend_pulled("smollm2-135m-instruct", cache)
    assert main(["pull", "smollm2-135m-instruct", str(path)]) == 0
    assert capsys.readouterr().out == f"{path}\n{path}\n"


def test_progress_terms_and_revision_are_passed_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path
) -> None:
    def fetch(name, *, cache: Path, revision, fetch, progress, notice) -> LocalModel:
        assert (name, cache, revision, fetch) == ("owner/name", cache, "v2", True)
        notice("the terms")
        for phase, done, total in [("download", 0, 10), ("download", 10, 10), ("check", 10, 10)]:
            progress(phase, done, total)
        return LocalModel(name, cache / "model", "safetensors")

    monkeypatch.setattr(pull, "resolve_source", fetch)
    assert main(["pull", "owner/name", "--revision", "v2"]) == 0
    assert capsys.readouterr() == (f"{cache}/model\n", "the terms\n")  # no bars where stderr is no terminal


def test_an_unknown_name_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "gemma3-270"]) == 2
    assert "octavo: error: 'gemma3-270' is neither a path here nor a model of the catalogue" in capsys.readouterr().err
