"""The engine's client against a scripted engine: what it counts, what it survives, how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from tests.tiny import save_tiny_llama

from octavo.batch import RequestUpdate
from octavo.config import Config
from octavo.engine import async_engine
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.events import ChoiceDelta, EngineInfo, GenerationRequest
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    Loading,
    Ready,
    ResetPrefixCache,
    StartFailed,
    StepReport,
    ToEngine,
    encode,
)
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.engine.transport import OnExit, OnMessage
from octavo.errors import InvalidRequest, RequestFailed, StartError, Unavailable
from octavo.request import SamplingParams

INFO = EngineInfo("tiny", ("tiny",), max_model_len=64, vocab_size=259, eos_token_ids=(258,))


class ScriptedTransport:
    """Says what the test makes it say; packs what it is sent as the socket would."""

    pid = None

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.num_starts = self.num_stops = 0
        self.on_message: OnMessage
        self.on_exit: OnExit

    async def start(self, config: Config, on_message: OnMessage, on_exit: OnExit) -> None:
        self.num_starts += 1
        self.on_message, self.on_exit = on_message, on_exit

    def send(self, message: ToEngine) -> None:
        encode(message)
        self.sent.append(message)

    async def stop(self) -> None:
        self.num_stops += 1

    def say(self, *updates: RequestUpdate, first: tuple[int, ...] = ()) -> None:
        self.on_message(StepReport(updates, first, 0.0, len(updates), EngineStats()))

    @property
    def added(self) -> list[AddRequest]:
        return [message for message in self.sent if isinstance(message, AddRequest)]

    @property
    def aborted_ids(self) -> list[int]:
        return [i for message in self.sent if isinstance(message, AbortRequests) for i in message.request_ids]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(save_tiny_llama(tmp_path_factory.mktemp("tiny")), None, chat_template=None)


Body = Callable[[AsyncEngine, ScriptedTransport], Awaitable[None]]


@pytest.fixture
def run(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Callable[[Body], None]:
    """Runs a test's body with a ready engine; afterwards nothing may be left of any request."""
    monkeypatch.setattr(async_engine, "_RESTART_DELAYS_S", (0.0,))

    def run(body: Body) -> None:
        async def main() -> None:
            transport = ScriptedTransport()
            engine = AsyncEngine(Config(), transport, lambda: tokenizer)
            await engine.start()
            transport.on_message(Ready(INFO))
            await engine.wait_ready(10)
            await body(engine, transport)
            await engine.close()
            assert engine.num_queued == 0
            assert not engine._by_engine_id and not engine._by_client_id and not engine._replies
            assert not engine.metrics._live

        asyncio.run(asyncio.wait_for(main(), 20))

    return run


def request(request_id: str = "a", **sampling: object) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(**{"max_tokens": 4, **sampling}),  # type: ignore[arg-type]
    )


async def collect(engine: AsyncEngine, it: GenerationRequest) -> list[ChoiceDelta]:
    return [delta async for delta in engine.generate(it)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("sampling", "error"),
    [({"bad_words": (" ",)}, InvalidRequest), ({"stop": ("\ud800",)}, UnicodeEncodeError)],
    ids=["no tokens", "cannot be packed"],
)
def test_a_request_that_cannot_be_handed_over_leaves_nothing_behind(
    run: Callable[[Body], None], sampling: dict[str, object], error: type[Exception]
) -> None:
    async def body(engine: AsyncEngine, transport: ScriptedTransport) -> None:
        for _ in range(3):
            with pytest.raises(error):
                await collect(engine, request(n=2, **sampling))
        assert engine.num_queued == 0 and not transport.added and engine.timeline("a") is None

    run(body)


def test_a_fault_in_the_text_of_one_request_ends_that_request_alone(
    run: Callable[[Body], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def body(engine: AsyncEngine, transport: ScriptedTransport) -> None:
        bad = asyncio.create_task(collect(engine, request("a", prompt_logprobs=1)))
        good = asyncio.create_task(collect(engine, request("b")))
        await until(lambda: len(transport.added) == 2)
        bad_id, good_id = (message.first_request_id for message in transport.added)
        without_details = RequestUpdate(bad_id, 0, (65,))
        transport.say(
            without_details, RequestUpdate(good_id, 0, (65,), finish_reason="length"), first=(bad_id, good_id)
        )
        assert [delta.finish_reason for delta in await good] == ["length"]
        with pytest.raises(RequestFailed):
            await bad
        assert transport.aborted_ids == [bad_id]

    run(body)
    assert "could not be read" in caplog.text


def test_an_answer_that_is_complete_outlives_its_engine(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncEngine, transport: ScriptedTransport) -> None:
        stream = engine.generate(request())
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: len(transport.added) == 1)
        request_id = transport.added[0].first_request_id
        transport.say(RequestUpdate(request_id, 0, (65,)), first=(request_id,))
        await first
        transport.say(RequestUpdate(request_id, 0, (66,), finish_reason="length"))
        transport.on_exit("signal 9")
        rest = [delta async for delta in stream]
        assert [(delta.token_ids, delta.finish_reason) for delta in rest] == [((66,), "length")]
        timeline = engine.timeline("a")
        assert timeline is not None and timeline["finish_reason"] == "length"

    run(body)


def test_what_runs_when_the_engine_dies_is_told_so_at_once(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncEngine, transport: ScriptedTransport) -> None:
        running = asyncio.create_task(collect(engine, request(n=3)))
        reset = asyncio.create_task(engine.reset_prefix_cache())
        await until(lambda: any(isinstance(message, ResetPrefixCache) for message in transport.sent))
        transport.on_exit("signal 9")
        for waiting in (running, reset):
            with pytest.raises(Unavailable) as caught:
                await asyncio.wait_for(waiting, 5)
            assert caught.value.code == "engine_dead"
        await until(lambda: transport.num_starts == 2)
        transport.on_message(Ready(INFO))
        assert engine.state == "ready"

    run(body)


def test_an_engine_that_cannot_be_restarted_yet_is_tried_again(run: Callable[[Body], None]) -> None:
    async def body(engine: AsyncEngine, transport: ScriptedTransport) -> None:
        transport.on_exit("signal 9")
        await until(lambda: transport.num_starts == 2)
        transport.on_message(StartFailed("no such folder"))
        transport.on_exit("exit code 2")
        assert engine.state == "starting" and "no such folder" in engine.state_reason
        await until(lambda: transport.num_starts == 3)
        transport.on_message(Loading("opening the model", 0, 0))
        assert engine.state_reason == "opening the model"
        transport.on_message(Ready(INFO))
        assert engine.state == "ready"

    run(body)


def test_an_engine_that_cannot_start_at_all_is_the_operators_mistake(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        transport = ScriptedTransport()
        engine = AsyncEngine(Config(), transport, lambda: tokenizer)
        await engine.start()
        transport.on_message(StartFailed("no such folder"))
        transport.on_exit("exit code 2")
        with pytest.raises(StartError, match="no such folder"):
            await engine.wait_ready(5)
        assert engine.state == "dead" and transport.num_starts == 1
        await engine.close()

    asyncio.run(main())


def test_a_tokenizer_that_fails_in_an_unforeseen_way_ends_the_start() -> None:
    def load() -> Tokenizer:
        raise RuntimeError("boom")

    async def main() -> None:
        engine = AsyncEngine(Config(), ScriptedTransport(), load)
        await engine.start()
        with pytest.raises(StartError, match="RuntimeError: boom"):
            await engine.wait_ready(5)
        await engine.close()

    asyncio.run(main())


def test_whoever_waits_for_an_engine_that_is_closed_is_told(run: Callable[[Body], None], tokenizer: Tokenizer) -> None:
    async def main() -> None:
        engine = AsyncEngine(Config(), ScriptedTransport(), lambda: tokenizer)
        await engine.start()
        waiting = asyncio.create_task(engine.wait_ready())
        await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, 5)
        with pytest.raises(Unavailable):
            await engine.start()

    asyncio.run(main())


def test_every_way_to_leave_gives_back_what_was_counted(run: Callable[[Body], None]) -> None:
    """Queued, half scheduled, between a fork and its first token, running, ended by a stop string, unread."""

    async def body(engine: AsyncEngine, transport: ScriptedTransport) -> None:
        for phase in range(5):
            stream = engine.generate(request(f"r{phase}", n=3, stop=("B",)))
            first = asyncio.ensure_future(anext(stream))
            await until(lambda phase=phase: len(transport.added) == phase + 1)
            leader = transport.added[-1].first_request_id
            ids = (leader, leader + 1, leader + 2)
            assert engine.num_queued == 3
            if phase >= 1:
                transport.say(first=ids[:1])
                assert engine.num_queued == 2
            if phase >= 2:
                transport.say(first=ids[1:])
                assert engine.num_queued == 0
            if phase >= 3:
                transport.say(RequestUpdate(leader, 0, (33,)), RequestUpdate(leader + 1, 1, (33,)))  # "B", as bytes go
            if phase >= 4:
                assert await engine.abort(f"r{phase}") and not await engine.abort("nobody")
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await stream.aclose()
            assert engine.num_queued == 0
            assert sorted(transport.aborted_ids[-3:]) == list(ids)

    run(body)


def test_parameters_that_no_message_can_carry_are_refused() -> None:
    for name in ("top_k", "max_tokens", "min_tokens", "n"):
        with pytest.raises(InvalidRequest, match=name):
            SamplingParams(**{name: 2**64, **({"max_tokens": None} if name == "min_tokens" else {})})
    assert SamplingParams(top_k=10**18).top_k == 10**18


def test_none_stands_for_the_default_of_a_list() -> None:
    none = SamplingParams(stop=None, stop_token_ids=None, bad_words=None, logit_bias=None)  # type: ignore[arg-type]
    assert none == SamplingParams() and replace(none, n=2).n == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", 5), ("stop_token_ids", 5), ("bad_words", {"a": 1}), ("allowed_token_ids", 5), ("logit_bias", [1]),
     ("temperature", 10**400), ("temperature", float("nan")), ("top_p", float("inf")), ("stop", b"abc")],
)  # fmt: skip
def test_parameters_of_a_wrong_type_are_named(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]
