"""The native backend's determinism as a property: hundreds of random interleavings, each request as it is alone.

Whatever shares the steps with a request, however they are cut, and whoever computes them (threads, instruction set,
plan or eager, fused or not), its token ids and the bits of its log-probabilities are those of the request alone.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.golden.architectures import ARCHITECTURES, VOCAB_SIZE, random_model
from tokenizers import Tokenizer, models

from octavo import _native
from octavo.backends.native.fusion import PASSES
from octavo.engine.llm import LLM, RequestOutput
from octavo.engine.output import ChoiceOutput
from octavo.kv_cache.cache_spec import LayerKv, make_cache_spec
from octavo.models.registry import build_spec
from octavo.request import SamplingParams

MAX_LEN = 64
NUM_ENGINES = 18  # of each variant, each with options of its own
NUM_ROUNDS = 3  # interleavings of each engine
POOL_SIZE = 16  # requests of each variant, from which the interleavings draw


@dataclass(frozen=True)
class Variant:
    architecture: str
    dtype: str
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype_bytes(self) -> int:
        return 4 if self.dtype == "float32" else 2


INTEGERS = {"act_dtype": "int8"}
VARIANTS = {
    "llama float32": Variant("llama-mha-biases-tied", "float32"),
    "gemma2 bfloat16": Variant("gemma2", "bfloat16"),
    "longrope bfloat16": Variant("phi3-longrope", "bfloat16"),
    "gemma2 int8": Variant("gemma2", "bfloat16", {"quantization": "int8", **INTEGERS}),
    "llama int4": Variant("llama-mha-biases-tied", "float32", {"quantization": "int4", **INTEGERS}),
    "starcoder2 int4 float16": Variant("starcoder2", "float16", {"quantization": "int4", **INTEGERS}),
}


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    params: SamplingParams


def some_request(rng: random.Random, shared: list[int]) -> Asked:
    prefix = shared[: rng.choice((0, 0, 5, 17, 32))]
    prompt = prefix + [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 2, 3, 9, 15, 16)))]
    options: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.8, 1.5)),
        "seed": rng.randrange(1000),
        "max_tokens": rng.randint(1, min(14, MAX_LEN - len(prompt))),
        "n": rng.choice((1, 1, 1, 2, 3)),
        "ignore_eos": True,
    }
    if rng.random() < 0.5:
        options["logprobs"] = rng.randint(0, 3)
    if rng.random() < 0.2:
        options["prompt_logprobs"] = rng.randint(0, 2)
    if rng.random() < 0.2:
        options["top_k"] = rng.randint(1, 20)
    return Asked(prompt, SamplingParams(**options))


def some_options(rng: random.Random, path: Path, variant: Variant) -> dict[str, Any]:
    budget = rng.choice((1, 3, 7, 16, 33, 64))
    block_size = rng.choice((1, 3, 4, 16, 20))
    fusion = rng.choice(("on", "off", rng.choice(list(PASSES)), ", ".join(rng.sample(list(PASSES), 2))))
    options: dict[str, Any] = {
        "isa": rng.choice(_native.usable_isas()),
        "threads": rng.choice((1, 1, 2)),
        "enforce_eager": rng.random() < 0.25,
        "fusion": fusion,
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(budget, rng.choice((1, 2, 5, 16))),
        "block_size": block_size,
        "enable_prefix_caching": rng.random() < 0.75,
    }
    if rng.random() < 0.15:
        options |= {"enable_chunked_prefill": False, "max_num_batched_tokens": MAX_LEN}
    if rng.random() < 0.5:  # for little more than one request of the longest length: some must give way
        spec = build_spec(json.loads((path / "config.json").read_text()))
        layers = [LayerKv(a.num_kv_heads, a.head_dim, a.window) for a in (layer.attention for layer in spec.layers)]
        kv = make_cache_spec(layers, block_size=block_size, dtype_bytes=variant.dtype_bytes)
        most = kv.max_blocks_per_request(MAX_LEN, options["max_num_batched_tokens"])
        options["kv_cache_memory_bytes"] = (most + 1) * kv.bytes_per_block
    return options


def make_llm(path: Path, variant: Variant, options: dict[str, Any]) -> LLM:
    base: dict[str, Any] = {
        "backend": "native",
        "dtype": variant.dtype,
        "threads": 1,
        "max_model_len": MAX_LEN,
        "kv_cache_memory_bytes": "4MiB",
        "repack_cache": False,
        **variant.options,
    }
    return LLM(str(path), **(base | options))


def interleaved(llm: LLM, asked: list[Asked], rng: random.Random) -> list[RequestOutput]:
    """The answers when requests arrive at random steps, and neighbours come and are aborted on the way."""
    waiting = list(enumerate(asked))
    rng.shuffle(waiting)
    found: dict[int, RequestOutput] = {}
    open_choices: dict[int, tuple[RequestOutput, ChoiceOutput]] = {}
    neighbours: list[int] = []
    while waiting or open_choices:
        for _ in range(rng.choice((0, 0, 1, 3)) if open_choices else 1):
            if waiting:
                i, one = waiting.pop()
                found[i] = llm._add(llm._request(one.prompt, one.params, 0), open_choices)
        if rng.random() < 0.1:
            before = set(open_choices)
            noise = Asked([rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))], SamplingParams(max_tokens=30))
            llm._add(llm._request(noise.prompt, noise.params, 0), open_choices)
            neighbours += set(open_choices) - before
        if neighbours and rng.random() < 0.3:
            neighbour = neighbours.pop()
            llm._core.abort((neighbour,))
            open_choices.pop(neighbour, None)
        if open_choices:
            llm._step(open_choices)
    return [found[i] for i in range(len(asked))]


def answer(output: RequestOutput) -> str:
    """What must not change, to the bit: repr() tells every float from every other."""
    assert all(choice.finish_reason == "length" for choice in output.outputs), [c.error for c in output.outputs]
    return repr((output.prompt_logprobs, [(c.token_ids, c.logprobs) for c in output.outputs]))


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    found = {}
    for name in {variant.architecture for variant in VARIANTS.values()}:
        found[name] = folder = tmp_path_factory.mktemp(name)
        random_model(ARCHITECTURES[name].config(), seed=1).save_pretrained(folder)
        words = {f"t{i}": i for i in range(VOCAB_SIZE)}
        Tokenizer(models.WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))
    yield found


@pytest.mark.parametrize("name", VARIANTS)
def test_a_request_is_answered_in_any_company_as_it_is_alone(name: str, paths: dict[str, Path]) -> None:
    variant = VARIANTS[name]
    path = paths[variant.architecture]
    rng = random.Random(name)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(32)]
    pool = [some_request(rng, shared) for _ in range(POOL_SIZE)]
    llm = make_llm(path, variant, {"enable_prefix_caching": False, "enforce_eager": True, "fusion": "off"})
    alone = [answer(llm.generate([one.prompt], one.params, use_tqdm=False)[0]) for one in pool]
    assert len(set(alone)) == POOL_SIZE
    seen: Counter[str] = Counter()
    for engine in range(NUM_ENGINES):
        options = some_options(rng, path, variant)
        llm = make_llm(path, variant, options)
        for round_ in range(NUM_ROUNDS):
            chosen = rng.choices(range(POOL_SIZE), k=rng.randint(2, 8))
            outputs = interleaved(llm, [pool[i] for i in chosen], rng)
            for i, output in zip(chosen, outputs, strict=True):
                assert answer(output) == alone[i], f"request {i} in round {round_} of engine {engine}: {options}"
                seen["prefix hits"] += output.num_cached_tokens > 0
        stats = llm._core.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
        seen["preemptions"] += stats.num_preemptions
        seen["eager"] += options["enforce_eager"]
        seen["two threads"] += options["threads"] == 2
        seen["unfused"] += options["fusion"] == "off"
    assert min(seen[way] for way in ("prefix hits", "preemptions", "eager", "two threads", "unfused")) > 0, seen
