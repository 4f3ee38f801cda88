"""`octavo bench throughput`: everything at once, by an engine in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.bench.offline import OfflineRun, TimedLLM
from octavo.bench.options import DatasetOptions, SamplingOptions, ThroughputOptions
from octavo.bench.process_usage import usage_of
from octavo.bench.prompts import PromptMaker
from octavo.bench.report import Section, rows
from octavo.bench.summary import combine
from octavo.bench.workload import MADE_UP, make_workload
from octavo.config import Config
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAYOUT = (
    ("num_requests", "Requests", 0, 1),
    ("num_truncated", "Cut to the context", 0, 1),
    ("elapsed_time", "Duration (s)", 2, 1),
    ("num_prompt_tokens", "Input tokens", 0, 1),
    ("num_output_tokens", "Output tokens", 0, 1),
    ("requests_per_second", "Requests (1/s)", 3, 1),
    ("tokens_per_second", "All tokens (1/s)", 2, 1),
    ("output_tokens_per_second", "Output tokens (1/s)", 2, 1),
    ("prefix_hit_rate", "Prompt tokens from the prefix cache (%)", 1, 100),
    ("peak_rss_bytes", "Peak RSS (MiB)", 1, 1 / 2**20),
    ("cpu_s_per_1k_output_tokens", "CPU s per 1,000 output tokens", 3, 1),
    ("cpu_s_per_1k_tokens", "CPU s per 1,000 tokens", 3, 1),
)


def run_throughput(
    config: Config,
    dataset: DatasetOptions,
    sampling: SamplingOptions,
    options: ThroughputOptions,
    note: Callable[[str], None],
) -> tuple[dict[str, Any], list[OfflineRun]]:
    """The result, and each repeat. Prompts come from --seed, the next repeat's from the next number."""
    llm = TimedLLM(config)
    maker, context_len = PromptMaker(llm.tokenizer), llm.info.max_model_len
    ignore_eos = sampling.ignore_eos
    if ignore_eos is None:
        ignore_eos = dataset.dataset_name in MADE_UP
    runs: list[OfflineRun] = []
    results: list[Mapping[str, Any]] = []
    for repeat in range(options.repeats):
        seed = (config.model.seed or 0) + repeat
        workload = make_workload(dataset, maker, seed=seed, context_len=context_len)
        if repeat == 0:
            for text in workload.notes:
                note(text)
        params = [_params(sampling, options.n, request.output_len, ignore_eos) for request in workload.requests]
        run = llm.run([request.prompt for request in workload.requests], params, use_tqdm=not options.disable_tqdm)
        runs.append(run)
        results.append(_result(run, len(workload.requests), workload.num_truncated))
    return _head(llm, config, dataset, options) | combine(results), runs


def throughput_sections(result: Mapping[str, Any]) -> list[Section]:
    return [Section("Offline throughput", rows(result, _LAYOUT))]


def throughput_figures(runs: Sequence[OfflineRun]) -> list[Figure]:
    """The course of the first run."""
    from octavo.bench.html_report import draw_cdf, new_figure

    run = runs[0]
    figure, axes = new_figure(3)
    ends = [step.ended_s - run.began_s for step in run.steps]
    totals, total = [], 0
    for step in run.steps:
        total += step.num_new_tokens
        totals.append(total)
    axes[0].plot(ends, totals)
    axes[0].set(title="output tokens so far", xlabel="s", ylabel="tokens", ylim=(0, None))
    axes[1].step(ends, [step.num_running for step in run.steps], where="pre")
    axes[1].set(title="requests that are not done", xlabel="s", ylabel="requests", ylim=(0, None))
    draw_cdf(axes[2], [1000 * step.duration_s for step in run.steps], "one step of the engine", "ms")
    return [figure]


def _head(llm: TimedLLM, config: Config, dataset: DatasetOptions, options: ThroughputOptions) -> dict[str, Any]:
    return {
        "model_id": config.model.model,
        "backend": llm.info.backend,
        "dtype": llm.info.dtype,
        "dataset_name": dataset.dataset_name,
        "repeats": options.repeats,
    }


def _params(sampling: SamplingOptions, n: int, max_tokens: int, ignore_eos: bool) -> SamplingParams:
    names = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(sampling, name)) is not None}
    temperature = sampling.temperature
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=ignore_eos, temperature=temperature, **given)


def _result(run: OfflineRun, num_requests: int, num_truncated: int) -> dict[str, Any]:
    total = run.num_prompt_tokens + run.num_output_tokens
    return {
        "elapsed_time": run.duration_s,
        "num_requests": num_requests,
        "num_truncated": num_truncated,
        "total_num_tokens": total,
        "num_prompt_tokens": run.num_prompt_tokens,
        "num_output_tokens": run.num_output_tokens,
        "requests_per_second": num_requests / run.duration_s,
        "tokens_per_second": total / run.duration_s,
        "output_tokens_per_second": run.num_output_tokens / run.duration_s,
        "prefix_hit_rate": run.num_cached_tokens / run.num_prompt_tokens,
        "peak_rss_bytes": usage_of([os.getpid()]).peak_rss_bytes,
        "cpu_s_per_1k_output_tokens": 1000 * run.cpu_s / run.num_output_tokens,
        "cpu_s_per_1k_tokens": 1000 * run.cpu_s / total,
    }
