"""What both endpoints do with deltas: fold them into whole choices, or frame them as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.engine.events import ChoiceDelta, TokenDetail
from octavo.server.generation import Generation
from octavo.server.openai.options import Options
from octavo.server.wire import json_bytes


@dataclass(slots=True)
class ChoiceFold:
    """A choice, put together from its deltas."""

    texts: list[str] = field(default_factory=list)
    details: list[TokenDetail] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self.details += delta.logprobs
        self.token_ids += delta.token_ids
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


class ChunkFrames:
    """The parts of a chunk that are alike in every chunk of a stream, made once; a chunk is then one join."""

    def __init__(
        self, answer_id: str, object_name: str, options: Options, generation: Generation, *, show_cached: bool
    ) -> None:
        head = {
            "id": answer_id,
            "object": object_name,
            "created": int(time.time()),
            "model": options.model,
            "system_fingerprint": options.fingerprint,
        }
        self._head = b"data: " + json_bytes(head)[:-1] + b',"choices":['
        self._choice_heads = [self._head + b'{"index":%d' % index for index in range(generation.num_choices)]
        self._tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self._options = options
        self._generation = generation
        self._show_cached = show_cached

    def chunk(
        self, delta: ChoiceDelta, content: bytes, extra: bytes = b"", *, outer: bytes = b"", ends: bool = True
    ) -> bytes:
        """One event for the choice of `delta`. `content` and `extra` are `members` of the choice, `outer` of the chunk.

        The finish reason is written if `delta` has one, and `ends`.
        """
        if delta.finish_reason is None or not ends:
            finish = b',"finish_reason":null'
        else:
            stop_reason = b"null" if delta.stop_reason is None else json_bytes(delta.stop_reason)
            finish = b',"finish_reason":' + json_bytes(delta.finish_reason) + b',"stop_reason":' + stop_reason
        tail = self._tail
        if self._options.continuous_usage:
            tail = b',"usage":' + json_bytes(self._generation.usage(details=self._show_cached)) + b"}\n\n"
        return b"".join((self._choice_heads[delta.choice], content, finish, extra, b"}]", outer, tail))

    def usage_chunk(self) -> bytes:
        """The last event of a stream that was asked for its usage."""
        if not self._options.include_usage:
            return b""
        return self._head + b'],"usage":' + json_bytes(self._generation.usage(details=self._show_cached)) + b"}\n\n"


def members(values: Mapping[str, Any]) -> bytes:
    """The members of a JSON object after others: ',"name":value' each."""
    return b"," + json_bytes(values)[1:-1] if values else b""
