"""The same answer always: a request's tokens and logprobs, bit for bit, whatever shares the engine with it.

The bits of PyTorch's products are known for AVX2 with MKL; elsewhere logprobs are compared within 1e-4.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import VOCAB_SIZE, save_tiny_llama

from octavo.config import make_config
from octavo.engine.build import build_engine
from octavo.engine.channel import QueueChannel
from octavo.engine.events import ChoiceDelta, TokenDetail
from octavo.engine.llm import LLM, RequestOutput
from octavo.engine.loop import EngineLoop
from octavo.engine.messages import AbortRequests, AddRequest, StepReport, Stop
from octavo.engine.model_files import load_model_tokenizer
from octavo.engine.output import ChoiceOutput
from octavo.request import SamplingParams

NUM_REQUESTS = 24
BITS_ARE_KNOWN = torch.backends.cpu.get_cpu_capability() == "AVX2" and torch.backends.mkl.is_available()
WORDS = ["Schiff ", "日本語", "🦚🇨🇿", "abc ", "def f(x):\n", "  ", "ěščř ", "1, 2, 3, "]


def some_params(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0, 1.5)),
        "seed": rng.randrange(1000),
        "max_tokens": rng.randint(1, 40),
        "n": rng.choice((1, 1, 1, 2, 3)),
    }
    for name, value in {
        "top_k": rng.randint(1, 20),
        "top_p": rng.random(),
        "min_p": rng.random() / 4,
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.7, 1.6),
        "logprobs": rng.randint(0, 4),
        "prompt_logprobs": rng.randint(0, 3),
        "logit_bias": {rng.randrange(VOCAB_SIZE): rng.uniform(-5, 5)},
        "min_tokens": min(5, options["max_tokens"]),
        "ignore_eos": True,
        "stop": [rng.choice(("a", "\ufffd", "e", "x"))],
        "stop_token_ids": [rng.randrange(VOCAB_SIZE)],
        "bad_words": [rng.choice("abcdefgh")],
        "allowed_token_ids": sorted(rng.sample(range(VOCAB_SIZE), 200)),
    }.items():
        if rng.random() < 0.2:
            options[name] = value
    return SamplingParams(**options)


def workload(seed: int) -> tuple[list[str], list[SamplingParams]]:
    """Prompts of 1 to about 120 tokens, some sharing prefixes, with all kinds of parameters."""
    rng = random.Random(seed)
    shared = "".join(rng.choices(WORDS, k=8))
    prompts = [
        rng.choice(("", "", shared, shared[:30])) + "".join(rng.choices(WORDS, k=rng.randint(1, 12)))
        for _ in range(NUM_REQUESTS)
    ]
    return prompts, [some_params(rng) for _ in prompts]


def together(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def alone(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    return [llm.generate([prompt], each, use_tqdm=False)[0] for prompt, each in zip(prompts, params, strict=True)]


def twice(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    together(llm, prompts, params)
    found = together(llm, prompts, params)
    assert sum(output.num_cached_tokens for output in found) > 0, "nothing was cached"
    return found


def backwards(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    return together(llm, prompts[::-1], params[::-1])[::-1]


def assert_same(found: list[TokenDetail] | None, wanted: list[TokenDetail] | None) -> None:
    if BITS_ARE_KNOWN or found is None or wanted is None:
        assert found == wanted
        return
    assert [detail.token_id for detail in found] == [detail.token_id for detail in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


Way = Callable[[LLM, list[str], list[SamplingParams]], list[RequestOutput]]
BASE = {"threads": 1, "max_model_len": 256, "max_num_batched_tokens": 256, "kv_cache_memory_bytes": "16MiB"}
WAYS: dict[str, tuple[dict[str, Any], Way]] = {
    "together": ({}, together),
    "in another order": ({}, backwards),
    "in chunks of 7": ({"max_num_batched_tokens": 7, "max_num_seqs": 7}, together),
    "one token a step": ({"max_num_batched_tokens": 1, "max_num_seqs": 3}, together),
    "prompts whole": ({"enable_chunked_prefill": False}, together),
    "prefix hits": ({}, twice),
    "prefix hits in chunks": ({"max_num_batched_tokens": 13, "max_num_seqs": 5}, twice),
    "preempted": ({"kv_cache_memory_bytes": "66KiB", "block_size": 4}, together),
    "blocks of 1": ({"block_size": 1}, together),
    "blocks of 64": ({"block_size": 64}, twice),
    "static batching": ({"batching": "static", "max_num_seqs": 4}, together),
    "by priority": ({"scheduling_policy": "priority", "max_num_seqs": 4}, together),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: Path) -> Iterator[Callable[[int], list[RequestOutput]]]:
    """Each request alone, its prompt whole, nothing cached, in one engine without forks."""
    llm = LLM(str(model), **BASE, enable_prefix_caching=False, max_num_seqs=4)
    found: dict[int, list[RequestOutput]] = {}

    def of(seed: int) -> list[RequestOutput]:
        if seed not in found:
            found[seed] = alone(llm, *workload(seed))
        return found[seed]

    yield of


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_answer_does_not_depend_on_the_way(
    way: str, seed: int, model: Path, expected: Callable[[int], list[RequestOutput]]
) -> None:
    options, run = WAYS[way]
    llm = LLM(str(model), **{**BASE, **options})
    found = run(llm, *workload(seed))
    stats = llm._core.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_usage) == (0, 0, 0.0)
    if way == "preempted":
        assert stats.num_preemptions > 2
    for output, wanted in zip(found, expected(seed), strict=True):
        assert_same(output.prompt_logprobs, wanted.prompt_logprobs)
        for choice, wanted_choice in zip(output.outputs, wanted.outputs, strict=True):
            assert_same(choice.logprobs, wanted_choice.logprobs)
            assert replace(choice, logprobs=None) == replace(wanted_choice, logprobs=None)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 9, "kv_cache_memory_bytes": "66KiB", "block_size": 4}]
)
def test_planning_a_step_ahead_changes_nothing(
    options: dict[str, Any], seed: int, model: Path, expected: Callable[[int], list[RequestOutput]]
) -> None:
    prompts, params = workload(seed)
    config = make_config({"model": str(model), **BASE, **options})
    tokenizer = load_model_tokenizer(config)
    core, _ = build_engine(config)
    texts: dict[int, list[ChoiceDelta]] = {}
    choices: dict[int, ChoiceOutput] = {}
    reports: queue.SimpleQueue[StepReport] = queue.SimpleQueue()
    channel = QueueChannel(reports.put)  # type: ignore[arg-type]
    for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        token_ids = tuple(tokenizer.encode(prompt))
        for choice in range(sampling.n):
            choices[10 * i + choice] = ChoiceOutput(choice, tokenizer, token_ids, sampling)
        bad_words = tokenizer.bad_words_token_ids(sampling.bad_words)
        channel.post(AddRequest(10 * i, token_ids, sampling, 0.0, bad_words_token_ids=bad_words))
    loop = threading.Thread(target=EngineLoop(core, channel, overlap="always").run)
    loop.start()
    while any(not choice.is_finished for choice in choices.values()):
        for update in reports.get(timeout=60).updates:
            output = choices[update.request_id]
            if not output.is_finished and (delta := output.push(update)) is not None:
                texts.setdefault(update.request_id, []).append(delta)
                if output.is_finished and update.finish_reason is None:
                    channel.post(AbortRequests((update.request_id,)))
    channel.post(Stop())
    loop.join(60)
    assert not loop.is_alive() and core.stats().kv_usage == 0
    for i, wanted in enumerate(expected(seed)):
        for choice, output in enumerate(wanted.outputs):
            deltas = texts[10 * i + choice]
            assert "".join(delta.text for delta in deltas) == output.text
            assert [token_id for delta in deltas for token_id in delta.token_ids] == output.token_ids
            assert_same([detail for delta in deltas for detail in delta.logprobs], output.logprobs or [])
            assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (output.finish_reason, output.stop_reason)


def test_choices_differ_but_not_from_one_run_to_the_next(model: Path) -> None:
    llm = LLM(str(model), **BASE)
    ask = partial(llm.generate, ["n choices"], SamplingParams(n=5, seed=7, max_tokens=20), use_tqdm=False)
    first, second = ask()[0], ask()[0]
    assert len({output.text for output in first.outputs}) == 5
    assert [output.token_ids for output in first.outputs] == [output.token_ids for output in second.outputs]


def test_a_choice_is_the_same_with_more_siblings(model: Path) -> None:
    llm = LLM(str(model), **BASE)
    params = [SamplingParams(n=n, seed=7, max_tokens=20) for n in (1, 2, 5)]
    one, two, five = (llm.generate(["siblings"], each, use_tqdm=False)[0].outputs for each in params)
    assert one == two[:1] == five[:1] and two == five[:2]


def test_an_aborted_neighbour_leaves_no_trace(model: Path) -> None:
    """SCH-05: rows come and go while others run with masks, seeds and biases of their own."""
    prompts, params = workload(3)
    llm = LLM(str(model), **BASE)
    wanted = together(llm, prompts, params)
    for _ in range(3):
        stopped = [
            SamplingParams(max_tokens=30, stop=["a", "e", "i", "o", "\ufffd"], min_tokens=1, seed=i) for i in range(24)
        ]
        llm._core.reset_prefix_cache()
        found = together(llm, prompts + prompts, params + stopped)[: len(prompts)]
        assert [[choice.token_ids for choice in output.outputs] for output in found] == [
            [choice.token_ids for choice in output.outputs] for output in wanted
        ]
