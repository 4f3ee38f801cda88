from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.tiny import EOS_TOKEN_ID, VOCAB_SIZE, save_tiny_llama

from octavo.config import Config, ModelFacts, make_config, resolve
from octavo.engine.llm import LLM
from octavo.errors import (
    CheckpointError,
    ConfigError,
    InvalidRequest,
    LoadError,
    StartError,
    TokenizerError,
    UnsupportedModel,
)
from octavo.machine import Machine
from octavo.request import SamplingParams

GIB = 2**30


def load(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"threads": 1, "kv_cache_memory_bytes": "4MiB", **options})


# -- what ends an answer (LOD-11) ------------------------------------------------------------------------


def forced(llm: LLM, token_id: int, **params: Any) -> tuple[list[int], str | None]:
    sampling = SamplingParams(temperature=0, max_tokens=6, logit_bias={token_id: 100}, **params)
    output = llm.generate(["abc"], sampling, use_tqdm=False)[0].outputs[0]
    return output.token_ids, output.finish_reason


def test_every_eos_ends_the_answer_whoever_names_it(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny", eos_token_id=40)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [41, 42]}))
    llm = load(folder)
    assert set(llm.info.eos_token_ids) == {40, 41, 42, EOS_TOKEN_ID}
    for token_id in (40, 41, 42, EOS_TOKEN_ID):
        assert forced(llm, token_id) == ([token_id], "stop")
        assert forced(llm, token_id, ignore_eos=True) == ([token_id] * 6, "length")
        token_ids, _ = forced(llm, token_id, min_tokens=4)
        assert token_id not in token_ids[:4] and token_ids[4:5] in ([token_id], [])
    assert forced(llm, 50) == ([50] * 6, "length")


def test_an_eos_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=str(VOCAB_SIZE)):
        load(save_tiny_llama(tmp_path / "tiny", eos_token_id=VOCAB_SIZE))


def test_sampling_defaults_come_from_generation_config(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    given = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(given))
    params = load(folder).default_sampling_params()
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.9, 20, 1.1)
    assert load(folder, generation_config="vllm").default_sampling_params() == SamplingParams()


# -- what cannot be served --------------------------------------------------------------------------------


def test_a_broken_checkpoint_ends_with_one_message(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)
    with pytest.raises(LoadError, match="no file or folder"):
        load(tmp_path / "nowhere")


def test_a_missing_parameter_is_named(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_nonfinite_logits_end_one_request_alone(tmp_path: Path) -> None:
    """ATT-11: a token whose embedding is NaN poisons the requests that hold it, and no other."""
    folder = save_tiny_llama(tmp_path / "tiny")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = np.nan
    save_file(tensors, folder / "model.safetensors")
    llm = load(folder)
    alone = llm.generate([[1, 2, 3]], use_tqdm=False)[0].outputs[0]
    good, bad, scored = llm.generate(
        [[1, 2, 3], [1, 7, 3], [7, 2, 3]],
        [replace(llm.default_sampling_params(), seed=1, prompt_logprobs=p) for p in (None, None, 0)],
        use_tqdm=False,
    )
    assert bad.outputs[0].finish_reason == scored.outputs[0].finish_reason == "error"
    assert "not finite" in (bad.outputs[0].error or "")
    assert good.outputs[0].finish_reason in ("length", "stop") and alone.finish_reason in ("length", "stop")
    assert llm._core.stats().kv_usage == 0


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([], {}, "prompt"),
        ([VOCAB_SIZE], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * 512, {}, "prompt"),
        ([1] * 500, {"max_tokens": 13}, "max_tokens"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ([1], {"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
    ],
)
def test_requests_are_checked_before_they_run(
    tmp_path_factory: pytest.TempPathFactory, prompt: list[int], params: dict[str, Any], field: str
) -> None:
    llm = load(save_tiny_llama(tmp_path_factory.mktemp("tiny")))
    with pytest.raises(InvalidRequest) as caught:
        llm.generate([[1, 2], prompt], SamplingParams(**params), use_tqdm=False)
    assert caught.value.param == field
    assert llm.generate([[1, 2]], use_tqdm=False)[0].outputs[0].token_ids


# -- resolve() ---------------------------------------------------------------------------------------------

FACTS = ModelFacts(
    context_len=8192,
    stored_dtype="BF16",
    has_block_types=False,
    num_parameters=10**9,
    num_head_parameters=0,
    stored_bytes=2 * 10**9,
    kv_request_bytes=lambda tokens, chunk, block_size, value_bytes: -(-tokens // block_size) * block_size * 1000,
)
MACHINE = Machine(num_cores=4, memory_total_bytes=16 * GIB, memory_available_bytes=8 * GIB)


def resolved(
    facts: ModelFacts = FACTS, machine: Machine = MACHINE, backends: Sequence[str] = ("reference",), **options: Any
) -> tuple[Config, dict[str, str]]:
    config, decisions = resolve(make_config(options), facts, machine, backends)
    return config, {line.field: line.value for line in decisions}


def test_what_nobody_set_is_decided_and_told() -> None:
    config, told = resolved()
    assert (config.model.dtype, config.model.threads, config.model.max_model_len) == ("bfloat16", 4, 8192)
    assert config.model.backend == "reference" and config.scheduler.max_num_batched_tokens == 512
    assert set(told) == {
        "backend", "dtype", "threads", "max-num-batched-tokens", "kv-cache-memory-bytes", "max-model-len",
    }  # fmt: skip


def test_what_somebody_set_is_kept_and_not_told() -> None:
    options = {
        "dtype": "float32", "threads": 2, "max_model_len": 100, "backend": "reference",
        "kv_cache_memory_bytes": "1GiB", "max_num_batched_tokens": 64,
    }  # fmt: skip
    config, told = resolved(**options)
    assert told == {}
    assert config.cache.kv_cache_memory_bytes == GIB and config.model.max_model_len == 100


QUANTIZED = dataclasses.replace(FACTS, stored_dtype="Q4_1", has_block_types=True, stored_bytes=6 * 10**8)


def test_quantized_weights_stay_integers_on_the_native_backend_and_it_says_how_activations_meet_them() -> None:
    config, told = resolved(QUANTIZED, backends=["native", "reference"])
    model = config.model
    assert (model.backend, model.dtype, model.quantization, model.act_dtype) == ("native", "bfloat16", "auto", "int8")
    assert told["act-dtype"] == "int8"
    config, told = resolved(QUANTIZED, backends=["native"], act_dtype="bf16")
    assert config.model.act_dtype == "bf16" and "act-dtype" not in told
    config, _ = resolved(QUANTIZED, backends=["native"], quantization="none")
    assert config.model.act_dtype == "bf16"
    config, told = resolved(FACTS, backends=["native"], quantization="int4")
    assert config.model.act_dtype == "int8" and told["act-dtype"] == "int8"


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"quantization": "int4"}, {"act_dtype": "int8"}])
def test_integers_are_refused_on_the_reference_backend(options: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="needs the native backend"):
        resolved(backend="reference", backends=["native", "reference"], **options)


def test_the_context_shrinks_to_the_memory_only_when_nobody_asked_for_more() -> None:
    config, told = resolved(kv_cache_memory_bytes=1_000_000)
    assert config.model.max_model_len == 992 and told["max-model-len"] == "992"
    with pytest.raises(ConfigError, match="4096 tokens needs .* Raise --kv-cache-memory-bytes"):
        resolved(kv_cache_memory_bytes=1_000_000, max_model_len=4096)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 9000}, "9000, but the model's context is 8192"),
        ({"kv_cache_memory_bytes": 1}, "Raise --kv-cache-memory-bytes"),
        ({"max_num_seq": 4}, "did you mean max_num_seqs"),
        ({"threads": 0}, "at least 1"),
        ({"dtype": "int3"}, "--dtype"),
    ],
)
def test_mistakes_name_the_way_out(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolved(**options)


def test_without_memory_nothing_starts() -> None:
    with pytest.raises(StartError, match="memory are free"):
        resolved(machine=replace(MACHINE, memory_available_bytes=GIB))


def test_without_chunks_a_step_holds_the_longest_prompt() -> None:
    config, told = resolved(enable_chunked_prefill=False, max_model_len=3000)
    assert config.scheduler.max_num_batched_tokens == 3000 and told["max-num-batched-tokens"] == "3000"


def test_no_more_requests_run_than_a_step_has_tokens_for() -> None:
    """Those behind in order would hold their blocks and never get on."""
    config, told = resolved(max_num_batched_tokens=8, max_num_seqs=64)
    assert config.scheduler.max_num_seqs == 8 and told["max-num-seqs"] == "8"
    assert "max-num-seqs" not in resolved(max_num_batched_tokens=64, max_num_seqs=64)[1]


def test_small_sizes_are_told_in_bytes() -> None:
    with pytest.raises(ConfigError, match="needs 16000 bytes of KV cache, but it has 7 bytes"):
        resolved(kv_cache_memory_bytes=7, max_model_len=10)


def test_a_chat_template_that_does_not_compile_ends_the_start(tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% for message in messages %}")
    with pytest.raises(TokenizerError, match="line 1"):
        load(save_tiny_llama(tmp_path / "tiny"), chat_template=str(template))
