from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from tests.tiny import save_tiny_llama

from octavo import __version__
from octavo.backends.native.cpu import detect_cpu
from octavo.backends.registry import BACKENDS
from octavo.cli import info
from octavo.cli.main import main
from octavo.cli.plan_text import layer_numbers
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


PLAN = ["info", "--plan", "--threads=1", "--kv-cache-memory-bytes=8MiB", "--no-repack-cache"]


def test_the_plan_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    assert main([*PLAN, str(model), "--quantization", "int4", "--fusion", "gate,residual"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["model", str(model)]
    assert "fusion     nodes saved: gate 2, residual 4" in lines
    titles = ["before the layers", "each of 2 layers (0-1)", "behind the layers"]
    assert [line for line in lines if line in titles] == titles
    assert sum("linear + silu gate" in line for line in lines) == 1
    starts = ("decode of 1 ", "decode of 8 ", "decode of 32 ", "prefill of 512 ")
    assert [line.startswith(start) for line, start in zip(lines[-5:-1], starts, strict=True)] == [True] * 4


def test_the_plan_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    assert main([*PLAN, str(model), "--json", "--fusion", "off", "--max-model-len", "100"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["model"] == str(model)
    assert shown["roofline"]["num_threads"] == 1 and shown["roofline"]["f32_gflop_s"] > 0
    assert shown["plan"]["fusion"] == {}
    assert [step["context_len"] for step in shown["plan"]["steps"]] == [100] * 4
    assert all(step["floor_s"] > 0 for step in shown["plan"]["steps"])


def test_what_has_no_plan_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny_llama(tmp_path / "tiny")
    file = tmp_path / "octavo.toml"
    file.write_text("enforce-eager = true\n")
    assert main([*PLAN, str(model), "--config", str(file)]) == 2
    assert "--plan shows a plan of the native backend; --enforce-eager makes none." in capsys.readouterr().err


def test_an_instruction_set_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = [isa for isa in ("avx2", "avx512", "amx") if isa not in detect_cpu().isas]
    if not missing:
        pytest.skip("this processor has every instruction set")
    assert main([*PLAN, str(save_tiny_llama(tmp_path / "tiny")), "--isa", missing[0]]) == 2
    assert f"--isa {missing[0]}: this processor runs portable" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "name"),
    [(["some-model"], "MODEL"), (["--max-model-len=8"], "--max-model-len"), (["--fusion=off"], "--fusion")],
)
def test_options_of_a_model_are_for_its_plan(capsys: pytest.CaptureFixture[str], argv: list[str], name: str) -> None:
    assert main(["info", *argv]) == 2
    assert f"{name} is for octavo info --plan." in capsys.readouterr().err


def test_runs_of_layers_are_written_as_ranges() -> None:
    assert layer_numbers([0]) == "0"
    assert layer_numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
