"""The command itself: exit codes, one-line errors, and what it must not import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octavo import __version__
from octavo.cli.main import COMMANDS, main, module_of

FOLDER = Path(sys.modules["octavo.cli.main"].__file__ or "").parent


def test_every_command_has_its_file() -> None:
    assert all((FOLDER / f"{module_of(name).rpartition('.')[2]}.py").is_file() for name in COMMANDS)


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in COMMANDS)


def test_without_a_command_the_help_is_a_mistake(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: octavo" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"octavo {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sevre"], "octavo: error: unknown command 'sevre'; did you mean serve? (see octavo --help).\n"),
        (
            ["info", "--jsno"],
            "octavo: error: octavo info has no --jsno; did you mean --json? (see octavo info --help).\n",
        ),
        (["info", "a", "b"], "octavo: error: unrecognized arguments: b (see octavo info --help).\n"),
        (
            ["serve", "--port", "x"],
            "octavo: error: --port is x; it must be an integer of at least 0 and at most 65535.\n",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    assert capsys.readouterr() == ("", message)


def test_unknown_environment_variables_are_warned_about(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEYS", "x")
    assert main(["pull"]) == 0
    assert "octavo: warning: environment variable OCTAVO_API_KEYS is not known" in capsys.readouterr().err


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_importing_octavo_imports_neither_torch_nor_numpy() -> None:
    loaded = "sorted({'torch', 'numpy', 'fastapi', 'octavo.engine'} & set(sys.modules))"
    assert run_python(f"import sys, octavo; print({loaded})") == "[]"


def test_the_package_offers_its_classes_on_first_use() -> None:
    code = "import octavo; print(octavo.LLM.__name__, octavo.AsyncLLM.__name__, octavo.SamplingParams(n=2).n)"
    assert run_python(code) == "LLM AsyncLLM 2"


def test_a_name_that_the_package_does_not_have_is_an_attribute_error() -> None:
    assert run_python("import octavo; print(hasattr(octavo, 'LLMM'), 'LLM' in dir(octavo))") == "False True"


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m octavo.cli serve --help | head -1"
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert run.stdout.startswith("usage: octavo serve")
    assert run.stderr == ""


@pytest.mark.parametrize("command", ["pull", "info"])
def test_commands_that_need_no_engine_start_without_torch(command: str) -> None:
    code = f"import sys; from octavo.cli.main import main; main(['{command}']); print('torch' in sys.modules)"
    assert run_python(code).splitlines()[-1] == "False"
