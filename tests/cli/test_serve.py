"""How `octavo serve` starts: what its two processes import, and what it prints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from tests.conftest import free_port, wait_ready
from tests.tiny import save_tiny_llama

FLAGS = ("--served-model-name", "tiny", "--threads", "1", "--max-model-len", "64", "--kv-cache-memory-bytes", "1MiB")


@pytest.fixture(scope="module")
def stderr(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a server and its engine, which list their imports, after one answer."""
    folder = tmp_path_factory.mktemp("start")
    model, port = save_tiny_llama(folder / "tiny"), free_port()
    command = [sys.executable, "-m", "octavo.cli", "serve", str(model), "--port", str(port), "--startup-report", *FLAGS]
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1", "OCTAVO_CACHE": str(folder / "cache")}
    with (folder / "stderr").open("wb") as file, subprocess.Popen(command, stderr=file, env=env) as process:
        try:
            wait_ready(process, port, float("inf"))
            body = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
            with urllib.request.urlopen(request, timeout=60) as response:
                assert json.load(response)["usage"]["completion_tokens"] == 2
        except BaseException:
            process.kill()
            raise
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    return (folder / "stderr").read_text()


def test_neither_process_imports_torch_or_transformers(stderr: str) -> None:
    imported = set(re.findall(r"^import time:.*\|\s+(\S+)$", stderr, re.MULTILINE))
    assert {"octavo.server.app", "octavo.engine.loop", "octavo._native"} <= imported, "both processes are seen"
    assert not {name for name in imported if name.partition(".")[0] in ("torch", "transformers")}


def test_the_startup_report_names_the_phases_of_both_processes(stderr: str) -> None:
    lines = re.findall(r"^startup (\w+): (.+?) +(\d+\.\d{3}) s +(\d+\.\d{3}) s of CPU$", stderr, re.MULTILINE)
    phases = {name: [phase for process, phase, *_ in lines if process == name] for name in ("server", "engine")}
    assert phases["server"][0] == "interpreter, flags" and phases["server"][-1] == "total"
    for phase in ("imports", "opening the model", "loading weights", "making the plan", "first step"):
        assert phase in phases["engine"]
    for name in phases:
        *parts, total = [float(wall_s) for process, _, wall_s, _ in lines if process == name]
        assert total > 0 and abs(sum(parts) - total) < 0.002 * len(parts)


def test_what_was_decided_about_the_weights_is_printed(stderr: str) -> None:
    assert re.search(r"^  dtype = float32  \(the checkpoint stores F32\)$", stderr, re.MULTILINE)
    assert re.search(r"^  weights: [0-9.]+ MiB \(.*\), packed in [0-9.]+ s$", stderr, re.MULTILINE)


def test_the_server_process_needs_neither_numpy_nor_the_extension(tmp_path: Path) -> None:
    script = "import sys, octavo.cli.serve, octavo.engine.async_engine, octavo.engine.transport, octavo.server.run\n"
    script += "import octavo.engine.model_files, octavo.engine.tokenizer\n"
    script += "print([name for name in ('numpy', 'ml_dtypes', 'octavo._native', 'torch') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr
