"""The thread team, through a C++ program: tiny regions, late workers, errors, forks, teams that come and go."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"


def test_the_team_keeps_its_promises(tmp_path: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no C++ compiler to build the test with, or not Linux")
    sources = [str(HERE / "team_test.cpp"), str(CSRC / "core/team.cpp")]
    command = [compiler, "-std=c++20", "-O1", "-pthread", f"-I{CSRC}", *sources, "-o", str(tmp_path / "team_test")]
    subprocess.run(command, check=True, timeout=120)
    found = subprocess.run([str(tmp_path / "team_test")], capture_output=True, text=True, timeout=120, check=False)
    assert (found.returncode, found.stdout) == (0, "ok\n"), found.stderr
