"""Workloads: prompts have the lengths that were asked for, as the tokenizer counts them, and share what they should."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import SPECIAL_TOKENS, byte_tokenizer
from tokenizers.processors import TemplateProcessing

from octavo.bench.options import DatasetOptions
from octavo.bench.prompts import PromptMaker
from octavo.bench.workload import BenchRequest, Workload, make_probe, make_workload
from octavo.engine.tokenizer import Tokenizer, load_tokenizer
from octavo.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def real_tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def bos_tokenizer() -> Tokenizer:
    tokenizer, bos = byte_tokenizer(), SPECIAL_TOKENS[1]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return Tokenizer(tokenizer, special_tokens={"bos_token": bos})


def workload(tokenizer: Tokenizer | None, *, seed: int = 0, context_len: int | None = None, **options: Any) -> Workload:
    maker = None if tokenizer is None else PromptMaker(tokenizer)
    return make_workload(DatasetOptions(**options), maker, seed=seed, context_len=context_len)


def lengths(made: Workload, tokenizer: Tokenizer) -> list[int]:
    counted = [len(tokenizer.encode(request.prompt)) for request in made.requests]
    assert counted == [request.prompt_len for request in made.requests]
    return counted


def file_of(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def refusal(tokenizer: Tokenizer | None, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        workload(tokenizer, **options)
    return str(error.value)


def test_random_prompts_have_the_length_asked_for(tokenizer: Tokenizer) -> None:
    made = workload(tokenizer, num_prompts=5, random_input_len=40, random_output_len=7)
    assert lengths(made, tokenizer) == [40] * 5
    assert [request.output_len for request in made.requests] == [7] * 5


def test_real_tokenizers_read_random_prompts_back(real_tokenizer: Tokenizer) -> None:
    made = workload(real_tokenizer, num_prompts=8, random_input_len=300)
    assert lengths(made, real_tokenizer) == [300] * 8
    assert all(request.prompt.replace(" ", "").isalpha() for request in made.requests)


def test_the_bos_that_a_server_adds_is_counted(bos_tokenizer: Tokenizer) -> None:
    assert bos_tokenizer.adds_bos
    made = workload(bos_tokenizer, num_prompts=4, random_input_len=128)
    assert lengths(made, bos_tokenizer) == [128] * 4


def test_random_lengths_fill_their_range(tokenizer: Tokenizer) -> None:
    made = workload(tokenizer, num_prompts=400, random_input_len=10, random_output_len=20, random_range_ratio=0.5)
    assert set(lengths(made, tokenizer)) == set(range(5, 16))
    assert {request.output_len for request in made.requests} == set(range(10, 31))


def test_random_prompts_share_their_prefix_and_nothing_else(tokenizer: Tokenizer) -> None:
    made = workload(tokenizer, num_prompts=20, random_input_len=30, random_prefix_len=12)
    assert set(lengths(made, tokenizer)) == {42}
    assert len({request.prompt[:12] for request in made.requests}) == 1
    assert len({request.prompt[12:24] for request in made.requests}) == 20


def test_a_seed_makes_the_same_prompts_and_another_one_others(tokenizer: Tokenizer) -> None:
    one, two, other = (workload(tokenizer, seed=seed, num_prompts=3, random_input_len=30) for seed in (1, 1, 2))
    assert one == two
    assert {request.prompt for request in one.requests}.isdisjoint(request.prompt for request in other.requests)


def test_prefixes_are_repeated_evenly(tokenizer: Tokenizer) -> None:
    made = workload(
        tokenizer,
        dataset_name="prefix_repetition",
        num_prompts=11,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=16,
        prefix_repetition_suffix_len=8,
        prefix_repetition_output_len=5,
    )
    assert lengths(made, tokenizer) == [24] * 11
    counts = Counter(request.prompt[:16] for request in made.requests)
    assert sorted(counts.values()) == [3, 4, 4]
    assert len({request.prompt[16:] for request in made.requests}) == 11
    assert {request.output_len for request in made.requests} == {5}


def test_general_lengths_set_those_of_the_data_set(tokenizer: Tokenizer) -> None:
    made = workload(tokenizer, num_prompts=2, input_len=9, output_len=3)
    assert lengths(made, tokenizer) == [9, 9] and made.requests[0].output_len == 3
    made = workload(
        tokenizer, dataset_name="prefix_repetition", num_prompts=10, input_len=9, output_len=3,
        prefix_repetition_prefix_len=4,
    )  # fmt: skip
    assert set(lengths(made, tokenizer)) == {13} and made.requests[0].output_len == 3


def trace_rows() -> list[dict[str, Any]]:
    return [
        {"timestamp": 1000, "input_length": 20, "output_length": 4, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 24, "output_length": 5, "hash_ids": [0, 2]},
        {"timestamp": 4000, "input_length": 30, "output_length": 6, "hash_ids": [0, 1]},
    ]


def trace(tmp_path: Path, tokenizer: Tokenizer, **options: Any) -> Workload:
    path = file_of(tmp_path, *trace_rows())
    return workload(tokenizer, dataset_name="trace", dataset_path=path, trace_block_size=16, **options)


def test_a_trace_keeps_lengths_times_and_shared_blocks(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = trace(tmp_path, tokenizer, num_prompts=3)
    assert lengths(made, tokenizer) == [20, 24, 30]
    assert [request.output_len for request in made.requests] == [4, 5, 6]
    assert [request.arrival_s for request in made.requests] == [0.0, 0.5, 3.0]
    first, second, third = (request.prompt for request in made.requests)
    assert first[:16] == second[:16] == third[:16]
    assert third.startswith(first) and second[16:20] != first[16:20]
    assert made.notes == () and made.num_truncated == 0


def test_a_trace_may_be_hurried(tmp_path: Path, tokenizer: Tokenizer) -> None:
    times = [request.arrival_s for request in trace(tmp_path, tokenizer, trace_speedup=2.0).requests]
    assert times == [0.0, 0.25, 1.5]
    times = [request.arrival_s for request in trace(tmp_path, tokenizer, trace_speedup=float("inf")).requests]
    assert times == [0.0, 0.0, 0.0]


def test_a_trace_is_cut_to_the_context_and_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = trace(tmp_path, tokenizer, num_prompts=3, context_len=28)
    assert lengths(made, tokenizer) == [20, 23, 22]
    assert made.num_truncated == 2
    assert made.notes == ("2 of 3 requests were cut to the context of 28 tokens",)
    assert made.requests[2].prompt.startswith(made.requests[0].prompt)  # what is cut keeps its beginning


def test_a_short_file_makes_a_short_benchmark_and_says_so(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made = trace(tmp_path, tokenizer, num_prompts=9)
    assert len(made.requests) == 3
    assert made.notes[0].endswith("has 3 usable entries; --num-prompts asks for 9")
    assert len(trace(tmp_path, tokenizer, num_prompts=2).requests) == 2


def conversation(*texts: str, roles: tuple[str, ...] = ("human", "gpt")) -> dict[str, Any]:
    return {"conversations": [{"from": roles[i % 2], "value": text} for i, text in enumerate(texts)]}


def test_sharegpt_asks_the_first_question_for_as_many_tokens_as_its_answer_has(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = file_of(
        tmp_path,
        conversation("What is this?", "A test, certainly.", "Why?", "Because."),
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Once more"},
                      {"role": "assistant", "content": "Another answer"}]},
        conversation("Nobody answered this"),
        conversation("Hi", "too short a question"),
        conversation("The answer is too short", "no"),
        conversation("x" * 1025, "too long a question"),
        conversation("The answer is too long", "y" * 2040),
    )  # fmt: skip
    made = workload(tokenizer, dataset_name="sharegpt", dataset_path=path, disable_shuffle=True)
    assert made.requests == [BenchRequest("What is this?", 13, 18), BenchRequest("Once more", 9, 14)]
    made = workload(tokenizer, dataset_name="sharegpt", dataset_path=path, output_len=6, disable_shuffle=True)
    assert {request.output_len for request in made.requests} == {6}
    assert len(made.requests) == 4  # the length of an answer that is not asked for does not matter


def test_sharegpt_may_be_one_json_array(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "array.json"
    path.write_text(json.dumps([conversation("What is this?", "A test.")], indent=1))
    made = workload(tokenizer, dataset_name="sharegpt", dataset_path=str(path))
    assert made.requests == [BenchRequest("What is this?", 13, 7)]


def test_custom_lines_are_prompts_with_or_without_a_length(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = file_of(tmp_path, {"prompt": "one\u2028line", "output_tokens": 3}, {"prompt": "two"})
    made = workload(tokenizer, dataset_name="custom", dataset_path=path, disable_shuffle=True)
    assert [(request.prompt, request.output_len) for request in made.requests] == [("one\u2028line", 3), ("two", 256)]
    without = workload(None, dataset_name="custom", dataset_path=path, disable_shuffle=True, custom_output_len=9)
    assert [(request.prompt_len, request.output_len) for request in without.requests] == [(None, 3), (None, 9)]


def test_lines_are_shuffled_by_the_seed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = file_of(tmp_path, *({"prompt": f"line {i}"} for i in range(30)))

    def order(seed: int) -> list[str]:
        made = workload(tokenizer, dataset_name="custom", dataset_path=path, seed=seed, num_prompts=10)
        return [request.prompt for request in made.requests]

    assert order(1) == order(1) != order(2)
    assert len(set(order(1))) == 10


def test_what_cannot_be_is_refused_with_the_way_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert refusal(tokenizer, dataset_name="random", dataset_path="x") == (
        "--dataset-path x has no effect on --dataset-name random, which is made up. Choose sharegpt, custom or trace."
    )
    assert refusal(tokenizer, dataset_name="trace") == "--dataset-name trace needs a file: --dataset-path FILE."
    assert "Give one: --tokenizer PATH." in refusal(None, dataset_name="random")
    assert "more than the 5 requests of --num-prompts" in refusal(
        tokenizer, dataset_name="prefix_repetition", num_prompts=5
    )
    path = file_of(tmp_path, conversation("What is this?", "A test."))
    assert "Give --tokenizer PATH, or --sharegpt-output-len N." in refusal(
        None, dataset_name="sharegpt", dataset_path=path
    )
    assert "entry 1 has no text under 'prompt'; it has conversations" in refusal(
        tokenizer, dataset_name="custom", dataset_path=path
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{oops\n', "line 2 is not JSON"),
        ("[1]", "entry 1 is not a JSON object"),
        ("", "holds no prompts"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens is 0; it must be an integer of at least 1"),
        ('{"prompt": ""}', "entry 1 has no text under 'prompt'"),
    ],
)
def test_files_with_mistakes_are_refused(tmp_path: Path, tokenizer: Tokenizer, text: str, message: str) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    assert message in refusal(tokenizer, dataset_name="custom", dataset_path=str(path))


def test_a_file_without_a_usable_conversation_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = file_of(tmp_path, conversation("Hi", "x"))
    assert "no conversation of a usable length" in refusal(tokenizer, dataset_name="sharegpt", dataset_path=path)


def test_a_probe_has_the_size_of_a_request_and_none_of_its_text(tokenizer: Tokenizer) -> None:
    (request,) = workload(tokenizer, num_prompts=1, random_input_len=50).requests
    probe = make_probe(request, PromptMaker(tokenizer), np.random.default_rng(1))
    assert len(tokenizer.encode(probe.prompt)) == probe.prompt_len == 50
    assert probe.prompt[:8] != request.prompt[:8]
    uncounted = make_probe(
        BenchRequest("some text of forty characters or so.....", None, 5), None, np.random.default_rng(1)
    )
    assert uncounted.prompt_len is None and 20 < len(uncounted.prompt) < 60


class MergingTokenizer:
    """Reads "ab" as one token, so that few random texts are read back as the tokens they were made of."""

    vocab_size = 3
    strips_leading_space = False
    texts = ("a", "b", "ab")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids, i = [], 0
        while i < len(text):
            ids.append(2 if text[i : i + 2] == "ab" else self.texts.index(text[i]))
            i += len(self.texts[ids[-1]])
        return ids

    def decode(self, token_ids: list[int]) -> str:
        return "".join(self.texts[i] for i in token_ids)

    def token_text(self, token_id: int) -> str:
        return self.texts[token_id]

    def is_special(self, token_id: int) -> bool:
        return False


def test_a_text_is_mended_until_its_length_is_right() -> None:
    tokenizer = MergingTokenizer()
    maker = PromptMaker(tokenizer)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    for count in (1, 2, 7, 100):
        for _ in range(20):
            assert maker.count(maker.text(maker.draw(count, rng), rng)) == count
