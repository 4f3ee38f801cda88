from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from octavo.backends import registry
from octavo.backends.registry import BACKENDS, backend_info, create_ops
from octavo.errors import ConfigError


def test_an_unknown_backend_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=f"unknown backend 'tpu'; known: {', '.join(BACKENDS)}"):
        backend_info("tpu")
    with pytest.raises(ConfigError, match="unknown backend 'tpu'"):
        create_ops("tpu", dtype="float32", num_threads=1)


def test_the_reference_says_which_torch_it_runs_on():
    info = backend_info("reference")
    assert info.available
    assert importlib.metadata.version("torch") in info.detail
    assert create_ops("reference", dtype="bfloat16", num_threads=1).dtype == "bfloat16"


def test_without_torch_the_reference_names_the_way_out(monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    info = backend_info("reference")
    assert not info.available
    with pytest.raises(ConfigError, match=r"PyTorch is not installed: pip install 'octavo\[torch\]'"):
        create_ops("reference", dtype="float32", num_threads=1)
