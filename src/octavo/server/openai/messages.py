"""Chat messages: their shape checked so that a mistake is named, then rendered by the model's chat template.

What a role, a tool call or a part means to the model is the template's business (engine/chat_template.py).
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from octavo.engine.chat_template import check_chat_template_kwargs
from octavo.errors import InvalidRequest, UnsupportedFeature
from octavo.server.openai.fields import refuse_unknown, show
from octavo.server.openai.schema import Message, TemplateBody
from octavo.server.service import INLINE_CHARS, Service

# What OpenAI's own answers carry when a client sends them back; null or empty in a text conversation.
_EMPTY_FIELDS = frozenset({"refusal", "audio", "annotations", "function_call", "reasoning"})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})


async def render_messages(body: TemplateBody, request: Request, service: Service, ignored: list[str]) -> str:
    """The prompt's text; the names of fields that have no meaning here are added to `ignored`.

    Raises InvalidRequest for messages that are wrong, or that the template refuses.
    """
    if not body.messages:
        what = "is required" if body.messages is None else "is an empty list"
        raise InvalidRequest(f"messages {what}.", param="messages", code="missing_field")
    conversation = [_checked(message, f"messages.{i}", ignored) for i, message in enumerate(body.messages)]
    if service.config.server.strict_api and ignored:
        refuse_unknown(ignored[0])
    template = service.client.tokenizer.chat_template
    if template is None:
        raise InvalidRequest(
            "This model has no chat template, so it takes no messages. Send a prompt to /v1/completions, or start the "
            "server with --chat-template.",
            param="messages",
        )
    continues = body.continue_final_message is True
    generates = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    if continues and conversation[-1]["role"] != "assistant":
        raise InvalidRequest(
            f"continue_final_message needs the assistant to have the last message, not {conversation[-1]['role']!r}.",
            param="continue_final_message",
        )
    variables = dict(body.chat_template_kwargs or {})
    check_chat_template_kwargs(variables)
    ignored += [f"chat_template_kwargs.{name}" for name in variables.keys() - template.variables]
    if body.reasoning_effort is not None:
        if "reasoning_effort" in template.variables:
            variables.setdefault("reasoning_effort", body.reasoning_effort)
        else:
            ignored.append("reasoning_effort")
    return await service.compute(
        lambda: template.render(
            conversation,
            add_generation_prompt=generates,
            continue_final_message=continues,
            documents=body.documents,
            **variables,
        ),
        # A client's variables may set off any amount of work, however small they are.
        is_large=request.state.body_bytes > INLINE_CHARS or bool(variables),
    )


def _checked(message: Message, param: str, ignored: list[str]) -> dict[str, Any]:
    for name, value in message.extra.items():
        if name not in _EMPTY_FIELDS:
            ignored.append(f"{param}.{name}")
        elif value:
            raise UnsupportedFeature(
                f"{param}.{name} is not supported by this server. Leave it out.", param=f"{param}.{name}"
            )
    checked: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.content is not None:
        _check_content(message.content, f"{param}.content", ignored)
    elif not (message.role == "assistant" and message.tool_calls):
        raise InvalidRequest(f"{param}.content is required.", param=f"{param}.content", code="missing_field")
    for name in ("name", "tool_calls", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            checked[name] = value
    return checked


def _check_content(content: object, param: str, ignored: list[str]) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{param} must be a string or a list of parts, got {show(content)}.", param=param, code="invalid_type"
        )
    for i, part in enumerate(content):
        where = f"{param}.{i}"
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise InvalidRequest(
                f"{where} must be an object with a type, got {show(part)}.", param=where, code="invalid_type"
            )
        if kind not in _TEXT_PARTS:
            raise UnsupportedFeature(
                f"{where} is of type {show(kind)}; this model takes text only.", param=f"{where}.type"
            )
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            raise InvalidRequest(
                f"{where}.{name} must be a string, got {show(part.get(name))}.",
                param=f"{where}.{name}",
                code="invalid_type",
            )
        ignored += [f"{where}.{other}" for other in part if other not in ("type", name)]
