"""The engine without its loop: a scheduler and a worker, and what passes between a client and them.

Sees token ids only. `plan`, `execute` and `commit` are the step; `execute` may run in another thread while
the next step is planned.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import replace

from octavo.backends.ops import Program
from octavo.batch import RequestUpdate, ScheduledBatch, StepOutput
from octavo.engine.messages import AddRequest, EngineStats, StepReport
from octavo.errors import RequestError
from octavo.request import SEED_LIMIT, FinishReason, Request
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

Execute = Callable[[ScheduledBatch], StepOutput]


class EngineCore:
    """Takes requests in, gives step reports out. Not thread-safe, but for `execute`.

    `program` is the model that `execute` runs, for reports on it.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        execute: Execute,
        *,
        max_model_len: int,
        seed: int | None = None,
        program: Program | None = None,
    ) -> None:
        self.program = program
        self._scheduler = scheduler
        self._execute = execute
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)
        self._refused: list[RequestUpdate] = []
        self._first_scheduled: dict[int, tuple[tuple[int, ...], float]] = {}  # by step id

    @property
    def has_work(self) -> bool:
        return bool(self._refused) or self._scheduler.has_work

    def add(self, message: AddRequest) -> None:
        """Queue the choices of one request. A request that cannot be served is answered by the next report."""
        sampling = message.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._seeds.randrange(SEED_LIMIT))
        room = self._max_model_len - len(message.prompt_token_ids)
        max_tokens = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        # Only the leader computes the prompt, so only it has prompt logprobs to give.
        leader = replace(sampling, n=1)
        sibling = replace(leader, prompt_logprobs=None)
        choices = [
            Request(
                request_id=message.first_request_id + choice,
                prompt_token_ids=message.prompt_token_ids,
                sampling=sibling if choice else leader,
                max_tokens=max_tokens,
                arrival_s=message.arrival_s,
                choice=choice,
                priority=message.priority,
                cache_salt=message.cache_salt,
                bad_words_token_ids=message.bad_words_token_ids,
            )
            for choice in range(sampling.n)
        ]
        try:
            if len(choices) == 1:
                self._scheduler.add(choices[0])
            else:
                self._scheduler.add_fork(choices[0], choices[1:])
        except RequestError as error:
            self._refused += [_failed(request, error.message) for request in choices]

    def abort(self, request_ids: tuple[int, ...]) -> None:
        """End choices that nobody listens to any more: no update follows."""
        for request_id in request_ids:
            self._scheduler.abort(request_id)

    def reset_prefix_cache(self) -> bool:
        return self._scheduler.reset_prefix_cache()

    def plan(self) -> ScheduledBatch | None:
        batch = self._scheduler.plan()
        if batch is not None and batch.new_rows:
            new_ids = tuple(row.request_id for row in batch.new_rows)
            self._first_scheduled[batch.step_id] = (new_ids, time.monotonic())
        return batch

    def execute(self, batch: ScheduledBatch) -> StepOutput:
        """Run a step. An error that is nobody's in particular ends the requests of this batch, not the engine."""
        try:
            return self._execute(batch)
        except Exception as error:
            logger.exception("step %d failed; its %d requests end with an error", batch.step_id, len(batch.requests))
            return _all_failed(batch, f"the step that computed this request failed: {type(error).__name__}: {error}")

    def commit(self, batch: ScheduledBatch, output: StepOutput) -> StepReport:
        updates = self._scheduler.commit(batch, output)
        first_scheduled, planned_s = self._first_scheduled.pop(batch.step_id, ((), 0.0))
        return self._report(tuple(updates), first_scheduled, planned_s, batch.num_tokens)

    def report_idle(self) -> StepReport:
        """What a client must hear although no step ran: refused requests, gauges after an abort."""
        return self._report((), (), 0.0, 0)

    def step(self) -> StepReport | None:
        """One whole step, nothing in flight before or after. None when there is nothing to do."""
        batch = self.plan()
        if batch is None:
            return self.report_idle() if self._refused else None
        try:
            output = self.execute(batch)
        except BaseException:  # Ctrl-C: what was planned must be committed, or no later step could be
            self.commit(batch, _all_failed(batch, "the step that computed this request was interrupted"))
            raise
        return self.commit(batch, output)

    def _report(
        self, updates: tuple[RequestUpdate, ...], first_scheduled: tuple[int, ...], planned_s: float, num_tokens: int
    ) -> StepReport:
        updates = (*self._refused, *updates)
        self._refused = []
        return StepReport(updates, first_scheduled, planned_s, num_tokens, self.stats())

    def stats(self) -> EngineStats:
        scheduler = self._scheduler
        return EngineStats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            kv_usage=scheduler.kv_usage,
            num_preemptions=scheduler.num_preemptions,
            prefix_query_tokens=scheduler.prefix_query_tokens,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            padding_tokens=scheduler.padding_tokens,
        )


def _all_failed(batch: ScheduledBatch, reason: str) -> StepOutput:
    ids = [i for request in batch.requests for i in (request.request_id, *request.fork_ids)]
    return StepOutput(batch.step_id, failed=dict.fromkeys(ids, reason))


def _failed(request: Request, message: str) -> RequestUpdate:
    return RequestUpdate(request.request_id, request.choice, finish_reason=FinishReason.ERROR.value, error=message)
