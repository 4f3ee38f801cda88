"""The numbers of a result, from requests whose times are known exactly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from octavo.bench.client import Record
from octavo.bench.load import LoadRun
from octavo.bench.options import ResultOptions
from octavo.bench.process_usage import Usage
from octavo.bench.summary import Selection, combine, output_tokens, summarize, tokens_by_second
from octavo.errors import ConfigError


def record(start_s: float, *times_s: float, tokens: int | None = None, error: str = "", **fields: Any) -> Record:
    return Record(
        fields.pop("prompt_len", 10),
        start_s,
        list(times_s),
        ["x"] * len(times_s),
        end_s=times_s[-1] if times_s else start_s + 1,
        output_tokens=len(times_s) if tokens is None else tokens,
        error=error,
        **fields,
    )


def run(
    *records: Record, duration_s: float = 4.0, usage: Usage | None = None, server_cpu_s: float | None = None
) -> LoadRun:
    return LoadRun(list(records), 100.0, duration_s, 0.4, 0.002, server_cpu_s, usage)


def select(**options: Any) -> Selection:
    return Selection.parse(ResultOptions(**options))


# Sent at 100.0 and 100.5; 4 tokens after 0.2 s at gaps of 0.1, 0.3, 0.1, and 2 tokens after 1.0 s at a gap of 0.5.
FIRST = record(100.0, 100.2, 100.3, 100.6, 100.7)
SECOND = record(100.5, 101.5, 102.0, prompt_len=30)


def test_throughput_counts_what_was_answered_over_the_whole_time() -> None:
    result = summarize(run(FIRST, SECOND), select(), None)
    assert (result["completed"], result["failed"]) == (2, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (40, 6)
    assert result["duration"] == 4.0
    assert result["request_throughput"] == 0.5
    assert result["output_throughput"] == 1.5
    assert result["total_token_throughput"] == 11.5
    assert result["tokens_per_chunk"] == 1.0


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("ttft", [200, 1000]),
        ("tpot", [500 / 3, 500]),  # (E2EL - TTFT) / (tokens - 1)
        ("itl", [100, 300, 100, 500]),
        ("e2el", [700, 1500]),
    ],
)
def test_latencies_follow_from_the_times(metric: str, values: Sequence[float]) -> None:
    result = summarize(run(FIRST, SECOND), select(metric_percentiles="0,50,100"), None)
    ordered = sorted(values)
    mean = sum(values) / len(values)
    middle = (ordered[(len(values) - 1) // 2] + ordered[len(values) // 2]) / 2
    deviation = (sum((value - mean) ** 2 for value in values) / len(values)) ** 0.5
    expected = {"mean": mean, "median": middle, "std": deviation, "p0": ordered[0], "p50": middle, "p100": ordered[-1]}
    assert {name: result[f"{name}_{metric}_ms"] for name in expected} == pytest.approx(expected)


def test_a_piece_of_several_tokens_is_one_gap_but_all_its_tokens_count() -> None:
    result = summarize(run(record(100.0, 100.2, 100.6, tokens=5)), select(), None)
    assert result["total_output_tokens"] == 5
    assert result["tokens_per_chunk"] == 2.5
    assert result["mean_itl_ms"] == pytest.approx(400)
    assert result["mean_tpot_ms"] == pytest.approx(100)
    assert result["max_output_tokens_per_s"] == pytest.approx(5)


def test_an_answer_of_one_token_has_no_time_per_output_token() -> None:
    result = summarize(run(record(100.0, 100.2)), select(goodput=("tpot:0",)), None)
    assert result["mean_tpot_ms"] == 0.0
    assert result["request_goodput"] == 0.25  # counted as 0, which is within any limit


def test_what_failed_is_counted_and_left_out_of_everything_else() -> None:
    failed = record(100.0, 103.0, error="status 500")
    result = summarize(run(FIRST, failed), select(), None)
    assert (result["completed"], result["failed"]) == (1, 1)
    assert result["total_output_tokens"] == 4
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["output_lens"] == [4, 0]
    assert result["errors"] == ["", "status 500"]


def test_a_run_in_which_everything_failed_has_zeros_and_no_warnings() -> None:
    result = summarize(run(record(100.0, error="no")), select(goodput=("ttft:1",)), None)
    assert result["completed"] == result["request_goodput"] == result["mean_itl_ms"] == result["p99_ttft_ms"] == 0
    assert result["tokens_per_chunk"] is None


def test_requests_in_flight_are_counted_exactly() -> None:
    later = record(102.0, 102.5)  # sent at the moment at which the second one ends
    assert summarize(run(FIRST, SECOND), select(), None)["max_concurrent_requests"] == 2
    assert summarize(run(SECOND, later), select(), None)["max_concurrent_requests"] == 1


def test_tokens_are_put_into_the_seconds_in_which_they_came() -> None:
    assert tokens_by_second([FIRST, SECOND], [4, 2]) == [4.0, 1.0, 1.0]
    assert summarize(run(FIRST, SECOND), select(), None)["max_output_tokens_per_s"] == 4.0


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        (("ttft:200",), 1),
        (("ttft:199",), 0),
        (("ttft:1000", "tpot:500", "e2el:1500"), 2),
        (("ttft:1000", "tpot:499.9"), 1),
        (("e2el:699",), 0),
    ],
)
def test_a_good_request_keeps_every_limit(goodput: tuple[str, ...], good: int) -> None:
    # Sent at 0, so that a request that is exactly at its limit is so in floating point too.
    exact = [Record(1, 0.0, [0.2, 0.3, 0.6, 0.7], ["x"] * 4, 0.7, 4), Record(1, 0.0, [1.0, 1.5], ["x"] * 2, 1.5, 2)]
    assert summarize(run(*exact), select(goodput=goodput), None)["request_goodput"] == good / 4.0


def test_without_limits_there_is_no_goodput() -> None:
    assert summarize(run(FIRST), select(), None)["request_goodput"] is None


def test_output_tokens_come_from_usage_then_the_tokenizer_then_the_pieces() -> None:
    assert output_tokens(record(0, 1, 2, tokens=7), len) == 7
    unknown = record(0, 1, 2)
    unknown.output_tokens = None
    unknown.texts = ["ab", "cde"]
    assert output_tokens(unknown, len) == 5
    assert output_tokens(unknown, None) == 2


def test_a_prompt_whose_length_the_data_set_does_not_know_has_the_servers() -> None:
    result = summarize(run(record(0, 1, prompt_len=None, prompt_tokens=12)), select(), None)
    assert (result["total_input_tokens"], result["input_lens"]) == (12, [12])


def test_prefix_hits_are_those_of_the_requests_that_tell_them() -> None:
    told = record(0, 1, prompt_tokens=40, cached_tokens=30)
    silent = record(0, 1, prompt_tokens=40)
    result = summarize(run(told, silent), select(), None)
    assert (result["prefix_cached_tokens"], result["prefix_hit_rate"]) == (30, 0.75)
    result = summarize(run(silent), select(), None)
    assert (result["prefix_cached_tokens"], result["prefix_hit_rate"]) == (None, None)


def test_costs_are_those_of_the_servers_processes_and_of_the_client() -> None:
    result = summarize(run(FIRST, SECOND, usage=Usage(2, 2**30, 2**29, 90.0), server_cpu_s=3.0), select(), None)
    assert (result["server_peak_rss_bytes"], result["server_pss_bytes"]) == (2**30, 2**29)
    assert result["server_cpu_s"] == 3.0
    assert result["server_cpu_s_per_1k_output_tokens"] == pytest.approx(500.0)
    assert result["server_cpu_s_per_1k_tokens"] == pytest.approx(3000 / 46)
    assert result["client_cpu_share"] == pytest.approx(0.1)
    assert result["client_max_send_delay_ms"] == pytest.approx(2.0)
    unknown = summarize(run(FIRST), select(), None)
    assert unknown["server_peak_rss_bytes"] is None and unknown["server_cpu_s_per_1k_tokens"] is None


def test_only_the_chosen_metrics_and_percentiles_are_there() -> None:
    result = summarize(run(FIRST), select(percentile_metrics="ttft,e2el", metric_percentiles="99.9"), None)
    found = {name for name in result if name.endswith("_ms") and not name.startswith("client")}
    kinds = ("mean", "median", "std", "p99.9")
    assert found == {f"{kind}_{metric}_ms" for metric in ("ttft", "e2el") for kind in kinds}


def test_several_runs_are_added_up_or_averaged_with_an_interval() -> None:
    results = [summarize(run(FIRST, duration_s=duration_s), select(), None) for duration_s in (1.0, 2.0, 4.0)]
    combined = combine(results)
    assert combined["completed"] == 3 and combined["duration"] == 7.0
    assert combined["output_throughput"] == pytest.approx((4 + 2 + 1) / 3)
    low, high = combined["confidence_intervals"]["output_throughput"]
    # Student: mean 7/3, sample deviation 1.5275, t(2) = 4.3027.
    assert (low, high) == pytest.approx((7 / 3 - 3.7946, 7 / 3 + 3.7946), abs=1e-3)
    assert [one["output_throughput"] for one in combined["runs"]] == [4.0, 2.0, 1.0]
    assert len(combined["ttfts"]) == 3 and "ttfts" not in combined["runs"][0]
    assert combined["request_goodput"] is None


def test_one_run_has_no_interval() -> None:
    result = summarize(run(FIRST), select(), None)
    assert combine([result]) == result


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"percentile_metrics": "ttft,itls"},
            "--percentile-metrics has 'itls'; the metrics are ttft, tpot, itl, e2el.",
        ),
        ({"metric_percentiles": "50,x"}, "--metric-percentiles has 'x'; percentiles are numbers from 0 to 100."),
        ({"metric_percentiles": "101"}, "--metric-percentiles has '101'; percentiles are numbers from 0 to 100."),
        ({"goodput": ("itl:5",)}, "--goodput has 'itl:5'; it must be METRIC:MS with one of ttft, tpot, e2el."),
        ({"goodput": ("ttft",)}, "--goodput has 'ttft'; ttft's limit must be a number of milliseconds."),
        ({"goodput": ("ttft:-1",)}, "--goodput has 'ttft:-1'; ttft's limit must be a number of milliseconds."),
    ],
)
def test_words_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        select(**options)
    assert str(error.value) == message
