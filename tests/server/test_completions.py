"""POST /v1/completions: prompts, echo, scoring, logprobs, limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.harness import MAX_MODEL_LEN, MODEL, FakeEngine, Running, build_tokenizer, configured, running
from tests.server.reading import fold, stream, strict_json

from octavo.engine.tokenizer import Tokenizer

PATH = "/v1/completions"
PROMPT = "Numbers: 1, 2, 3,"


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"model": MODEL, "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    return strict_json(response.content)


def refused(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(PATH, json={"model": MODEL, "prompt": PROMPT, "max_tokens": 5, **fields})
    assert response.status_code == 400, response.text
    return response.json()["error"]


@pytest.fixture(scope="module")
def bos_client() -> Iterator[httpx.Client]:
    """A server whose tokenizer puts a BOS token before prompts."""
    tokenizer = build_tokenizer(adds_bos=True)
    config = configured()
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        yield client


def test_the_answer_has_openai_shape(client: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = complete(client)
    assert answer["object"] == "text_completion" and answer["model"] == MODEL
    assert answer["id"].startswith("cmpl-") and answer["system_fingerprint"].startswith("octavo-")
    num_prompt = len(tokenizer.encode(PROMPT))
    usage = answer["usage"]
    assert usage["prompt_tokens"] == num_prompt and usage["completion_tokens"] == 5
    assert usage["total_tokens"] == num_prompt + 5
    assert usage["prompt_tokens_details"]["cached_tokens"] == num_prompt // 16 * 16
    [choice] = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length"
    assert choice["logprobs"] is None and choice["stop_reason"] is None
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}


def test_every_form_of_prompt_gives_the_same_answer(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    texts = [complete(client, prompt=prompt)["choices"][0]["text"] for prompt in (PROMPT, [PROMPT], ids, [ids])]
    assert len(set(texts)) == 1 and texts[0]


def test_every_prompt_gets_n_choices_in_order(client: httpx.Client) -> None:
    prompts = ["Snow is", "Fire is", "Water is"]
    answer = complete(client, prompt=prompts, n=2, seed=7)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    for i, prompt in enumerate(prompts):
        alone = complete(client, prompt=prompt, n=2, seed=7)
        for k in range(2):
            assert answer["choices"][2 * i + k]["text"] == alone["choices"][k]["text"]
    assert answer["usage"]["completion_tokens"] == 6 * 5
    assert answer["usage"]["prompt_tokens"] == sum(
        complete(client, prompt=p)["usage"]["prompt_tokens"] for p in prompts
    )
    folded = fold(stream(client, PATH, {"prompt": prompts, "n": 2, "seed": 7, "max_tokens": 5, "ignore_eos": True}))
    assert [folded[i]["text"] for i in range(6)] == [choice["text"] for choice in answer["choices"]]


def test_sixteen_tokens_unless_told_otherwise(client: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "ignore_eos": True}
    assert client.post(PATH, json=body).json()["usage"]["completion_tokens"] == 16
    near_the_end = client.post(PATH, json={**body, "prompt": [40] * (MAX_MODEL_LEN - 3)}).json()
    assert near_the_end["usage"]["completion_tokens"] == 3 and near_the_end["choices"][0]["finish_reason"] == "length"


def test_echo_without_generation_scores_the_prompt(server: Running, client: httpx.Client, tokenizer: Tokenizer) -> None:
    """API-03"""
    ids = tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids):
        answer = complete(client, prompt=prompt, echo=True, max_tokens=0, logprobs=1)
        [choice] = answer["choices"]
        assert choice["text"] == PROMPT and choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens"] == len(ids)
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == PROMPT and len(logprobs["tokens"]) == len(ids)
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(logprob <= 0 for logprob in logprobs["token_logprobs"][1:])
        assert all(1 <= len(top) <= 2 for top in logprobs["top_logprobs"][1:])
        offsets = list(itertools.accumulate((len(token) for token in logprobs["tokens"]), initial=0))[:-1]
        assert logprobs["text_offset"] == offsets
    before = len(server.engine.seen)
    answer = complete(client, echo=True, max_tokens=0, n=2)
    assert [choice["text"] for choice in answer["choices"]] == [PROMPT] * 2
    assert answer["usage"]["completion_tokens"] == 0
    assert len(server.engine.seen) == before, "the engine had nothing to do"
    # The whole context may be scored.
    assert (
        complete(client, prompt=[40] * MAX_MODEL_LEN, echo=True, max_tokens=0, logprobs=0)["usage"]["prompt_tokens"]
        == 512
    )


def test_no_tokens_and_no_echo_is_an_empty_answer(client: httpx.Client) -> None:
    answer = complete(client, max_tokens=0)
    assert answer["choices"][0]["text"] == "" and answer["usage"]["completion_tokens"] == 0


def test_echo_logprobs_cover_prompt_and_output(client: httpx.Client) -> None:
    """API-05"""
    answer = complete(client, echo=True, logprobs=2, max_tokens=3)
    choice, usage = answer["choices"][0], answer["usage"]
    assert choice["text"].startswith(PROMPT)
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == usage["prompt_tokens"] + 3
    assert logprobs["token_logprobs"].count(None) == 1 and logprobs["token_logprobs"][0] is None
    assert logprobs["text_offset"][usage["prompt_tokens"]] == len(PROMPT)


def test_text_offsets_point_into_the_text_although_a_bos_token_stands_before_it(bos_client: httpx.Client) -> None:
    choice = complete(bos_client, echo=True, logprobs=0, max_tokens=0)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == PROMPT and logprobs["tokens"][0] == "<s>"
    assert logprobs["text_offset"][:2] == [0, 0] and logprobs["text_offset"] == sorted(logprobs["text_offset"])
    for token, offset in zip(logprobs["tokens"][1:], logprobs["text_offset"][1:], strict=True):
        assert PROMPT[offset:].startswith(token)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("max_tokens", [0, 6])
@pytest.mark.parametrize("extra", [{}, {"prompt_logprobs": 1, "return_token_ids": True}], ids=["plain", "extra"])
def test_a_stream_adds_up_to_the_answer(
    client: httpx.Client, n: int, echo: bool, logprobs: int | None, max_tokens: int, extra: dict[str, Any]
) -> None:
    """API-06"""
    body = {
        "n": n,
        "echo": echo,
        "logprobs": logprobs,
        "max_tokens": max_tokens,
        "prompt": ["café 日本", PROMPT],
        **extra,
    }
    answer = complete(client, **body)
    streamed = stream(client, PATH, {"model": MODEL, "ignore_eos": True, **body})
    assert streamed.is_done
    folded = fold(streamed)
    assert len(folded) == len(answer["choices"]) == 2 * n
    for choice in answer["choices"]:
        if choice["logprobs"] is not None and not choice["logprobs"]["tokens"]:
            choice["logprobs"] = None  # a stream has no chunk to write an empty list in
        if not choice.get("token_ids", True):
            del choice["token_ids"]
        assert folded[choice["index"]] == choice
        if echo:
            assert choice["text"].startswith(("café 日本", PROMPT)[choice["index"] // n])


def test_the_logprobs_of_long_prompts_are_streamed_in_full(client: httpx.Client) -> None:
    body = {"prompt": [40 + i % 50 for i in range(490)], "echo": True, "logprobs": 1, "max_tokens": 3, "n": 2}
    answer = complete(client, **body)
    folded = fold(stream(client, PATH, {**body, "ignore_eos": True}))
    assert [folded[i] for i in range(2)] == answer["choices"]
    assert len(folded[1]["logprobs"]["tokens"]) == 493


def test_the_number_of_prompt_logprobs_is_bounded(client: httpx.Client) -> None:
    """SEC-02"""
    many = {"prompt": [[40] * 500] * 2, "n": 100, "max_tokens": 1}
    for asked, param in (({"echo": True, "logprobs": 20}, "logprobs"), ({"prompt_logprobs": 20}, "prompt_logprobs")):
        error = refused(client, **many, **asked)
        assert error["param"] == param and "2100000" in error["message"]


def test_logprobs_zero_is_a_value(client: httpx.Client) -> None:
    """API-07"""
    logprobs = complete(client, logprobs=0)["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == 5 and all(isinstance(x, float) for x in logprobs["token_logprobs"])
    assert logprobs["top_logprobs"] is None


def test_tokens_that_are_part_of_a_character_are_written_as_bytes(client: httpx.Client) -> None:
    logprobs = complete(client, prompt="🀄", echo=True, max_tokens=0, logprobs=0)["choices"][0]["logprobs"]
    written = b"".join(
        bytes.fromhex(token.removeprefix("bytes:").replace("\\x", "")) if token.startswith("bytes:") else token.encode()
        for token in logprobs["tokens"]
    )
    assert written == "🀄".encode()


def test_tokens_can_be_written_as_ids(client: httpx.Client, tokenizer: Tokenizer) -> None:
    body = {"echo": True, "max_tokens": 0, "logprobs": 1, "return_tokens_as_token_ids": True}
    logprobs = complete(client, **body)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [f"token_id:{token_id}" for token_id in tokenizer.encode(PROMPT)]
    assert all(key.startswith("token_id:") for top in logprobs["top_logprobs"][1:] for key in top)


def test_token_ids_and_prompt_logprobs_come_when_asked_for(client: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    choice = complete(client, return_token_ids=True, prompt_logprobs=2)["choices"][0]
    assert choice["prompt_token_ids"] == ids and len(choice["token_ids"]) == 5
    assert tokenizer.decode(choice["token_ids"]) == choice["text"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 1
    for token_id, entry in zip(ids[1:], rest, strict=True):
        assert set(entry[str(token_id)]) == {"logprob", "rank", "decoded_token"}


def test_context_limits_are_told_with_true_numbers(client: httpx.Client) -> None:
    """API-17"""
    limit = MAX_MODEL_LEN
    assert complete(client, prompt=[40] * (limit - 4), max_tokens=4)["usage"]["total_tokens"] == limit
    for num_prompt, max_tokens in ((limit, None), (limit, 1), (limit + 1, 1), (limit - 1, 2), (limit - 4, limit)):
        fields = {"prompt": [40] * num_prompt, "max_tokens": max_tokens}
        error = refused(client, **fields)
        assert error["code"] == "context_length_exceeded", (num_prompt, max_tokens, error)
        assert str(limit) in error["message"] and str(num_prompt) in error["message"]
    long_text = refused(client, prompt="the sea " * 400)
    assert long_text["code"] == "context_length_exceeded" and str(limit) in long_text["message"]
    huge_text = refused(client, prompt="the sea " * 200_000)
    assert huge_text["code"] == "context_length_exceeded" and huge_text["param"] == "prompt"
    assert refused(client, prompt=[40] * 500, max_tokens=12, min_tokens=13)["param"] == "min_tokens"
    assert refused(client, prompt=["a", [40] * limit])["param"] == "prompt.1"


def test_truncation_keeps_the_side_that_was_asked_for(client: httpx.Client) -> None:
    ids = list(range(40, 140))
    body = {"prompt": ids, "return_token_ids": True}

    def kept(**fields: Any) -> list[int]:
        return complete(client, **body, **fields)["choices"][0]["prompt_token_ids"]

    assert kept(truncate_prompt_tokens=10) == ids[-10:]
    assert kept(truncate_prompt_tokens=10, truncation_side="left") == ids[-10:]
    assert kept(truncate_prompt_tokens=10, truncation_side="right") == ids[:10]
    assert kept(truncate_prompt_tokens=200) == ids
    body["prompt"] = [40] * 2000
    assert len(kept(truncate_prompt_tokens=-1, max_tokens=12)) == MAX_MODEL_LEN - 12
    echoed = complete(client, prompt="the sea " * 2000, truncate_prompt_tokens=3, echo=True, max_tokens=0)
    assert echoed["usage"]["prompt_tokens"] == 3 and "the sea ".endswith(echoed["choices"][0]["text"][-1])


def test_stops_end_the_choice_before_them(client: httpx.Client, tokenizer: Tokenizer) -> None:
    """DET-04"""
    whole = complete(client, max_tokens=30, seed=3, return_token_ids=True)["choices"][0]
    stop = whole["text"][7:10]
    at = whole["text"].find(stop)
    for body in ({"stop": stop}, {"stop": ["zzzz", stop]}):
        choice = complete(client, max_tokens=30, seed=3, **body)["choices"][0]
        assert choice["text"] == whole["text"][:at] and choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == stop
        assert (
            fold(stream(client, PATH, {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "seed": 3, **body}))[0]
            == choice
        )
    shown = complete(client, max_tokens=30, seed=3, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert shown["text"] == whole["text"][: at + len(stop)]
    token_id = whole["token_ids"][4]
    by_id = complete(client, max_tokens=30, seed=3, stop_token_ids=[token_id])["choices"][0]
    assert by_id["finish_reason"] == "stop" and by_id["stop_reason"] == token_id


def test_sampling_parameters_reach_the_engine(server: Running, client: httpx.Client) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "presence_penalty": 1, "frequency_penalty": -1.5,
        "repetition_penalty": 1.25, "seed": -9, "stop": ["x", "y"], "stop_token_ids": [3], "n": 2,
        "include_stop_str_in_output": True, "ignore_eos": True, "min_tokens": 2, "max_tokens": 9, "logprobs": 3,
        "prompt_logprobs": 1, "logit_bias": {"5": -100, "6": 1.5}, "allowed_token_ids": [5, 6], "bad_words": ["bad"],
        "skip_special_tokens": False, "spaces_between_special_tokens": False, "cache_salt": "tenant-7",
        "request_id": "my-request",
    }  # fmt: skip
    complete(client, **fields)
    request = server.engine.seen[-1]
    assert request.request_id == "my-request" and request.cache_salt == "tenant-7" and request.prompt_text == PROMPT
    assert request.arrival_s > 0
    expected = {**fields, "logit_bias": {5: -100.0, 6: 1.5}}
    for name in ("request_id", "cache_salt"):
        del expected[name]
    for name, value in expected.items():
        got = getattr(request.sampling, name)
        assert (list(got) if isinstance(got, tuple) else got) == value, name


def test_sampling_defaults_come_from_the_model(tokenizer: Tokenizer) -> None:
    config = configured()
    defaults = {"temperature": 0.25, "top_k": 3, "max_tokens": 7}
    with running(config, lambda: FakeEngine(tokenizer, config, default_sampling=defaults)) as it, it.client() as client:
        body = {"prompt": PROMPT, "ignore_eos": True}
        assert client.post(PATH, json=body).json()["usage"]["completion_tokens"] == 7
        client.post(PATH, json={**body, "temperature": 0})
        plain, greedy = (request.sampling for request in it.engine.seen)
        assert (plain.temperature, plain.top_k, plain.top_p) == (0.25, 3, 1.0)
        assert greedy.temperature == 0 and greedy.top_k == 3, "0 is a value"


def test_special_tokens_are_added_once(bos_client: httpx.Client) -> None:
    """API-18: completions add BOS once, chat not at all."""

    def ids(path: str, body: dict[str, Any]) -> list[int]:
        answer = bos_client.post(path, json={"max_tokens": 1, "return_token_ids": True, **body}).json()
        return answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]

    bos = bos_client.post("/tokenize", json={"prompt": ""}).json()["tokens"]
    assert len(bos) == 1
    plain = ids(PATH, {"prompt": PROMPT})
    assert plain[:1] == bos and plain.count(bos[0]) == 1
    assert ids(PATH, {"prompt": "<s>" + PROMPT}) == plain
    assert ids(PATH, {"prompt": PROMPT, "add_special_tokens": False}) == plain[1:]
    messages = [{"role": "user", "content": "Hi"}]
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    from_chat = ids("/v1/chat/completions", {"messages": messages})
    assert bos[0] not in from_chat
    assert from_chat == ids(PATH, {"prompt": rendered, "add_special_tokens": False})
    assert from_chat == bos_client.post("/tokenize", json={"messages": messages}).json()["tokens"]


def test_priority_is_handed_on_where_it_is_heeded(tokenizer: Tokenizer) -> None:
    import dataclasses

    config = configured()
    config = dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, scheduling_policy="priority"))
    with running(config, lambda: FakeEngine(tokenizer, config)) as it, it.client() as client:
        assert complete(client, priority=-3) and it.engine.seen[-1].priority == -3
