"""Whatever a client sends, it gets a 4xx that names the field, and the next request works."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from tests.server.harness import MAX_MODEL_LEN, MODEL, FakeEngine, Running, configured, running

from octavo.request import MAX_LOGIT_BIAS, MAX_STOP_STRING_CHARS, MAX_STOP_STRINGS, MAX_TOKEN_LIST

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "a"}]
INF = "1e999"


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 1, **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": USER, "max_tokens": 1, **fields}


def assert_refused(response: httpx.Response, param: str | None, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    assert "Traceback" not in response.text and ".py" not in response.text
    return error


def assert_alive(client: httpx.Client) -> None:
    response = client.post(COMPLETIONS, json=completion())
    assert response.status_code == 200 and response.json()["choices"], response.text


# Raw bodies: API-08
RAW = {
    "empty body": "",
    "broken JSON": "{:",
    "array body": "[]",
    "string body": '"prompt"',
    "number body": "5",
    "null body": "null",
    "two documents": "{} {}",
    "NaN": '{"model":"tiny","prompt":"a","temperature":NaN}',
    "Infinity": '{"model":"tiny","prompt":"a","temperature":Infinity}',
    "1e999": '{"model":"tiny","prompt":"a","temperature":1e999}',
    "-1e999 in a list": '{"model":"tiny","prompt":[-1e999]}',
    "lone surrogate": '{"model":"tiny","prompt":"\\ud800"}',
    "lone low surrogate": '{"model":"tiny","prompt":"a\\udc00b"}',
    "control character": '{"model":"tiny","prompt":"a\x01b"}',
    "number of 5000 digits": '{"model":"tiny","prompt":"a","seed":' + "1" * 5000 + "}",
    "100000 brackets": "[" * 100_000,
    "100000 objects": '{"a":' * 100_000,
    "trailing comma": '{"model":"tiny","prompt":"a",}',
    "single quotes": "{'model':'tiny'}",
    "byte order mark": "\ufeff{}",
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", RAW)
def test_a_body_that_is_no_json_object_is_refused(client: httpx.Client, path: str, name: str) -> None:
    response = client.post(path, content=RAW[name].encode(), headers={"Content-Type": "application/json"})
    assert_refused(response, None)
    assert_alive(client)


def test_a_body_that_is_no_utf8_is_refused(client: httpx.Client) -> None:
    for content in (b'{"prompt":"\xff"}', b'{"prompt":"\xed\xa0\x80"}', b"\x80", b"\x00"):
        assert_refused(client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}), None)
    assert_alive(client)


def test_repeated_keys_take_the_last_value(client: httpx.Client) -> None:
    content = '{"model":"nope","model":"tiny","prompt":"Hello","max_tokens":9,"max_tokens":2,"ignore_eos":true}'
    response = client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 2


# (path, body, the field that the error names)
ROWS: list[tuple[str, dict[str, Any], str | None]] = [
    # messages: API-08
    (CHAT, {"model": MODEL}, "messages"),
    (CHAT, chat(messages=None), "messages"),
    (CHAT, chat(messages=[]), "messages"),  # API-01
    (CHAT, chat(messages={}), "messages"),
    (CHAT, chat(messages="hello"), "messages"),
    (CHAT, chat(messages=[None]), "messages.0"),
    (CHAT, chat(messages=["hello"]), "messages.0"),
    (CHAT, chat(messages=[{}]), "messages.0.role"),
    (CHAT, chat(messages=[{"role": 1, "content": "a"}]), "messages.0.role"),
    (CHAT, chat(messages=[{"role": None, "content": "a"}]), "messages.0.role"),
    (CHAT, chat(messages=[*USER, {"role": "user"}]), "messages.1.content"),
    (CHAT, chat(messages=[{"role": "user", "content": None}]), "messages.0.content"),
    (CHAT, chat(messages=[{"role": "assistant", "content": None}]), "messages.0.content"),
    (CHAT, chat(messages=[{"role": "user", "content": 5}]), "messages.0.content"),
    (CHAT, chat(messages=[{"role": "user", "content": {}}]), "messages.0.content"),
    (CHAT, chat(messages=[{"role": "user", "content": ["a"]}]), "messages.0.content.0"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"text": "a"}]}]), "messages.0.content.0"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages.0.content.0.text"),
    (CHAT, chat(messages=[{"role": "user", "content": [{"type": "text", "text": 3}]}]), "messages.0.content.0.text"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "messages.0.content.0.type",
    ),
    (CHAT, chat(messages=[{"role": "user", "content": "a", "name": 3}]), "messages.0.name"),
    (CHAT, chat(messages=[{"role": "user", "content": "a", "audio": {"id": "x"}}]), "messages.0.audio"),
    (CHAT, chat(messages=[{"role": "wizard", "content": "a"}]), "messages"),
    (CHAT, chat(messages=[{"role": "", "content": "a"}]), "messages"),
    (CHAT, chat(messages=[*USER, {"role": "assistant", "content": None, "tool_calls": ["x"]}]), "messages"),
    (CHAT, chat(messages=[*USER, {"role": "assistant", "content": None, "tool_calls": {}}]), "messages.1.tool_calls"),
    # other fields of chat
    (CHAT, chat(max_tokens=0), "max_tokens"),  # API-17
    (CHAT, chat(max_tokens=-1), "max_tokens"),
    (CHAT, chat(max_completion_tokens=0), "max_completion_tokens"),
    (CHAT, chat(max_completion_tokens=5), "max_completion_tokens"),  # beside max_tokens=1
    (CHAT, chat(max_completion_tokens="5"), "max_completion_tokens"),
    (CHAT, chat(logprobs=3), "logprobs"),
    (CHAT, chat(logprobs="true"), "logprobs"),
    (CHAT, chat(top_logprobs=3), "top_logprobs"),  # API-07
    (CHAT, chat(logprobs=False, top_logprobs=1), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=-1), "top_logprobs"),  # SEC-02
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=10**9), "top_logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs="5"), "top_logprobs"),
    (CHAT, chat(add_generation_prompt="yes"), "add_generation_prompt"),
    (CHAT, chat(continue_final_message=True), "continue_final_message"),
    (CHAT, chat(chat_template_kwargs=[]), "chat_template_kwargs"),
    (CHAT, chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs"),
    (CHAT, chat(chat_template="{{ messages }}"), "chat_template"),
    (CHAT, chat(documents=["a"]), "documents.0"),
    (CHAT, chat(documents=[{"text": "a"}]), "documents"),
    (CHAT, chat(tools={}), "tools"),
    (CHAT, chat(tools=[{"type": "function", "function": {"name": "f"}}]), "tools"),
    (CHAT, chat(tool_choice="required"), "tool_choice"),
    (CHAT, chat(tool_choice={"type": "function", "function": {"name": "f"}}), "tool_choice"),
    (CHAT, chat(functions=[{"name": "f"}]), "functions"),
    (CHAT, chat(response_format={"type": "json_object"}), "response_format"),
    (CHAT, chat(response_format={"type": "json_schema", "json_schema": {}}), "response_format"),
    (CHAT, chat(response_format="json"), "response_format"),
    (CHAT, chat(modalities=["audio"]), "modalities"),
    (CHAT, chat(prompt="a"), "prompt"),
    (CHAT, chat(echo=True), "echo"),
    (CHAT, chat(reasoning_effort=3), "reasoning_effort"),
    # prompt: API-01, API-08
    (COMPLETIONS, {"model": MODEL}, "prompt"),
    (COMPLETIONS, completion(prompt=None), "prompt"),
    (COMPLETIONS, completion(prompt=""), "prompt"),
    (COMPLETIONS, completion(prompt=[""]), "prompt"),
    (COMPLETIONS, completion(prompt=[]), "prompt"),
    (COMPLETIONS, completion(prompt=[[]]), "prompt"),
    (COMPLETIONS, completion(prompt=["a", ""]), "prompt.1"),
    (COMPLETIONS, completion(prompt={}), "prompt"),
    (COMPLETIONS, completion(prompt=5), "prompt"),
    (COMPLETIONS, completion(prompt=True), "prompt"),
    (COMPLETIONS, completion(prompt=[1, "a"]), "prompt"),
    (COMPLETIONS, completion(prompt=["a", 1]), "prompt.1"),
    (COMPLETIONS, completion(prompt=[1, 2.0]), "prompt"),
    (COMPLETIONS, completion(prompt=[True]), "prompt"),
    (COMPLETIONS, completion(prompt=[[1], [2, None]]), "prompt.1"),
    (COMPLETIONS, completion(prompt=[-1]), "prompt"),
    (COMPLETIONS, completion(prompt=[10**9]), "prompt"),
    (COMPLETIONS, completion(prompt=[10**30]), "prompt"),
    (COMPLETIONS, completion(prompt=[None]), "prompt.0"),
    (COMPLETIONS, completion(prompt=["a"] * 257), "prompt"),  # SEC-02
    (COMPLETIONS, completion(prompt=["a"] * 1_000_000), "prompt"),
    (COMPLETIONS, completion(prompt=[1] * 1_000_000), "prompt"),
    (COMPLETIONS, completion(messages=USER), "messages"),
    # numbers
    (COMPLETIONS, completion(temperature="hot"), "temperature"),
    (COMPLETIONS, completion(temperature=-0.1), "temperature"),
    (COMPLETIONS, completion(temperature=1e9), "temperature"),
    (COMPLETIONS, completion(temperature=True), "temperature"),
    (COMPLETIONS, completion(temperature=10**400), "temperature"),
    (COMPLETIONS, completion(temperature=[1]), "temperature"),
    (COMPLETIONS, completion(top_p=1.1), "top_p"),
    (COMPLETIONS, completion(top_p=-1), "top_p"),
    (COMPLETIONS, completion(top_k=-2), "top_k"),
    (COMPLETIONS, completion(top_k=1.5), "top_k"),
    (COMPLETIONS, completion(min_p=2), "min_p"),
    (COMPLETIONS, completion(presence_penalty=2.1), "presence_penalty"),
    (COMPLETIONS, completion(frequency_penalty=-2.1), "frequency_penalty"),
    (COMPLETIONS, completion(repetition_penalty=0), "repetition_penalty"),
    (COMPLETIONS, completion(max_tokens=-1), "max_tokens"),  # API-17
    (COMPLETIONS, completion(max_tokens="many"), "max_tokens"),
    (COMPLETIONS, completion(max_tokens=1.5), "max_tokens"),
    (COMPLETIONS, completion(max_tokens=10**9), "max_tokens"),
    (COMPLETIONS, completion(max_tokens=MAX_MODEL_LEN), "max_tokens"),
    (COMPLETIONS, completion(max_completion_tokens=4), "max_completion_tokens"),
    (COMPLETIONS, completion(min_tokens=-1), "min_tokens"),
    (COMPLETIONS, completion(min_tokens=5), "min_tokens"),  # above max_tokens
    (COMPLETIONS, completion(seed=2**63), "seed"),
    (COMPLETIONS, completion(seed="x"), "seed"),
    (COMPLETIONS, completion(seed=1.0), "seed"),
    (COMPLETIONS, completion(n=0), "n"),  # SEC-02
    (COMPLETIONS, completion(n=-1), "n"),
    (COMPLETIONS, completion(n=129), "n"),
    (COMPLETIONS, completion(n=5_000_000), "n"),
    (COMPLETIONS, completion(n=128, prompt=["a", "b", "c"]), "n"),
    (COMPLETIONS, completion(best_of=10**9), "best_of"),
    (COMPLETIONS, completion(best_of=2), "best_of"),
    (COMPLETIONS, completion(logprobs=-1), "logprobs"),
    (COMPLETIONS, completion(logprobs=21), "logprobs"),
    (COMPLETIONS, completion(logprobs=10**9), "logprobs"),
    (COMPLETIONS, completion(logprobs=True), "logprobs"),
    (COMPLETIONS, completion(top_logprobs=2), "top_logprobs"),
    (COMPLETIONS, completion(prompt_logprobs=-1), "prompt_logprobs"),
    (COMPLETIONS, completion(prompt_logprobs=21), "prompt_logprobs"),
    # stops and token lists
    (COMPLETIONS, completion(stop=7), "stop"),
    (COMPLETIONS, completion(stop=[7]), "stop.0"),
    (COMPLETIONS, completion(stop=[""]), "stop"),
    (COMPLETIONS, completion(stop=["a"] * (MAX_STOP_STRINGS + 1)), "stop"),
    (COMPLETIONS, completion(stop="a" * (MAX_STOP_STRING_CHARS + 1)), "stop"),
    (COMPLETIONS, completion(stop_token_ids=["a"]), "stop_token_ids.0"),
    (COMPLETIONS, completion(stop_token_ids=[-1]), "stop_token_ids"),
    (COMPLETIONS, completion(stop_token_ids=[10**6]), "stop_token_ids"),
    (COMPLETIONS, completion(stop_token_ids=[1] * (MAX_TOKEN_LIST + 1)), "stop_token_ids"),
    (COMPLETIONS, completion(allowed_token_ids=[]), "allowed_token_ids"),
    (COMPLETIONS, completion(allowed_token_ids=[10**6]), "allowed_token_ids"),
    (COMPLETIONS, completion(allowed_token_ids=[1.5]), "allowed_token_ids.0"),
    (COMPLETIONS, completion(bad_words=[""]), "bad_words"),
    (COMPLETIONS, completion(bad_words="a"), "bad_words"),
    # logit_bias: SMP-03
    (COMPLETIONS, completion(logit_bias={"AI": 1}), "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"9999999": 5}), "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"-1": 5}), "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"1": 1e9}), "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"1": 101}), "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"1": None}), "logit_bias.1"),
    (COMPLETIONS, completion(logit_bias={"1": "x"}), "logit_bias.1"),
    (COMPLETIONS, completion(logit_bias={"0": 1, "1": 10**400}), "logit_bias.1"),
    (COMPLETIONS, completion(logit_bias={"01": 1}), "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"٣": 1}), "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"": 1}), "logit_bias"),
    (COMPLETIONS, completion(logit_bias={"9" * 500: 1}), "logit_bias"),
    (COMPLETIONS, completion(logit_bias=[1]), "logit_bias"),
    (COMPLETIONS, completion(logit_bias={str(i): 0 for i in range(MAX_LOGIT_BIAS + 1)}), "logit_bias"),
    # flags and strings
    (COMPLETIONS, completion(stream="maybe"), "stream"),
    (COMPLETIONS, completion(stream=1), "stream"),
    (COMPLETIONS, completion(echo="yes"), "echo"),
    (COMPLETIONS, completion(ignore_eos=1), "ignore_eos"),
    (COMPLETIONS, completion(skip_special_tokens=0), "skip_special_tokens"),
    (COMPLETIONS, completion(stream_options={"include_usage": True}), "stream_options"),
    (COMPLETIONS, completion(stream=True, stream_options=[]), "stream_options"),
    (COMPLETIONS, completion(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (
        COMPLETIONS,
        completion(stream=True, stream_options={"include_usage": False, "continuous_usage_stats": True}),
        "stream_options.continuous_usage_stats",
    ),
    (COMPLETIONS, completion(model=5), "model"),
    (COMPLETIONS, completion(cache_salt=""), "cache_salt"),
    (COMPLETIONS, completion(cache_salt="x" * 257), "cache_salt"),
    (COMPLETIONS, completion(cache_salt=5), "cache_salt"),
    (COMPLETIONS, completion(request_id="a b"), "request_id"),
    (COMPLETIONS, completion(request_id="\r\nX: y"), "request_id"),
    (COMPLETIONS, completion(request_id=""), "request_id"),
    (COMPLETIONS, completion(request_id="x" * 65), "request_id"),
    (COMPLETIONS, completion(priority="high"), "priority"),
    (COMPLETIONS, completion(priority=3), "priority"),  # without --scheduling-policy priority
    (COMPLETIONS, completion(truncate_prompt_tokens=0), "truncate_prompt_tokens"),
    (COMPLETIONS, completion(truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
    (COMPLETIONS, completion(truncate_prompt_tokens=MAX_MODEL_LEN + 1), "truncate_prompt_tokens"),
    (COMPLETIONS, completion(truncation_side="left"), "truncation_side"),
    (COMPLETIONS, completion(truncate_prompt_tokens=4, truncation_side="middle"), "truncation_side"),
    # known elsewhere, not offered here: never ignored
    (COMPLETIONS, completion(suffix="x"), "suffix"),
    (COMPLETIONS, completion(use_beam_search=True), "use_beam_search"),
    (COMPLETIONS, completion(guided_json={"type": "object"}), "guided_json"),
    (COMPLETIONS, completion(guided_regex="a+"), "guided_regex"),
    (COMPLETIONS, completion(structured_outputs={"choice": ["a"]}), "structured_outputs"),
    (COMPLETIONS, completion(logprob_token_ids=[1]), "logprob_token_ids"),
    (COMPLETIONS, completion(n_predict=4), "n_predict"),
    (COMPLETIONS, completion(n_keep=4), "n_keep"),
    (COMPLETIONS, completion(mirostat=2), "mirostat"),
    (COMPLETIONS, completion(repeat_penalty=1.3), "repeat_penalty"),
    (COMPLETIONS, completion(grammar="root ::= x"), "grammar"),
    (COMPLETIONS, completion(cache_prompt=False), "cache_prompt"),
    (COMPLETIONS, completion(stop_regex="a"), "stop_regex"),
    (COMPLETIONS, completion(lora_path="x"), "lora_path"),
    (COMPLETIONS, completion(kv_transfer_params={"a": 1}), "kv_transfer_params"),
    # the tokenizer routes
    ("/tokenize", {"model": MODEL}, "prompt"),
    ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": ["a"]}, "prompt"),
    ("/tokenize", {"messages": [{"role": "user"}]}, "messages.0.content"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "abc"}, "tokens"),
    ("/detokenize", {"tokens": [1, "a"]}, "tokens.1"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [10**6]}, "tokens"),
]


@pytest.mark.parametrize(("path", "body", "param"), ROWS, ids=lambda value: None if isinstance(value, dict) else value)
def test_a_wrong_field_is_refused_by_name(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    error = assert_refused(client.post(path, json=body), param)
    assert len(error["message"]) < 500
    assert_alive(client)


def test_a_refusal_reaches_neither_engine_nor_queue(server: Running, client: httpx.Client) -> None:
    before = len(server.engine.seen)
    for path, body, _ in ROWS:
        if path in (CHAT, COMPLETIONS) and len(str(body)) < 1000:
            client.post(path, json=body)
    assert len(server.engine.seen) == before
    assert server.engine.num_queued == 0


def test_unsupported_fields_say_that_they_are_unsupported(client: httpx.Client) -> None:
    error = assert_refused(client.post(COMPLETIONS, json=completion(guided_json={})), "guided_json")
    assert error["code"] == "unsupported" and "not supported" in error["message"]


def test_fields_that_ask_for_nothing_are_no_reason_to_refuse(client: httpx.Client) -> None:
    neutral = {
        "tools": None,
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "best_of": 2,
        "n": 2,
        "use_beam_search": False,
        "guided_json": None,
        "length_penalty": 1.0,
        "modalities": ["text"],
        "logprobs": None,
        "temperature": None,
        "stop": None,
        "stop_token_ids": [],
        "logit_bias": None,
        "seed": None,
        "top_p": 1,
    }
    response = client.post(CHAT, json=chat(**neutral))
    assert response.status_code == 200, response.text
    assert len(response.json()["choices"]) == 2
    assert response.headers["x-octavo-warnings"] == "ignored fields: parallel_tool_calls"


def test_ignored_fields_are_named_in_a_header(client: httpx.Client) -> None:
    body = chat(
        user="me",
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        made_up=1,
        **{"x\r\nSet-Cookie: a": 1, "é" * 99: 2},
    )
    body["messages"] = [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "extra": 1}]
    response = client.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    assert "set-cookie" not in response.headers
    warned = response.headers["x-octavo-warnings"]
    for name in ("user", "metadata", "store", "service_tier", "made_up", "x??Set-Cookie??a", "messages.0.extra"):
        assert name in warned
    assert "messages.0.content.0.cache_control" in warned
    many = client.post(COMPLETIONS, json=completion(**{f"f{i}": i for i in range(100)}))
    assert many.status_code == 200 and many.headers["x-octavo-warnings"].endswith("and 84 more")
    assert_refused(client.post(COMPLETIONS, json=completion(**{f"f{i}": i for i in range(1000)})), None)


def test_a_strict_server_refuses_unknown_fields_and_a_missing_model(tokenizer) -> None:
    config = configured(strict_api=True)
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        assert_refused(client.post(COMPLETIONS, json=completion(made_up=1)), "made_up")
        message = {"role": "user", "content": "a", "extra": 1}
        assert_refused(client.post(CHAT, json=chat(messages=[message])), "messages.0.extra")
        assert_refused(client.post(COMPLETIONS, json={"prompt": "a"}), "model")
        assert client.post(COMPLETIONS, json=completion(user="me")).status_code == 200


@pytest.mark.parametrize(
    "content_type", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_a_body_that_does_not_claim_to_be_json_is_refused(client: httpx.Client, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    response = client.post(COMPLETIONS, content=json.dumps(completion()), headers=headers)
    assert assert_refused(response, None)["code"] == "invalid_content_type"


def test_unknown_models_are_404(client: httpx.Client) -> None:
    """LOR-05"""
    for path, body in ((CHAT, chat(model="nope")), (COMPLETIONS, completion(model="nope"))):
        error = assert_refused(client.post(path, json=body), "model", 404)
        assert error["code"] == "model_not_found" and "nope" in error["message"]
    assert_refused(client.get("/v1/models/nope"), "model", 404)
    assert_refused(client.post(COMPLETIONS, json=completion(model="x" * 100_000)), "model", 404)


def test_unknown_routes_and_methods_are_json_errors(client: httpx.Client) -> None:
    for path in ("/", "/v1", "/v1/nope", "/v1/completions/", "/v1/chat", "//v1/models", "/V1/models"):
        assert_refused(client.get(path), None, 404)
    for method, path in (("GET", COMPLETIONS), ("PUT", CHAT), ("POST", "/v1/models"), ("DELETE", "/health")):
        response = client.request(method, path)
        assert_refused(response, None, 405)
        assert response.headers["allow"]
