"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from octavo.engine.events import ChoiceDelta, GenerationRequest, TokenDetail
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.server.generation import Generation
from octavo.server.openai.answer import ChoiceFold, ChunkFrames, members
from octavo.server.openai.fields import check_extra, parse_body, warning_headers
from octavo.server.openai.logprobs import completion_logprobs, prompt_logprobs
from octavo.server.openai.options import Options, check_alternatives, parse_options
from octavo.server.openai.prompts import encode_prompts, engine_requests, read_prompts
from octavo.server.openai.schema import CompletionBody
from octavo.server.service import Service
from octavo.server.sse import EventStream, until_departure
from octavo.server.wire import JsonResponse, json_bytes

_DEFAULT_MAX_TOKENS = 16
_OBJECT = "text_completion"


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
    pieces = _Pieces(job, generation, service.client.tokenizer)
    headers = warning_headers(job.ignored_fields)
    show_cached = service.config.server.enable_prompt_tokens_details
    if job.options.stream:
        writer = _CompletionChunks(job, generation, show_cached=show_cached)
        return EventStream(service, pieces.deltas(), writer, headers)

    async def fold() -> Response:
        body = await _fold(job, generation, pieces.deltas(), show_cached=show_cached)
        return JsonResponse(body, headers=headers)

    return await until_departure(request, service, fold())


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


class _Pieces:
    """The deltas of a completion as a client reads them: with echo, the prompt is the first piece of each choice."""

    def __init__(self, job: CompletionJob, generation: Generation, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._echo = job.echo
        self._echoes_logprobs = job.options.logprobs is not None
        self._lengths: dict[int, int] = {}  # choice -> characters of its prompt, once that is out

    def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        return self._echoed() if self._echo else self._generation.deltas()

    async def _echoed(self) -> AsyncGenerator[ChoiceDelta, None]:
        async with aclosing(self._generation.deltas()) as deltas:
            async for delta in deltas:
                if delta.choice not in self._lengths:
                    prompt = self._prompt_piece(delta.choice)
                    self._lengths[delta.choice] = len(prompt.text)
                    yield prompt
                if delta.logprobs:
                    delta = replace(delta, logprobs=tuple(_shifted(delta.logprobs, self._lengths[delta.choice])))
                yield delta

    def _prompt_piece(self, choice: int) -> ChoiceDelta:
        index = choice // self._generation.num_choices_per_prompt
        request = self._generation.requests[index]
        text = request.prompt_text
        if text is not None and not self._echoes_logprobs:
            return ChoiceDelta(choice, text)
        decoded = self._tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        text = decoded if text is None else text
        # What the tokenizer put in front (a BOS token) is in the ids but not in the text that was sent.
        details = _shifted(self._generation.prompt_details[index], len(text) - len(decoded))
        return ChoiceDelta(choice, text, logprobs=tuple(details) if self._echoes_logprobs else ())


def _shifted(details: Sequence[TokenDetail], by: int) -> Iterator[TokenDetail]:
    for detail in details:
        yield replace(detail, text_offset=max(0, detail.text_offset + by))


async def _fold(
    job: CompletionJob, generation: Generation, pieces: AsyncGenerator[ChoiceDelta, None], *, show_cached: bool
) -> dict[str, Any]:
    options = job.options
    folds = [ChoiceFold() for _ in range(generation.num_choices)]
    async with aclosing(pieces):
        async for delta in pieces:
            folds[delta.choice].add(delta)
    choices = []
    for index, fold in enumerate(folds):
        choice: dict[str, Any] = {"index": index, "text": fold.text, "logprobs": None}
        if options.logprobs is not None:
            choice["logprobs"] = completion_logprobs(fold.details, options.logprobs, as_ids=options.tokens_as_ids)
        choice["finish_reason"] = fold.finish_reason
        choice["stop_reason"] = fold.stop_reason
        choice |= _prompt_fields(job, generation, index)
        if options.return_token_ids:
            choice["token_ids"] = fold.token_ids
        choices.append(choice)
    return {
        "id": job.answer_id,
        "object": _OBJECT,
        "created": int(time.time()),
        "model": options.model,
        "system_fingerprint": options.fingerprint,
        "choices": choices,
        "usage": generation.usage(details=show_cached),
    }


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

    def __init__(self, job: CompletionJob, generation: Generation, *, show_cached: bool) -> None:
        self._job = job
        self._options = job.options
        self._generation = generation
        self._frames = ChunkFrames(job.answer_id, _OBJECT, job.options, generation, show_cached=show_cached)
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
