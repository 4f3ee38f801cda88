"""`LLM` and `AsyncLLM` as Python programs use and misuse them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import save_tiny_llama

from octavo.batch import ScheduledBatch, StepOutput
from octavo.engine.events import GenerationRequest
from octavo.engine.llm import LLM, AsyncLLM
from octavo.errors import InvalidRequest, Unavailable
from octavo.request import SamplingParams

OPTIONS: dict[str, Any] = {"threads": 1, "max_model_len": 128, "kv_cache_memory_bytes": 2**20}
GREEDY = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def shared(model: Path) -> LLM:
    return LLM(str(model), **OPTIONS)


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """One for all tests, as each must leave it clean."""
    yield shared
    assert_clean(shared)


def assert_clean(llm: LLM) -> None:
    scheduler = llm._core._scheduler
    scheduler.check()
    assert not scheduler.has_work and not scheduler._in_flight and scheduler.kv_usage == 0


def test_prompts_may_come_from_a_generator(llm: LLM) -> None:
    outputs = llm.generate((text for text in ("ab", "cd")), GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["ab", "cd"]
    assert llm.generate([], GREEDY, use_tqdm=False) == []


@pytest.mark.parametrize(
    "prompts",
    [5, None, b"ab", [None], [1.5], [True], [b"ab"], [[1, "a"]], [[]], "", {"prompt": 5}, {"prompt_token_ids": "ab"},
     {"prompt": None}, {"prompt": "a", "cache_salt": 5}, {"prompt_token_ids": [300]}, {"text": "a"}],
)  # fmt: skip
def test_a_prompt_of_a_wrong_form_is_refused_by_name(llm: LLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(prompts, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("params", [{"temperature": 0}, "greedy", [GREEDY, GREEDY], [None], 5])
def test_sampling_parameters_of_a_wrong_form_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequest, match="sampling"):
        llm.generate("ab", params, use_tqdm=False)


def test_priorities_that_nobody_would_heed_are_refused(llm: LLM, model: Path) -> None:
    with pytest.raises(InvalidRequest, match="not heeded"):
        llm.generate(["a"], GREEDY, use_tqdm=False, priority=[1])
    heeding = LLM(str(model), scheduling_policy="priority", **OPTIONS)
    assert len(heeding.generate(["a", "b"], GREEDY, use_tqdm=False, priority=[1, -1])) == 2
    for priority in ([1, 2], ["x"], 5):
        with pytest.raises(InvalidRequest, match="priorit"):
            heeding.generate(["a"], GREEDY, use_tqdm=False, priority=priority)  # type: ignore[arg-type]


def test_a_request_that_fails_while_the_others_are_queued_takes_them_along(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="bad_words"):
        llm.generate(["a", "b"], [GREEDY, SamplingParams(bad_words=(" ",))], use_tqdm=False)
    assert_clean(llm)


def test_one_entry_per_token_of_the_vocabulary_is_enough(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids has 300 entries"):
        llm.generate("a", SamplingParams(allowed_token_ids=(1,) * 300), use_tqdm=False)


@pytest.mark.parametrize("when", ["before", "during", "after"])
def test_ctrl_c_leaves_an_engine_that_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """A step is never cut off: the interrupt waits for its end."""
    wanted = llm.generate(["ab", "cd"], GREEDY, use_tqdm=False)
    core, steps = llm._core, 0
    plan, execute = core.plan, core.execute

    def interrupt(at: str) -> None:
        nonlocal steps
        steps += at == "during"
        if at == when and steps == 2:
            signal.raise_signal(signal.SIGINT)

    def interrupted_plan() -> ScheduledBatch | None:
        batch = plan()
        interrupt("before")
        return batch

    def interrupted_execute(batch: ScheduledBatch) -> StepOutput:
        interrupt("during")
        output = execute(batch)
        interrupt("after")
        return output

    with monkeypatch.context() as patch:
        patch.setattr(core, "plan", interrupted_plan)
        patch.setattr(core, "execute", interrupted_execute)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["ab", "xy"], SamplingParams(max_tokens=50, n=3, ignore_eos=True), use_tqdm=False)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert_clean(llm)
    again = llm.generate(["ab", "cd"], GREEDY, use_tqdm=False)
    assert [o.outputs for o in again] == [o.outputs for o in wanted]


def test_a_second_ctrl_c_does_not_wait_and_leaves_an_engine_that_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = llm.generate("ab", GREEDY, use_tqdm=False)

    def stuck(batch: ScheduledBatch) -> StepOutput:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the second one did not get through")

    with monkeypatch.context() as patch:
        patch.setattr(llm._core, "_execute", stuck)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["ab", "xy"], GREEDY, use_tqdm=False)
    assert_clean(llm)
    assert llm.generate("ab", GREEDY, use_tqdm=False)[0].outputs == wanted[0].outputs


def test_two_models_share_a_process(llm: LLM, tmp_path: Path) -> None:
    other = LLM(str(save_tiny_llama(tmp_path / "other", seed=7)), **OPTIONS)
    first, second, again = (it.generate("ab", GREEDY, use_tqdm=False)[0].outputs[0] for it in (llm, other, llm))
    assert first.token_ids == again.token_ids != second.token_ids


def test_an_async_llm_refuses_what_the_model_cannot_serve_and_leaves_nothing_behind(model: Path) -> None:
    def request(name: str, token_ids: tuple[int, ...] = (1, 2, 3)) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        return GenerationRequest(request_id=name, prompt_token_ids=token_ids, sampling=sampling)

    async def main() -> None:
        llm = AsyncLLM(str(model), **OPTIONS)
        await llm.start()

        async def collect(name: str) -> list[int]:
            return [token_id async for delta in llm.generate(request(name)) for token_id in delta.token_ids]

        for token_ids in ((999,), (), (1,) * 128):
            with pytest.raises(InvalidRequest):
                llm.generate(request("bad", token_ids))
        stream = llm.generate(request("left"))
        async for _ in stream:
            break
        await stream.aclose()
        tasks = [asyncio.create_task(collect(str(number))) for number in range(8)]
        await asyncio.sleep(0.02)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
        assert len(results[1]) == 100 and results[1::2] == [results[1]] * 4
        assert llm.num_queued == 0 and not llm._by_client_id and not llm._by_engine_id
        last = asyncio.create_task(collect("last"))
        await asyncio.sleep(0.02)
        await llm.close()
        await llm.close()
        with pytest.raises(Unavailable):
            await last
        with pytest.raises(Unavailable):
            await llm.start()

    asyncio.run(asyncio.wait_for(main(), 60))
