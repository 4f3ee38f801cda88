"""Chat templates against transformers, and what a template or a client may not do."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import vocabularies

from octavo.engine import chat_template
from octavo.engine.chat_template import MAX_KWARGS_BYTES, ChatTemplate, check_chat_template_kwargs
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import InvalidRequest, TokenizerError, UnsupportedFeature
from octavo.loader.gguf_tokenizer import build_tokenizer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- set content = message.content %}
        {{- content | tojson if content is mapping or content is iterable else content }}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<start_of_turn>model\n' }}
{% endif %}
"""
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {%- set ns.count = ns.count + 1 %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {% generation %}{{- '<|im_start|>assistant\\n' + content }}{% endgeneration %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set turns = messages[1:] %}
{%- else %}{% set system = '' %}{% set turns = messages %}{%- endif %}
{{- bos_token }}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system + '\\n\\n' if loop.first and system else '') + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {%- continue %}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3, "gemma": GEMMA, "qwen": QWEN, "mistral": MISTRAL}
SPECIAL = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather in a place, e.g. <Łódź> & 'São Paulo'.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Łódź"}'}}
PARSED_CALL = {**CALL, "function": {"name": "weather", "arguments": {"place": "Łódź"}}}


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


def system(text):
    return {"role": "system", "content": text}


def tool(text):
    return {"role": "tool", "content": text, "tool_call_id": "1"}


def template(source, **special):
    return ChatTemplate({"default": source}, special or SPECIAL)


LOADED = {name: template(source) for name, source in TEMPLATES.items()}


@pytest.fixture(scope="module")
def theirs():
    backend = build_tokenizer(vocabularies.byte_level()).tokenizer
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **SPECIAL)


CONVERSATIONS = {
    "one turn": [user("Hello there")],
    "turns": [user("  Hi\n"), assistant("Hello! 🦚"), user("žluťoučký kůň")],
    "system": [system("Be brief."), user("Hi")],
    "markup": [user("<b>&amp; {{ messages }} {% raw %}</b> '\"\\")],
}


@pytest.mark.parametrize(
    ("name", "conversation"),
    [
        (name, conversation)
        for name in TEMPLATES
        for conversation in CONVERSATIONS
        if (name, conversation) != ("gemma", "system")
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_and_ids_equal_those_of_transformers(theirs, name, conversation, add_generation_prompt):
    # API-18
    messages = CONVERSATIONS[conversation]
    options = {"add_generation_prompt": add_generation_prompt}
    text = template(TEMPLATES[name]).render(messages, **options)
    kwargs = {"chat_template": TEMPLATES[name], **options}
    assert text == theirs.apply_chat_template(messages, tokenize=False, **kwargs)
    ours = Tokenizer.from_gguf(vocabularies.byte_level())
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.apply_chat_template(messages, return_dict=False, **kwargs)


@given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=30), min_size=1, max_size=5))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_any_texts_render_as_in_transformers(theirs, texts):
    messages = [(assistant if index % 2 else user)(text) for index, text in enumerate(texts)]
    for name in ("smollm2", "llama3", "gemma", "mistral"):
        options = {"tokenize": False, "add_generation_prompt": True}
        expected = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], **options)
        assert LOADED[name].render(messages) == expected


def test_tools_and_calls_render_as_in_transformers(theirs):
    messages = [system("Be brief."), user("Weather?"), assistant(None, tool_calls=[CALL]), tool("rain"), user("Thanks")]
    parsed = [*messages[:2], assistant(None, tool_calls=[PARSED_CALL]), *messages[3:]]
    for source, tools in ((QWEN, [TOOL]), (LLAMA3, None)):
        expected = theirs.apply_chat_template(
            parsed, tools=tools, chat_template=source, tokenize=False, add_generation_prompt=True
        )
        assert template(source).render(messages, tools=tools) == expected
    assert "<Łódź> & 'São Paulo'" in template(QWEN).render(messages, tools=[TOOL]), "JSON is not HTML"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("final", ["Sure", "Sure, here: ", " \n Well\n", "a<|im_end|>"])
def test_the_final_message_is_continued_as_in_transformers(theirs, name, final):
    messages = [user("Hi"), assistant(final)]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    expected = theirs.apply_chat_template(messages, chat_template=TEMPLATES[name], tokenize=False, **options)
    assert template(TEMPLATES[name]).render(messages, **options) == expected


def test_continuing_needs_a_text_to_continue():
    options = {"continue_final_message": True, "add_generation_prompt": False}
    with pytest.raises(InvalidRequest, match="exclude each other"):
        template(SMOLLM2).render([user("a")], continue_final_message=True)
    with pytest.raises(InvalidRequest, match="no text to go on in"):
        template(QWEN).render([user("a"), assistant(None)], **options)
    with pytest.raises(InvalidRequest, match="does not write the last message"):
        template("{{ messages[0].content }}").render([user("a"), assistant("b")], **options)


def test_keywords_reach_the_template(theirs):
    options = {"add_generation_prompt": True, "enable_thinking": False}
    expected = theirs.apply_chat_template([user("a")], chat_template=QWEN, tokenize=False, **options)
    assert template(QWEN).render([user("a")], **options) == expected
    assert expected.endswith("</think>\n\n")
    assert "enable_thinking" in template(QWEN).variables
    assert "enable_thinking" not in template(SMOLLM2).variables


def test_documents_reach_a_template_that_has_a_place_for_them():
    source = "{% for d in documents or [] %}[{{ d.title }}: {{ d.text }}]{% endfor %}{{ messages[0].content }}"
    documents = [{"title": "T", "text": "x"}]
    assert template(source).render([user("q")], documents=documents) == "[T: x]q"
    with pytest.raises(UnsupportedFeature, match="no place for documents"):
        template(SMOLLM2).render([user("q")], documents=documents)


def test_the_language_is_hugging_faces():
    source = """\
{%- for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}
{{- {'b': 'é<', 'a': [1]} | tojson }}
{{- {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}
{%- set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}
{{- strftime_now('%Y') }}{{ unknown_name }}{{ dict(a=1).a }}
{%- generation %}{{ messages[0].content }}{% endgeneration %}"""
    expected = '012{"b": "é<", "a": [1]}{\n  "a": 2,\n  "b": 1\n}2' + time.strftime("%Y") + "1q"
    assert template(source).render([user("q")]) == expected


def test_named_templates_serve_requests_with_tools():
    named = ChatTemplate(
        {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}{{ messages[0].content }}"}
    )
    assert named.render([user("q")]) == "Dq"
    assert named.render([user("q")], tools=[TOOL]) == "T1q"
    assert named.has_tools
    assert ChatTemplate({"only": "O{{ messages[0].content }}"}).render([user("q")]) == "Oq"


# -- content parts -------------------------------------------------------------------------------------------------

PARTS = """\
{%- for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{{ part.text }}|{% endfor %}{% endif %};{% endfor %}"""
ONLY_PARTS = "{% for m in messages %}{% for part in m.content %}{{ part['text'] }}|{% endfor %}{% endfor %}"


def test_text_parts_are_joined_for_a_template_that_knows_strings_only():
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert "user\na\nb\nc<|im_end|>" in template(SMOLLM2).render([user(parts)])


def test_parts_are_handed_to_a_template_that_reads_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template(PARTS).render([user(parts), assistant("c")]) == "user:a|b|;assistant:c;"
    assert template(ONLY_PARTS).render([user(parts), assistant("c")]) == "a|b|c|"


@pytest.mark.parametrize(
    ("part", "error", "message"),
    [
        (
            {"type": "image_url", "image_url": {"url": "x"}},
            UnsupportedFeature,
            "type 'image_url'; this model takes text",
        ),
        ({"type": "input_audio"}, UnsupportedFeature, "input_audio"),
        ({"type": "text"}, InvalidRequest, "part without a type or its text"),
        ({"type": "text", "text": 5}, InvalidRequest, "part without a type or its text"),
        ({"text": "x"}, InvalidRequest, "part without a type"),
        (None, InvalidRequest, "part without a type"),
    ],
)
def test_parts_that_are_no_text_are_refused(part, error, message):
    with pytest.raises(error, match=message) as caught:
        template(SMOLLM2).render([user("a"), user([part])])
    assert "messages[1]" in str(caught.value)
    assert caught.value.param == "messages"


# -- roles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([system("s"), user("u")], "System role not supported"),
        ([user("a"), user("b")], "Conversation roles must alternate user/assistant/user/assistant/..."),
        ([assistant("a")], "Conversation roles must alternate"),
        ([user("a"), assistant("b"), tool("c")], "Conversation roles must alternate"),
    ],
)
def test_a_template_that_refuses_is_quoted(messages, message):
    # API-10
    with pytest.raises(InvalidRequest) as caught:
        template(GEMMA).render(messages)
    assert str(caught.value).startswith(message)
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_unknown_role_is_named(name):
    # API-10
    for messages in ([{"role": "foo", "content": "x"}], [user("u"), {"role": "ipython", "content": "x"}]):
        role = messages[-1]["role"]
        if name == "llama3" and role == "ipython":
            assert "<|start_header_id|>ipython" in template(LLAMA3).render(messages)
            continue
        with pytest.raises(InvalidRequest, match=rf"role is '{role}', a role that the chat template does not know"):
            template(TEMPLATES[name]).render(messages)


def test_a_message_that_the_template_drops_is_refused():
    # API-10
    knows_two = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}{% endfor %}"
    for messages, index, role in [
        ([system("s1"), user("u1")], 0, "system"),
        ([system("u1"), user("u1")], 0, "system"),  # its text stands elsewhere
        ([user("u1"), {"role": "developer", "content": "d1"}], 1, "developer"),
        ([user("u1"), system([{"type": "text", "text": "s1"}])], 1, "system"),
    ]:
        with pytest.raises(InvalidRequest, match=rf"messages\[{index}\] has the role '{role}'.*no place"):
            template(knows_two).render(messages)
    assert template(knows_two).render([user("u1"), system(""), assistant("a1")]) == "u1a1"


def test_a_system_message_in_the_middle_is_refused_where_it_would_be_dropped():
    source = MISTRAL.replace("{{- raise_exception", "{#- ").replace("user/assistant') }}", "#}")
    with pytest.raises(InvalidRequest, match=r"messages\[1\] has the role 'system'"):
        template(source).render([user("u1"), system("s1"), assistant("a1")])


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        (LLAMA3, [user("  spaces around \n")]),
        (LLAMA3, [user("a"), assistant("b"), tool('two\nlines and "quotes"')]),
        (QWEN, [user("a"), assistant("<think>hm</think>\n\nb"), user("c")]),
    ],
)
def test_a_text_that_the_template_changes_is_not_taken_for_dropped(source, messages):
    assert template(source).render(messages)


def test_missing_content_is_an_error_of_the_client():
    with pytest.raises(InvalidRequest, match="cannot render these messages: can only concatenate str"):
        template(SMOLLM2).render([user(None)])
    for messages, message in [
        ([], "messages is empty"),
        ([None], r"messages\[0\] is not an object"),
        ([{}], r"messages\[0\].role is None"),
        ([{"role": 1, "content": "a"}], r"messages\[0\].role is 1"),
        ([user(5)], r"messages\[0\].content is 5"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            template(SMOLLM2).render(messages)


# -- tools without a place in the template ---------------------------------------------------------------------------


def test_tools_are_described_where_the_template_knows_none():
    own = template(SMOLLM2)
    assert not own.has_tools
    text = own.render([system("Be brief."), user("Weather?")], tools=[TOOL])
    first = text.split("<|im_end|>")[0]
    assert first.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(TOOL, ensure_ascii=False) in first
    assert own.render([user("Weather?")], tools=[TOOL]).startswith("<|im_start|>system\nYou can call functions.")
    assert "call functions" not in own.render([user("Weather?")], tools=[])


def test_calls_and_results_are_written_where_the_template_knows_none():
    messages = [user("Weather?"), assistant(None, tool_calls=[CALL]), tool("rain")]
    text = template(SMOLLM2).render(messages)
    assert '<tool_call>\n{"name": "weather", "arguments": {"place": "Łódź"}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>tool\nrain<|im_end|>" in text
    with pytest.raises(InvalidRequest, match=r"messages\[2\] has the role 'tool'"):
        template(MISTRAL.replace("{{- raise_exception", "{#- ").replace("user/assistant') }}", "#}")).render(messages)


def test_a_template_that_drops_a_call_is_refused():
    source = "{% for m in messages %}{% if not m.tool_calls %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(InvalidRequest, match=r"messages\[1\] has the role 'assistant'.* no place for tool calls"):
        template(source).render([user("a"), assistant("b", tool_calls=[CALL])])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({**CALL, "function": {"name": "f", "arguments": "{"}}, "arguments of 'f' are not JSON"),
        ({"function": {}}, "without function.name"),
        ("f", "without function.name"),
    ],
)
def test_calls_are_checked(call, message):
    with pytest.raises(InvalidRequest, match=message):
        template(QWEN).render([user("a"), assistant(None, tool_calls=[call])])


def test_reasoning_is_found_under_every_name():
    source = "{% set m = messages[0] %}{{ m.reasoning_content }}-{{ m.reasoning }}-{{ m.thinking }}-{{ m.content }}"
    for name in ("reasoning", "reasoning_content", "thinking"):
        assert template(source).render([assistant("a", **{name: "r"})]) == "r-r-r-a"


# -- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"raise_exception": 1}, "may not set 'raise_exception'"),
        ({"messages": []}, "may not set 'messages'"),
        ({"bos_token": ""}, "may not set 'bos_token'"),
        ({"x": "y" * MAX_KWARGS_BYTES}, f"the limit is {MAX_KWARGS_BYTES}"),
        ({"x": object()}, "not plain JSON"),
    ],
)
def test_keywords_are_limited(kwargs, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_chat_template_kwargs(kwargs)
    assert caught.value.param == "chat_template_kwargs"


@pytest.mark.parametrize(
    "escape",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "cycler.__init__.__globals__.os.popen('id').read()",
        "raise_exception.__globals__['json']",
        "messages.append({'role': 'user'})",
        "messages[0].update(role='x')",
        "namespace.__init__.__globals__",
        "(messages | map(attribute='__class__') | list)[0].__mro__",
        "'{0.__class__}'.format(messages)",
        "messages | attr('__class__')",
        "dict.__base__.__subclasses__()",
        "joiner.__call__.__func__.__globals__",
        "lipsum.__globals__",
    ],
)
def test_the_sandbox_holds(escape):
    messages = [user("a")]
    source = "{{ messages[0].content }}{% set x = " + escape + " %}{{ x }}{{ x.y }}"
    try:
        text = template(source).render(messages)
    except InvalidRequest as error:
        text = str(error)
    assert not re.search(r"<class|<built-in|uid=|<module|<function", text)
    assert messages == [user("a")]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took too long"),
        ("{% set r = range(99999) %}{% for i in r %}{% for j in r if 0 %}{% endfor %}{% endfor %}", "took too long"),
        ("{% for c in x %}{% for d in x %}{% endfor %}{% endfor %}", "took too long"),
        ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "nested too deeply"),
        (
            "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            "the limit",
        ),
        (
            "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
            "the limit",
        ),
        ("{{ 'ab' * 10**9 }}", "the limit"),
        ("{{ [1] * 10**9 }}", "the limit"),
        ("{{ 7**(7**12) }}", "the limit"),
        ("{% for i in range(99999) %}{{ 'abcdefgh' * 999 }}{% endfor %}", "wrote more than"),
        ("{{ range(10**9) | list }}", "Range too big"),
        ("{{ undefined_function() }}", "'undefined_function' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_does_not_end_is_ended(monkeypatch, body, message):
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 100_000)
    # What ends by the clock ends soon, and what ends by its size has all the time it needs.
    timeout_s = 0.3 if message == "took too long" else 60
    # The body runs behind the messages, so that loading the template stays quick.
    source = "{{ messages[0].content }}{% if x %}" + body + "{% endif %}"
    guarded = ChatTemplate({"default": source}, timeout_s=timeout_s)
    start = time.monotonic()
    with pytest.raises(InvalidRequest, match=message) as caught:
        guarded.render([user("a")], x="x" * 20_000)
    assert time.monotonic() - start < 30
    assert "Traceback" not in str(caught.value) and ".py" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "'default' does not compile, line 1"),
        ("a\nb\n{{ x | no_such_filter }}", "line 3: No filter named 'no_such_filter'"),
        ("{% include 'x' %}", "uses include in line 1"),
        ("{% import 'x' as y %}", "uses import in line 1"),
        ("{% generation %}", "does not compile"),
    ],
)
def test_a_template_with_an_error_is_refused_when_it_is_loaded(source, message):
    with pytest.raises(TokenizerError, match=message):
        template(source)


def test_threads_share_a_template():
    shared = template(QWEN)
    with ThreadPoolExecutor(4) as threads:
        texts = list(threads.map(lambda number: shared.render([user(f"message {number}")]), range(200)))
    assert texts == [shared.render([user(f"message {number}")]) for number in range(200)]


def test_smollm2_has_the_template_that_is_tested_here(smollm2_path):
    for messages in ([user("Hi")], [system("s"), user("Hi")]):
        assert load_tokenizer(smollm2_path).render_chat(messages) == template(SMOLLM2).render(messages)
