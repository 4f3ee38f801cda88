"""What the native backend cannot do is said with the value and the way out, before anything runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.tiny import save_tiny_llama

from octavo import _native
from octavo.backends.native.ops import MAX_HEAD_DIM, NativeOps
from octavo.engine.llm import LLM
from octavo.errors import ConfigError, UnsupportedModel

KV = {"block_size": 16, "layers_per_block": 2, "num_kv_heads": 2}


def test_heads_beyond_the_kernels_room_are_refused() -> None:
    ops = NativeOps(dtype="float32", num_threads=1)
    ops.kv_cache(num_blocks=2, head_dim=MAX_HEAD_DIM, **KV)
    with pytest.raises(UnsupportedModel, match=f"heads of 272 values.*up to {MAX_HEAD_DIM}.*--backend reference"):
        ops.kv_cache(num_blocks=2, head_dim=272, **KV)
    with pytest.raises(ValueError, match="heads of 272 values"):
        _native.KvArena(
            dtype="float32", num_blocks=2, block_size=16, num_layers=2, num_kv_heads=2, head_dim=MAX_HEAD_DIM + 16
        )


def test_a_kv_cache_that_the_system_does_not_give_is_a_config_error() -> None:
    ops = NativeOps(dtype="float32", num_threads=1)
    with pytest.raises(ConfigError, match="KV cache of 1000000000000 blocks.*--kv-cache-memory-bytes"):
        ops.kv_cache(num_blocks=10**12, head_dim=64, **KV)


def test_threads_beyond_the_limit_or_that_cannot_be_started_are_a_config_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ConfigError, match="--threads is 100000; .* at most 1024"):
        NativeOps(dtype="float32", num_threads=100_000)

    def refuse(num_threads: int) -> None:
        raise RuntimeError("Resource temporarily unavailable")

    monkeypatch.setattr(_native, "Team", refuse)
    with pytest.raises(ConfigError, match="--threads is 900: they cannot be started .*Lower it"):
        NativeOps(dtype="float32", num_threads=900)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fusion": "nonsense"}, "no pass 'nonsense'; it is on, off, or some of gate"),
        ({"quantization": "int4", "backend": "reference"}, "int4 needs the native backend"),
        ({"act_dtype": "int8", "backend": "reference"}, "int8 needs the native backend"),
        ({"isa": "sse9"}, "isa is sse9; it must be one of auto, portable"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    model = save_tiny_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        LLM(str(model), threads=1, max_model_len=64, kv_cache_memory_bytes="1MiB", repack_cache=False, **options)


def test_an_instruction_set_that_this_processor_lacks_is_refused(tmp_path: Path) -> None:
    missing = [isa for isa in ("avx2", "avx512", "amx") if isa not in _native.usable_isas()]
    if not missing:
        pytest.skip("this processor has every instruction set")
    model = save_tiny_llama(tmp_path / "model")
    with pytest.raises(ConfigError, match=f"--isa {missing[0]}: this processor runs portable"):
        LLM(str(model), threads=1, isa=missing[0], max_model_len=64, kv_cache_memory_bytes="1MiB", repack_cache=False)


def test_more_rows_of_logits_than_the_step_has_room_for_are_refused() -> None:
    plan = _native.Plan("auto", _native.Team(1), "float32")
    tokens, picked = (plan.slot(8, "tokens"), 0, 8), (plan.slot(8, "logits_rows"), 0, 8)
    plan.pick_rows(x=tokens, y=picked)
    plan.keep(tokens[0])
    plan.set_rows(2)
    plan.reserve()
    plan.run_rows(0, 1, np.array([1, 0], np.int32), None)
    with pytest.raises(ValueError, match="more rows of logits than the step has tokens"):
        plan.run_rows(0, 1, np.zeros(3, np.int32), None)
    with pytest.raises(IndexError, match="row out of range"):
        plan.run_rows(0, 1, np.array([2], np.int32), None)
