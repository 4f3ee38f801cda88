"""Every architecture through the whole engine, along the paths a request can take, against `transformers`.

A mechanism that must not change what a model says adds a row to PATHS.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.golden.architectures import ARCHITECTURES, NUM_GENERATED, VOCAB_SIZE, GoldenModel, Maker
from tokenizers import Tokenizer, models

from octavo.engine.llm import LLM, RequestOutput
from octavo.kv_cache.cache_spec import LayerKv, make_cache_spec
from octavo.models.registry import build_spec
from octavo.request import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=NUM_GENERATED, ignore_eos=True)


def outputs_of(found: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in found]


def all_together(llm: LLM, model: GoldenModel) -> list[list[int]]:
    return outputs_of(llm.generate(model.prompts, GREEDY, use_tqdm=False))


def one_by_one(llm: LLM, model: GoldenModel) -> list[list[int]]:
    return [outputs_of(llm.generate([prompt], GREEDY, use_tqdm=False))[0] for prompt in model.prompts]


def after_a_hit(llm: LLM, model: GoldenModel) -> list[list[int]]:
    """The same prompts, then their continuations: both find their prefixes."""
    first = all_together(llm, model)
    again = llm.generate(model.prompts, GREEDY, use_tqdm=False)
    assert all(output.num_cached_tokens > 0 for output in again)
    longer = [prompt + tokens[:9] for prompt, tokens in zip(model.prompts, first, strict=True)]
    rest = SamplingParams(temperature=0, max_tokens=NUM_GENERATED - 9, ignore_eos=True)
    continued = llm.generate(longer, rest, use_tqdm=False)
    assert all(output.num_cached_tokens > 0 for output in continued)
    for tokens, output in zip(first, continued, strict=True):
        assert tokens[9:] == output.outputs[0].token_ids
    return outputs_of(again)


def with_choices(llm: LLM, model: GoldenModel) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=NUM_GENERATED, ignore_eos=True, n=3)
    found = llm.generate(model.prompts, params, use_tqdm=False)
    for output in found:
        assert output.outputs[0].token_ids == output.outputs[1].token_ids == output.outputs[2].token_ids
    return outputs_of(found)


def with_preemption(llm: LLM, model: GoldenModel) -> list[list[int]]:
    """Many short prompts are admitted together and grow until some must give way."""
    short = [prompt[:2] for prompt in model.prompts]
    found = outputs_of(llm.generate(short * 4 + model.prompts, GREEDY, use_tqdm=False))
    assert llm._core.stats().num_preemptions > 0
    for i, tokens in enumerate(found[:-3]):
        model.check_greedy(short[i % 3], tokens)
    return found[-3:]


@dataclass(frozen=True)
class Path:
    run: Callable[[LLM, GoldenModel], list[list[int]]]
    options: dict[str, Any] = field(default_factory=dict)
    is_short_of_memory: bool = False


PATHS = {
    "whole": Path(one_by_one, {"enable_prefix_caching": False, "enable_chunked_prefill": False}),
    "chunked": Path(one_by_one, {"max_num_batched_tokens": 7, "max_num_seqs": 7}),
    "batched": Path(all_together, {"max_num_batched_tokens": 32}),
    "prefix hit": Path(after_a_hit, {"block_size": 4}),
    "n > 1": Path(with_choices, {"max_num_batched_tokens": 24}),
    "preempted": Path(with_preemption, {"block_size": 1, "max_num_batched_tokens": 24}, is_short_of_memory=True),
    "static": Path(all_together, {"batching": "static"}),
    "eager": Path(all_together, {"enforce_eager": True, "max_num_batched_tokens": 32}),
    "unfused": Path(all_together, {"fusion": "off"}),
    "portable kernels": Path(all_together, {"isa": "portable"}),
    "two threads": Path(all_together, {"threads": 2}),
    "reference": Path(all_together, {"backend": "reference", "max_num_batched_tokens": 32}),
}


def engine(model: GoldenModel, path: Path) -> LLM:
    # Token ids go in and come out; the engine only has to know that they are tokens.
    words = {f"t{i}": i for i in range(VOCAB_SIZE)}
    Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(model.path / "tokenizer.json"))
    spec = build_spec(json.loads((model.path / "config.json").read_text()))
    max_model_len = min(model.max_model_len, spec.max_context)
    options = {"threads": 1, "max_model_len": max_model_len, "kv_cache_memory_bytes": "32MiB", **path.options}
    if path.is_short_of_memory:
        layers = [LayerKv(a.num_kv_heads, a.head_dim, a.window) for a in (layer.attention for layer in spec.layers)]
        kv = make_cache_spec(layers, block_size=options["block_size"], dtype_bytes=4)
        most = kv.max_blocks_per_request(max_model_len, options["max_num_batched_tokens"])
        options["kv_cache_memory_bytes"] = most * kv.bytes_per_block  # for one request of the longest length
    return LLM(str(model.path), **options)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_are_those_of_transformers(golden_model: Maker, name: str, path: str) -> None:
    model = golden_model(name)
    llm = engine(model, PATHS[path])
    found = PATHS[path].run(llm, model)
    for prompt, tokens in zip(model.prompts, found, strict=True):
        assert len(tokens) == NUM_GENERATED
        model.check_greedy(prompt, tokens)
    assert llm._core.stats().kv_usage == 0
