"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.events import ChoiceDelta, GenerationRequest, TokenDetail
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.server.generation import Generation
from octavo.server.openai.answer import Choice, ChunkFrames, fold, head, members, written
from octavo.server.openai.fields import check_extra, parse_body, warning_headers
from octavo.server.openai.logprobs import completion_logprobs, prompt_logprobs
from octavo.server.openai.options import Options, check_alternatives, parse_options
from octavo.server.openai.prompts import encode_prompts, engine_requests, read_prompts
from octavo.server.openai.schema import CompletionBody
from octavo.server.service import Service
from octavo.server.sse import EventStream, until_departure
from octavo.server.wire import json_bytes

_DEFAULT_MAX_TOKENS = 16
_OBJECT = "text_completion"
_ECHO_SLICE = 256  # tokens of a long prompt whose logprobs are written without a pause


@dataclass(frozen=True, slots=True)
class CompletionJob:
    """A completions request, parsed and tokenized."""

    options: Options
    requests: Sequence[GenerationRequest]
    echo: bool
    ignored_fields: list[str]

    @property
    def answer_id(self) -> str:
        return f"cmpl-{self.options.request_id}"


async def create_completion(request: Request, service: Service) -> Response:
    job = await parse_completion(request, service)
    generation = Generation(service.client, job.requests)
    deltas = _echoed(job, generation, service.client.tokenizer) if job.echo else generation.deltas()
    headers = warning_headers(job.ignored_fields)
    if job.options.stream:
        return EventStream(service, deltas, _CompletionChunks(job, generation), headers)

    async def answer() -> Response:
        choices = await fold(deltas, generation.num_choices)
        return await written(service, choices, lambda: _body(job, generation, choices), headers)

    return await until_departure(request, service, answer())


async def parse_completion(request: Request, service: Service) -> CompletionJob:
    """Raises the RequestError that refuses the request; nothing has been queued then."""
    info = service.ready_info()
    body = parse_body(CompletionBody, await service.read(request))
    ignored = check_extra(body, strict=service.config.server.strict_api)
    check_alternatives("logprobs", body.logprobs, service.config.server)
    echo = body.echo is True
    options = parse_options(
        body,
        request,
        service,
        info,
        max_tokens=body.max_tokens,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        scores_prompt=echo,
    )
    if body.prompt is None:
        raise InvalidRequest("prompt is required.", param="prompt", code="missing_field")
    is_cut = options.truncate_to is not None
    prompts = read_prompts(body.prompt, service, info, is_cut=is_cut)
    service.check_room(options.sampling.n * len(prompts))
    adds = body.add_special_tokens is not False
    prompts = await encode_prompts(prompts, service, info, add_special_tokens=adds, is_cut=is_cut, param="prompt")
    return CompletionJob(options, engine_requests(prompts, options, info, param="prompt"), echo, ignored)


async def _echoed(
    job: CompletionJob, generation: Generation, tokenizer: Tokenizer
) -> AsyncGenerator[ChoiceDelta, None]:
    """The deltas of `generation`; before the first of each choice, its prompt. Text offsets count from there."""
    num_prompt_chars: dict[int, int] = {}
    async with aclosing(generation.deltas()) as deltas:
        async for delta in deltas:
            if delta.choice not in num_prompt_chars:
                text, details = _prompt_shown(job, generation, tokenizer, delta.choice)
                num_prompt_chars[delta.choice] = len(text)
                yield ChoiceDelta(delta.choice, text, logprobs=tuple(details[:_ECHO_SLICE]))
                for start in range(_ECHO_SLICE, len(details), _ECHO_SLICE):
                    await asyncio.sleep(0)
                    yield ChoiceDelta(delta.choice, logprobs=tuple(details[start : start + _ECHO_SLICE]))
            if delta.logprobs:
                delta = replace(delta, logprobs=tuple(_shifted(delta.logprobs, num_prompt_chars[delta.choice])))
            yield delta


def _prompt_shown(
    job: CompletionJob, generation: Generation, tokenizer: Tokenizer, choice: int
) -> tuple[str, list[TokenDetail]]:
    index = choice // generation.num_choices_per_prompt
    request = generation.requests[index]
    text, shows_logprobs = request.prompt_text, job.options.logprobs is not None
    if text is not None and not shows_logprobs:
        return text, []
    decoded = tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    text = decoded if text is None else text
    # What the tokenizer put in front (a BOS token) is in the ids but not in the text that was sent.
    details = _shifted(generation.prompt_details[index], len(text) - len(decoded))
    return text, list(details) if shows_logprobs else []


def _shifted(details: Sequence[TokenDetail], by: int) -> Iterator[TokenDetail]:
    for detail in details:
        yield replace(detail, text_offset=max(0, detail.text_offset + by))


def _body(job: CompletionJob, generation: Generation, choices: Sequence[Choice]) -> dict[str, Any]:
    options = job.options
    shown = []
    for index, choice in enumerate(choices):
        logprobs = None
        if options.logprobs is not None:
            logprobs = completion_logprobs(choice.details, options.logprobs, as_ids=options.tokens_as_ids)
        shown.append(
            {
                "index": index,
                "text": choice.text,
                "logprobs": logprobs,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **_prompt_fields(job, generation, index),
                **({"token_ids": choice.token_ids} if options.return_token_ids else {}),
            }
        )
    usage = generation.usage(details=options.shows_cached_tokens)
    return {**head(job.answer_id, _OBJECT, options), "choices": shown, "usage": usage}


def _prompt_fields(job: CompletionJob, generation: Generation, choice: int) -> dict[str, Any]:
    """What a choice tells about its prompt, when asked to."""
    prompt_index = choice // generation.num_choices_per_prompt
    shown: dict[str, Any] = {}
    if job.options.prompt_logprobs is not None:
        shown["prompt_logprobs"] = prompt_logprobs(generation.prompt_details[prompt_index], job.options.prompt_logprobs)
    if job.options.return_token_ids:
        shown["prompt_token_ids"] = generation.requests[prompt_index].prompt_token_ids
    return shown


class _CompletionChunks:
    """A `ChunkWriter`."""

    def __init__(self, job: CompletionJob, generation: Generation) -> None:
        self._job = job
        self._options = job.options
        self._generation = generation
        self._frames = ChunkFrames(job.answer_id, _OBJECT, job.options, generation)
        self._has_begun = [False] * generation.num_choices
        self._has_extra = job.options.return_token_ids or job.options.prompt_logprobs is not None

    def write(self, delta: ChoiceDelta) -> bytes:
        extra = self._extra(delta) if self._has_extra else b""
        if not (delta.text or delta.logprobs or delta.finish_reason or extra):
            return b""
        logprobs = b"null"
        if delta.logprobs and self._options.logprobs is not None:
            logprobs = json_bytes(
                completion_logprobs(delta.logprobs, self._options.logprobs, as_ids=self._options.tokens_as_ids)
            )
        return self._frames.chunk(delta, b',"text":' + json_bytes(delta.text) + b',"logprobs":' + logprobs, extra)

    def end(self) -> bytes:
        return self._frames.usage_chunk()

    def _extra(self, delta: ChoiceDelta) -> bytes:
        shown: dict[str, Any] = {}
        if not self._has_begun[delta.choice]:
            self._has_begun[delta.choice] = True
            shown |= _prompt_fields(self._job, self._generation, delta.choice)
        if self._options.return_token_ids and delta.token_ids:
            shown["token_ids"] = delta.token_ids
        return members(shown)
