"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.events import ChoiceDelta, GenerationRequest
from octavo.errors import InvalidRequest
from octavo.server.generation import Generation
from octavo.server.openai.answer import Choice, ChunkFrames, fold, head, members, written
from octavo.server.openai.fields import check_extra, parse_body, warning_headers
from octavo.server.openai.logprobs import chat_logprobs, prompt_logprobs
from octavo.server.openai.messages import render_messages
from octavo.server.openai.options import Options, check_alternatives, parse_options
from octavo.server.openai.prompts import Prompt, encode_prompts, engine_requests
from octavo.server.openai.schema import ChatBody
from octavo.server.service import Service
from octavo.server.sse import EventStream, until_departure
from octavo.server.wire import json_bytes


@dataclass(frozen=True, slots=True)
class ChatJob:
    """A chat request, parsed, rendered and tokenized."""

    options: Options
    requests: Sequence[GenerationRequest]
    ignored_fields: list[str]

    @property
    def answer_id(self) -> str:
        return f"chatcmpl-{self.options.request_id}"


async def create_chat_completion(request: Request, service: Service) -> Response:
    job = await parse_chat(request, service)
    generation = Generation(service.client, job.requests)
    headers = warning_headers(job.ignored_fields)
    if job.options.stream:
        return EventStream(service, generation.deltas(), _ChatChunks(job, generation), headers)

    async def answer() -> Response:
        choices = await fold(generation.deltas(), generation.num_choices)
        return await written(service, choices, lambda: _body(job, generation, choices), headers)

    return await until_departure(request, service, answer())


async def parse_chat(request: Request, service: Service) -> ChatJob:
    """Raises the RequestError that refuses the request; nothing has been queued then."""
    info = service.ready_info()
    body = parse_body(ChatBody, await service.read(request))
    ignored = check_extra(body, strict=service.config.server.strict_api)
    options = parse_options(
        body,
        request,
        service,
        info,
        max_tokens=_max_tokens(body),
        default_max_tokens=None,
        logprobs=_logprobs(body, service),
    )
    service.check_room(options.sampling.n)
    text = await render_messages(body, request, service, ignored)
    prompts = await encode_prompts(
        [Prompt(text, ())],
        service,
        info,
        # The template writes the special tokens itself: added here too, there would be two BOS tokens.
        add_special_tokens=body.add_special_tokens is True,
        is_cut=options.truncate_to is not None,
        param="messages",
    )
    return ChatJob(options, engine_requests(prompts, options, info, param="messages"), ignored)


def _max_tokens(body: ChatBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequest(
            f"max_tokens is {old} and max_completion_tokens is {new}: two names of one limit. Send one of them.",
            param="max_completion_tokens",
        )
    name, value = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
    if value is not None and value < 1:
        raise InvalidRequest(f"{name} is {value}; it must be at least 1.", param=name)
    return value


def _logprobs(body: ChatBody, service: Service) -> int | None:
    check_alternatives("top_logprobs", body.top_logprobs, service.config.server)
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return None


def _body(job: ChatJob, generation: Generation, choices: Sequence[Choice]) -> dict[str, Any]:
    options = job.options
    shown = []
    for index, choice in enumerate(choices):
        logprobs = None
        if options.logprobs is not None:
            logprobs = chat_logprobs(choice.details, options.logprobs, as_ids=options.tokens_as_ids)
        shown.append(
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **({"token_ids": choice.token_ids} if options.return_token_ids else {}),
            }
        )
    return {
        **head(job.answer_id, "chat.completion", options),
        "choices": shown,
        "usage": generation.usage(details=options.shows_cached_tokens),
        **_prompt_fields(options, generation),
    }


def _prompt_fields(options: Options, generation: Generation) -> dict[str, Any]:
    """What the answer tells about the prompt, when asked to."""
    shown: dict[str, Any] = {}
    if options.prompt_logprobs is not None:
        shown["prompt_logprobs"] = prompt_logprobs(generation.prompt_details[0], options.prompt_logprobs)
    if options.return_token_ids:
        shown["prompt_token_ids"] = generation.requests[0].prompt_token_ids
    return shown


class _ChatChunks:
    """A `ChunkWriter`: for each choice its role, then content, then the finish, each in chunks of their own."""

    _ROLE = b',"delta":{"role":"assistant","content":"","refusal":null},"logprobs":null'
    _NO_CONTENT = b',"delta":{},"logprobs":null'

    def __init__(self, job: ChatJob, generation: Generation) -> None:
        self._options = job.options
        self._generation = generation
        self._frames = ChunkFrames(job.answer_id, "chat.completion.chunk", job.options, generation)
        self._has_begun = [False] * generation.num_choices
        self._is_first = True

    def write(self, delta: ChoiceDelta) -> bytes:
        chunks = []
        if not self._has_begun[delta.choice]:
            self._has_begun[delta.choice] = True
            chunks.append(self._begin(delta))
        if delta.text or delta.logprobs or (delta.token_ids and self._options.return_token_ids):
            chunks.append(self._content(delta))
        if delta.finish_reason is not None:
            chunks.append(self._frames.chunk(delta, self._NO_CONTENT))
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    def end(self) -> bytes:
        return self._frames.usage_chunk()

    def _begin(self, delta: ChoiceDelta) -> bytes:
        outer = {}
        if self._is_first:
            self._is_first = False
            outer = _prompt_fields(self._options, self._generation)
        return self._frames.chunk(delta, self._ROLE, ends=False, outer=members(outer))

    def _content(self, delta: ChoiceDelta) -> bytes:
        logprobs = b"null"
        if delta.logprobs and self._options.logprobs is not None:
            logprobs = json_bytes(
                chat_logprobs(delta.logprobs, self._options.logprobs, as_ids=self._options.tokens_as_ids)
            )
        content = b',"delta":{"content":' + json_bytes(delta.text) + b'},"logprobs":' + logprobs
        extra = members({"token_ids": delta.token_ids}) if self._options.return_token_ids else b""
        return self._frames.chunk(delta, content, extra, ends=False)
