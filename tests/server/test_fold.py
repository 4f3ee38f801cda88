"""Streaming is a delivery mode, not other semantics: 300 random requests, each asked for in both ways."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.server.harness import FakeEngine, configured, running
from tests.server.reading import fold, stream

from octavo.engine.events import GenerationRequest
from octavo.engine.tokenizer import Tokenizer

TEXTS = [
    "👩\u200d👩\u200d👧🇨🇿 ěščř 日本語 é🦚 and the sea",
    "The old lighthouse keeper opened the door. assistant!! assistant",
    "🀄🦚🀄🦚🀄🦚 naïve café — “quotes” \u2028 line \u0085 break\n\ttab",
    "a\u0301e\u0308 combining, Straße, ﷽, 한국어, עברית, ไทย",
    "<|im_start|>user\nHi<|im_end|> special <s> tokens",
]


@pytest.fixture(scope="module")
def spelling(tokenizer: Tokenizer) -> Iterator[httpx.Client]:
    """A server whose model spells out one of TEXTS, chosen and cut by the seed, two tokens a step."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]

    def script(request: GenerationRequest, choice: int, position: int) -> int:
        seed = (request.sampling.seed or 0) + choice
        spelled = ids[seed % len(ids)]
        return spelled[(position + seed // len(ids)) % len(spelled)]

    config = configured()
    with (
        running(config, lambda: FakeEngine(tokenizer, config, script=script, tokens_per_step=2)) as it,
        it.client() as client,
    ):
        yield client


def random_request(random_: random.Random) -> tuple[str, dict[str, Any]]:
    body: dict[str, Any] = {
        "max_tokens": random_.randint(1, 60),
        "seed": random_.randrange(1000),
        "n": random_.choice([1, 1, 1, 2, 3]),
        "ignore_eos": random_.random() < 0.8,
        "skip_special_tokens": random_.random() < 0.7,
    }
    if random_.random() < 0.6:
        text = random_.choice(TEXTS)
        starts = [random_.randrange(len(text) - 4) for _ in range(random_.randint(1, 4))]
        body["stop"] = [text[start : start + random_.randint(1, 8)] for start in starts] + ["never\u0001"]
        body["include_stop_str_in_output"] = random_.random() < 0.3
        body["min_tokens"] = random_.choice([0, 0, min(5, body["max_tokens"])])
    if random_.random() < 0.3:
        body["return_token_ids"] = True
    if random_.random() < 0.5:
        body["messages"] = [{"role": "user", "content": random_.choice(TEXTS)}]
        if random_.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": random_.randrange(3)}
        return "/v1/chat/completions", body
    body["prompt"] = random_.choice([TEXTS[0], TEXTS[1:3], [40, 41, 200], TEXTS[4]])
    body["echo"] = random_.random() < 0.4
    if random_.random() < 0.4:
        body["logprobs"] = random_.randrange(3)
    return "/v1/completions", body


@pytest.mark.parametrize("block", range(6))
def test_a_random_request_gives_the_same_answer_streamed(spelling: httpx.Client, block: int) -> None:
    random_ = random.Random(block)
    finishes = set()
    for _ in range(50):
        path, body = random_request(random_)
        response = spelling.post(path, json=body)
        assert response.status_code == 200, (body, response.text)
        answer = response.json()
        streamed = stream(spelling, path, {**body, "stream_options": {"include_usage": True}})
        assert streamed.is_done and streamed.events[-1]["usage"] == answer["usage"]
        folded = fold(streamed)
        assert len(folded) == len(answer["choices"])
        for choice in answer["choices"]:
            got = folded[choice["index"]]
            text = choice["text"] if "text" in choice else choice["message"]["content"]
            assert got["text"] == text, body
            assert (got["finish_reason"], got["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
            assert got.get("token_ids", []) == choice.get("token_ids", [])
            if choice["logprobs"] is not None:
                wanted = {name: value for name, value in choice["logprobs"].items() if name != "refusal"}
                assert {name: got["logprobs"][name] for name in wanted} == wanted
            finishes.add(choice["finish_reason"])
            # Nothing that a stop string cut off has been shown.
            if not body.get("include_stop_str_in_output") and not body.get("min_tokens") and not body.get("echo"):
                assert not any(stop in text for stop in body.get("stop", ()))
    assert finishes == {"stop", "length"}


def test_no_prefix_of_a_stream_is_ever_taken_back(spelling: httpx.Client) -> None:
    """DET-02, DET-04, DET-06: what has been shown is a prefix of the final text."""
    for seed in range(25):
        body = {
            "prompt": "x",
            "max_tokens": 50,
            "seed": seed,
            "ignore_eos": True,
            "stop": ["lighthouse keeper", "🦚🀄"],
        }
        whole = spelling.post("/v1/completions", json=body).json()["choices"][0]["text"]
        shown = ""
        for chunk in stream(spelling, "/v1/completions", body).chunks:
            shown += chunk["text"]
            assert whole.startswith(shown)
            assert "\ufffd" not in shown or "\ufffd" in whole
        assert shown == whole
