from __future__ import annotations

import json
import os
import sys

import pytest

from octavo import __version__
from octavo.backends.registry import BACKENDS
from octavo.cli import info
from octavo.cli.main import main
from octavo.loader.catalogue import CATALOGUE, model_path


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    return tmp_path


def test_json_holds_what_a_report_needs(capsys: pytest.CaptureFixture[str], cache) -> None:
    assert main(["info", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["version"] == __version__
    assert shown["python"] == sys.version.split()[0]
    assert shown["machine"]["num_cores"] == len(os.sched_getaffinity(0))
    assert 0 < shown["machine"]["memory_available_bytes"] <= shown["machine"]["memory_total_bytes"]
    assert [backend["name"] for backend in shown["backends"]] == list(BACKENDS)
    assert shown["cpu"]["isas"][0] == "portable"
    assert (shown["cache_folder"], shown["models"]) == (str(cache), [])


def test_pulled_models_are_listed(capsys: pytest.CaptureFixture[str], cache) -> None:
    path = model_path(CATALOGUE["gemma3-270m"], cache)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(2**20))
    assert main(["info"]) == 0
    assert f"model      gemma3-270m, 1 MiB, {path}" in capsys.readouterr().out


def test_a_missing_backend_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["info"]) == 0
    assert "backend    reference: not available: PyTorch is not installed" in capsys.readouterr().out


def test_text_and_json_come_from_the_same_facts() -> None:
    gathered = info.gather()
    text = info.as_text(gathered)
    assert gathered.cpu.model_name in text
    assert all(feature in text for feature in gathered.cpu.features)
