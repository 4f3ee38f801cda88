"""The official client, unchanged: what it parses, and how it tells errors."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tests.server.harness import MODEL, FakeEngine, Running, configured, running, wait_until

from octavo.engine.tokenizer import Tokenizer

KEY = "sk-test"
MESSAGES = [{"role": "user", "content": "Hi there"}]


@pytest.fixture(scope="module")
def guarded(tokenizer: Tokenizer) -> Iterator[Running]:
    config = configured(api_key=(KEY,))
    with running(config, lambda: FakeEngine(tokenizer, config)) as it:
        yield it


@pytest.fixture(scope="module")
def sdk(guarded: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL]
    assert sdk.models.retrieve(MODEL).owned_by == "octavo"


def test_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, n=2, seed=3, temperature=0.5, stop=["zzz"], user="me",
        logprobs=True, top_logprobs=2, extra_body={"ignore_eos": True, "top_k": 5, "min_p": 0.1},
    )  # fmt: skip
    assert answer.object == "chat.completion" and answer.usage.completion_tokens == 16
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0
    for index, choice in enumerate(answer.choices):
        assert choice.index == index and choice.finish_reason == "length" and choice.message.content
        assert len(choice.logprobs.content) == 8 and len(choice.logprobs.content[0].top_logprobs) == 2
    again = sdk.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=8, n=2, seed=3, temperature=0.5, extra_body={"ignore_eos": True}
    )
    assert [choice.message.content for choice in again.choices] == [c.message.content for c in answer.choices]


def test_chat_streamed(sdk: openai.OpenAI) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 8, "seed": 3}
    extra = {"ignore_eos": True}
    whole = sdk.chat.completions.create(**asked, extra_body=extra)
    text, usage = "", None
    for chunk in sdk.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body=extra
    ):
        assert chunk.object == "chat.completion.chunk"
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == whole.choices[0].message.content and usage == whole.usage


def test_the_stream_helper_of_the_client(sdk: openai.OpenAI) -> None:
    # The helper raises at finish_reason "length": the model must be left to end by itself.
    with sdk.chat.completions.stream(model=MODEL, messages=MESSAGES, seed=1, logprobs=True) as events:
        deltas = "".join(event.delta for event in events if event.type == "content.delta")
        final = events.get_final_completion()
    assert final.choices[0].message.content == deltas and final.choices[0].logprobs.content


def test_completions(sdk: openai.OpenAI) -> None:
    asked = {"model": MODEL, "prompt": ["Hello", "The sea"], "max_tokens": 6, "echo": True, "logprobs": 1, "seed": 1}
    answer = sdk.completions.create(**asked, extra_body={"ignore_eos": True})
    assert [choice.text[:5] for choice in answer.choices] == ["Hello", "The s"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    texts = {0: "", 1: ""}
    for chunk in sdk.completions.create(**asked, stream=True, extra_body={"ignore_eos": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in answer.choices]


async def test_the_asynchronous_client(guarded: Running) -> None:
    async with openai.AsyncOpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0) as client:
        events = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, stream=True)
        assert len([event async for event in events]) >= 2


def test_errors_are_the_clients_own_classes(sdk: openai.OpenAI, guarded: Running) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        sdk.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1)
    assert wrong.value.param == "temperature" and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        sdk.completions.create(model=MODEL, prompt="the sea " * 1000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as unknown:
        sdk.chat.completions.create(model="nope", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as other:
        with pytest.raises(openai.AuthenticationError):
            other.models.list()


def test_an_error_in_mid_stream_is_raised(tokenizer: Tokenizer) -> None:
    """STR-01"""
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config, fails_at=3)) as it:
        with openai.OpenAI(base_url=f"{it.url}/v1", api_key="x", max_retries=0) as client:
            got = []
            with pytest.raises(openai.APIError, match="not finite"):
                for chunk in client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
                    got.append(chunk)
            assert len(got) >= 3


def test_closing_a_stream_of_the_client_ends_the_request(tokenizer: Tokenizer) -> None:
    """SCH-02"""
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config, step_s=0.01)) as it:
        with openai.OpenAI(base_url=f"{it.url}/v1", api_key="x", max_retries=0) as client:
            events = client.chat.completions.create(
                model=MODEL, messages=MESSAGES, stream=True, extra_body={"ignore_eos": True}
            )
            next(iter(events))
            events.close()
            assert wait_until(lambda: not it.engine.live) and it.engine.num_aborted == 1
