"""`octavo bench` as a command: each of its parts once from end to end, exit codes, and what mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Serve, free_port
from tests.tiny import save_tiny_llama

from octavo.cli.bench_startup import serve_flags
from octavo.cli.main import main
from octavo.config import make_config

QUIET = "--disable-tqdm"
ENGINE = ["--threads=1", "--backend=reference", "--kv-cache-memory-bytes=8MiB"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a mistake is answered with."""
    assert main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.removeprefix("octavo: error: ").removesuffix("\n")


def test_a_server_is_measured_from_end_to_end(
    serve: Serve, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--dataset-name", "prefix_repetition", "--prefix-repetition-num-prefixes", "2", "--num-prompts", "12",
        "--prefix-repetition-prefix-len", "64", "--prefix-repetition-suffix-len", "16", "--output-len", "8",
        "--max-concurrency", "3", "--num-warmups", "1", "--goodput", "ttft:60000", "e2el:60000", "--metadata", "a=b",
        "c=d", "--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json",
        "--html", str(tmp_path / "r.html"), QUIET,
    ]  # fmt: skip
    with serve(model, *ENGINE) as url:
        assert main(["bench", "serve", "--base-url", url, *flags]) == 0
        shown = capsys.readouterr()
        chat = ["--backend", "openai-chat", "--num-prompts", "2", "--input-len", "8", "--output-len", "4", QUIET]
        assert main(["bench", "serve", "--base-url", url, *chat, "--connections", "fresh"]) == 0
        # More than the context holds: refused by the test request.
        assert main(["bench", "serve", "--base-url", url, "--input-len", "600", "--num-prompts", "1", QUIET]) == 1
    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"]) == (12, 0)
    assert (result["a"], result["c"]) == ("b", "d")
    assert result["input_lens"] == [80] * 12 and result["output_lens"] == [8] * 12
    assert result["total_output_tokens"] == 96
    assert result["request_goodput"] == result["request_throughput"]
    assert 0.3 < result["prefix_hit_rate"] < 0.8
    assert result["max_concurrent_requests"] <= 3
    assert result["server_peak_rss_bytes"] > 50 * 2**20 and result["server_cpu_s"] > 0
    assert result["mean_e2el_ms"] >= result["mean_ttft_ms"] > 0
    assert "Successful requests" in shown.out and "Server: peak RSS (MiB)" in shown.out
    assert f"the result is in {tmp_path / 'r.json'}" in shown.err
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_throughput_from_end_to_end(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    flags = ["--num-prompts", "4", "--input-len", "12", "--output-len", "3", "--output-json", str(path), QUIET]
    assert main(["bench", "throughput", str(model), *ENGINE, *flags, "--temperature", "0.5", "--top-k", "5"]) == 0
    assert "Output tokens (1/s)" in capsys.readouterr().out
    assert json.loads(path.read_text())["num_output_tokens"] == 12


def test_latency_from_end_to_end(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    flags = [
        "--input-len",
        "9",
        "--output-len",
        "4",
        "--batch-size",
        "2",
        "--num-iters",
        "2",
        "--num-iters-warmup",
        "0",
    ]
    assert main(["bench", "latency", str(model), *ENGINE, *flags, "--output-json", str(path), QUIET]) == 0
    assert "Weights and KV read (GB/s)" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["latencies"]) == 2


def test_startup_from_end_to_end(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    flags = ["--num-iters", "1", "--num-iters-warmup", "0", "--output-json", str(path), QUIET]
    assert main(["bench", "startup", str(model), *ENGINE, "--api-key", "secret", *flags]) == 0
    assert "First token: mean (s)" in capsys.readouterr().out
    result = json.loads(path.read_text())
    assert result["peak_rss_bytes"] > 50 * 2**20
    assert 0 < result["avg_health_time"] <= result["avg_ready_time"] < result["avg_first_token_time"]


def test_bench_alone_lists_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert main(["bench"]) == 2
    assert capsys.readouterr().out == shown
    assert all(f"bench {part} " in shown for part in ("serve", "throughput", "latency", "startup"))
    assert "run-batch" not in shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["sevre"], "unknown command 'bench sevre'; did you mean bench serve? (see octavo --help)."),
        (
            ["serve", "--dataset-name", "radnom"],
            "--dataset-name is radnom; it must be one of random, sharegpt, prefix_repetition, trace, timed_trace, "
            "custom; did you mean random?",
        ),
        (
            ["serve", "--request-rate", "0"],
            "--request-rate is 0.0; it must be a number of at least 1e-06 and at most inf.",
        ),
        (
            ["serve", "--burstiness", "nan"],
            "--burstiness is nan; it must be a number of at least 0.001 and at most inf.",
        ),
        (["serve", "--temperature", "inf"], "--temperature is inf; it must be a number of at least 0."),
        (["serve", "--num-prompts", "0"], "--num-prompts is 0; it must be an integer of at least 1."),
        (["serve", "--max-concurrency", "x"], "--max-concurrency is x; it must be an integer of at least 1."),
        (["serve", "--extra-body", "{"], "--extra-body is {; it is not valid JSON"),
        (["serve", "--goodput", "ttft:1", "tpot:x"], "--goodput has 'tpot:x'; tpot's limit must be a number of"),
        (
            ["serve", "--metric-percentiles", "50,"],
            "--metric-percentiles has ''; percentiles are numbers from 0 to 100.",
        ),
        (["serve", "--self-timed"], "octavo bench serve has no --self-timed: a trace is sent at its own times unless"),
        (["serve", "--dataset-nam"], "octavo bench serve has no --dataset-nam; did you mean --dataset-name?"),
        (["serve", "--html", "/no/such/folder/r.html"], "--html /no/such/folder/r.html: there is no folder"),
        (["latency", "--batch-size", "0"], "--batch-size is 0; it must be an integer of at least 1."),
        (["latency", "--port", "1"], "--port is a flag of octavo serve, not of octavo bench latency."),
        (["latency", "--output-json", "/no/such/folder/r"], "--output-json /no/such/folder/r: there is no folder"),
        (["throughput", "--extra-body", "{}"], "octavo bench throughput has no --extra-body"),
        (["startup", "--ssl-keyfile", "x"], "--ssl-keyfile is a flag of octavo serve, not of octavo bench startup."),
        (["startup", "--num-iters-cold", "3"], "octavo bench startup has no --num-iters-cold: use --num-iters N."),
        (["startup", "--block-size", "0"], "--block-size is 0; it must be an integer of at least 1."),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(capsys, *argv).startswith(message)


def test_a_batch_that_does_not_fit_is_a_mistake(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(capsys, "latency", str(model), *ENGINE, "--batch-size", "65", "--input-len", "4")
    assert "but 64 run at once. Raise --max-num-seqs." in message


def test_a_server_that_is_not_there_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    argv = ["bench", "serve", "--port", str(port), "--ready-check-timeout-sec", "0", "--num-prompts", "1"]
    assert main(argv) == 1
    assert capsys.readouterr().err == (
        f"octavo: error: http://127.0.0.1:{port} cannot be used: http://127.0.0.1:{port} refuses connections.\n"
    )


def test_infinite_rates_are_numbers_here() -> None:
    from octavo.bench.options import DatasetOptions, LoadOptions
    from octavo.cli.bench_flags import options_from
    from octavo.cli.bench_serve import add_flags
    from octavo.cli.main import command_parser

    parser = command_parser("bench serve")
    add_flags(parser)
    args = parser.parse(["--request-rate", "inf", "--burstiness=inf", "--trace-speedup", "inf", "--no-ignore-eos"])
    load = options_from(LoadOptions, args)
    assert load.request_rate == load.burstiness == float("inf") == options_from(DatasetOptions, args).trace_speedup


def test_options_become_the_flags_of_serve() -> None:
    given = {
        "model": "m",
        "max_model_len": 64,
        "enable_prefix_caching": False,
        "async_scheduling": True,
        "api_key": ("a", "b"),
        "kv_cache_memory_bytes": 3 * 2**20,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
        "seed": -1,
    }
    make_config(given)
    assert serve_flags(given) == [
        "--model=m",
        "--max-model-len=64",
        "--no-enable-prefix-caching",
        "--async-scheduling",
        "--api-key=a",
        "--api-key=b",
        "--kv-cache-memory-bytes=3MiB",
        '--rope-scaling={"rope_type": "yarn", "factor": 2.0}',
        "--seed=-1",
    ]
