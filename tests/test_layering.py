"""Imports point down only. The layers below are the architecture; see docs/architecture.md.

Function-local imports count, those under `if TYPE_CHECKING:` do not.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "octavo"
SOURCE = Path(__file__).parents[1] / "src" / PACKAGE

# Lowest first. Folders of one layer do not import each other, except the modules of layer 0.
LAYERS: tuple[frozenset[str], ...] = tuple(
    frozenset(names.split())
    for names in (
        "errors request batch config options machine metrics",
        "backends distributed",
        "quantization kv_cache",
        "loader",
        "models sampling",
        "speculative",
        "worker scheduler",
        "engine",
        "server bench",
        "cli",
    )
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}

# Who may import what else: a module or folder of the package, or a distribution.
ONLY_IN = {
    "torch": ("backends/reference",),
    "_native": ("backends/native",),
}
NOT_IN = {
    "numpy": ("errors", "request", "batch", "config", "options", "metrics", "kv_cache", "scheduler", "server", "cli"),
    "transformers": ("",),
}


@dataclass(frozen=True)
class Import:
    line: int
    target: str  # dotted; absolute


def imports_of(source: str, module: str, *, is_package: bool) -> Iterator[Import]:
    """Every import statement of a file, as absolute dotted names; `from a import b` gives both a and a.b."""
    tree = ast.parse(source)
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*above, base] if base else above)
            yield Import(node.lineno, base)
            for alias in node.names:
                yield Import(node.lineno, f"{base}.{alias.name}")


def violations(root: Path) -> list[str]:
    """One line for each import that breaks a rule, as `file:line: why`."""
    found: dict[str, None] = {}  # ordered, without repeats
    for path, module in modules_of(root):
        relative = path.relative_to(root)
        here = relative.parts[0].removesuffix(".py")
        if here == "__init__":
            continue
        if here not in RANK:
            found[f"{relative}: {here!r} has no layer"] = None
            continue
        for item in imports_of(path.read_text(), module, is_package=path.name == "__init__.py"):
            for why in reasons(relative, here, item.target):
                found[f"{relative}:{item.line}: {why}"] = None
    return list(found)


def reasons(relative: Path, here: str, target: str) -> Iterator[str]:
    parts = target.split(".")
    inside = parts[0] == PACKAGE
    name = (parts[1] if len(parts) > 1 else "") if inside else parts[0]
    place = relative.with_suffix("").as_posix()
    if name in ONLY_IN and not any(is_within(place, allowed) for allowed in ONLY_IN[name]):
        yield f"{name} is imported by {', '.join(ONLY_IN[name])} only"
    if name in NOT_IN and any(is_within(place, refused) for refused in NOT_IN[name]):
        yield f"{name} is not imported here"
    if inside and name in RANK and name != here:
        same_layer = RANK[name] == RANK[here]
        if RANK[name] > RANK[here] or (same_layer and RANK[here] > 0):
            yield f"{here} (layer {RANK[here]}) imports {name} (layer {RANK[name]})"


def is_within(place: str, folder: str) -> bool:
    return not folder or place == folder or place.startswith(folder + "/")


def modules_of(root: Path) -> list[tuple[Path, str]]:
    named = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        named.append((path, ".".join([PACKAGE, *(part for part in parts if part != "__init__")])))
    return named


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module -> the modules of the package that it imports itself."""
    modules = modules_of(root)
    known = {module for _, module in modules}
    graph: dict[str, set[str]] = {}
    for path, module in modules:
        targets = {item.target for item in imports_of(path.read_text(), module, is_package=path.name == "__init__.py")}
        graph[module] = (targets & known) - {module, PACKAGE}
    return graph


def test_imports_point_down_only() -> None:
    assert violations(SOURCE) == []


def test_no_module_imports_itself_through_others() -> None:
    graphlib.TopologicalSorter(import_graph(SOURCE)).prepare()  # raises CycleError naming the cycle


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("scheduler/a.py", "from octavo.engine.loop import Loop", "scheduler (layer 6) imports engine (layer 7)"),
        ("scheduler/a.py", "import octavo.worker", "scheduler (layer 6) imports worker (layer 6)"),
        ("request.py", "def f():\n    from octavo import engine", "request (layer 0) imports engine (layer 7)"),
        ("kv_cache/a.py", "from ..models.registry import x", "kv_cache (layer 2) imports models (layer 4)"),
        ("kv_cache/__init__.py", "from ..cli import main", "kv_cache (layer 2) imports cli (layer 9)"),
        ("worker/a.py", "def f():\n    import torch.nn", "torch is imported by backends/reference only"),
        ("backends/referenced.py", "import torch", "torch is imported by backends/reference only"),
        ("engine/a.py", "from octavo import _native", "_native is imported by backends/native only"),
        ("scheduler/a.py", "import numpy as np", "numpy is not imported here"),
        ("batch.py", "from numpy import ndarray", "numpy is not imported here"),
        ("loader/a.py", "from transformers import AutoTokenizer", "transformers is not imported here"),
        ("utils/a.py", "", "'utils' has no layer"),
    ],
)
def test_the_checker_catches(tmp_path: Path, name: str, text: str, why: str) -> None:
    write(tmp_path, {name: text})
    (found,) = violations(tmp_path)
    assert found.startswith(name) and found.endswith(why)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("engine/a.py", "from octavo.scheduler.scheduler import Scheduler\nfrom octavo import __version__"),
        ("batch.py", "from octavo.request import SamplingParams"),
        (
            "scheduler/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from octavo.engine.loop import Loop",
        ),
        ("backends/reference/a.py", "import torch"),
        ("backends/native/a.py", "from octavo import _native"),
        ("worker/a.py", "import numpy as np\nfrom .b import c"),
    ],
)
def test_the_checker_allows(tmp_path: Path, name: str, text: str) -> None:
    write(tmp_path, {name: text})
    assert violations(tmp_path) == []


def test_the_checker_sees_a_cycle(tmp_path: Path) -> None:
    write(tmp_path, {"engine/a.py": "from octavo.engine import b", "engine/b.py": "from octavo.engine.a import c"})
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(import_graph(tmp_path)).prepare()
