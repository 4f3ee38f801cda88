"""Reads answers strictly: JSON without NaN, server-sent events line by line."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import httpx


def strict_json(text: str | bytes) -> Any:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass
class Stream:
    """What a stream said: its events in order, its comments, and whether it ended with [DONE]."""

    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    is_done: bool = False
    headers: httpx.Headers = field(default_factory=httpx.Headers)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ())]

    def of(self, index: int) -> list[dict[str, Any]]:
        return [chunk for chunk in self.chunks if chunk["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(
            chunk["text"] if "text" in chunk else chunk["delta"].get("content") or "" for chunk in self.of(index)
        )

    def finish_reasons(self, index: int = 0) -> list[str]:
        return [chunk["finish_reason"] for chunk in self.of(index) if chunk["finish_reason"] is not None]


def parse_stream(raw: bytes) -> Stream:
    stream = Stream()
    assert raw.endswith(b"\n\n"), raw[-80:]
    for block in raw[:-2].decode("utf-8").split("\n\n"):
        # A reader that splits at any Unicode line break must find the same lines.
        assert block.splitlines() == block.split("\n"), block
        if block.startswith(":"):
            stream.comments.append(block)
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        assert not stream.is_done, f"an event after [DONE]: {block}"
        if block == "data: [DONE]":
            stream.is_done = True
        else:
            stream.events.append(strict_json(block.removeprefix("data: ")))
    return stream


def stream(client: httpx.Client, path: str, body: dict[str, Any]) -> Stream:
    response = client.post(path, json={**body, "stream": True})
    if response.status_code != 200:
        raise AssertionError(f"{response.status_code} {response.text}")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    result = parse_stream(response.content)
    result.status, result.headers = response.status_code, response.headers
    return result


def fold(stream: Stream) -> dict[int, dict[str, Any]]:
    """The choices that a stream's chunks add up to, in the shape of a non-streaming answer's choices."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in stream.chunks:
        is_chat = "delta" in chunk
        choice = choices.setdefault(
            chunk["index"],
            {"index": chunk["index"], "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None},
        )
        assert choice["finish_reason"] is None, "a chunk after the finish"
        choice["text"] += (chunk["delta"].get("content") or "") if is_chat else chunk["text"]
        if chunk["logprobs"] is not None:
            if choice["logprobs"] is None:
                choice["logprobs"] = {name: [] for name in chunk["logprobs"]}
            for name, values in chunk["logprobs"].items():
                if values is None:
                    choice["logprobs"][name] = None
                else:
                    choice["logprobs"][name] += values
        for name in ("finish_reason", "stop_reason"):
            if chunk.get(name) is not None:
                choice[name] = chunk[name]
        for name in ("prompt_logprobs", "prompt_token_ids"):
            if name in chunk:
                assert name not in choice
                choice[name] = chunk[name]
        if "token_ids" in chunk:
            choice.setdefault("token_ids", []).extend(chunk["token_ids"])
    return choices
