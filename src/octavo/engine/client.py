"""How the server, `AsyncLLM` and the batch runner talk to an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from octavo.engine.events import ChoiceDelta, EngineInfo, GenerationRequest
from octavo.engine.tokenizer import Tokenizer
from octavo.metrics import Metrics


class EngineClient(Protocol):
    """An engine as its clients see it. All methods belong to one event loop."""

    metrics: Metrics

    @property
    def state(self) -> str:
        """'starting', 'ready', 'draining', 'dead'."""
        ...

    @property
    def state_reason(self) -> str:
        """One line for /health: why it is not ready."""
        ...

    @property
    def info(self) -> EngineInfo:
        """Raises Unavailable until the engine is ready."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises Unavailable until it is loaded."""
        ...

    @property
    def num_queued(self) -> int:
        """Choices that wait for their first step; compared with --max-queued-requests before a request is taken."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[ChoiceDelta, None]:
        """Run a request; deltas of its choices interleave, each choice ends once.

        Closing the iterator (or cancelling its task) aborts the request and frees its blocks within a step.
        Raises Unavailable when the queue is full, draining or the engine dies, RequestFailed for an error of
        this request alone.
        """
        ...

    async def abort(self, request_id: str) -> bool:
        """End a live request with finish_reason 'abort'; False when no such request lives."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget every published block; False while running requests hold some (those stay valid)."""
        ...

    def timeline(self, request_id: str) -> dict[str, object] | None:
        """The timestamps of a live or recent request, for /v1/requests/{id}."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let live ones finish, abort what is left after `timeout_s`."""
        ...

    async def close(self) -> None: ...
