"""The step loop: messages in, steps, reports out; with one step planned ahead where that pays."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from octavo.batch import ScheduledBatch, StepOutput
from octavo.engine.channel import EngineChannel
from octavo.engine.core import EngineCore
from octavo.engine.messages import AbortRequests, AddRequest, Reply, ResetPrefixCache, Stop, Vocabulary

Overlap = Literal["auto", "always", "never"]

# Planning ahead hides the host's work, but a request that arrives meanwhile waits one step longer for its
# first token. It pays once the host's work is a noticeable share of a step.
_OVERLAP_SHARE = 0.03
_SMOOTHING = 0.05


class StoppedWhileStarting(Exception):
    """The client needs this engine no more."""


def receive_vocabulary(channel: EngineChannel) -> Vocabulary:
    """Wait for what the client's tokenizer knows. Raises StoppedWhileStarting when it says stop instead."""
    while True:
        for message in channel.receive(wait=True):
            if isinstance(message, Vocabulary):
                return message
            if isinstance(message, Stop):
                raise StoppedWhileStarting


@dataclass(slots=True)
class _StepTimes:
    """Moving averages that tell whether planning ahead pays."""

    host_s: float = 0.0
    execute_s: float = 0.0

    def note(self, host_s: float, execute_s: float) -> None:
        self.host_s += _SMOOTHING * (host_s - self.host_s)
        self.execute_s += _SMOOTHING * (execute_s - self.execute_s)

    @property
    def overlap_pays(self) -> bool:
        return self.host_s > _OVERLAP_SHARE * self.execute_s


class EngineLoop:
    """Runs an `EngineCore` for the client at the other end of a channel, until that client says stop."""

    def __init__(self, core: EngineCore, channel: EngineChannel, *, overlap: Overlap = "auto") -> None:
        self._core = core
        self._channel = channel
        self._overlap = overlap
        self._times = _StepTimes()
        self._stopping = False

    def run(self) -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="octavo-worker") as worker:
            in_flight: tuple[ScheduledBatch, Future[tuple[StepOutput, float]]] | None = None
            while True:
                idle = in_flight is None and not self._core.has_work
                aborted = self._receive(wait=idle)
                if self._stopping and in_flight is None:
                    return
                host_start = time.perf_counter()
                batch = None if self._stopping or (in_flight and not self._plans_ahead) else self._core.plan()
                if in_flight is None:
                    if batch is None:
                        if aborted or self._core.has_work:
                            self._channel.send(self._core.report_idle())
                    elif self._plans_ahead:
                        in_flight = batch, worker.submit(self._execute, batch)
                    else:  # nothing happens meanwhile, so that another thread would only cost its wakeups
                        host_s = time.perf_counter() - host_start
                        self._commit(batch, *self._execute(batch), host_s)
                    continue
                following = None if batch is None else (batch, worker.submit(self._execute, batch))
                host_s = time.perf_counter() - host_start
                planned, future = in_flight
                self._commit(planned, *future.result(), host_s)
                in_flight = following

    def _commit(self, batch: ScheduledBatch, output: StepOutput, execute_s: float, host_s: float) -> None:
        """Record the step and report it. `host_s` went into planning beside it."""
        start = time.perf_counter()
        self._channel.send(self._core.commit(batch, output))
        self._times.note(host_s + time.perf_counter() - start, execute_s)

    @property
    def _plans_ahead(self) -> bool:
        return self._overlap == "always" or (self._overlap == "auto" and self._times.overlap_pays)

    def _execute(self, batch: ScheduledBatch) -> tuple[StepOutput, float]:
        start = time.perf_counter()
        return self._core.execute(batch), time.perf_counter() - start

    def _receive(self, *, wait: bool) -> bool:
        """Take in what has arrived; True when something was aborted."""
        aborted = False
        for message in self._channel.receive(wait=wait):
            match message:
                case AddRequest():
                    self._core.add(message)
                case AbortRequests():
                    self._core.abort(message.request_ids)
                    aborted = True
                case ResetPrefixCache():
                    self._channel.send(Reply(message.call_no, self._core.reset_prefix_cache()))
                case Stop():
                    self._stopping = True
        return aborted
