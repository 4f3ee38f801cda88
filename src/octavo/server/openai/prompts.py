"""From a prompt in any of its forms to engine requests that fit the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.engine.events import EngineInfo, GenerationRequest
from octavo.engine.limits import check_limits
from octavo.errors import ContextLengthExceeded, InvalidRequest
from octavo.request import SamplingParams
from octavo.server.openai.fields import show
from octavo.server.openai.options import Options
from octavo.server.service import Service

# To find where it is cut, a text is encoded in full: what that may cost is bounded.
_MAX_CUT_CHARS_PER_TOKEN = 64
_MAX_PROMPT_SCORES = 1_000_000


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as it was sent (text or ids), then as token ids."""

    text: str | None
    token_ids: Sequence[int]


def read_prompts(value: object, service: Service, info: EngineInfo, *, is_cut: bool) -> list[Prompt]:
    """The prompts of a completions body: text, a list of texts, token ids, or a list of those.

    Counts are checked before anything of that size is made; `is_cut` says that over-long prompts are allowed,
    as they will be truncated. The token ids of a text are not known yet.
    """
    if isinstance(value, str):
        return [Prompt(value, ())]
    if not isinstance(value, list):
        raise InvalidRequest(
            f"prompt must be a string or a list, got {show(value)}.", param="prompt", code="invalid_type"
        )
    if not value:
        raise InvalidRequest("prompt is an empty list.", param="prompt")
    if isinstance(value[0], int):
        return [_ids(value, "prompt", info, is_cut)]
    limit = service.config.server.max_prompts
    if len(value) > limit:
        raise InvalidRequest(
            f"prompt holds {len(value)} prompts; this server takes at most {limit} at once (--max-prompts).",
            param="prompt",
        )
    return [
        Prompt(one, ()) if isinstance(one, str) else _ids(one, f"prompt.{i}", info, is_cut)
        for i, one in enumerate(value)
    ]


def _ids(value: object, param: str, info: EngineInfo, is_cut: bool) -> Prompt:
    if not isinstance(value, list):
        raise InvalidRequest(
            f"{param} must be text or a list of token ids, got {show(value)}.", param=param, code="invalid_type"
        )
    if len(value) > info.max_model_len and not is_cut:
        raise ContextLengthExceeded(
            f"{param} has {len(value)} tokens and the context is {info.max_model_len}. Shorten it.",
            param=param,
        )
    if set(map(type, value)) - {int}:
        worst = next(one for one in value if type(one) is not int)
        raise InvalidRequest(f"{param} must hold token ids only, got {show(worst)}.", param=param, code="invalid_type")
    return Prompt(None, value)


async def encode_prompts(
    prompts: Sequence[Prompt], service: Service, info: EngineInfo, *, add_special_tokens: bool, is_cut: bool, param: str
) -> list[Prompt]:
    """Texts get their token ids; one that cannot fit the context is refused before it is encoded."""
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    most = _MAX_CUT_CHARS_PER_TOKEN * info.max_model_len
    if is_cut and any(len(text) > most for text in texts):
        raise InvalidRequest(
            f"{param} has {max(map(len, texts))} characters; to be truncated it may have at most {most}. Cut it first.",
            param=param,
        )
    encoded = iter(
        await service.encode(
            texts, add_special_tokens=add_special_tokens, max_tokens=None if is_cut else info.max_model_len, param=param
        )
    )
    return [prompt if prompt.text is None else Prompt(prompt.text, next(encoded)) for prompt in prompts]


def engine_requests(
    prompts: Sequence[Prompt], options: Options, info: EngineInfo, *, param: str
) -> list[GenerationRequest]:
    """One request per prompt: truncated if the client wants that, checked against the model, max_tokens resolved."""
    requests = []
    for index, prompt in enumerate(prompts):
        name = param if len(prompts) == 1 else f"{param}.{index}"
        token_ids, text = tuple(prompt.token_ids), prompt.text
        size = _kept_tokens(options, info)
        if size is not None and len(token_ids) > size:
            token_ids = token_ids[-size:] if options.truncates_left else token_ids[:size]
            text = None
        check_limits(token_ids, options.sampling, info, param=name)
        requests.append(
            GenerationRequest(
                request_id=options.request_id if len(prompts) == 1 else f"{options.request_id}.{index}",
                prompt_token_ids=token_ids,
                sampling=_resolved(options, info.max_model_len - len(token_ids)),
                prompt_text=text,
                arrival_s=options.arrival_s,
                priority=options.priority,
                cache_salt=options.cache_salt,
            )
        )
    _check_scores(requests, options)
    return requests


def _check_scores(requests: Sequence[GenerationRequest], options: Options) -> None:
    """Bound the logprobs of prompts, which come all at once."""
    if options.sampling.prompt_logprobs is None:
        return
    num_tokens = sum(len(request.prompt_token_ids) for request in requests)
    num_scores = num_tokens * options.sampling.n * (1 + options.sampling.prompt_logprobs)
    if num_scores > _MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"The request asks for {num_scores} log-probabilities of prompt tokens; the limit is {_MAX_PROMPT_SCORES}. "
            "Send fewer prompts at once, or ask for fewer alternatives.",
            param="logprobs" if options.prompt_logprobs is None else "prompt_logprobs",
        )


def _kept_tokens(options: Options, info: EngineInfo) -> int | None:
    if options.truncate_to != -1:
        return options.truncate_to
    max_tokens = options.sampling.max_tokens
    return max(1, info.max_model_len - (1 if max_tokens is None else max_tokens))


def _resolved(options: Options, room: int) -> SamplingParams:
    if options.sampling.max_tokens is not None:
        return options.sampling
    most = room if options.default_max_tokens is None else min(room, options.default_max_tokens)
    return replace(options.sampling, max_tokens=most)
