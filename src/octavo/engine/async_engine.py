"""The engine's client: admits requests, feeds the engine, turns its reports into events.

Works over any transport: a process (`octavo serve`) or a thread (`AsyncLLM`). Everything here runs on one
event loop; a report is handled at once for all requests of the step.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Literal

from octavo.config import Config
from octavo.engine.events import ChoiceDelta, EngineInfo, GenerationRequest
from octavo.engine.messages import (
    AbortRequests,
    AddRequest,
    FromEngine,
    Loading,
    Ready,
    Reply,
    ResetPrefixCache,
    StartFailed,
    StepReport,
    Vocabulary,
)
from octavo.engine.output import ChoiceOutput
from octavo.engine.startup import Phase
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.transport import Transport
from octavo.engine.wakeup import Wakeup
from octavo.errors import InvalidRequest, OctavoError, RequestFailed, StartError, Unavailable
from octavo.metrics import Metrics, RequestTimeline
from octavo.request import FinishReason

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "dead"]

_RESTART_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_STABLE_AFTER_S = 60.0  # an engine that ran this long starts again without delay
_RETRY_AFTER_S = 1.0
_REPLY_TIMEOUT_S = 30.0


@dataclass(eq=False, slots=True)
class _Live:
    """A request that has not ended, and what waits to be read from it."""

    request: GenerationRequest
    first_request_id: int
    outputs: list[ChoiceOutput]
    timeline: RequestTimeline
    num_open: int
    num_queued: int
    deltas: deque[ChoiceDelta] = field(default_factory=deque)
    error: OctavoError | None = None
    changed: Wakeup = field(default_factory=Wakeup)

    def put(self, delta: ChoiceDelta) -> None:
        self.deltas.append(delta)
        self.changed.set()

    @property
    def open_ids(self) -> tuple[int, ...]:
        return tuple(self.first_request_id + output.choice for output in self.outputs if not output.is_finished)


class AsyncEngine:
    """An `EngineClient`."""

    def __init__(
        self,
        config: Config,
        transport: Transport,
        load_tokenizer: Callable[[], Tokenizer],
        metrics: Metrics | None = None,
    ) -> None:
        self.metrics = metrics or Metrics(requests_kept=config.server.served_requests_kept)
        self._config = config
        self._transport = transport
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Tokenizer | None = None
        self._info: EngineInfo | None = None
        self._state: State = "starting"
        self._reason = "the engine is starting"
        self._start_error: StartError | None = None
        self._changed = asyncio.Event()  # set whenever the state may have changed
        self._ids = itertools.count(1)
        self._by_engine_id: dict[int, _Live] = {}
        self._by_client_id: dict[str, _Live] = {}
        self._num_queued = 0
        self._replies: dict[int, asyncio.Future[bool]] = {}
        self._num_restarts = 0
        self._restart_failure: str | None = None
        self._started_s = 0.0
        self._hears = False  # the engine has been started, so that messages reach it
        self._phases: tuple[Phase, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life ------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Start the engine and load the tokenizer beside it. Returns at once: see `wait_ready`.

        Raises Unavailable when it has been closed: an engine starts once.
        """
        if self._state == "dead":
            raise Unavailable(f"The engine cannot be started again: {self._reason}.")
        self._spawn(self._prepare_tokenizer())
        await self._start_engine()

    async def wait_ready(self, timeout_s: float | None = None) -> EngineInfo:
        """Wait until requests can be served. Raises the StartError that prevents it, Unavailable once it is closed."""
        async with asyncio.timeout(timeout_s):
            while not (self._state == "ready" and self._tokenizer is not None):
                if self._start_error is not None:
                    raise self._start_error
                if self._state == "dead":
                    raise Unavailable(f"The engine is not ready: {self._reason}.")
                self._changed.clear()
                await self._changed.wait()
        return self.info

    async def drain(self, timeout_s: float) -> None:
        if self._state != "dead":
            self._set_state("draining", "the server is shutting down")
        deadline = time.monotonic() + timeout_s
        while self._by_client_id and (left := deadline - time.monotonic()) > 0:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), left)
            except TimeoutError:
                break
        for live in list(self._by_client_id.values()):
            self._abort_live(live)

    async def close(self) -> None:
        self._set_state("dead", "the engine has been stopped")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._transport.stop()
        self._fail_all(Unavailable("The server has shut down."))

    # -- what the server reads ---------------------------------------------------------------------------
    @property
    def state(self) -> State:
        return "starting" if self._state == "ready" and self._tokenizer is None else self._state

    @property
    def state_reason(self) -> str:
        return self._reason

    @property
    def info(self) -> EngineInfo:
        if self._info is None:
            raise Unavailable(f"The model is not ready: {self._reason}.", retry_after_s=_RETRY_AFTER_S)
        return self._info

    @property
    def startup_phases(self) -> tuple[Phase, ...]:
        """Of the engine process, once it is ready."""
        return self._phases

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise Unavailable(f"The model is not ready: {self._reason}.", retry_after_s=_RETRY_AFTER_S)
        return self._tokenizer

    @property
    def num_queued(self) -> int:
        return self._num_queued

    def timeline(self, request_id: str) -> dict[str, object] | None:
        return self.metrics.find(request_id)

    # -- requests ----------------------------------------------------------------------------------------
    async def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        live = self._admit(request)
        try:
            while True:
                live.changed.clear()
                while live.deltas:
                    yield live.deltas.popleft()
                if live.error is not None:
                    raise live.error
                if live.num_open == 0:
                    return
                await live.changed.wait()
        finally:
            self._forget(live)

    async def abort(self, request_id: str) -> bool:
        live = self._by_client_id.get(request_id)
        if live is None:
            return False
        self._abort_live(live)
        return True

    async def reset_prefix_cache(self) -> bool:
        if self._state not in ("ready", "draining"):
            raise Unavailable(f"The engine is not ready: {self._reason}.", retry_after_s=_RETRY_AFTER_S)
        call_no = next(self._ids)
        reply = self._replies[call_no] = asyncio.get_running_loop().create_future()
        try:
            self._transport.send(ResetPrefixCache(call_no))
            return await asyncio.wait_for(reply, _REPLY_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"The engine did not answer within {_REPLY_TIMEOUT_S:g} seconds.") from None
        finally:
            del self._replies[call_no]

    def _admit(self, request: GenerationRequest) -> _Live:
        if self.state != "ready":
            raise Unavailable(f"The server takes no requests now: {self._reason}.", retry_after_s=_RETRY_AFTER_S)
        if request.request_id in self._by_client_id:
            raise InvalidRequest(
                f"request_id {request.request_id!r} belongs to a request that is still running.", param="request_id"
            )
        n, limit = request.sampling.n, self._config.server.max_queued_requests
        if self._num_queued + n > limit:
            self.metrics.admission_rejected("queue_full")
            raise Unavailable(
                f"{self._num_queued} requests wait already; this one adds {n} and the limit is {limit} "
                "(--max-queued-requests). Try again later.",
                code="queue_full",
                retry_after_s=_RETRY_AFTER_S,
            )
        tokenizer, sampling = self.tokenizer, request.sampling
        first_request_id = next(self._ids)
        for _ in range(n - 1):
            next(self._ids)
        outputs = [ChoiceOutput(choice, tokenizer, request.prompt_token_ids, sampling) for choice in range(n)]
        message = AddRequest(
            first_request_id,
            request.prompt_token_ids,
            sampling,
            request.arrival_s,
            request.priority,
            request.cache_salt,
            tokenizer.bad_words_token_ids(sampling.bad_words) if sampling.bad_words else (),
        )
        self._transport.send(message)
        # All that can fail is behind us: whatever is counted from here on, `_forget` takes back.
        live = _Live(request, first_request_id, outputs, self.metrics.request_arrived(request), n, n)
        self._by_client_id[request.request_id] = live
        for output in outputs:
            self._by_engine_id[first_request_id + output.choice] = live
        self._num_queued += n
        return live

    def _forget(self, live: _Live) -> None:
        """The one way out of a request, whatever ended it."""
        if self._by_client_id.get(live.request.request_id) is not live:
            return
        del self._by_client_id[live.request.request_id]
        if open_ids := live.open_ids:
            self._transport.send(AbortRequests(open_ids))
            live.timeline.finished(time.monotonic(), FinishReason.ABORT.value)
        for output in live.outputs:
            self._by_engine_id.pop(live.first_request_id + output.choice, None)
        self._num_queued -= live.num_queued
        live.num_queued = 0
        self._changed.set()

    def _abort_live(self, live: _Live) -> None:
        if open_ids := live.open_ids:
            self._transport.send(AbortRequests(open_ids))
        for output in live.outputs:
            if not output.is_finished:
                live.put(output.abort())
                live.num_open -= 1
        live.timeline.finished(time.monotonic(), FinishReason.ABORT.value)

    # -- what the engine says ------------------------------------------------------------------------------
    def _on_message(self, message: FromEngine) -> None:
        match message:
            case StepReport():
                self._on_step(message)
            case Reply():
                if (reply := self._replies.get(message.call_no)) is not None and not reply.done():
                    reply.set_result(message.ok)
            case Loading():
                share = f" ({100 * message.done // message.total}%)" if message.total else ""
                self._set_state(self._state, f"{message.phase}{share}")
            case Ready():
                self._info, self._phases = message.info, message.phases
                self.metrics.engine_ready(message.info)
                if self._state == "starting":
                    self._set_state("ready", "ready")
                    if self._num_restarts:
                        logger.info("the engine is ready again")
            case StartFailed() if self._num_restarts:
                # It has run before, so what stands against it may pass: `_on_exit` tries again.
                self._restart_failure = message.message
            case StartFailed():
                self._start_error = StartError(message.message)
                self._set_state("dead", message.message)

    def _on_step(self, report: StepReport) -> None:
        now = time.monotonic()
        for request_id in report.first_scheduled:
            live = self._by_engine_id.get(request_id)
            if live is not None:
                live.num_queued -= 1
                self._num_queued -= 1
                live.timeline.scheduled(report.planned_s)
        stopped: list[int] = []
        for update in report.updates:
            live = self._by_engine_id.get(update.request_id)
            if live is None or live.outputs[update.choice].is_finished:
                continue
            if update.error is not None:
                live.error = RequestFailed(update.error)
            output = live.outputs[update.choice]
            try:
                delta = output.push(update)
            except Exception:
                # A fault of ours in one answer's text must not silence all the others.
                logger.exception("an update of choice %d of a request could not be read", update.choice)
                self._fail(live, RequestFailed("The server failed to read what the engine made of this request."))
                continue
            if delta is None:
                continue
            if delta.token_ids:
                live.timeline.tokens(now, len(delta.token_ids), update.choice)
            live.timeline.num_cached_tokens = max(live.timeline.num_cached_tokens, update.num_cached_tokens)
            live.timeline.num_preemptions = max(live.timeline.num_preemptions, update.num_preemptions)
            if delta.finish_reason is not None:
                if update.finish_reason is None:
                    stopped.append(update.request_id)
                live.num_open -= 1
                if live.num_open == 0:
                    live.timeline.finished(now, delta.finish_reason)
            live.put(delta)
        if stopped:
            self._transport.send(AbortRequests(tuple(stopped)))
        self.metrics.engine_step(report)

    def _on_exit(self, why: str) -> None:
        if self._state == "dead":
            self._changed.set()
            return
        was_ready = self._info is not None
        why, self._restart_failure = self._restart_failure or why, None
        self._fail_all(
            Unavailable(f"The engine ended unexpectedly ({why}); this request is lost. Try again.", code="engine_dead")
        )
        if self._state == "draining":
            self._set_state("dead", f"the engine ended ({why})")
        elif not was_ready and self._num_restarts == 0:
            self._start_error = StartError(f"the engine ended while it started ({why}); its log says why.")
            self._set_state("dead", str(self._start_error))
        else:
            self._info = None
            self._set_state("starting", f"the engine ended ({why}) and is being restarted")
            logger.error("the engine ended (%s); restarting it", why)
            self._spawn(self._restart())

    async def _restart(self) -> None:
        if time.monotonic() - self._started_s > _STABLE_AFTER_S:
            self._num_restarts = 0
        delay_s = _RESTART_DELAYS_S[min(self._num_restarts, len(_RESTART_DELAYS_S) - 1)]
        self._num_restarts += 1
        try:
            await self._transport.stop()
            await asyncio.sleep(delay_s)
            await self._start_engine()
        except OSError as error:  # no memory for a process, no room for its socket
            self._on_exit(f"it cannot be started: {error}")

    async def _start_engine(self) -> None:
        self._started_s = time.monotonic()
        self._hears = False
        await self._transport.start(self._config, self._on_message, self._on_exit)
        self._hears = True
        self._send_vocabulary()
        if (pid := self._transport.pid) is not None:
            self.metrics.watch_process("engine", pid)

    async def _prepare_tokenizer(self) -> None:
        try:
            self._tokenizer = await asyncio.to_thread(self._load_tokenizer)
            self._send_vocabulary()
        except Exception as error:
            if not isinstance(error, StartError):
                logger.exception("the tokenizer could not be loaded")
                error = StartError(f"the tokenizer could not be loaded ({type(error).__name__}: {error})")
            self._start_error = error
            self._set_state("dead", str(error))
        self._changed.set()

    def _send_vocabulary(self) -> None:
        """Every start of the engine waits for it."""
        tokenizer = self._tokenizer
        if self._hears and tokenizer is not None:
            self._transport.send(Vocabulary(tokenizer.vocab_size, tokenizer.eos_token_ids))

    def _fail_all(self, error: Unavailable) -> None:
        """End what still runs, and every call that waits for the engine, with `error`."""
        for live in self._by_client_id.values():
            for output in live.outputs:
                output.finish_reason = output.finish_reason or FinishReason.ERROR.value
            self._fail(live, error)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(error)

    def _fail(self, live: _Live, error: OctavoError) -> None:
        """End a request with `error`, unless all of its choices have ended and only wait to be read."""
        if live.num_open:
            live.error = error
            live.changed.set()
            live.timeline.finished(time.monotonic(), FinishReason.ERROR.value)

    def _set_state(self, state: State, reason: str) -> None:
        self._state, self._reason = state, reason
        self._changed.set()

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
