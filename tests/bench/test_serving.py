"""`octavo bench serve` against a server whose answers are known: what is sent, when, and what the result says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.bench.fake_server import MODEL, FakeServer, Reply, fake_server
from tests.tiny import byte_tokenizer

from octavo.bench.options import DatasetOptions, LoadOptions, ResultOptions, SamplingOptions, TargetOptions
from octavo.bench.report import as_text, serve_sections
from octavo.bench.serving import ServeBenchmark, ServeOptions, ServeOutcome, result_path, save_result
from octavo.errors import ConfigError, OctavoError, RequestFailed, Unavailable
from octavo.options import options_of

SECTIONS = {
    "target": TargetOptions,
    "dataset": DatasetOptions,
    "load": LoadOptions,
    "sampling": SamplingOptions,
    "result": ResultOptions,
}

# What a result of vLLM's has, under the same names.
VLLM_KEYS = """
    date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency
    duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
    output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests
    mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms
    mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms
""".split()
DETAIL_KEYS = "input_lens output_lens ttfts itls generated_texts errors".split()
OWN_KEYS = """
    dataset_name connections repeats seed num_truncated tokens_per_chunk p90_ttft_ms p90_tpot_ms p90_itl_ms p90_e2el_ms
    server_peak_rss_bytes server_pss_bytes server_cpu_s server_cpu_s_per_1k_output_tokens server_cpu_s_per_1k_tokens
    client_cpu_share client_max_send_delay_ms prefix_cached_tokens prefix_hit_rate
""".split()


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    byte_tokenizer().save(str(path))
    return str(path)


@pytest.fixture
def custom(tmp_path: Path) -> str:
    """Five prompts that need no tokenizer."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"prompt {i}", "output_tokens": 4}) for i in range(5)))
    return str(path)


def serve_options(**given: Any) -> ServeOptions:
    """The options by name, whatever their class."""
    given = {"disable_tqdm": True, "ready_check_timeout_sec": 5.0, **given}
    owner = {option.name: part for part, section in SECTIONS.items() for option in options_of(section, part)}
    sections = {
        part: section(**{n: v for n, v in given.items() if owner[n] == part}) for part, section in SECTIONS.items()
    }
    return ServeOptions(**sections)  # type: ignore[arg-type]


async def bench(server: FakeServer, **given: Any) -> ServeOutcome:
    return await ServeBenchmark(serve_options(base_url=server.url, **given), lambda text: None).run()


async def bench_custom(server: FakeServer, path: str, **given: Any) -> ServeOutcome:
    return await bench(server, dataset_name="custom", dataset_path=path, **given)


def prompts(server: FakeServer) -> list[str]:
    return [seen.body["prompt"] for seen in server.completions]


async def test_the_result_has_the_keys_of_vllms_and_our_own(custom: str) -> None:
    async with fake_server() as server:
        result = (await bench_custom(server, custom, metadata=("run=7",))).result
        assert set(result) == {*VLLM_KEYS, *OWN_KEYS, "run"}
        assert result["run"] == "7"
        json.dumps(result, allow_nan=False)
        detailed = (await bench_custom(server, custom, save_detailed=True)).result
        assert set(detailed) == {*VLLM_KEYS, *OWN_KEYS, *DETAIL_KEYS}
        assert set((await bench_custom(server, custom, repeats=2)).result) == {
            *VLLM_KEYS, *OWN_KEYS, "confidence_intervals", "runs"
        }  # fmt: skip


async def test_the_numbers_are_those_of_the_server(custom: str) -> None:
    async with fake_server(Reply(first_s=0.2, gap_s=0.1)) as server:
        result = (await bench_custom(server, custom)).result
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (5, 0, 20)
    assert result["max_concurrent_requests"] == 5
    for name, at_least in (("mean_ttft_ms", 200), ("mean_tpot_ms", 95), ("median_itl_ms", 95), ("mean_e2el_ms", 500)):
        assert at_least <= result[name] < 3 * at_least, name
    assert result["output_throughput"] == pytest.approx(20 / result["duration"])
    assert result["model_id"] == MODEL and result["tokenizer_id"] is None
    assert result["total_input_tokens"] == 35  # no tokenizer: what usage says


async def test_the_test_request_comes_first_and_shares_no_text(custom: str) -> None:
    async with fake_server() as server:
        await bench_custom(server, custom, num_warmups=3)
    asked = prompts(server)
    assert len(asked) == 1 + 3 + 5
    assert {text.startswith("prompt") for text in asked[:4]} == {False}
    assert sorted(asked[4:]) == [f"prompt {i}" for i in range(5)]
    assert len(set(asked)) == 9


async def test_without_a_ready_check_nothing_else_is_sent(custom: str) -> None:
    async with fake_server() as server:
        await bench_custom(server, custom, ready_check_timeout_sec=0.0)
    assert len(server.completions) == 5


@pytest.mark.parametrize("limit", [1, 2])
async def test_no_more_requests_than_the_limit_are_in_flight(custom: str, limit: int) -> None:
    async with fake_server(Reply(gap_s=0.005)) as server:
        result = (await bench_custom(server, custom, max_concurrency=limit)).result
    assert server.most_open == limit
    assert result["max_concurrent_requests"] == limit
    assert result["max_concurrency"] == limit


async def test_requests_are_sent_at_the_rate(custom: str) -> None:
    async with fake_server() as server:
        outcome = await bench_custom(server, custom, request_rate=20.0, burstiness=float("inf"))
    (run,) = outcome.runs
    sent = [record.start_s - run.began_s for record in run.records]
    assert all(due <= at < due + 1.0 for due, at in zip((0.05, 0.1, 0.15, 0.2, 0.25), sent, strict=True))
    assert outcome.result["client_max_send_delay_ms"] == pytest.approx(
        1000 * max(at - due for due, at in zip((0.05, 0.1, 0.15, 0.2, 0.25), sent, strict=True))
    )
    assert (outcome.result["request_rate"], outcome.result["burstiness"]) == (20.0, "inf")


async def test_a_trace_is_sent_at_its_own_times_unless_there_is_a_rate(tmp_path: Path, tokenizer_path: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n10,30,2\n10.4,40,3\n11.2,2000,900\n")
    given = {"dataset_name": "trace", "dataset_path": str(path), "tokenizer": tokenizer_path}
    async with fake_server(models=[{"id": MODEL, "max_model_len": 512}]) as server:
        outcome = await bench(server, **given, trace_speedup=4.0)
        (run,) = outcome.runs
        sent = [record.start_s - run.began_s for record in run.records]
        assert all(due <= at < due + 1.0 for due, at in zip((0.0, 0.1, 0.3), sent, strict=True))
        assert [seen.body["max_tokens"] for seen in server.completions[1:]] == [2, 3, 256]
        assert [len(seen.body["prompt"]) for seen in server.completions[1:]] == [30, 40, 256]
        assert all(seen.body["ignore_eos"] for seen in server.completions)
        assert (outcome.result["num_truncated"], outcome.result["total_input_tokens"]) == (1, 326)
        outcome = await bench(server, **given, request_rate=50.0, burstiness=float("inf"), max_model_len=100)
        (run,) = outcome.runs
        assert 0.06 <= run.records[-1].start_s - run.began_s < 0.3
        assert [len(seen.body["prompt"]) for seen in server.completions[5:]] == [30, 40, 50]


async def test_repeats_ask_other_things(tokenizer_path: str) -> None:
    async with fake_server() as server:
        result = (
            await bench(server, tokenizer=tokenizer_path, num_prompts=3, input_len=20, output_len=2, repeats=3)
        ).result
    asked = prompts(server)
    assert len(set(asked)) == len(asked) == 1 + 3 * 3
    assert result["completed"] == 9 and result["num_prompts"] == 3
    low, high = result["confidence_intervals"]["output_throughput"]
    assert low <= result["output_throughput"] <= high
    assert len(result["runs"]) == 3


async def test_fields_of_the_request_come_from_the_flags(custom: str) -> None:
    async with fake_server() as server:
        await bench_custom(
            server, custom, temperature=0.5, top_p=0.9, top_k=-1, logprobs=2, ignore_eos=True,
            extra_body={"min_tokens": 4, "temperature": 0.7}, header=("X-Run=a=b",), api_key="secret",
            served_model_name="other",
        )  # fmt: skip
        seen = server.completions[-1]
        assert seen.body | {"prompt": ""} == {
            "prompt": "", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True},
            "model": "other", "temperature": 0.7, "top_p": 0.9, "top_k": -1, "logprobs": 2, "ignore_eos": True,
            "min_tokens": 4,
        }  # fmt: skip
        assert seen.headers["x-run"] == "a=b" and seen.headers["authorization"] == "Bearer secret"
        await bench_custom(server, custom, backend="openai-chat", logprobs=1)
    seen = server.completions[-1]
    assert seen.path == "/v1/chat/completions"
    assert (seen.body["logprobs"], seen.body["top_logprobs"], seen.body["temperature"]) == (True, 1, 0.0)
    assert "ignore_eos" not in seen.body


async def test_the_key_may_come_from_the_environment(custom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "hidden")
    async with fake_server() as server:
        await bench_custom(server, custom)
    assert {seen.headers["authorization"] for seen in server.seen} == {"Bearer hidden"}


async def test_the_servers_process_is_found_by_its_port(custom: str) -> None:
    async with fake_server() as server:  # in this process
        found = (await bench_custom(server, custom)).result
        given = (await bench_custom(server, custom, server_pid=os.getpid())).result
    assert found["server_peak_rss_bytes"] == pytest.approx(given["server_peak_rss_bytes"], rel=0.2)
    assert found["server_peak_rss_bytes"] > 10 * 2**20
    assert found["server_cpu_s"] >= 0


async def test_a_server_may_still_be_loading(custom: str) -> None:
    answers = iter([Reply(status=503, error="loading"), Reply(status=503, error="loading")])
    async with fake_server(lambda body: next(answers, Reply())) as server:
        assert (await bench_custom(server, custom)).result["completed"] == 5
    assert len(server.completions) == 3 + 5


async def test_failures_are_counted_by_their_reason(custom: str) -> None:
    def reply(body: dict[str, Any]) -> Reply:
        refuses = body["prompt"] in ("prompt 1", "prompt 3")
        return (
            Reply(status=429, error="too many")
            if refuses
            else Reply(breaks_after=1 if body["prompt"] == "prompt 2" else None)
        )

    async with fake_server(reply) as server:
        outcome = await bench_custom(server, custom)
    assert (outcome.result["completed"], outcome.result["failed"]) == (2, 3)
    assert list(outcome.failures.items()) == [
        ("status 429: too many", 2),
        ("connection: the server closed the connection before the response was complete", 1),
    ]


async def refusal(server: FakeServer, kind: type[OctavoError], **given: Any) -> str:
    with pytest.raises(kind) as error:
        await bench(server, **given)
    return str(error.value)


async def test_a_refused_test_request_ends_it_before_anything_is_measured(custom: str) -> None:
    given = {"dataset_name": "custom", "dataset_path": custom}
    async with fake_server(Reply(status=400, error="no such field: ignore_eos")) as server:
        assert await refusal(server, RequestFailed, **given) == (
            f"{server.url} refuses the test request, before anything is measured: status 400: no such field: ignore_eos"
        )
    assert len(server.completions) == 1


async def test_a_server_that_does_not_answer_is_waited_for_and_then_given_up(custom: str) -> None:
    given = {"dataset_name": "custom", "dataset_path": custom, "ready_check_timeout_sec": 0.3}
    async with fake_server(Reply(status=503, error="loading")) as server:
        message = await refusal(server, Unavailable, **given)
        assert message == f"{server.url} does not serve the test request: status 503: loading"
    assert await refusal(server, Unavailable, **given) == (
        f"{server.url} cannot be used: {server.url} refuses connections."
    )


async def test_a_model_that_is_not_named_and_not_listed_is_refused(custom: str) -> None:
    given = {"dataset_name": "custom", "dataset_path": custom}
    async with fake_server(models=None) as server:
        assert await refusal(server, Unavailable, **given) == (
            f"{server.url} does not say which model it serves (it answered 404 to /v1/models). Name it with --model."
        )
        assert (await bench(server, **given, model="mine")).result["model_id"] == "mine"
    assert server.completions[-1].body["model"] == "mine"


async def test_made_up_prompts_need_a_tokenizer() -> None:
    async with fake_server() as server:
        assert "no tokenizer on this machine. Give one: --tokenizer PATH." in await refusal(server, ConfigError)
        assert "is neither a path here nor a model" in await refusal(server, OctavoError, tokenizer="nowhere")


async def test_the_models_own_tokenizer_is_found_by_its_root(tokenizer_path: str) -> None:
    folder = str(Path(tokenizer_path).parent)
    async with fake_server(models=[{"id": "alias", "root": folder}]) as server:
        result = (await bench(server, num_prompts=1, input_len=9, output_len=1)).result
    assert (result["model_id"], result["tokenizer_id"]) == ("alias", folder)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"endpoint": "v1/completions"}, "--endpoint is v1/completions; it must be a path that begins with /."),
        (
            {"endpoint": "/v1/chat/completions"},
            "--endpoint /v1/chat/completions does not go with --backend openai: openai-chat sends messages, to "
            "/v1/chat/completions, and the others a prompt, to /v1/completions.",
        ),
        ({"base_url": "ftp://x"}, "--base-url is ftp://x; it must be like http://127.0.0.1:8000."),
        ({"header": ("nothing",)}, "--header has 'nothing'; it must be KEY=VALUE."),
        ({"metadata": ("=x",)}, "--metadata has '=x'; it must be KEY=VALUE."),
        ({"goodput": ("itl:1",)}, "--goodput has 'itl:1'; it must be METRIC:MS with one of ttft, tpot, e2el."),
    ],
)
def test_mistakes_are_found_before_anything_is_sent(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ServeBenchmark(serve_options(**given), lambda text: None)
    assert str(error.value) == message


async def test_a_server_pid_that_is_nobodys_is_refused(custom: str) -> None:
    given = {"dataset_name": "custom", "dataset_path": custom, "server_pid": 2**31 - 1}
    async with fake_server() as server:
        assert "there is no such process here" in await refusal(server, ConfigError, **given)


def test_results_are_saved_alone_or_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    save_result(path, {"a": 1}, append=False)
    save_result(path, {"a": 2}, append=True)
    save_result(path, {"a": 3}, append=True)
    assert [json.loads(line) for line in path.read_text().split("\n")] == [{"a": 1}, {"a": 2}, {"a": 3}]
    save_result(path, {"a": 4}, append=False)
    assert json.loads(path.read_text()) == {"a": 4}
    with pytest.raises(ConfigError, match="the result cannot be written to"):
        save_result(tmp_path, {}, append=False)


def test_files_are_named_as_vllm_names_them() -> None:
    result = {"model_id": "owner/model", "date": "20260101-000000"}
    assert str(result_path(serve_options(), result)) == "openai-infqps-model-20260101-000000.json"
    options = serve_options(label="mine", request_rate=2.0, max_concurrency=8, result_dir="out")
    assert str(result_path(options, result)) == "out/mine-2.0qps-concurrency8-model-20260101-000000.json"
    assert str(result_path(serve_options(result_dir="out", result_filename="x.json"), result)) == "out/x.json"


async def test_the_table_shows_what_the_result_has(custom: str) -> None:
    async with fake_server() as server:
        result = (await bench_custom(server, custom, goodput=("ttft:5000",), repeats=2)).result
    text = as_text(serve_sections(result))
    for line in ("Successful requests", "Good requests (1/s)", "Time to first token", "P99 (ms)", "Server: peak RSS"):
        assert line in text
    assert "mean of 2 runs [95 % confidence]" in text
    assert "prefix cache" not in text  # the server does not tell
    assert max(map(len, text.split("\n"))) < 110


async def test_a_client_that_was_too_slow_is_warned_about(custom: str) -> None:
    async with fake_server() as server:
        outcome = await bench_custom(server, custom)
    result = outcome.result | {"client_cpu_share": 0.93, "client_max_send_delay_ms": 250.0, "request_rate": 5.0}
    first, second = ServeOutcome(result, outcome.runs).warnings
    assert first.startswith("the client itself used 93% of a core")
    assert second.startswith("a request was sent 250 ms late")
    calm = outcome.result | {"client_cpu_share": 0.1, "client_max_send_delay_ms": 1.0}
    assert ServeOutcome(calm, outcome.runs).warnings == []
