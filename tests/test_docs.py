"""The documentation says what is there: generated pages are current, and every file, test, command and flag exists."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

from octavo.cli.main import COMMANDS, command_parser, module_of
from octavo.models.registry import BUILDERS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}


def glossary_rows() -> list[list[str]]:
    lines = [line for line in TEXT["docs/glossary.md"].splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def names_in(path: Path) -> set[str]:
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def all_flags() -> set[str]:
    flags: set[str] = set()
    for name in COMMANDS:
        parser = command_parser(name)
        importlib.import_module(module_of(name)).add_flags(parser)
        flags |= set(parser.flags)
    return flags


def test_the_page_of_the_command_line_is_current() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert TEXT["docs/cli.md"] == generate.page(), "run: make docs"


@pytest.mark.parametrize("row", glossary_rows(), ids=lambda row: row[0])
def test_every_mechanism_of_the_glossary_has_its_file_and_its_test(row: list[str]) -> None:
    _, _, file, test, _ = row
    assert (ROOT / file.strip("`")).is_file()
    path, _, name = test.strip("`").partition("::")
    assert name in names_in(ROOT / path)


def test_files_that_are_named_exist() -> None:
    for page, text in TEXT.items():
        for path in re.findall(r"`((?:src|tests|bench|docs|csrc)/[\w./-]*)", text):
            assert (ROOT / path).exists(), f"{page}: {path}"
        for folder in re.findall(r"^\| `(\w+)` \| .* \| .* \|$", TEXT["docs/architecture.md"], re.MULTILINE):
            assert folder == "Request" or (ROOT / "src/octavo" / folder).is_dir(), folder


def test_links_between_pages_lead_somewhere() -> None:
    for page, text in TEXT.items():
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
            assert ((ROOT / page).parent / target).exists(), f"{page}: {target}"


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for text in TEXT.values() for name in re.findall(r"[`$] ?make ([a-z]+)", text)}
    assert {"serve", "test"} <= named <= targets


def test_commands_that_are_named_exist() -> None:
    for page, text in TEXT.items():
        for command in re.findall(r"[`$] ?octavo ((?:bench )?[a-z][a-z-]*)", text):
            assert command in (*COMMANDS, "bench"), f"{page}: octavo {command}"


def test_flags_that_are_named_exist() -> None:
    known = all_flags()
    for page, text in TEXT.items():
        shown = text.partition("## Coming from")[0]
        for flag in re.findall(r"`(--[a-z][a-z-]*)", shown):
            assert flag in known, f"{page}: {flag}"


def test_a_flag_of_another_engine_is_answered_by_one_of_ours() -> None:
    known = all_flags()
    answers = TEXT["docs/cli.md"].partition("## Coming from")[2]
    for row in answers.splitlines()[4:]:
        for flag in re.findall(r"--[a-z][a-z-]*", row.rpartition(" | ")[2]):
            assert flag in known, row


def test_the_families_that_the_readme_lists_are_those_of_the_registry() -> None:
    row = next(line for line in TEXT["README.md"].splitlines() if line.startswith("| models |"))
    listed = row.lower().replace(" ", "").replace("-", "")
    for architecture in BUILDERS:
        family = re.sub(r"\d*For.*", "", architecture).lower()
        assert family in listed, architecture


def test_the_pin_of_torch_is_the_same_everywhere() -> None:
    dev = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"]
    (pin,) = [requirement for requirement in dev if requirement.startswith("torch==")]
    version = pin.removeprefix("torch==")
    assert f"TORCH := {version}\n" in (ROOT / "Makefile").read_text()
    assert f"`pip install torch=={version}`" in TEXT["README.md"]
