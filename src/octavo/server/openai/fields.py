"""What a body may hold beside the fields that are honoured, and how its mistakes are told.

Three kinds: known to other servers but not offered here (400, unless the value asks for nothing), harmless
ones that clients send routinely (ignored, and said so in a header), and unknown ones (the same, or 400 with
--strict-api). Nothing is ignored in silence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from octavo.errors import InvalidRequest, UnsupportedFeature
from octavo.server.openai.schema import GenerationBody, Strict

WARNINGS_HEADER = "X-Octavo-Warnings"
_MAX_NAMED = 16
_MAX_NAME_CHARS = 64
_MAX_VALUE_CHARS = 80

Body = TypeVar("Body", bound=Strict)

# Harmless to ignore: they name the caller, or choose something that this server does not have.
IGNORED = frozenset(
    "user metadata store service_tier parallel_tool_calls safety_identifier prompt_cache_key prompt_cache_retention "
    "verbosity".split()
)

_OFF: tuple[object, ...] = (None, False)
_ZERO: tuple[object, ...] = (None, 0)
_NOTHING: tuple[object, ...] = (None, [])

# Field -> the values that ask for nothing.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # OpenAI
    "suffix": (None, ""),
    "best_of": (None, 1),
    "tools": _NOTHING,
    "tool_choice": (None, "none", "auto"),
    "functions": _NOTHING,
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "moderation": (None,),
    # fields of another endpoint
    "echo": _OFF,
    "max_completion_tokens": (None,),
    "top_logprobs": _ZERO,
    "messages": (None,),
    "prompt": (None,),
    "input": (None,),
    # vLLM
    "chat_template": (None,),
    "use_beam_search": _OFF,
    "length_penalty": (None, 1),
    "early_stopping": _OFF,
    "logprob_token_ids": _NOTHING,
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json_object": _OFF,
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "structural_tag": (None,),
    "kv_transfer_params": (None, {}),
    "vllm_xargs": (None, {}),
    "repetition_detection": (None,),
    "thinking_token_budget": (None,),
    "stream_interval": (None, 1),
    "mm_processor_kwargs": (None, {}),
    "session_id": (None,),
    "prompt_embeds": (None,),
    "return_prompt_text": _OFF,
    "include_reasoning": (None, True),
    # SGLang
    "stop_regex": (None, "", []),
    "no_stop_trim": _OFF,
    "regex": (None,),
    "ebnf": (None,),
    "json_schema": (None,),
    "lora_path": (None, "", []),
    "session_params": (None,),
    "custom_logit_processor": (None,),
    "custom_params": (None,),
    "rid": (None,),
    "extra_key": (None,),
    "data_parallel_rank": (None,),
    "return_hidden_states": _OFF,
    "beam_width": (None, 1),
    "separate_reasoning": (None, True),
    "input_ids": (None,),
    # llama.cpp
    "n_predict": (None,),
    "n_keep": _ZERO,
    "n_discard": _ZERO,
    "min_keep": _ZERO,
    "n_indent": _ZERO,
    "typical_p": (None, 1),
    "top_n_sigma": (None, -1),
    "xtc_probability": _ZERO,
    "dry_multiplier": _ZERO,
    "dynatemp_range": _ZERO,
    "mirostat": _ZERO,
    "repeat_penalty": (None, 1),
    "samplers": _NOTHING,
    "grammar": (None, ""),
    "cache_prompt": (None, True),
    "id_slot": (None, -1),
    "n_probs": _ZERO,
    "post_sampling_probs": _OFF,
    "timings_per_token": _OFF,
    "t_max_predict_ms": (None, 0, -1),
    "return_tokens": _OFF,
    "lora": _NOTHING,
    "image_data": _NOTHING,
}

_HINTS = {
    "max_completion_tokens": "Send max_tokens.",
    "top_logprobs": "Send logprobs with the number of alternatives.",
    "messages": "They belong to /v1/chat/completions.",
    "prompt": "It belongs to /v1/completions.",
    "input": "Send prompt or messages.",
    "best_of": "Send n alone; best_of may only repeat it.",
    "chat_template": "A template is code: the operator chooses it (--chat-template). Send chat_template_kwargs.",
    "n_predict": "Send max_tokens.",
    "repeat_penalty": "Send repetition_penalty.",
    "cache_prompt": "Send a cache_salt of your own to compute a prompt afresh.",
    "n_probs": "Send logprobs.",
    "return_tokens": "Send return_token_ids.",
    "rid": "Send request_id.",
    "extra_key": "Send cache_salt.",
    "no_stop_trim": "Send include_stop_str_in_output.",
    "stop_regex": "Send stop.",
    "early_stopping": "Beam search is not offered.",
    "input_ids": "Send the token ids as prompt.",
}


def parse_body(model: type[Body], raw: Mapping[str, Any]) -> Body:
    """`raw` as `model`. Raises InvalidRequest naming the first wrong field."""
    try:
        body = msgspec.convert(raw, model)
    except msgspec.ValidationError as error:
        raise _invalid(str(error), raw) from None
    _keep_extra(body, raw)
    return body


def _keep_extra(body: Strict, raw: Mapping[str, Any]) -> None:
    """Leave the members of `raw` that are no fields in the body's `extra`, and so within it."""
    names = body.__struct_fields__
    for name, value in raw.items():
        if name not in names:
            body.__dict__[name] = value
        elif isinstance(field := getattr(body, name), Strict):
            _keep_extra(field, value)
        elif isinstance(field, list) and field and isinstance(field[0], Strict):
            for each, given in zip(field, value, strict=True):
                _keep_extra(each, given)


def check_extra(body: Strict, *, strict: bool) -> list[str]:
    """The names of the fields that will be ignored. Raises for what must not be."""
    ignored: list[str] = []
    options = body.stream_options if isinstance(body, GenerationBody) else None
    for name in options.extra if options is not None else ():
        if strict:
            refuse_unknown(f"stream_options.{name}")
        ignored.append(f"stream_options.{name}")
    for name, value in body.extra.items():
        neutral = UNSUPPORTED.get(name)
        if neutral is not None:
            n = getattr(body, "n", None)
            if value in neutral or (name == "best_of" and value == n and value is not True):
                continue
            hint = _HINTS.get(name, "Leave it out.")
            raise UnsupportedFeature(f"{name} is not supported by this server. {hint}", param=name)
        if name not in IGNORED and strict:
            refuse_unknown(name)
        ignored.append(name)
    return ignored


def refuse_unknown(name: str) -> NoReturn:
    shown = name[:_MAX_NAME_CHARS]
    raise InvalidRequest(f"Unknown field {shown!r}. Leave it out (the server runs with --strict-api).", param=shown)


def warning_headers(ignored: list[str]) -> dict[str, str]:
    """Names the fields that were ignored, in a form that is safe in a header."""
    if not ignored:
        return {}
    names = [_header_safe(name) for name in ignored[:_MAX_NAMED]]
    more = f" and {len(ignored) - _MAX_NAMED} more" if len(ignored) > _MAX_NAMED else ""
    return {WARNINGS_HEADER: f"ignored fields: {', '.join(names)}{more}"}


def _header_safe(name: str) -> str:
    return "".join(
        char if char.isascii() and (char.isalnum() or char in "_-.") else "?" for char in name[:_MAX_NAME_CHARS]
    )


def show(value: object) -> str:
    """A value of a request for an error message: short, and cheap whatever it is."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = repr(value[: _MAX_VALUE_CHARS + 1] if isinstance(value, str) else value)
    return text if len(text) <= _MAX_VALUE_CHARS + 2 else f"{text[:_MAX_VALUE_CHARS]}..."


_KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}

# As msgspec says it: "Expected `int | null`, got `str` - at `$.stop_token_ids[3]`"; "..." stands for an object's key.
_PLACE = re.compile(r"(?P<problem>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.(?P<name>\w+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
_WRONG_KIND = re.compile(r"Expected `(?P<kinds>[^`]+)`, got `.*", re.DOTALL)
_TOO_LONG = re.compile(r"Expected `object` of length <= (?P<limit>\d+)")
_MISSING = re.compile(r"Object missing required field `(?P<name>\w+)`")


def _invalid(message: str, raw: Mapping[str, Any]) -> InvalidRequest:
    place = _PLACE.fullmatch(message)
    assert place is not None, message
    problem = place["problem"]
    kind = _WRONG_KIND.fullmatch(problem)
    kinds = [_KINDS.get(name, name) for name in kind["kinds"].split(" | ") if name != "null"] if kind else []
    walked = list(_walk(place["path"] or "", raw))
    steps = [name[:_MAX_NAME_CHARS] for name, _ in walked]
    value = walked[-1][1] if walked else raw
    param = ".".join(steps)
    if missing := _MISSING.fullmatch(problem):
        param = ".".join([*steps, missing["name"]])
        return InvalidRequest(f"{param} is required.", param=param, code="missing_field")
    if limit := _TOO_LONG.fullmatch(problem):
        problem = f"has {len(value)} entries; the limit is {limit['limit']}"
    elif kinds:
        problem = f"must be {' or '.join(kinds)}, got {show(value)}"
    else:  # a number that no float holds
        problem = f"is refused: {problem[:1].lower()}{problem[1:]}"
    return InvalidRequest(f"{param} {problem}.", param=param, code="invalid_type")


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The names of the members on the way to what is wrong, each with its value."""
    for step in _STEP.finditer(path):
        if step["name"] is not None:
            name, value = step["name"], value[step["name"]]
        elif step["index"] is not None:
            name, value = step["index"], value[int(step["index"])]
        else:  # the first wrong one of an object of numbers
            name, value = next((name, each) for name, each in value.items() if not _is_float(each))
        yield name, value


def _is_float(value: object) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(float(value))  # type: ignore[arg-type]
    except OverflowError:
        return False
