"""`octavo bench latency` and `throughput` with a tiny model in this process."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import save_tiny_llama

from octavo.bench.html_report import write_html
from octavo.bench.latency import Phases, latency_figures, latency_sections, run_latency
from octavo.bench.offline import OfflineRun, Step, TimedLLM
from octavo.bench.options import DatasetOptions, LatencyOptions, SamplingOptions, ThroughputOptions
from octavo.bench.report import as_text
from octavo.bench.throughput import run_throughput, throughput_figures, throughput_sections
from octavo.config import Config, make_config
from octavo.errors import ConfigError
from octavo.request import SamplingParams


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = save_tiny_llama(tmp_path_factory.mktemp("tiny"))
    options = {"model": str(path), "backend": "reference", "threads": 1, "max_model_len": 128, "max_num_seqs": 8}
    return make_config({**options, "kv_cache_memory_bytes": 4 << 20})


def latency(config: Config, measure: Any = None, **options: Any) -> tuple[dict[str, Any], list[OfflineRun]]:
    given = {"input_len": 20, "output_len": 6, "batch_size": 3, "num_iters": 3, "num_iters_warmup": 1, **options}
    return run_latency(config, LatencyOptions(**given, disable_tqdm=True), measure)


def throughput(
    config: Config, *, repeats: int = 1, n: int = 1, **dataset: Any
) -> tuple[dict[str, Any], list[OfflineRun]]:
    given = {"num_prompts": 10, "input_len": 20, "output_len": 5, **dataset}
    options = ThroughputOptions(disable_tqdm=True, repeats=repeats, n=n)
    return run_throughput(config, DatasetOptions(**given), SamplingOptions(), options, lambda text: None)


def test_steps_account_for_every_token(config: Config) -> None:
    llm = TimedLLM(config)
    params = SamplingParams(max_tokens=7, ignore_eos=True)
    run = llm.run(["hello", "another prompt", "x"], [params] * 3, use_tqdm=False)
    assert run.num_output_tokens == sum(step.num_new_tokens for step in run.steps) == 21
    assert run.num_prompt_tokens == len("hello") + len("another prompt") + 1
    assert [step.num_running for step in run.steps][:1] == [3]
    assert all(step.began_s <= step.ended_s for step in run.steps)
    assert run.began_s <= run.steps[0].began_s and run.steps[-1].ended_s <= run.ended_s
    assert sum(step.duration_s for step in run.steps) <= run.duration_s
    assert run.cpu_s > 0


def test_a_run_is_cut_where_every_choice_has_its_first_token() -> None:
    steps = [
        Step(10.0, 11.0, 1, 2, 1),
        Step(11.5, 12.0, 2, 2, 0),
        Step(12.25, 12.5, 2, 2, 0),
        Step(12.5, 13.0, 1, 1, 0),
    ]
    phases = Phases.of(OfflineRun(10.0, 13.0, 3.0, steps, 40, 6, 0))
    assert phases == Phases(prefill_s=2.0, num_prefill_steps=2, decode_s=0.75, num_decode_tokens=3)


def test_latency_runs_the_batch_as_often_as_asked(config: Config) -> None:
    result, runs = latency(config)
    assert len(runs) == len(result["latencies"]) == 3
    assert all(run.num_output_tokens == 18 for run in runs)
    assert all(run.num_cached_tokens == 0 for run in runs)  # other prompts each time
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert list(result["percentiles"]) == [10, 25, 50, 75, 90, 99]
    low, high = result["confidence_intervals"]["avg_latency"]
    assert low <= result["avg_latency"] <= high
    assert result["prefill_tokens_per_second"] == pytest.approx(60 / result["prefill_s"])
    assert result["decode_tokens_per_second"] > 0
    assert result["decode_bandwidth_share"] is None
    json.dumps(result, allow_nan=False)


@dataclass(frozen=True)
class Measured:
    read_gb_s: float = 0.5
    f32_gflop_s: float = 2.0
    bf16_gflop_s: float = 3.0
    int8_gop_s: float = 4.0


def test_latency_is_compared_with_the_measured_roofline(config: Config) -> None:
    result, _ = latency(config, Measured)
    assert result["decode_bandwidth_share"] == pytest.approx(result["decode_gb_s"] / 0.5)
    assert result["prefill_bandwidth_share"] == pytest.approx(result["prefill_gb_s"] / 0.5)
    for phase in ("prefill", "decode"):
        assert result[f"{phase}_peak_gflop_s"] == pytest.approx(2.0)
        assert result[f"{phase}_flop_share"] == pytest.approx(result[f"{phase}_gflop_s"] / 2.0)
    text = as_text(latency_sections(result))
    assert "Share of the measured bandwidth (%)" in text and "Share of the measured peak (%)" in text


def test_bytes_a_second_are_those_of_the_decode_steps(config: Config) -> None:
    result, runs = latency(config)
    decode_s = sum(Phases.of(run).decode_s for run in runs) / len(runs)
    weights = 2 * (32 * 32 * 3 + 3 * 48 * 32) * 4 + 259 * 32 * 4 + 3 * 32 * 4 + 5 * 32 * 4
    kv = [3 * (20 + k) * 2 * 2 * 2 * 8 * 4 for k in range(1, 6)]
    assert result["step_bytes"] == weights + kv[0]
    assert result["decode_gb_s"] == pytest.approx((5 * weights + sum(kv)) / decode_s / 1e9)


@pytest.mark.parametrize(
    ("quantization", "act_dtype", "peaks"),
    [
        ("none", "auto", (2.0, 2.0)),
        ("int8", "int8", (2.0, 4.0)),
        ("int4", "int8", (2.0, 4.0)),
        ("int4", "bf16", (2.0, 2.0)),
    ],
)
def test_every_weight_format_of_the_native_backend_is_compared(
    config: Config, quantization: str, act_dtype: str, peaks: tuple[float, float]
) -> None:
    changes = {"backend": "native", "quantization": quantization, "act_dtype": act_dtype, "repack_cache": False}
    result, _ = latency(make_config(changes, base=config), Measured, num_iters=1)
    plain = 2 * (32 * 32 * 3 + 3 * 48 * 32) + 259 * 32
    value_bytes = result["step_bytes"] / plain
    assert 4 < value_bytes < 6 if quantization == "none" else value_bytes < 3
    for phase in ("prefill", "decode"):
        assert all(result[f"{phase}_{name}"] > 0 for name in ("gb_s", "gflop_s", "bandwidth_share", "flop_share"))
        assert peaks[0] <= result[f"{phase}_peak_gflop_s"] <= peaks[1]
        assert (result[f"{phase}_peak_gflop_s"] > 3) == (act_dtype == "int8")


def test_answers_of_one_token_have_no_decode(config: Config) -> None:
    result, _ = latency(config, Measured, output_len=1, num_iters=1)
    assert result["decode_tokens_per_second"] is None and result["decode_gb_s"] is None
    assert result["confidence_intervals"] == {}
    assert "Decode" in as_text(latency_sections(result))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 9}, "--batch-size 9 with --n 1 makes 9 choices, but 8 run at once. Raise --max-num-seqs."),
        ({"batch_size": 3, "n": 3}, "--batch-size 3 with --n 3 makes 9 choices"),
        ({"input_len": 120, "output_len": 9}, "make 129 tokens; the context has 128"),
    ],
)
def test_a_batch_that_cannot_run_as_one_is_refused(config: Config, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        latency(config, **options)
    assert message in str(error.value)


def test_throughput_counts_requests_and_tokens(config: Config) -> None:
    result, (run,) = throughput(config)
    assert (result["num_requests"], result["num_prompt_tokens"], result["num_output_tokens"]) == (10, 200, 50)
    assert result["total_num_tokens"] == 250
    assert result["elapsed_time"] == run.duration_s
    assert result["requests_per_second"] == pytest.approx(10 / run.duration_s)
    assert result["tokens_per_second"] == pytest.approx(250 / run.duration_s)
    assert result["peak_rss_bytes"] > 50 * 2**20
    json.dumps(result, allow_nan=False)


def test_throughput_repeats_with_other_prompts(config: Config) -> None:
    result, runs = throughput(config, repeats=2, n=2)
    assert len(runs) == 2 and result["num_output_tokens"] == 200
    assert result["prefix_hit_rate"] == 0.0
    low, high = result["confidence_intervals"]["tokens_per_second"]
    assert low <= result["tokens_per_second"] <= high


def test_shared_prefixes_show_as_hits(config: Config) -> None:
    result, _ = throughput(
        config, dataset_name="prefix_repetition", num_prompts=20, prefix_repetition_prefix_len=64,
        prefix_repetition_num_prefixes=1, input_len=8,
    )  # fmt: skip
    assert result["num_prompt_tokens"] == 20 * 72
    assert 0.2 < result["prefix_hit_rate"] < 64 / 72


def test_a_trace_is_cut_to_the_models_context(config: Config, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,30,4\n2,500,300\n")
    result, _ = throughput(config, dataset_name="trace", dataset_path=str(path), input_len=None, output_len=None)
    assert (result["num_truncated"], result["num_prompt_tokens"], result["num_output_tokens"]) == (1, 30 + 64, 4 + 64)


def test_reports_have_their_plots(config: Config, tmp_path: Path) -> None:
    result, runs = latency(config)
    page = tmp_path / "latency.html"
    write_html(str(page), "Latency", {"model": "<tiny>"}, latency_sections(result), latency_figures(runs))
    text = page.read_text()
    assert text.count("<svg") == 1 and "one decode step" in text and "&lt;tiny&gt;" in text
    result, runs = throughput(config)
    write_html(str(page), "Throughput", {}, throughput_sections(result), throughput_figures(runs))
    assert "output tokens so far" in page.read_text()
