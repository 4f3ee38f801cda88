"""What the endpoints share: the engine's client, the configuration, and the client requests in flight."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from starlette.requests import Request

import octavo
from octavo.config import Config
from octavo.engine.client import EngineClient
from octavo.engine.events import EngineInfo
from octavo.errors import InvalidRequest, NotFound, RequestError, Unavailable
from octavo.server.body import read_json_object

T = TypeVar("T")

INLINE_CHARS = 8192  # text up to this size is tokenized faster than a thread is woken

_THREADS = 2
_THREAD_TIMEOUT_S = 60.0
_RETRY_AFTER_START_S = 5.0
_RETRY_AFTER_DRAIN_S = 10.0
_RETRY_AFTER_FULL_S = 1.0


class Service:
    """One per application; every method belongs to its event loop."""

    def __init__(self, client: EngineClient, config: Config) -> None:
        self.client = client
        self.config = config
        self.is_draining = False
        self._live: dict[object, Callable[[RequestError], None]] = {}
        self._idle = asyncio.Event()
        self._threads = asyncio.Semaphore(_THREADS)
        self._fingerprint: tuple[EngineInfo, str] | None = None

    # -- admission ---------------------------------------------------------------------------------------
    def ready_info(self) -> EngineInfo:
        """What the ready engine serves. Raises Unavailable while it starts, drains or is dead."""
        if self.is_draining:
            raise Unavailable("The server is shutting down. Try another one.", retry_after_s=_RETRY_AFTER_DRAIN_S)
        if self.client.state != "ready":
            reason = self.client.state_reason
            raise Unavailable(f"The model is not ready: {reason}.", retry_after_s=_RETRY_AFTER_START_S)
        return self.client.info

    def served_model(self, name: str | None, info: EngineInfo) -> str:
        """The name that answers carry. Raises NotFound for a model that is not served."""
        if name is None:
            if self.config.server.strict_api:
                raise InvalidRequest("model is required.", param="model", code="missing_field")
            return info.served_model_names[0]
        if name not in info.served_model_names:
            served = ", ".join(info.served_model_names)
            raise NotFound(
                f"The model {name[:200]!r} does not exist here; served: {served}.",
                param="model",
                code="model_not_found",
            )
        return name

    def check_room(self, num_choices: int) -> None:
        """Refuse early what the queue cannot take, before any work is done for it.

        The engine's client decides again, and finally, when it takes the request.
        """
        limit, num_queued = self.config.server.max_queued_requests, self.client.num_queued
        if num_choices > limit:
            raise InvalidRequest(
                f"The request asks for {num_choices} choices (n times prompts); this server queues at most {limit} "
                "(--max-queued-requests). Split it.",
                param="n",
            )
        if num_queued + num_choices > limit:
            self.client.metrics.admission_rejected("queue_full")
            raise Unavailable(
                f"{num_queued} choices wait already, this request adds {num_choices} and the limit is {limit} "
                "(--max-queued-requests). Try again later.",
                code="queue_full",
                retry_after_s=_RETRY_AFTER_FULL_S,
            )

    # -- hard work --------------------------------------------------------------------------------------------
    async def compute(self, work: Callable[[], T], *, is_large: bool) -> T:
        """The result of `work`, done here if it is small, else in a thread, so that one client delays no other.

        Raises Unavailable when it takes too long; a thread cannot be stopped, so it is left behind.
        """
        if not is_large:
            return work()
        try:
            async with asyncio.timeout(_THREAD_TIMEOUT_S), self._threads:
                return await asyncio.to_thread(work)
        except TimeoutError:
            raise Unavailable(f"Reading the request took more than {_THREAD_TIMEOUT_S:g} seconds.") from None

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, max_tokens: int | None, param: str
    ) -> list[list[int]]:
        """Token ids of each text. Raises InvalidRequest naming `param` for one that cannot fit `max_tokens`."""
        tokenizer = self.client.tokenizer

        def work() -> list[list[int]]:
            return [tokenizer.encode(text, add_special_tokens, max_tokens=max_tokens) for text in texts]

        try:
            return await self.compute(work, is_large=sum(map(len, texts)) > INLINE_CHARS)
        except InvalidRequest as error:
            error.param = error.param or param
            raise

    async def read(self, request: Request) -> dict[str, Any]:
        return await read_json_object(request, self.config.server)

    # -- requests in flight --------------------------------------------------------------------------------
    @property
    def num_live(self) -> int:
        return len(self._live)

    @contextmanager
    def live(self, fail: Callable[[RequestError], None]) -> Iterator[None]:
        """Count a request as in flight; `fail` ends it with an error when the server cannot wait for it."""
        key = object()
        self._live[key] = fail
        try:
            yield
        finally:
            del self._live[key]
            if not self._live:
                self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no request is in flight; False when `timeout_s` passed first."""
        self._idle.clear()
        if not self._live:
            return True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True

    def fail_all(self, error: RequestError) -> None:
        for fail in list(self._live.values()):
            fail(error)

    # -- identity ------------------------------------------------------------------------------------------
    def fingerprint(self, info: EngineInfo) -> str:
        """Changes with whatever may change the answer to a seeded request: release, model, backend, number format."""
        if self._fingerprint is None or self._fingerprint[0] is not info:
            identity = (octavo.__version__, info.model, info.vocab_size, info.backend, info.dtype)
            digest = hashlib.blake2b(repr(identity).encode(), digest_size=6).hexdigest()
            self._fingerprint = (info, f"octavo-{digest}")
        return self._fingerprint[1]
