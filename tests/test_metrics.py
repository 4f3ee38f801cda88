"""Names that dashboards rely on, numbers that follow from one timeline per request, text that parses."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from octavo.metrics import Metrics, RequestTimeline
from octavo.request import FinishReason, SamplingParams

# Every series of vLLM's own Grafana dashboards, and what the Kubernetes inference gateway reads.
DASHBOARD_SAMPLES = {
    *(
        f"vllm:{name}_{suffix}"
        for name in (
            "e2e_request_latency_seconds",
            "inter_token_latency_seconds",
            "request_time_per_output_token_seconds",
            "time_to_first_token_seconds",
            "request_prompt_tokens",
            "request_generation_tokens",
            "request_queue_time_seconds",
            "request_prefill_time_seconds",
            "request_decode_time_seconds",
            "request_inference_time_seconds",
            "request_max_num_generation_tokens",
            "request_params_n",
            "request_params_max_tokens",
            "iteration_tokens_total",
        )
        for suffix in ("bucket", "sum", "count")
    ),
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:cache_config_info",
}
_TOKEN_EDGES = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
_PHASE_EDGES = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
VLLM_EDGES = {
    "vllm:time_to_first_token_seconds": (
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    ),
    "vllm:inter_token_latency_seconds": _TOKEN_EDGES,
    "vllm:request_time_per_output_token_seconds": _TOKEN_EDGES,
    "vllm:e2e_request_latency_seconds": _PHASE_EDGES,
    "vllm:request_queue_time_seconds": _PHASE_EDGES,
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "vllm:request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000",
    "vllm:request_params_n": "1 2 5 10 20",
}
FINER_TOKEN_EDGES = {0.001, 0.002, 0.003, 0.005, 0.0075}
ENGINE = SimpleNamespace(model="folder/model", served_model_names=("chat",), block_size=16, num_blocks=400)


def request(request_id="r1", *, num_prompt_tokens=5, arrival_s=0.0, **sampling) -> SimpleNamespace:
    return SimpleNamespace(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_prompt_tokens)),
        sampling=SamplingParams(**{"max_tokens": 100} | sampling),
        arrival_s=arrival_s,
    )


def step(num_tokens=1, **stats) -> SimpleNamespace:
    counts = {
        "num_running": 0,
        "num_waiting": 0,
        "kv_usage": 0.0,
        "num_preemptions": 0,
        "prefix_query_tokens": 0,
        "prefix_hit_tokens": 0,
        "padding_tokens": 0,
    }
    return SimpleNamespace(num_tokens=num_tokens, stats=SimpleNamespace(**counts | stats))


def scrape(metrics: Metrics) -> dict[str, dict[tuple, float]]:
    """Sample name -> label values other than model and engine -> value."""
    samples: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            key = tuple(sorted(labels.items()))
            assert key not in samples.setdefault(sample.name, {}), f"{sample.name} {key} twice"
            samples[sample.name][key] = sample.value
    return samples


def value(metrics: Metrics, name: str) -> float:
    return scrape(metrics)[f"vllm:{name}"][()]


def start(metrics: Metrics, arrival_s: float, admitted_s: float, **options) -> RequestTimeline:
    timeline = metrics.request_arrived(request(**options))
    timeline.arrival_s, timeline.admitted_s = arrival_s, admitted_s
    return timeline


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.engine_ready(ENGINE)
    return metrics


def test_every_series_of_the_dashboards_is_there_from_the_start(metrics):
    assert scrape(metrics).keys() >= DASHBOARD_SAMPLES


def test_all_but_the_process_series_carry_model_and_engine(metrics):
    metrics.admission_rejected("queue_full")
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            if sample.name.startswith("octavo:process"):
                assert set(sample.labels) == {"process"}
            else:
                assert sample.labels["engine"] == "0"
                assert sample.labels.get("model_name") == ("chat" if sample.name != "vllm:cache_config_info" else None)


def test_types_are_what_vllm_declares(metrics):
    types = {family.name: family.type for family in text_string_to_metric_families(metrics.render().decode())}
    assert types["vllm:iteration_tokens_total"] == "histogram"
    assert types["vllm:num_requests_running"] == "gauge"
    assert types["vllm:prompt_tokens"] == "counter"
    assert not [name for name, type in types.items() if type == "unknown"]


@pytest.mark.parametrize("name", VLLM_EDGES)
def test_bucket_edges_include_those_of_vllm(metrics, name):
    edges = {float(dict(labels)["le"]) for labels in scrape(metrics)[f"{name}_bucket"]}
    assert edges >= {float(edge) for edge in VLLM_EDGES[name].split()} | {float("inf")}
    if "token_seconds" in name or "inter_token" in name:
        assert edges >= FINER_TOKEN_EDGES


def test_the_latencies_of_a_request_follow_from_its_timestamps(metrics):
    timeline = start(metrics, arrival_s=100.0, admitted_s=100.25, num_prompt_tokens=7)
    timeline.scheduled(101.0)
    timeline.scheduled(101.5)  # another choice: the first counts
    timeline.num_cached_tokens = 3
    timeline.num_preemptions = 2
    timeline.tokens(103.0, 1)
    timeline.tokens(103.5, 1)
    timeline.tokens(104.5, 1)
    timeline.finished(104.75, FinishReason.STOP)
    samples = scrape(metrics)
    for name, expected in {
        "time_to_first_token_seconds": 3.0,  # MET-01: from arrival, the queue included
        "request_queue_time_seconds": 0.75,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 1.5,
        "request_inference_time_seconds": 3.5,
        "e2e_request_latency_seconds": 4.75,
        "request_time_per_output_token_seconds": 0.75,
        "request_prompt_tokens": 7,
        "request_generation_tokens": 3,
        "request_max_num_generation_tokens": 3,
        "request_params_n": 1,
        "request_params_max_tokens": 100,
        "request_num_preemptions": 2,
    }.items():
        assert samples[f"vllm:{name}_sum"][()] == pytest.approx(expected), name
        assert samples[f"vllm:{name}_count"][()] == 1, name
    assert samples["vllm:inter_token_latency_seconds_sum"][()] == pytest.approx(1.5)
    assert samples["vllm:inter_token_latency_seconds_count"][()] == 2
    assert samples["vllm:prompt_tokens_total"][()] == 7
    assert samples["vllm:prompt_tokens_cached_total"][()] == 3
    assert samples["vllm:generation_tokens_total"][()] == 3
    assert samples["vllm:request_success_total"] == {
        (("finished_reason", reason),): float(reason == "stop") for reason in ("stop", "length", "abort", "error")
    }


def test_an_observation_lands_in_the_first_bucket_that_is_not_below_it(metrics):
    for seconds in (0.0, 0.3, 0.30001, 1e9):
        timeline = start(metrics, arrival_s=0.0, admitted_s=0.0)
        timeline.finished(seconds, FinishReason.ABORT)
    buckets = {
        dict(labels)["le"]: count
        for labels, count in scrape(metrics)["vllm:e2e_request_latency_seconds_bucket"].items()
    }
    assert buckets["0.001"] == buckets["0.2"] == 1
    assert buckets["0.3"] == 2
    assert buckets["0.5"] == buckets["7680.0"] == 3
    assert buckets["+Inf"] == 4


def test_tokens_that_come_together_share_their_gap(metrics):
    timeline = start(metrics, arrival_s=0.0, admitted_s=0.0)
    timeline.scheduled(0.0)
    timeline.tokens(1.0, 1)
    timeline.tokens(2.0, 4)
    timeline.finished(2.0, FinishReason.LENGTH)
    samples = scrape(metrics)
    assert samples["vllm:inter_token_latency_seconds_sum"][()] == 1.0
    assert samples["vllm:inter_token_latency_seconds_count"][()] == 4
    assert samples["vllm:request_time_per_output_token_seconds_sum"][()] == 0.25


def test_choices_are_timed_apart_and_the_request_once(metrics):
    timeline = start(metrics, arrival_s=0.0, admitted_s=0.0, n=3)
    timeline.scheduled(1.0)
    timeline.tokens(2.0, 1, 0)
    timeline.tokens(2.0, 1, 1)
    timeline.tokens(3.0, 1, 1)
    timeline.tokens(5.0, 1, 0)
    timeline.finished(6.0, FinishReason.STOP)
    samples = scrape(metrics)
    assert samples["vllm:time_to_first_token_seconds_count"][()] == 1
    assert samples["vllm:request_success_total"][(("finished_reason", "stop"),)] == 1
    assert samples["vllm:prompt_tokens_total"][()] == 5
    assert samples["vllm:request_params_n_sum"][()] == 3
    assert samples["vllm:request_generation_tokens_sum"][()] == samples["vllm:generation_tokens_total"][()] == 4
    assert samples["vllm:request_generation_tokens_count"][()] == 3
    assert samples["vllm:request_max_num_generation_tokens_sum"][()] == 2
    assert samples["vllm:inter_token_latency_seconds_sum"][()] == 4.0
    assert samples["vllm:request_decode_time_seconds_sum"][()] == 3.0


def test_a_request_that_never_ran_has_an_end_and_no_phases(metrics):
    timeline = start(metrics, arrival_s=0.0, admitted_s=0.0)
    timeline.finished(2.0, FinishReason.ABORT)
    samples = scrape(metrics)
    assert samples["vllm:e2e_request_latency_seconds_sum"][()] == 2.0
    for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert samples[f"vllm:{name}_seconds_count"][()] == 0, name
    assert samples["vllm:prompt_tokens_total"][()] == 0


def test_a_prompt_that_was_only_scored_has_a_prefill_and_no_first_token(metrics):
    timeline = start(metrics, arrival_s=0.0, admitted_s=0.0, max_tokens=0)
    timeline.scheduled(1.0)
    timeline.finished(3.0, FinishReason.LENGTH)
    samples = scrape(metrics)
    assert samples["vllm:request_prefill_time_seconds_sum"][()] == 2.0
    assert samples["vllm:request_inference_time_seconds_sum"][()] == 2.0
    assert samples["vllm:time_to_first_token_seconds_count"][()] == 0
    assert samples["vllm:prompt_tokens_total"][()] == 5


def test_finishing_twice_counts_once(metrics):
    timeline = start(metrics, arrival_s=0.0, admitted_s=0.0)
    timeline.finished(1.0, FinishReason.ABORT)
    timeline.finished(9.0, FinishReason.ERROR)
    success = scrape(metrics)["vllm:request_success_total"]
    assert success[(("finished_reason", "abort"),)] == 1 and success[(("finished_reason", "error"),)] == 0


def test_arrival_is_monotonic_time_and_an_absent_one_means_now(metrics):
    before = time.monotonic()
    timeline = metrics.request_arrived(request(arrival_s=0.0))
    assert before <= timeline.arrival_s == timeline.admitted_s <= time.monotonic()
    timeline = metrics.request_arrived(request("r2", arrival_s=before - 5))
    assert timeline.arrival_s == before - 5
    assert timeline.created_s == pytest.approx(time.time() - 5, abs=1)


def test_a_timeline_is_found_live_then_for_as_many_finished_requests_as_are_kept():
    metrics = Metrics(requests_kept=2)
    timelines = [start(metrics, 10.0, 10.5, request_id=f"r{i}", num_prompt_tokens=4) for i in range(3)]
    assert metrics.find("r0")["state"] == "queued"
    timelines[0].scheduled(11.0)
    assert metrics.find("r0")["state"] == "running"
    timelines[0].tokens(12.0, 1)
    timelines[0].tokens(12.5, 1)
    timelines[0].finished(13.0, FinishReason.LENGTH)
    found = metrics.find("r0")
    assert found.pop("created") == pytest.approx(time.time(), abs=5)
    assert found == {
        "id": "r0",
        "state": "finished",
        "finish_reason": "length",
        "num_prompt_tokens": 4,
        "num_cached_tokens": 0,
        "num_output_tokens": 2,
        "num_preemptions": 0,
        "admission_s": 0.5,
        "queue_s": 0.5,
        "prefill_s": 1.0,
        "time_to_first_token_s": 2.0,
        "decode_s": 0.5,
        "e2e_s": 3.0,
        "choices": [{"index": 0, "num_output_tokens": 2, "time_per_output_token_s": 0.5, "longest_gap_s": 0.5}],
    }
    for timeline in timelines[1:]:
        timeline.finished(14.0, FinishReason.ABORT)
    assert metrics.find("r0") is None
    assert metrics.find("r1")["finish_reason"] == metrics.find("r2")["finish_reason"] == "abort"
    assert metrics.find("nobody") is None


def test_an_id_used_again_shows_the_newer_request():
    metrics = Metrics(requests_kept=2)
    start(metrics, 0.0, 0.0, num_prompt_tokens=3).finished(1.0, FinishReason.STOP)
    second = start(metrics, 5.0, 5.0, num_prompt_tokens=9)
    assert metrics.find("r1")["num_prompt_tokens"] == 9
    second.finished(6.0, FinishReason.STOP)
    assert metrics.find("r1")["num_prompt_tokens"] == 9


def test_keeping_no_requests_keeps_none():
    metrics = Metrics(requests_kept=0)
    start(metrics, 0.0, 0.0).finished(1.0, FinishReason.STOP)
    assert metrics.find("r1") is None


def test_gauges_show_the_last_step_and_counters_go_on_over_a_restart_of_the_engine(metrics):
    metrics.engine_step(step(num_running=3, num_waiting=2, kv_usage=0.25, num_preemptions=1, prefix_query_tokens=50))
    metrics.engine_step(
        step(num_running=1, kv_usage=0.5, num_preemptions=4, prefix_query_tokens=80, prefix_hit_tokens=32)
    )
    assert [value(metrics, f"num_requests_{name}") for name in ("running", "waiting")] == [1, 0]
    assert value(metrics, "kv_cache_usage_perc") == 0.5
    assert value(metrics, "num_preemptions_total") == 4
    metrics.engine_ready(ENGINE)
    assert value(metrics, "num_requests_running") == 0
    metrics.engine_step(step(num_preemptions=2, prefix_query_tokens=100, prefix_hit_tokens=1))
    assert value(metrics, "num_preemptions_total") == 6
    assert value(metrics, "prefix_cache_queries_total") == 180
    assert value(metrics, "prefix_cache_hits_total") == 33


def test_step_sizes_are_counted_and_reports_without_a_step_are_not(metrics):
    for num_tokens in (1, 8, 9, 0, 2048):
        metrics.engine_step(step(num_tokens))
    samples = scrape(metrics)
    assert samples["vllm:iteration_tokens_total_count"][()] == 4
    assert samples["vllm:iteration_tokens_total_sum"][()] == 2066
    buckets = {dict(labels)["le"]: count for labels, count in samples["vllm:iteration_tokens_total_bucket"].items()}
    assert (buckets["1.0"], buckets["8.0"], buckets["16.0"], buckets["2048.0"]) == (1, 2, 3, 4)


def test_the_cache_layout_is_shown_once_it_is_known():
    metrics = Metrics()
    assert "vllm:cache_config_info" not in scrape(metrics)
    metrics.engine_ready(ENGINE)
    assert scrape(metrics)["vllm:cache_config_info"] == {(("block_size", "16"), ("num_gpu_blocks", "400")): 1.0}


def test_a_model_without_a_served_name_goes_by_its_own():
    metrics = Metrics()
    metrics.engine_ready(SimpleNamespace(model='odd "name"\n', served_model_names=(), block_size=1, num_blocks=1))
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    assert families["vllm:num_requests_running"].samples[0].labels["model_name"] == 'odd "name"\n'


def test_rejections_are_counted_by_reason(metrics):
    for reason in ("queue_full", "queue_full", "draining"):
        metrics.admission_rejected(reason)
    assert scrape(metrics)["vllm:admission_rejections_total"] == {
        (("reason", "queue_full"),): 2.0,
        (("reason", "draining"),): 1.0,
    }


def test_memory_and_cpu_time_of_watched_processes_while_they_live(metrics):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        metrics.watch_process("engine", child.pid)
        samples = scrape(metrics)
        memory = {
            dict(labels)["process"]: size for labels, size in samples["octavo:process_resident_memory_bytes"].items()
        }
        assert memory["server"] > 10e6 and memory["engine"] > 1e6
        cpu = {
            dict(labels)["process"]: seconds for labels, seconds in samples["octavo:process_cpu_seconds_total"].items()
        }
        assert cpu["server"] == pytest.approx(sum(os.times()[:2]), abs=1)
        assert 0 <= cpu["engine"] < 10
        child.communicate(b"\n")
    assert {dict(labels)["process"] for labels in scrape(metrics)["octavo:process_cpu_seconds_total"]} == {"server"}


def test_two_servers_in_a_process_share_nothing(metrics):
    start(metrics, 0.0, 0.0).finished(1.0, FinishReason.STOP)
    other = Metrics()
    assert scrape(other)["vllm:e2e_request_latency_seconds_count"][()] == 0
    assert not [name for name in REGISTRY._names_to_collectors if name.startswith(("vllm:", "octavo:"))]


def test_importing_metrics_does_not_import_an_http_server():
    code = (
        "import octavo.metrics, sys; assert 'prometheus_client' not in sys.modules; octavo.metrics.Metrics().render()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_request_without_max_tokens_has_no_such_parameter(metrics):
    start(metrics, 0.0, 0.0, max_tokens=None).finished(1.0, FinishReason.STOP)
    assert value(metrics, "request_params_max_tokens_count") == 0
