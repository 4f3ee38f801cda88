"""The request bodies: every field that is honoured, with its type. What is not here, `fields` refuses or reports.

Types are strict: "0.5" is no number, 1 is no boolean; an integer is a number. null means absent. Ranges are
checked where their limits are known: in `SamplingParams`, `options` and `prompts`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from octavo.request import MAX_LOGIT_BIAS

_Strings = Annotated[list[str], Field(fail_fast=True)]
_TokenIds = Annotated[list[int], Field(fail_fast=True)]
_StringOrStrings = Annotated[
    _Strings,
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
_Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}},
                {"type": "array", "items": {"type": "integer"}},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            ]
        }
    ),
]
_Content = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]


def _few(value: object) -> object:
    """Refuse a large object before its entries are looked at one by one."""
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise PydanticCustomError(
            "too_many", "has {n} entries; the limit is {limit}", {"n": len(value), "limit": MAX_LOGIT_BIAS}
        )
    return value


_Biases = Annotated[dict[str, float], BeforeValidator(_few)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="Send the usage in one more chunk before [DONE].")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every chunk.")


class GenerationBody(Strict):
    """What both endpoints take; defaults are the model's own sampling defaults, else those of `SamplingParams`."""

    model: str | None = Field(None, description="One of the names that /v1/models lists.")
    max_tokens: int | None = None
    min_tokens: int | None = Field(None, description="End tokens and stop strings are not heeded before.")
    n: int | None = Field(None, description="Choices for each prompt; they share the KV of the prompt.")
    temperature: float | None = Field(None, description="Below 1e-5: greedy.")
    top_p: float | None = Field(None, description="0 keeps the one best token.")
    top_k: int | None = Field(None, description="0 and -1: all.")
    min_p: float | None = None
    presence_penalty: float | None = Field(None, description="Counts output tokens only.")
    frequency_penalty: float | None = Field(None, description="Counts output tokens only.")
    repetition_penalty: float | None = Field(None, description="Counts prompt and output tokens; 1 turns it off.")
    seed: int | None = None
    stop: _StringOrStrings | None = None
    stop_token_ids: _TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: _Biases | None = Field(None, description="Token id to bias, -100 to 100.")
    allowed_token_ids: _TokenIds | None = None
    bad_words: _Strings | None = None
    prompt_logprobs: int | None = Field(None, description="Alternatives for each prompt token.")
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep this many prompt tokens; -1: as many as fit beside max_tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which end of the prompt is cut; default left."
    )
    add_special_tokens: bool | None = Field(None, description="Default: true for completions, false for chat.")
    priority: int | None = Field(None, description="Lower runs first; needs --scheduling-policy priority.")
    cache_salt: str | None = Field(None, description="Only requests with the same salt share cached prefixes.")
    request_id: str | None = Field(None, description="Name of this request; the header X-Request-Id does the same.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Add prompt_token_ids and token_ids to the answer.")
    return_tokens_as_token_ids: bool | None = Field(None, description="In logprobs, write tokens as token_id:N.")


class CompletionBody(GenerationBody):
    prompt: _Prompt = Field(None, description="Text or token ids, one prompt or a list of them.")
    echo: bool | None = Field(None, description="Begin the answer with the prompt.")
    logprobs: int | None = Field(None, description="Alternatives beside the chosen token; 0 is a value.")


class Message(Strict):
    role: str
    content: _Content = None
    name: str | None = None
    tool_calls: Annotated[list[Any], Field(fail_fast=True)] | None = Field(
        None, description="Calls that the assistant made before."
    )
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class TemplateBody(Strict):
    """How messages become a prompt."""

    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    add_generation_prompt: bool | None = Field(None, description="Default: true, false with continue_final_message.")
    continue_final_message: bool | None = Field(
        None, description="Leave the last message open; the answer goes on there."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        None, description="For templates that use them."
    )
    reasoning_effort: str | None = Field(None, description="Handed to the chat template.")


class ChatBody(GenerationBody, TemplateBody):
    max_completion_tokens: int | None = Field(None, description="The newer name of max_tokens. Default: the room left.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, description="Alternatives for each token; needs logprobs.")


class TokenizeBody(TemplateBody):
    model: str | None = None
    prompt: str | None = Field(None, description="Text, or messages instead.")
    add_special_tokens: bool | None = Field(None, description="Default: true for prompt, false for messages.")
    return_token_strs: bool | None = None


class DetokenizeBody(Strict):
    model: str | None = None
    tokens: _TokenIds
    skip_special_tokens: bool | None = Field(None, description="Default: false.")
