"""What both endpoints do with deltas: fold them into whole choices, or frame them as chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from octavo.engine.events import ChoiceDelta, TokenDetail
from octavo.server.generation import Generation
from octavo.server.openai.options import Options
from octavo.server.service import Service
from octavo.server.wire import json_bytes

_MANY_DETAILS = 2000  # written beside the loop


@dataclass(slots=True)
class Choice:
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


async def fold(deltas: AsyncGenerator[ChoiceDelta, None], num_choices: int) -> list[Choice]:
    choices = [Choice() for _ in range(num_choices)]
    async with aclosing(deltas):
        async for delta in deltas:
            choices[delta.choice].add(delta)
    return choices


def head(answer_id: str, object_name: str, options: Options) -> dict[str, Any]:
    """The members that every answer and every chunk begins with."""
    return {
        "id": answer_id,
        "object": object_name,
        "created": int(time.time()),
        "model": options.model,
        "system_fingerprint": options.fingerprint,
    }


async def written(
    service: Service, choices: Sequence[Choice], body: Callable[[], dict[str, Any]], headers: Mapping[str, str]
) -> Response:
    """The answer whose JSON `body` makes, in a thread when there is much to write about `choices`."""
    num_details = sum(len(detail.top) + 1 for choice in choices for detail in choice.details)
    content = await service.compute(lambda: json_bytes(body()), is_large=num_details > _MANY_DETAILS)
    return Response(content, media_type="application/json", headers=dict(headers))


class ChunkFrames:
    """The parts of a chunk that are alike in every chunk of a stream, made once; a chunk is then one join."""

    def __init__(self, answer_id: str, object_name: str, options: Options, generation: Generation) -> None:
        self._head = b"data: " + json_bytes(head(answer_id, object_name, options))[:-1] + b',"choices":['
        self._choice_heads = [self._head + b'{"index":%d' % index for index in range(generation.num_choices)]
        self._tail = b',"usage":null}\n\n' if options.include_usage else b"}\n\n"
        self._options = options
        self._generation = generation

    def chunk(
        self, delta: ChoiceDelta, content: bytes, extra: bytes = b"", *, outer: bytes = b"", ends: bool = True
    ) -> bytes:
        """One event for the choice of `delta`. `content` and `extra` are `members` of the choice, `outer` of the chunk.

        The finish reason is written if `delta` has one, and `ends`.
        """
        if delta.finish_reason is None or not ends:
            finish = b',"finish_reason":null'
        else:
            finish = members({"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})
        tail = self._usage_tail() if self._options.continuous_usage else self._tail
        return b"".join((self._choice_heads[delta.choice], content, finish, extra, b"}]", outer, tail))

    def usage_chunk(self) -> bytes:
        """The last event of a stream that was asked for its usage."""
        return self._head + b"]" + self._usage_tail() if self._options.include_usage else b""

    def _usage_tail(self) -> bytes:
        usage = self._generation.usage(details=self._options.shows_cached_tokens)
        return b',"usage":' + json_bytes(usage) + b"}\n\n"


def members(values: Mapping[str, Any]) -> bytes:
    """The members of a JSON object after others: ',"name":value' each."""
    return b"," + json_bytes(values)[1:-1] if values else b""
