"""What the server counts and times, and the timeline of each request, as Prometheus text.

Names are vLLM's, so that its dashboards work; what vLLM has no name for starts with `octavo:`. Every latency
is derived from one `RequestTimeline` per request, whose timestamps are `time.monotonic()` seconds. Recording
costs about a microsecond: numbers are plain attributes until a scrape turns them into text.

All methods belong to one thread, the client's event loop.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

# vLLM's bucket edges, with finer ones added below: a small model decodes a token in a few milliseconds.
_TTFT_BOUNDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2, 0.25, 0.3,
    0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_BOUNDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_PHASE_BOUNDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0,
    30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_COUNT_BOUNDS = tuple(float(digit * 10**exponent) for exponent in range(6) for digit in (1, 2, 5)) + (1e6,)
_STEP_BOUNDS = (1.0, *(float(2**exponent) for exponent in range(1, 15)))
_N_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class ArrivedRequest(Protocol):
    """What `request_arrived` reads of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def arrival_s(self) -> float: ...


class ReadyEngine(Protocol):
    """What `engine_ready` reads of an engine."""

    @property
    def model(self) -> str: ...
    @property
    def served_model_names(self) -> Sequence[str]: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...


class EngineCounts(Protocol):
    """Gauges after a step, and counters since the engine started."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def num_preemptions(self) -> int: ...
    @property
    def prefix_query_tokens(self) -> int: ...
    @property
    def prefix_hit_tokens(self) -> int: ...
    @property
    def padding_tokens(self) -> int: ...


class EngineStep(Protocol):
    """What `engine_step` reads of a step's report."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def stats(self) -> EngineCounts: ...


@dataclass(eq=False, slots=True)
class _ChoiceTimes:
    """Token times of one choice, in bounded memory."""

    num_tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    longest_gap_s: float = 0.0

    @property
    def time_per_token_s(self) -> float | None:
        """Mean time between its tokens; None below two tokens."""
        return (self.last_s - self.first_s) / (self.num_tokens - 1) if self.num_tokens > 1 else None


@dataclass(eq=False, slots=True)
class RequestTimeline:
    """When things happened to one request. Each timestamp is taken once; None has not happened.

    arrival_s -> admitted_s (read, checked, tokenized) -> scheduled_s (first step planned)
    -> first_token_s (of any choice) ... last_token_s -> finished_s (of the last choice)
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int | None
    created_s: float  # Unix time of the arrival
    arrival_s: float
    admitted_s: float
    choices: list[_ChoiceTimes]
    _metrics: Metrics = field(repr=False)
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0

    def scheduled(self, now_s: float) -> None:
        """A step was planned for a choice of the request; only the first counts."""
        if self.scheduled_s is None:
            self.scheduled_s = now_s
            self._metrics.queue_time.observe(max(0.0, now_s - self.admitted_s))

    def tokens(self, now_s: float, count: int, choice: int = 0) -> None:
        """A choice received `count` output tokens at once."""
        metrics = self._metrics
        metrics.generation_tokens.value += count
        times = self.choices[choice]
        if times.num_tokens == 0:
            times.first_s = now_s
            if self.first_token_s is None:
                self.first_token_s = now_s
                metrics.time_to_first_token.observe(now_s - self.arrival_s)
                self.prompt_done(now_s)
        else:
            gap_s = now_s - times.last_s
            times.longest_gap_s = max(times.longest_gap_s, gap_s)
            # Tokens that came together share the time since the ones before, so the mean stays that of a token.
            metrics.inter_token_latency.observe(gap_s / count, count)
        times.num_tokens += count
        times.last_s = self.last_token_s = now_s

    def finished(self, now_s: float, reason: str) -> None:
        """The last choice ended, with a FinishReason value. A second call changes nothing."""
        if self.finished_s is not None:
            return
        self.finished_s = now_s
        self.finish_reason = reason
        self._metrics.request_finished(self)

    def prompt_done(self, now_s: float) -> None:
        self._metrics.prompt_tokens.value += self.num_prompt_tokens
        if self.scheduled_s is not None:
            self._metrics.prefill_time.observe(now_s - self.scheduled_s)

    @property
    def num_output_tokens(self) -> int:
        return sum(times.num_tokens for times in self.choices)

    def describe(self) -> dict[str, object]:
        """The timeline as JSON values; durations in seconds, None where not known (yet).

        time_to_first_token_s = admission_s + queue_s + prefill_s.
        """
        if self.finished_s is not None:
            state = "finished"
        else:
            state = "queued" if self.scheduled_s is None else "running"
        return {
            "id": self.request_id,
            "state": state,
            "created": self.created_s,
            "finish_reason": self.finish_reason,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "num_preemptions": self.num_preemptions,
            "admission_s": self.admitted_s - self.arrival_s,
            "queue_s": _between(self.admitted_s, self.scheduled_s),
            "prefill_s": _between(self.scheduled_s, self.first_token_s),
            "time_to_first_token_s": _between(self.arrival_s, self.first_token_s),
            "decode_s": _between(self.first_token_s, self.last_token_s),
            "e2e_s": _between(self.arrival_s, self.finished_s),
            "choices": [
                {
                    "index": index,
                    "num_output_tokens": times.num_tokens,
                    "time_per_output_token_s": times.time_per_token_s,
                    "longest_gap_s": times.longest_gap_s if times.num_tokens > 1 else None,
                }
                for index, times in enumerate(self.choices)
            ],
        }


def _between(start_s: float | None, end_s: float | None) -> float | None:
    return None if start_s is None or end_s is None else end_s - start_s


class Metrics:
    """All series of a server and the timelines of its requests, live and the last `requests_kept` finished."""

    def __init__(self, *, requests_kept: int = 256) -> None:
        self._requests_kept = requests_kept
        self._live: dict[str, RequestTimeline] = {}
        self._finished: OrderedDict[str, RequestTimeline] = OrderedDict()
        self._model_name = ""
        self._cache_config: tuple[int, int] | None = None  # block size, number of blocks
        self._processes = {"server": os.getpid()}
        self._counted: dict[_Counter, float] = {}  # what the present engine has reported since it started
        self._registry: CollectorRegistry | None = None

        self.num_running = _Gauge("vllm:num_requests_running", "Requests that hold KV blocks.")
        self.num_waiting = _Gauge("vllm:num_requests_waiting", "Requests that wait for their first or next step.")
        self.kv_usage = _Gauge("vllm:kv_cache_usage_perc", "Share of KV blocks that live requests hold; 1 is all.")
        self.preemptions = _Counter("vllm:num_preemptions", "Requests that lost their KV blocks to others.")
        self.prefix_queries = _Counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_hits = _Counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.padding_tokens = _Counter(
            "octavo:padding_tokens", "Rows computed for requests that had ended (static batching)."
        )
        self.prompt_tokens = _Counter("vllm:prompt_tokens", "Prompt tokens of requests whose prefill is done.")
        self.cached_prompt_tokens = _Counter(
            "vllm:prompt_tokens_cached", "Prompt tokens of finished requests that the prefix cache spared."
        )
        self.generation_tokens = _Counter("vllm:generation_tokens", "Output tokens.")
        self.request_success = _Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            label="finished_reason",
            label_values=tuple(reason.value for reason in FinishReason),
        )
        self.rejections = _Counter(
            "vllm:admission_rejections", "Requests that were not taken, by reason.", label="reason"
        )

        self.time_to_first_token = _Histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first output token.", _TTFT_BOUNDS
        )
        self.inter_token_latency = _Histogram(
            "vllm:inter_token_latency_seconds", "Time between output tokens of a choice.", _TOKEN_BOUNDS
        )
        self.time_per_output_token = _Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the output tokens of a choice, per choice.",
            _TOKEN_BOUNDS,
        )
        self.e2e_latency = _Histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to the end of the last choice.", _PHASE_BOUNDS
        )
        self.queue_time = _Histogram(
            "vllm:request_queue_time_seconds", "Admission to first scheduled step.", _PHASE_BOUNDS
        )
        self.prefill_time = _Histogram(
            "vllm:request_prefill_time_seconds", "First scheduled step to first token.", _PHASE_BOUNDS
        )
        self.decode_time = _Histogram("vllm:request_decode_time_seconds", "First to last token.", _PHASE_BOUNDS)
        self.inference_time = _Histogram(
            "vllm:request_inference_time_seconds", "First scheduled step to last token.", _PHASE_BOUNDS
        )
        self.request_prompt_tokens = _Histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished request.", _COUNT_BOUNDS
        )
        self.request_generation_tokens = _Histogram(
            "vllm:request_generation_tokens", "Output tokens of a choice of a finished request.", _COUNT_BOUNDS
        )
        self.request_max_generation_tokens = _Histogram(
            "vllm:request_max_num_generation_tokens", "Output tokens of a request's longest choice.", _COUNT_BOUNDS
        )
        self.request_params_n = _Histogram("vllm:request_params_n", "n of finished requests.", _N_BOUNDS)
        self.request_params_max_tokens = _Histogram(
            "vllm:request_params_max_tokens", "max_tokens of finished requests that gave one.", _COUNT_BOUNDS
        )
        self.request_num_preemptions = _Histogram(
            "vllm:request_num_preemptions", "Preemptions of a finished request.", (0.0, *_N_BOUNDS)
        )
        self.iteration_tokens = _Histogram("vllm:iteration_tokens_total", "Tokens computed in a step.", _STEP_BOUNDS)

    # -- requests --------------------------------------------------------------------------------------
    def request_arrived(self, request: ArrivedRequest) -> RequestTimeline:
        """Open the timeline of a request that has just been admitted. Its `arrival_s` 0 means now."""
        now_s = time.monotonic()
        arrival_s = min(request.arrival_s, now_s) if request.arrival_s > 0 else now_s
        timeline = self._live[request.request_id] = RequestTimeline(
            request_id=request.request_id,
            num_prompt_tokens=len(request.prompt_token_ids),
            max_tokens=request.sampling.max_tokens,
            created_s=time.time() - (now_s - arrival_s),
            arrival_s=arrival_s,
            admitted_s=now_s,
            choices=[_ChoiceTimes() for _ in range(request.sampling.n)],
            _metrics=self,
        )
        return timeline

    def admission_rejected(self, reason: str) -> None:
        self.rejections.increase(reason)

    def request_finished(self, timeline: RequestTimeline) -> None:
        """Observe what is known once a request has ended. Called by its timeline."""
        now_s, reason = timeline.finished_s, timeline.finish_reason
        assert now_s is not None and reason is not None
        if timeline.first_token_s is None and reason in (FinishReason.STOP, FinishReason.LENGTH):
            timeline.prompt_done(now_s)  # a prompt that was only scored
            timeline.last_token_s = now_s
        self.request_success.increase(reason)
        self.e2e_latency.observe(now_s - timeline.arrival_s)
        if timeline.last_token_s is not None:
            if timeline.scheduled_s is not None:
                self.inference_time.observe(timeline.last_token_s - timeline.scheduled_s)
            if timeline.first_token_s is not None:
                self.decode_time.observe(timeline.last_token_s - timeline.first_token_s)
        for times in timeline.choices:
            self.request_generation_tokens.observe(times.num_tokens)
            if (mean_s := times.time_per_token_s) is not None:
                self.time_per_output_token.observe(mean_s)
        self.request_prompt_tokens.observe(timeline.num_prompt_tokens)
        self.request_max_generation_tokens.observe(max(times.num_tokens for times in timeline.choices))
        self.request_params_n.observe(len(timeline.choices))
        if timeline.max_tokens is not None:
            self.request_params_max_tokens.observe(timeline.max_tokens)
        self.request_num_preemptions.observe(timeline.num_preemptions)
        self.cached_prompt_tokens.value += timeline.num_cached_tokens

        if self._live.get(timeline.request_id) is timeline:
            del self._live[timeline.request_id]
        self._finished.pop(timeline.request_id, None)
        self._finished[timeline.request_id] = timeline
        while len(self._finished) > self._requests_kept:
            self._finished.popitem(last=False)

    def find(self, request_id: str) -> dict[str, object] | None:
        """The timeline of a live or recently finished request, None when it is not known (any more)."""
        timeline = self._live.get(request_id) or self._finished.get(request_id)
        return None if timeline is None else timeline.describe()

    # -- the engine ------------------------------------------------------------------------------------
    def engine_ready(self, engine: ReadyEngine) -> None:
        """An engine has started, or started again: its own counters begin at 0, ours go on."""
        self._model_name = engine.served_model_names[0] if engine.served_model_names else engine.model
        self._cache_config = (engine.block_size, engine.num_blocks)
        self._counted.clear()
        for gauge in (self.num_running, self.num_waiting, self.kv_usage):
            gauge.value = 0.0

    def engine_step(self, step: EngineStep) -> None:
        stats = step.stats
        self.num_running.value = stats.num_running
        self.num_waiting.value = stats.num_waiting
        self.kv_usage.value = stats.kv_usage
        for counter, total in (
            (self.preemptions, stats.num_preemptions),
            (self.prefix_queries, stats.prefix_query_tokens),
            (self.prefix_hits, stats.prefix_hit_tokens),
            (self.padding_tokens, stats.padding_tokens),
        ):
            counter.value += total - self._counted.get(counter, 0)
            self._counted[counter] = total
        if step.num_tokens:
            self.iteration_tokens.observe(step.num_tokens)

    def watch_process(self, name: str, pid: int) -> None:
        """Report memory and CPU time of process `pid` as `name`, while it lives."""
        self._processes[name] = pid

    # -- output ----------------------------------------------------------------------------------------
    def render(self) -> bytes:
        """Everything in Prometheus' text format."""
        # Imported with the first scrape: it brings an HTTP server along, a tenth of a second of start-up.
        from prometheus_client import CollectorRegistry, generate_latest

        if self._registry is None:
            self._registry = CollectorRegistry()
            self._registry.register(self)
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What `prometheus_client` asks of a collector."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        labels = {"model_name": self._model_name, "engine": "0"}
        for series in vars(self).values():
            if isinstance(series, _Gauge | _Counter | _Histogram):
                yield series.family(labels)
        if self._cache_config is not None:
            info = {
                "engine": "0",
                "block_size": str(self._cache_config[0]),
                "num_gpu_blocks": str(self._cache_config[1]),
            }
            cache_config = GaugeMetricFamily("vllm:cache_config_info", "Layout of the KV cache.", labels=list(info))
            cache_config.add_metric(list(info.values()), 1)
            yield cache_config
        memory = GaugeMetricFamily("octavo:process_resident_memory_bytes", "Resident memory.", labels=["process"])
        cpu = CounterMetricFamily("octavo:process_cpu_seconds", "CPU time, user and system.", labels=["process"])
        for name, pid in self._processes.items():
            if (usage := _process_usage(pid)) is not None:
                memory.add_metric([name], usage[0])
                cpu.add_metric([name], usage[1])
        yield memory
        yield cpu


class _Gauge:
    def __init__(self, name: str, help: str) -> None:
        self._name = name
        self._help = help
        self.value = 0.0

    def family(self, labels: dict[str, str]) -> Metric:
        from prometheus_client.metrics_core import GaugeMetricFamily

        family = GaugeMetricFamily(self._name, self._help, labels=list(labels))
        family.add_metric(list(labels.values()), self.value)
        return family


class _Counter:
    """A number that only grows, or one per value of `label`: `label_values` are shown from the start."""

    def __init__(self, name: str, help: str, *, label: str | None = None, label_values: Sequence[str] = ()) -> None:
        self._name = name
        self._help = help
        self._label = label
        self._values = dict.fromkeys(label_values, 0.0)
        self.value = 0.0

    def increase(self, label_value: str) -> None:
        self._values[label_value] = self._values.get(label_value, 0.0) + 1

    def family(self, labels: dict[str, str]) -> Metric:
        from prometheus_client.metrics_core import CounterMetricFamily

        if self._label is None:
            family = CounterMetricFamily(self._name, self._help, labels=list(labels))
            family.add_metric(list(labels.values()), self.value)
            return family
        family = CounterMetricFamily(self._name, self._help, labels=[*labels, self._label])
        for label_value, value in self._values.items():
            family.add_metric([*labels.values(), label_value], value)
        return family


class _Histogram:
    """Observations by upper bound, not cumulative until they are shown."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._edges = [*map(str, bounds), "+Inf"]
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: dict[str, str]) -> Metric:
        from prometheus_client.metrics_core import HistogramMetricFamily

        buckets = list(zip(self._edges, accumulate(self._counts), strict=True))
        family = HistogramMetricFamily(self._name, self._help, labels=list(labels))
        family.add_metric(list(labels.values()), buckets, self._sum)
        return family


def _process_usage(pid: int) -> tuple[int, float] | None:
    """Resident bytes and CPU seconds of a process, None when it is gone or this system has no /proc."""
    folder = Path("/proc") / str(pid)
    try:
        num_pages = int((folder / "statm").read_text().split()[1])
        # The command's name, in brackets, may hold spaces: fields are counted from behind it.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    return num_pages * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK")
