"""Shared by all tests: the real models where they have been pulled, and a real server.

A test that uses a model is marked `model`, and skipped with the command that fetches it where it is absent.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from octavo.config import ENVIRONMENT, cache_dir
from octavo.loader.catalogue import CATALOGUE, model_path

MODEL_FIXTURES = ("smollm2_path", "gemma3_path", "smollm2_tokenizer_json")

Serve = Callable[..., AbstractContextManager[str]]


def pytest_configure() -> None:
    """Nothing downloads, and the user's own settings do not reach the tests; the cache folder alone is shared."""
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    for name in set(ENVIRONMENT) - {"OCTAVO_CACHE"}:
        os.environ.pop(name, None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not set(MODEL_FIXTURES).isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker("model")


def pulled(name: str) -> Path:
    path = model_path(CATALOGUE[name], cache_dir())
    if not path.is_file():
        pytest.skip(f"the model is not here: octavo pull {name}")
    return path


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return pulled("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def gemma3_path() -> Path:
    """Gemma 3 270M, Q4_K_M, with sliding windows."""
    return pulled("gemma3-270m")


@pytest.fixture(scope="session")
def smollm2_tokenizer_json(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2's tokenizer as a file for other programs."""
    from octavo.loader.gguf import GgufFile
    from octavo.loader.gguf_tokenizer import build_tokenizer

    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    build_tokenizer(GgufFile.open(smollm2_path).metadata).tokenizer.save(str(path))
    return path


@pytest.fixture(scope="session")
def serve() -> Serve:
    """`with serve(model, *flags) as url`: `octavo serve` in a process of its own, ready, and ended cleanly after."""
    return serving


@contextlib.contextmanager
def serving(model: str | Path, *flags: str, ready_within_s: float = 120) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "octavo.cli", "serve", str(model), "--port", str(port), *flags]
    with subprocess.Popen(command) as process:
        try:
            wait_ready(process, port, time.monotonic() + ready_within_s)
            yield f"http://127.0.0.1:{port}"
        except BaseException:
            process.kill()
            raise
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, "the server did not end cleanly"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_ready(process: subprocess.Popen[bytes], port: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode} before it was ready"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")  # the one route that needs no key
            if connection.getresponse().status == 200:
                return
        time.sleep(0.05)
    raise AssertionError("the server was not ready in time")
