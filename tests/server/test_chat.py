"""POST /v1/chat/completions: messages, the shape of answers and chunks, usage."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tests.server.harness import MAX_MODEL_LEN, MODEL, FakeEngine, Running, build_tokenizer, configured, running
from tests.server.reading import fold, stream, strict_json

from octavo.engine.tokenizer import Tokenizer

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Hi there"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "ignore_eos": True, **fields}


def chat(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json=body(**fields))
    assert response.status_code == 200, response.text
    return strict_json(response.content)


def prompt_of(client: httpx.Client, tokenizer: Tokenizer, **fields: Any) -> str:
    return tokenizer.decode(
        chat(client, return_token_ids=True, **fields)["prompt_token_ids"], skip_special_tokens=False
    )


def test_the_answer_has_openai_shape(client: httpx.Client) -> None:
    answer = chat(client)
    assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
    [choice] = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    assert choice["message"]["content"] and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 6


def test_every_chunk_keeps_the_schema(client: httpx.Client) -> None:
    """API-14"""
    usage = chat(client)["usage"]
    for asked in (None, False, True):
        options = {} if asked is None else {"stream_options": {"include_usage": asked}}
        got = stream(client, PATH, body(**options))
        assert got.is_done and len({event["id"] for event in got.events}) == 1
        with_choices = [event for event in got.events if event["choices"]]
        for event in with_choices:
            assert set(event) - {"usage"} == {"id", "object", "created", "model", "system_fingerprint", "choices"}
            assert event["object"] == "chat.completion.chunk" and event.get("usage") is None
            assert all({"index", "delta", "logprobs", "finish_reason"} <= set(choice) for choice in event["choices"])
        if asked:
            assert got.events[-1]["choices"] == [] and got.events[-1]["usage"] == usage
            assert all("usage" in event for event in got.events)
        else:
            assert with_choices == got.events and all("usage" not in event for event in got.events)


def test_usage_can_come_with_every_chunk(client: httpx.Client) -> None:
    for path, fields in ((PATH, {"messages": MESSAGES}), ("/v1/completions", {"prompt": "a"})):
        got = stream(
            client,
            path,
            {"max_tokens": 6, "ignore_eos": True, "stream_options": {"continuous_usage_stats": True}, **fields},
        )
        counts = [event["usage"]["completion_tokens"] for event in got.events]
        assert counts == sorted(counts) and counts[-1] == 6 and got.events[-1]["choices"] == []
        assert all(event["usage"]["total_tokens"] - event["usage"]["completion_tokens"] > 0 for event in got.events)


def test_every_choice_has_one_role_and_one_finish(client: httpx.Client) -> None:
    """API-13"""
    got = stream(client, PATH, body(n=3, seed=5, max_tokens=200, ignore_eos=False))
    assert {chunk["index"] for chunk in got.chunks} == {0, 1, 2}
    lengths = set()
    for index in range(3):
        chunks = got.of(index)
        lengths.add(len(chunks))
        assert chunks[0]["delta"]["role"] == "assistant"
        assert sum("role" in chunk["delta"] for chunk in chunks) == 1
        assert [at for at, chunk in enumerate(chunks) if chunk["finish_reason"]] == [len(chunks) - 1]
    assert len(lengths) > 1, "the choices must end at different times for this test to bite"


@pytest.mark.parametrize(
    "fields", [{"logprobs": True}, {"logprobs": True, "top_logprobs": 0}, {"logprobs": True, "top_logprobs": 2}]
)
def test_logprobs_have_the_chat_schema(client: httpx.Client, fields: dict[str, Any]) -> None:
    """API-07, DET-03"""
    choice = chat(client, **fields)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 6
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"} and isinstance(entry["logprob"], float)
        assert len(entry["top_logprobs"]) == fields.get("top_logprobs", 0)
        assert all(set(top) == {"token", "logprob", "bytes"} for top in entry["top_logprobs"])
    written = b"".join(bytes(entry["bytes"]) for entry in content)
    assert written.decode("utf-8", "replace") == choice["message"]["content"]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize(
    "logprobs", [{}, {"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "return_token_ids": True}]
)
def test_a_stream_adds_up_to_the_answer(client: httpx.Client, n: int, logprobs: dict[str, Any]) -> None:
    answer = chat(client, n=n, **logprobs)
    folded = fold(stream(client, PATH, body(n=n, **logprobs)))
    for choice in answer["choices"]:
        message = choice.pop("message")
        if choice["logprobs"]:
            choice["logprobs"].pop("refusal")
            folded[choice["index"]]["logprobs"].pop("refusal")
        assert folded[choice["index"]] == {**choice, "text": message["content"]}


def test_prompt_details_come_once_at_the_top(client: httpx.Client) -> None:
    asked = {"prompt_logprobs": 1, "return_token_ids": True, "n": 2}
    answer = chat(client, **asked)
    got = stream(client, PATH, body(**asked))
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert [event[name] for event in got.events if name in event] == [answer[name]]
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]


def test_without_max_tokens_the_room_that_is_left_is_used(client: httpx.Client) -> None:
    """API-17"""
    answer = client.post(PATH, json={"messages": MESSAGES, "ignore_eos": True}).json()
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN and answer["choices"][0]["finish_reason"] == "length"
    response = client.post(PATH, json={"messages": [{"role": "user", "content": "the " * 600}]})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"
    assert response.json()["error"]["param"] == "messages"


def test_both_names_of_max_tokens_work(client: httpx.Client) -> None:
    for fields in ({"max_completion_tokens": 3}, {"max_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}):
        answer = client.post(PATH, json={"messages": MESSAGES, "ignore_eos": True, **fields}).json()
        assert answer["usage"]["completion_tokens"] == 3


def test_messages_become_the_templates_text(client: httpx.Client, tokenizer: Tokenizer) -> None:
    text = prompt_of(client, tokenizer)
    assert text == (
        "<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"
    )
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    assert "user\nHi\nthere<|im_end|>" in prompt_of(client, tokenizer, messages=[{"role": "user", "content": parts}])
    assert prompt_of(client, tokenizer, add_generation_prompt=False) == text.removesuffix("<|im_start|>assistant\n")
    answered = [*MESSAGES, {"role": "assistant", "content": "Hello, I"}]
    continued = prompt_of(client, tokenizer, messages=answered, continue_final_message=True)
    assert continued == text + "Hello, I"


def test_messages_as_openai_clients_send_them_back_are_taken(client: httpx.Client) -> None:
    answer = chat(client)["choices"][0]["message"]
    history = [*MESSAGES, {**answer, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}]
    response = client.post(PATH, json=body(messages=[*history, {"role": "user", "content": "More", "name": "me"}]))
    assert response.status_code == 200 and "x-octavo-warnings" not in response.headers


def test_what_a_template_refuses_is_the_clients_mistake() -> None:
    """API-10"""
    template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.role }}: {{ m.content }}\n"
        "{% endfor %}"
    )
    user, assistant = MESSAGES[1], {"role": "assistant", "content": "b"}
    refused = {
        "Roles must alternate user/assistant": [[user, user], [assistant, user], [user, assistant, assistant]],
        "System role not supported": [MESSAGES],
        "'foo'": [[{"role": "foo", "content": "x"}], [user, {"role": "foo", "content": "x"}]],
    }
    tokenizer, config = build_tokenizer(chat_template=template), configured()
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        for said, conversations in refused.items():
            for messages in conversations:
                response = client.post(PATH, json=body(messages=messages))
                assert response.status_code == 400, response.text
                error = response.json()["error"]
                assert said in error["message"] and error["param"] == "messages"
                assert "Traceback" not in response.text
        assert chat(client, messages=[user, assistant, user])


def test_a_model_without_a_template_says_so() -> None:
    tokenizer, config = build_tokenizer(chat_template=None), configured()
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        response = client.post(PATH, json=body())
        assert response.status_code == 400 and "no chat template" in response.json()["error"]["message"]
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


def test_template_variables_are_handed_on_or_reported() -> None:
    template = "{{ messages[0].content }}|{{ mood }}|{{ reasoning_effort }}"
    tokenizer, config = build_tokenizer(chat_template=template), configured()
    fields = {"messages": MESSAGES[1:], "chat_template_kwargs": {"mood": "calm", "other": 1}, "reasoning_effort": "low"}
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        response = client.post(PATH, json=body(return_token_ids=True, **fields))
        assert response.headers["x-octavo-warnings"] == "ignored fields: chat_template_kwargs.other"
        assert tokenizer.decode(response.json()["prompt_token_ids"]) == "Hi there|calm|low"


def test_large_conversations_are_handled_beside_the_loop(
    server: Running, client: httpx.Client, tokenizer: Tokenizer
) -> None:
    text = "the sea " * 3000
    answer = chat(
        client, messages=[{"role": "user", "content": text}], truncate_prompt_tokens=40, return_token_ids=True
    )
    assert answer["prompt_token_ids"] == tokenizer.encode(
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )[-40:]  # fmt: skip
