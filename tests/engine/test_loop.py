from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from octavo.batch import ScheduledBatch, ScheduledRequest, StepOutput
from octavo.engine.channel import QueueChannel
from octavo.engine.loop import EngineLoop, Overlap
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineStats,
    FromEngine,
    Reply,
    ResetPrefixCache,
    StepReport,
    Stop,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from octavo.request import SamplingParams


class CountingCore:
    """Every added request takes `max_tokens` steps; records how many steps were planned before their commit."""

    def __init__(self) -> None:
        self.left: dict[int, int] = {}
        self.planned = self.committed = 0
        self.most_in_flight = 0
        self.aborted: list[int] = []

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def add(self, message: AddRequest) -> None:
        self.left[message.first_request_id] = message.sampling.max_tokens or 0

    def abort(self, request_ids: tuple[int, ...]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.left.pop(request_id, None)

    def reset_prefix_cache(self) -> bool:
        return not self.left

    def plan(self) -> ScheduledBatch | None:
        ready = [i for i, left in self.left.items() if left > self.planned - self.committed]
        if not ready:
            return None
        self.planned += 1
        self.most_in_flight = max(self.most_in_flight, self.planned - self.committed)
        return ScheduledBatch(self.planned, tuple(ScheduledRequest(i, 0, 1, ((0,),), True) for i in ready))

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        time.sleep(0.001)
        return StepOutput(batch.step_id)

    def commit(self, batch: ScheduledBatch, output: StepOutput) -> StepReport:
        assert batch.step_id == output.step_id == self.committed + 1, "steps commit in order"
        self.committed += 1
        for request in batch.requests:
            if request.request_id in self.left:
                self.left[request.request_id] -= 1
                if self.left[request.request_id] == 0:
                    del self.left[request.request_id]
        return StepReport((), (), 0.0, batch.num_tokens, EngineStats(num_running=len(self.left)))

    def report_idle(self) -> StepReport:
        return StepReport((), (), 0.0, 0, EngineStats(num_running=len(self.left)))


def run_loop(core: CountingCore, messages: list[ToEngine], overlap: Overlap) -> list[FromEngine]:
    sent: list[FromEngine] = []
    channel = QueueChannel(sent.append)
    thread = threading.Thread(target=EngineLoop(core, channel, overlap=overlap).run)  # type: ignore[arg-type]
    for message in messages:
        channel.post(message)
    thread.start()
    deadline = time.monotonic() + 10
    while core.has_work or core.planned != core.committed:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    channel.post(Stop())
    thread.join(10)
    assert not thread.is_alive()
    return sent


def add(request_id: int, max_tokens: int) -> AddRequest:
    return AddRequest(request_id, (1, 2), SamplingParams(max_tokens=max_tokens), 0.0)


@pytest.mark.parametrize(("overlap", "in_flight"), [("never", 1), ("always", 2)])
def test_steps_are_planned_ahead_only_when_told(overlap: Overlap, in_flight: int) -> None:
    core = CountingCore()
    reports = run_loop(core, [add(1, 20), add(2, 5)], overlap)
    assert core.most_in_flight == in_flight
    assert core.committed == core.planned >= 20
    assert sum(isinstance(report, StepReport) for report in reports) == core.committed


def test_an_abort_without_a_step_is_reported_so_that_gauges_fall() -> None:
    core = CountingCore()
    reports = run_loop(core, [add(1, 1000), AbortRequests((1,))], "never")
    assert core.aborted == [1]
    last = [report for report in reports if isinstance(report, StepReport)][-1]
    assert last.stats.num_running == 0


def test_a_call_is_answered() -> None:
    assert run_loop(CountingCore(), [ResetPrefixCache(7)], "never") == [Reply(7, True)]


def test_messages_survive_packing() -> None:
    sampling = SamplingParams(
        n=3, seed=-5, stop=["a", "é"], logit_bias={7: -1.5}, allowed_token_ids=[1, 7], bad_words=["x"], temperature=0.5
    )
    message = AddRequest(9, (1, 2, 3), sampling, 12.5, -1, "salt", ((4, 5),))
    assert decode_to_engine(encode(message)) == message
    report = StepReport((), (9, 10), 1.0, 8, EngineStats(kv_usage=0.25))
    assert decode_from_engine(encode(report)) == report


def test_bad_sampling_values_do_not_pass_the_border() -> None:
    good = AddRequest(1, (1,), SamplingParams(), 0.0)
    bad = encode(good).replace(b"\xa5top_p\xcb\x3f\xf0", b"\xa5top_p\xcb\xbf\xf0")  # 1.0 becomes -1.0
    with pytest.raises(Exception, match="top_p"):
        decode_to_engine(bad)
    assert replace(good.sampling) == good.sampling
