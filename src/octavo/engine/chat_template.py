"""Conversations to prompt text, through the model's own Jinja template.

A template comes with a model file and is code: it runs in Jinja's immutable sandbox, with a limit on time and
on output. Rendering is plain CPU work without shared state: it may run in any thread. Loops, calls and output
end at the deadline; one single operation that is slow or huge by itself (say `'%99999999s' % 1`) cannot be
stopped from here, so a server renders in a thread that it can leave behind.

A message that a template would drop in silence is refused, and so are roles that it does not know.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from octavo.errors import InvalidRequest, TokenizerError, UnsupportedFeature

RENDER_TIMEOUT_S: Final = 5.0
PROBE_TIMEOUT_S: Final = 0.5  # of each render of a made-up message when a template is loaded
MAX_RENDERED_CHARS: Final = 32 * 1024 * 1024
MAX_KWARGS_BYTES: Final = 64 * 1024
MAX_SHAPES: Final = 1024  # of conversations, for which it is remembered what the template drops
KNOWN_ROLES: Final = ("system", "developer", "user", "assistant", "tool")
_RESERVED: Final = frozenset(
    "messages tools documents add_generation_prompt continue_final_message raise_exception strftime_now"
    " range dict namespace cycler joiner bos_token eos_token unk_token sep_token pad_token cls_token mask_token".split()
)
_REASONING_FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
_SENTINEL: Final = "octavoProbe"
_END_MARK: Final = "octavoEndOfFinalMessage"
_TOOLS_TEXT: Final = """\
You can call functions. These exist, one JSON schema per line:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON, and with nothing else:
<tool_call>
{{"name": NAME, "arguments": OBJECT}}
</tool_call>"""

Message = Mapping[str, Any]


class ChatTemplate:
    """The chat templates of one model: "default", and perhaps "tool_use" for requests with tools.

    `variables` are the names that the templates read: a keyword outside of it has no effect.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
        timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        """Compile `templates`. Raises TokenizerError for one that does not compile."""
        if not templates:
            raise TokenizerError("There is no chat template to compile.")
        self._special_tokens = dict(special_tokens or {})
        self._templates = {
            name: _Compiled(name, source, self._special_tokens, timeout_s) for name, source in sorted(templates.items())
        }
        self._default = self._templates.get("default", next(iter(self._templates.values())))
        self._for_tools = self._templates.get("tool_use", self._default)
        self.variables = frozenset().union(*(template.variables for template in self._templates.values()))

    @property
    def has_tools(self) -> bool:
        """Whether the model's own template presents tools; if not, they are described in a system message."""
        return "tools" in self._for_tools.variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **chat_template_kwargs: Any,
    ) -> str:
        """The prompt text, special tokens included: encode it with add_special_tokens=False.

        `continue_final_message` leaves the last message open, so that the model goes on in it. Raises
        InvalidRequest with the template's own words when it refuses the messages, and naming the role when it
        would drop a message; UnsupportedFeature for content that is not text.
        """
        check_chat_template_kwargs(chat_template_kwargs)
        template = self._for_tools if tools else self._default
        conversation = _checked_messages(messages, template)
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "add_generation_prompt and continue_final_message exclude each other. Set one of them to false.",
                param="continue_final_message",
            )
        if documents and "documents" not in template.variables:
            raise UnsupportedFeature("The model's chat template has no place for documents.", param="documents")
        if not template.writes_tool_calls:
            conversation = [_with_calls_as_text(message) for message in conversation]
        if tools and "tools" not in template.variables:
            conversation = _with_tools_as_text(conversation, tools)
            tools = None
        conversation = [template.with_content_format(message) for message in conversation]
        variables = {
            **self._special_tokens,
            **chat_template_kwargs,
            "tools": list(tools) if tools else None,
            "documents": list(documents) if documents else None,
            "add_generation_prompt": add_generation_prompt,
        }
        if continue_final_message:
            text = _cut_after_final_message(template, conversation, variables)
        else:
            text = template.render({**variables, "messages": conversation})
        for index in sorted(template.dropped(conversation, variables)):
            what = "tool calls" if conversation[index].get("tool_calls") else "such a message"
            raise InvalidRequest(
                f"messages[{index}] has the role {conversation[index]['role']!r}, and the model's chat template has no "
                f"place for {what} there. Put its text into another message.",
                param="messages",
            )
        return text


def check_chat_template_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for variables that a client may not set, or that are too large."""
    for name in kwargs:
        if name in _RESERVED:
            raise InvalidRequest(
                f"chat_template_kwargs may not set {name!r}; it has its own field or belongs to the template language.",
                param="chat_template_kwargs",
            )
    try:
        size = len(json.dumps(kwargs))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"chat_template_kwargs is not plain JSON: {error}", param="chat_template_kwargs"
        ) from error
    if size > MAX_KWARGS_BYTES:
        raise InvalidRequest(
            f"chat_template_kwargs has {size} bytes; the limit is {MAX_KWARGS_BYTES}.", param="chat_template_kwargs"
        )


class _Compiled:
    """One template, and what it can take, found out by rendering probes."""

    def __init__(self, name: str, source: str, special_tokens: Mapping[str, str], timeout_s: float) -> None:
        self._environment = _Environment()
        self._timeout_s = timeout_s
        self._dropped: dict[bytes, frozenset[int]] = {}
        try:
            tree = self._environment.parse(source)
            if banned := next(tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)), None):
                raise TokenizerError(
                    f"The chat template {name!r} uses {type(banned).__name__.lower()} in line {banned.lineno}; "
                    "a chat template is one file."
                )
            self.variables = frozenset(node.name for node in tree.find_all(nodes.Name) if node.ctx == "load")
            self.words = frozenset(node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str))
            self.writes_tool_calls = "tool_calls" in self.words or any(
                node.attr == "tool_calls" for node in tree.find_all(nodes.Getattr)
            )
            self._template = self._environment.from_string(_Guard().visit(tree).set_environment(self._environment))
        except jinja2.TemplateSyntaxError as error:
            raise TokenizerError(
                f"The chat template {name!r} does not compile, line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise TokenizerError(f"The chat template {name!r} is nested too deeply.") from error
        self._probe_variables = dict(special_tokens)
        as_text = self.probe([{"role": "user", "content": _SENTINEL}])
        as_parts = self.probe([{"role": "user", "content": [{"type": "text", "text": _SENTINEL}]}])
        # A template that knows only strings prints a list as Python or JSON.
        self.takes_parts = _SENTINEL in as_parts and "'type'" not in as_parts and '"type"' not in as_parts
        self.takes_text = _SENTINEL in as_text or not self.takes_parts

    def probe(self, messages: Sequence[Message], **more: Any) -> str:
        """The rendered text, or nothing if the template refuses."""
        variables = {**self._probe_variables, "add_generation_prompt": False, **more, "messages": messages}
        try:
            return self.render(variables, min(PROBE_TIMEOUT_S, self._timeout_s))
        except InvalidRequest:
            return ""

    def dropped(self, conversation: Sequence[Message], variables: Mapping[str, Any]) -> frozenset[int]:
        """The messages of a conversation of this shape that do not come up in the text.

        Templates change texts (trim them, cut out reasoning, quote them), so words of our own are looked for. Beside
        tool calls many templates leave out the text; there the name of the function is looked for.
        """
        shape: list[object] = [bool(variables["tools"])]
        words: dict[int, str] = {}
        for index, message in enumerate(conversation):
            says, calls = bool(_text_of(message).strip()), bool(message.get("tool_calls"))
            shape.append((message["role"], says, calls))
            if says or calls:
                words[index] = f"{_SENTINEL}{index}End"
        key = hashlib.sha256(repr(shape).encode()).digest()
        if (known := self._dropped.get(key)) is not None:
            return known
        marked = [_with_word(message, words.get(index)) for index, message in enumerate(conversation)]
        text = self.probe(marked, **{name: variables[name] for name in ("tools", "documents")})
        if not text:
            return frozenset()  # it refuses our words, so they tell nothing
        if len(self._dropped) >= MAX_SHAPES:
            self._dropped.clear()
        self._dropped[key] = frozenset(index for index, word in words.items() if word not in text)
        return self._dropped[key]

    def with_content_format(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, list) and not self.takes_parts:
            return {**message, "content": "\n".join(part["text"] for part in content)}
        if isinstance(content, str) and not self.takes_text:
            return {**message, "content": [{"type": "text", "text": content}]}
        return message

    def render(self, variables: Mapping[str, Any], timeout_s: float | None = None) -> str:
        """Raises InvalidRequest for whatever goes wrong; the message holds no trace."""
        try:
            return self._environment.run(self._template, variables, timeout_s or self._timeout_s)
        except _Refusal as error:
            raise InvalidRequest(str(error), param="messages") from error
        except _LimitReached as error:
            raise InvalidRequest(
                f"The chat template {error}. Send a shorter conversation.", param="messages"
            ) from error
        except RecursionError as error:
            raise InvalidRequest(
                "The conversation is nested too deeply for the chat template.", param="messages"
            ) from error
        except Exception as error:  # a template can raise anything
            raise InvalidRequest(
                f"The chat template cannot render these messages: {error}", param="messages"
            ) from error


class _Refusal(jinja2.TemplateError):
    """What a template says with raise_exception."""


class _LimitReached(Exception):
    pass


class _GenerationBlocks(Extension):
    """`{% generation %}`: marks the assistant's text for training; here it only groups."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _Guard(NodeTransformer):
    """Makes every turn of every loop look at the clock, and every `~` at its size."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return nodes.Call(nodes.EnvironmentAttribute("concatenate"), node.nodes, [], None, None)


class _Namespace(Namespace):
    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may not hold {name!r}")
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with Hugging Face's additions and a deadline for each render of each thread."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
        self._limits = threading.local()
        self.filters["tojson"] = _to_json
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.now().strftime(form),
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
        }
        del self.globals["lipsum"]

    def run(self, template: jinja2.Template, variables: Mapping[str, Any], timeout_s: float) -> str:
        self._limits.deadline_s = time.monotonic() + timeout_s
        pieces: list[str] = []
        size = 0
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_RENDERED_CHARS:
                raise _LimitReached(f"wrote more than {MAX_RENDERED_CHARS} characters")
            self.tick()
            pieces.append(piece)
        return "".join(pieces)

    def tick(self) -> bool:
        if time.monotonic() > self._limits.deadline_s:
            raise _LimitReached("took too long")
        return True

    def concatenate(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        return super().call(context, callee, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(_length(left) + _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            _check_size(left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length())
        elif operator == "*":
            _check_size(_length(left) * right if isinstance(right, int) else _length(right) * left)
        return super().call_binop(context, operator, left, right)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _check_size(size: Any) -> None:
    if isinstance(size, int) and size > MAX_RENDERED_CHARS:
        raise _LimitReached(f"makes a value of {size} characters; the limit is {MAX_RENDERED_CHARS}")


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter writes HTML entities. `indent` is capped."""
    if isinstance(indent, int):
        indent = min(indent, 16)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _checked_messages(messages: Sequence[Message], template: _Compiled) -> list[dict[str, Any]]:
    """Copies with known roles, text parts only, tool arguments parsed, reasoning under all its names."""
    if not messages:
        raise InvalidRequest("messages is empty; a conversation needs at least one message.", param="messages")
    checked: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidRequest(f"messages[{index}] is not an object.", param="messages")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or (role not in KNOWN_ROLES and role not in template.words):
            raise InvalidRequest(
                f"messages[{index}].role is {role!r}, a role that the chat template does not know. Use one of "
                f"{', '.join(KNOWN_ROLES)}.",
                param="messages",
            )
        copy = dict(message)
        if isinstance(content, list | tuple):
            copy["content"] = [_checked_part(part, index) for part in content]
        elif content is not None and not isinstance(content, str):
            raise InvalidRequest(f"messages[{index}].content is {content!r}, not text.", param="messages")
        if calls := message.get("tool_calls"):
            copy["tool_calls"] = [_checked_call(call, index) for call in calls]
        reasoning = next((message[name] for name in _REASONING_FIELDS if message.get(name) is not None), None)
        if reasoning is not None:
            copy |= dict.fromkeys(_REASONING_FIELDS, reasoning)
        checked.append(copy)
    return checked


def _checked_part(part: Any, index: int) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part if isinstance(part, str) else part.get("refusal" if kind == "refusal" else "text") if kind else None
    if isinstance(part, str) or kind in ("text", "input_text", "output_text", "refusal"):
        if isinstance(text, str):
            return {"type": "text", "text": text}
    elif isinstance(kind, str):
        raise UnsupportedFeature(
            f"messages[{index}].content has a part of type {kind!r}; this model takes text only.", param="messages"
        )
    raise InvalidRequest(f"messages[{index}].content has a part without a type or its text.", param="messages")


def _checked_call(call: Any, index: int) -> dict[str, Any]:
    """A tool call with its arguments as an object: templates write them in their own way."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"messages[{index}].tool_calls has an entry without function.name.", param="messages")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"messages[{index}].tool_calls: the arguments of {function['name']!r} are not JSON: {error}",
                param="messages",
            ) from error
    return {**call, "function": {**function, "arguments": arguments}}


def _with_tools_as_text(conversation: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For a template that has no place for tools: their schemas in the system message."""
    text = _TOOLS_TEXT.format(tools="\n".join(map(_to_json, tools)))
    first = conversation[0]
    if first["role"] == "system":
        return [{**first, "content": f"{_text_of(first)}\n\n{text}"}, *conversation[1:]]
    return [{"role": "system", "content": text}, *conversation]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """For a template that has no place for tool calls: the way `_TOOLS_TEXT` asks for them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = [{key: call["function"][key] for key in ("name", "arguments")} for call in calls]
    lines = [f"<tool_call>\n{_to_json(call)}\n</tool_call>" for call in written]
    text = _text_of(message)
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join([text, *lines] if text else lines)}


def _text_of(message: Message) -> str:
    content = message.get("content")
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _with_text(message: Message, text: str) -> dict[str, Any] | None:
    """A copy whose (last) text is `text`; None if it has none."""
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": text}
    if isinstance(content, list) and content:
        return {**message, "content": [*content[:-1], {"type": "text", "text": text}]}
    return None


def _with_word(message: Message, word: str | None) -> Message:
    """A copy that says `word` alone: as its text, or as the function that it calls."""
    if word is None:
        return message
    if calls := message.get("tool_calls"):
        return {**message, "tool_calls": [{**call, "function": {**call["function"], "name": word}} for call in calls]}
    return _with_text(message, word) or message


def _cut_after_final_message(
    template: _Compiled, conversation: list[dict[str, Any]], variables: Mapping[str, Any]
) -> str:
    """The rendered text up to the end of the last message's own text."""
    content = conversation[-1].get("content")
    final_text = content[-1]["text"] if isinstance(content, list) and content else content
    marked = _with_text(conversation[-1], f"{final_text}{_END_MARK} ")
    if marked is None:
        raise InvalidRequest("continue_final_message: the last message has no text to go on in.", param="messages")
    text = template.render({**variables, "messages": [*conversation[:-1], marked]})
    before, mark, after = text.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequest(
            "continue_final_message: the chat template does not write the last message's text.", param="messages"
        )
    # A template that trims the text has trimmed the space behind the mark, and would have trimmed before it.
    return before if after.startswith(" ") else before.rstrip()
