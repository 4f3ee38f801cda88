"""From what every request did to the numbers of a result, under the names that `vllm bench serve` gives them.

Everything is computed from the arrival times of the pieces. With L output tokens, of which the last came at E:
TTFT is the time to the first piece, ITL every gap between pieces, E2EL the time to E, TPOT (E2EL - TTFT) / (L - 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.bench.client import Record
from octavo.bench.load import LoadRun
from octavo.bench.options import GOODPUT_METRICS, METRICS, ResultOptions
from octavo.bench.statistics import confidence_interval, mean, median, percentile, std
from octavo.errors import ConfigError

CountTokens = Callable[[str], int]

# Of several runs these are added up; of everything else the mean is taken.
_SUMMED = (
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "prefix_cached_tokens"),
    *("elapsed_time", "num_requests", "num_truncated", "total_num_tokens", "num_prompt_tokens", "num_output_tokens"),
)
_LARGEST = ("server_peak_rss_bytes", "peak_rss_bytes")  # high-water marks of a process's life
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which metrics are reported, parsed from the options."""

    metrics: tuple[str, ...]
    percentiles: tuple[float, ...]
    goodput_ms: Mapping[str, float]

    @classmethod
    def parse(cls, options: ResultOptions) -> Selection:
        """Raises ConfigError naming the word that is wrong."""
        metrics = tuple(word.strip() for word in options.percentile_metrics.split(","))
        for word in metrics:
            if word not in METRICS:
                raise ConfigError(f"--percentile-metrics has {word!r}; the metrics are {', '.join(METRICS)}.")
        percentiles = []
        for word in options.metric_percentiles.split(","):
            try:
                percentiles.append(float(word))
            except ValueError:
                percentiles.append(math.nan)
            if not 0 <= percentiles[-1] <= 100:
                raise ConfigError(f"--metric-percentiles has {word!r}; percentiles are numbers from 0 to 100.")
        return cls(metrics, tuple(percentiles), _goodput(options.goodput))


def _goodput(pairs: Sequence[str]) -> dict[str, float]:
    limits = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        if name not in GOODPUT_METRICS:
            raise ConfigError(f"--goodput has {pair!r}; it must be METRIC:MS with one of {', '.join(GOODPUT_METRICS)}.")
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = math.nan
        if not limits[name] >= 0:
            raise ConfigError(f"--goodput has {pair!r}; {name}'s limit must be a number of milliseconds.")
    return limits


def output_tokens(record: Record, count: CountTokens | None) -> int:
    """As the server's usage says; without it as the tokenizer counts the text; without that the number of pieces."""
    if not record.has_succeeded:
        return 0
    if record.output_tokens is not None:
        return record.output_tokens
    return len(record.times_s) if count is None else count("".join(record.texts))


def tpot_s(record: Record, num_tokens: int) -> float:
    """Seconds for each token after the first; 0 for answers of one token."""
    return (record.latency_s - record.ttft_s) / (num_tokens - 1) if num_tokens > 1 else 0.0


def summarize(run: LoadRun, selection: Selection, count: CountTokens | None) -> dict[str, Any]:
    """The scalars of one run, and the lists of `DETAILS`."""
    good = [record for record in run.records if record.has_succeeded]
    lens = [output_tokens(record, count) for record in run.records]
    good_lens = [num_tokens for record, num_tokens in zip(run.records, lens, strict=True) if record.has_succeeded]
    input_lens = [_input_len(record) for record in run.records]
    tpots = [tpot_s(record, num_tokens) for record, num_tokens in zip(good, good_lens, strict=True)]
    itls = [record.itls_s for record in run.records]
    values = {
        "ttft": [record.ttft_s for record in good],
        "tpot": [tpot for tpot, num_tokens in zip(tpots, good_lens, strict=True) if num_tokens > 1],
        "itl": [gap for record, gaps in zip(run.records, itls, strict=True) if record.has_succeeded for gap in gaps],
        "e2el": [record.latency_s for record in good],
    }
    total_input, total_output = sum(map(_input_len, good)), sum(lens)
    num_pieces = sum(len(record.times_s) for record in good)
    result: dict[str, Any] = {
        "duration": run.duration_s,
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / run.duration_s,
        "request_goodput": _num_within(selection.goodput_ms, good, tpots) / run.duration_s
        if selection.goodput_ms
        else None,
        "output_throughput": total_output / run.duration_s,
        "total_token_throughput": (total_input + total_output) / run.duration_s,
        "max_output_tokens_per_s": float(max(tokens_by_second(good, good_lens), default=0.0)),
        "max_concurrent_requests": peak_concurrency(run.records),
        "tokens_per_chunk": total_output / num_pieces if num_pieces else None,
    }
    for metric in selection.metrics:
        result |= _statistics(metric, values[metric], selection.percentiles)
    result |= _costs(run, total_input, total_output) | _prefix_cache(good)
    return result | {
        "input_lens": input_lens,
        "output_lens": lens,
        "ttfts": [record.ttft_s if record.has_succeeded else 0.0 for record in run.records],
        "itls": itls,
        "generated_texts": ["".join(record.texts) for record in run.records],
        "errors": [record.error for record in run.records],
    }


def combine(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of several runs: sums, means and, of each mean, the 95 % confidence interval under its name."""
    if len(results) == 1:
        return dict(results[0])
    combined: dict[str, Any] = {}
    intervals: dict[str, list[float]] = {}
    for name, first in results[0].items():
        values = [result[name] for result in results]
        if name in DETAILS:
            combined[name] = [entry for value in values for entry in value]
        elif any(value is None for value in values):
            combined[name] = None
        elif name in _SUMMED:
            combined[name] = sum(values)
        elif name in _LARGEST:
            combined[name] = max(values)
        else:
            interval = confidence_interval(values)
            combined[name] = interval.mean
            intervals[name] = [interval.low, interval.high]
        assert name in DETAILS or first is None or isinstance(first, int | float), name
    runs = [{name: value for name, value in result.items() if name not in DETAILS} for result in results]
    return combined | {"confidence_intervals": intervals, "runs": runs}


def tokens_by_second(records: Sequence[Record], lens: Sequence[int]) -> list[float]:
    """Output tokens that came in each second since the first request was sent; a piece has its share of them."""
    if not records:
        return []
    began_s = min(record.start_s for record in records)
    seconds = np.zeros(int(max(record.end_s for record in records) - began_s) + 1)
    for record, num_tokens in zip(records, lens, strict=True):
        for time_s in record.times_s:
            seconds[int(time_s - began_s)] += num_tokens / len(record.times_s)
    buckets: list[float] = seconds.tolist()
    return buckets


def concurrency(records: Sequence[Record]) -> list[tuple[float, int]]:
    """(time, requests in flight from then on), at every change."""
    changes = [(record.start_s, 1) for record in records] + [(record.end_s, -1) for record in records]
    changes.sort()
    steps, in_flight = [], 0
    for time_s, change in changes:
        in_flight += change
        steps.append((time_s, in_flight))
    return steps


def peak_concurrency(records: Sequence[Record]) -> int:
    return max((in_flight for _, in_flight in concurrency(records)), default=0)


def _input_len(record: Record) -> int:
    """As the data set counts it; where it could not, as the server says."""
    return record.prompt_len if record.prompt_len is not None else record.prompt_tokens or 0


def _statistics(metric: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    values = [1000 * value for value in values_s]
    named = {"mean": mean(values), "median": median(values), "std": std(values)}
    named |= {f"p{p:g}": percentile(values, p) for p in percentiles}
    return {f"{name}_{metric}_ms": value for name, value in named.items()}


def _num_within(limits_ms: Mapping[str, float], records: Sequence[Record], tpots: Sequence[float]) -> int:
    num_good = 0
    for record, tpot in zip(records, tpots, strict=True):
        reached = {"ttft": record.ttft_s, "tpot": tpot, "e2el": record.latency_s}
        num_good += all(1000 * reached[name] <= limit for name, limit in limits_ms.items())
    return num_good


def _costs(run: LoadRun, total_input: int, total_output: int) -> dict[str, float | None]:
    cpu_s, usage, total = run.server_cpu_s, run.server_usage, total_input + total_output
    return {
        "server_peak_rss_bytes": usage.peak_rss_bytes if usage is not None else None,
        "server_pss_bytes": usage.pss_bytes if usage is not None else None,
        "server_cpu_s": cpu_s,
        "server_cpu_s_per_1k_output_tokens": 1000 * cpu_s / total_output
        if cpu_s is not None and total_output
        else None,
        "server_cpu_s_per_1k_tokens": 1000 * cpu_s / total if cpu_s is not None and total else None,
        "client_cpu_share": run.client_cpu_s / run.duration_s,
        "client_max_send_delay_ms": 1000 * run.send_delay_s,
    }


def _prefix_cache(records: Sequence[Record]) -> dict[str, float | None]:
    """Of the requests whose usage tells it; None where none does."""
    told = [(r.cached_tokens, r.prompt_tokens) for r in records if r.cached_tokens is not None and r.prompt_tokens]
    if not told:
        return {"prefix_cached_tokens": None, "prefix_hit_rate": None}
    cached = sum(num_cached for num_cached, _ in told)
    return {"prefix_cached_tokens": cached, "prefix_hit_rate": cached / sum(num_prompt for _, num_prompt in told)}
