"""The request bodies: every field that is honoured, with its type. What is not here, `fields` refuses or reports.

Types are strict: "0.5" is no number, 1 is no boolean; an integer is a number. null means absent. Ranges are
checked where their limits are known: in `SamplingParams`, `options` and `prompts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from octavo.request import MAX_LOGIT_BIAS

TRUNCATION_SIDES = ("left", "right")

_STRING, _INTEGERS = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
_Prompt = Annotated[
    Any,
    Meta(
        description="Text or token ids, one prompt or a list of them.",
        extra_json_schema={
            "anyOf": [_STRING, {"type": "array", "items": _STRING}, _INTEGERS, {"type": "array", "items": _INTEGERS}]
        },
    ),
]
_Content = Annotated[
    Any,
    Meta(extra_json_schema={"anyOf": [_STRING, {"type": "array", "items": {"type": "object"}}, {"type": "null"}]}),
]
_Biases = Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)]


class Strict(msgspec.Struct, dict=True):
    """An object of a body; `fields.parse_body` leaves the members that are no fields in `extra`."""

    @property
    def extra(self) -> Mapping[str, Any]:
        return self.__dict__


class StreamOptions(Strict):
    include_usage: Annotated[bool | None, Meta(description="Send the usage in one more chunk before [DONE].")] = None
    continuous_usage_stats: Annotated[bool | None, Meta(description="Send the usage so far in every chunk.")] = None


class GenerationBody(Strict):
    """What both endpoints take; defaults are the model's own sampling defaults, else those of `SamplingParams`."""

    model: Annotated[str | None, Meta(description="One of the names that /v1/models lists.")] = None
    max_tokens: int | None = None
    min_tokens: Annotated[int | None, Meta(description="End tokens and stop strings are not heeded before.")] = None
    n: Annotated[int | None, Meta(description="Choices for each prompt; they share the KV of the prompt.")] = None
    temperature: Annotated[float | None, Meta(description="Below 1e-5: greedy.")] = None
    top_p: Annotated[float | None, Meta(description="0 keeps the one best token.")] = None
    top_k: Annotated[int | None, Meta(description="0 and -1: all.")] = None
    min_p: float | None = None
    presence_penalty: Annotated[float | None, Meta(description="Counts output tokens only.")] = None
    frequency_penalty: Annotated[float | None, Meta(description="Counts output tokens only.")] = None
    repetition_penalty: Annotated[
        float | None, Meta(description="Counts prompt and output tokens; 1 turns it off.")
    ] = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[_Biases | None, Meta(description="Token id to bias, -100 to 100.")] = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Annotated[int | None, Meta(description="Alternatives for each prompt token.")] = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="Keep this many prompt tokens; -1: as many as fit beside max_tokens.")
    ] = None
    truncation_side: Annotated[
        str | None,
        Meta(description="Which end of the prompt is cut; default left.", extra_json_schema={"enum": TRUNCATION_SIDES}),
    ] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default: true for completions, false for chat.")] = (
        None
    )
    priority: Annotated[int | None, Meta(description="Lower runs first; needs --scheduling-policy priority.")] = None
    cache_salt: Annotated[str | None, Meta(description="Only requests with the same salt share cached prefixes.")] = (
        None
    )
    request_id: Annotated[
        str | None, Meta(description="Name of this request; the header X-Request-Id does the same.")
    ] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: Annotated[bool | None, Meta(description="Add prompt_token_ids and token_ids to the answer.")] = (
        None
    )
    return_tokens_as_token_ids: Annotated[bool | None, Meta(description="In logprobs, write tokens as token_id:N.")] = (
        None
    )

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]


class CompletionBody(GenerationBody):
    prompt: _Prompt = None
    echo: Annotated[bool | None, Meta(description="Begin the answer with the prompt.")] = None
    logprobs: Annotated[int | None, Meta(description="Alternatives beside the chosen token; 0 is a value.")] = None


class Message(Strict):
    role: str
    content: _Content = None
    name: str | None = None
    tool_calls: Annotated[list[Any] | None, Meta(description="Calls that the assistant made before.")] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


_Messages = list[Message] | None
_Generates = Annotated[bool | None, Meta(description="Default: true, false with continue_final_message.")]
_Continues = Annotated[bool | None, Meta(description="Leave the last message open; the answer goes on there.")]
_TemplateKwargs = Annotated[dict[str, Any] | None, Meta(description="Variables for the chat template.")]
_Documents = Annotated[list[dict[str, Any]] | None, Meta(description="For templates that use them.")]
_Effort = Annotated[str | None, Meta(description="Handed to the chat template.")]


class ChatBody(GenerationBody):
    messages: _Messages = None
    add_generation_prompt: _Generates = None
    continue_final_message: _Continues = None
    chat_template_kwargs: _TemplateKwargs = None
    documents: _Documents = None
    reasoning_effort: _Effort = None
    max_completion_tokens: Annotated[
        int | None, Meta(description="The newer name of max_tokens. Default: the room left.")
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Meta(description="Alternatives for each token; needs logprobs.")] = None


class TokenizeBody(Strict):
    messages: _Messages = None
    add_generation_prompt: _Generates = None
    continue_final_message: _Continues = None
    chat_template_kwargs: _TemplateKwargs = None
    documents: _Documents = None
    reasoning_effort: _Effort = None
    model: str | None = None
    prompt: Annotated[str | None, Meta(description="Text, or messages instead.")] = None
    add_special_tokens: Annotated[bool | None, Meta(description="Default: true for prompt, false for messages.")] = None
    return_token_strs: bool | None = None


TemplateBody = ChatBody | TokenizeBody  # what has messages, and says how they become a prompt


class DetokenizeBody(Strict):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: Annotated[bool | None, Meta(description="Default: false.")] = None
