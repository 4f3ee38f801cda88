from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.server.harness import FakeEngine, Running, build_tokenizer, configured, running

from octavo.engine.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return build_tokenizer()


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    """A server that all tests of a file share; it must survive each of them."""
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config)) as it:
        yield it


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
