"""`octavo bench latency`: one batch, again and again, by an engine in this process.

A run's prefill ends with the step after which every choice has a token; what follows is its decode. Each part is
compared with what it must read and compute at least (roofline.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from octavo.backends.native.ops import Program
from octavo.backends.native.plan_report import plan_cost
from octavo.backends.native.roofline import Roofline
from octavo.backends.step_cost import StepCost, StepRequest
from octavo.bench.offline import OfflineRun, TimedLLM
from octavo.bench.options import LatencyOptions
from octavo.bench.process_usage import usage_of
from octavo.bench.prompts import PromptMaker
from octavo.bench.report import Row, Section, rows
from octavo.bench.roofline import step_cost
from octavo.bench.statistics import confidence_interval, mean, percentile, std
from octavo.config import Config, dtype_bytes
from octavo.engine.model_files import find_model
from octavo.errors import ConfigError, RequestFailed
from octavo.loader.source import open_checkpoint
from octavo.models.registry import build_spec
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PERCENTILES = (10, 25, 50, 75, 90, 99)
_FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class Phases:
    """One run cut in two."""

    prefill_s: float
    num_prefill_steps: int
    decode_s: float
    num_decode_tokens: int

    @classmethod
    def of(cls, run: OfflineRun) -> Phases:
        end = next(i for i, step in enumerate(run.steps, 1) if step.num_without_token == 0)
        decode = run.steps[end:]
        return cls(
            run.steps[end - 1].ended_s - run.began_s,
            end,
            sum(step.duration_s for step in decode),
            sum(step.num_new_tokens for step in decode),
        )


def run_latency(
    config: Config, options: LatencyOptions, measure_roofline: Callable[[], Roofline] | None = None
) -> tuple[dict[str, Any], list[OfflineRun]]:
    """The result, and each measured run. Every run has prompts of its own, so none hits the prefix cache.

    The machine is measured after the runs: the memory for it would count as theirs.
    Raises ConfigError when the batch cannot run as one.
    """
    llm = TimedLLM(config)
    _check(llm, options)
    maker = PromptMaker(llm.tokenizer)
    rng = np.random.default_rng(config.model.seed or 0)
    params = SamplingParams(n=options.n, max_tokens=options.output_len, ignore_eos=True, temperature=1.0, seed=0)
    runs: list[OfflineRun] = []
    num_rounds = options.num_iters_warmup + options.num_iters
    for i in tqdm(range(num_rounds), desc="Runs", unit="run", disable=options.disable_tqdm):
        prompts = [maker.draw(options.input_len, rng) for _ in range(options.batch_size)]
        run = llm.run(prompts, [params] * len(prompts), use_tqdm=False)
        wanted = options.batch_size * options.n * options.output_len
        if run.num_output_tokens != wanted:
            raise RequestFailed(f"the batch gave {run.num_output_tokens} tokens, not {wanted}: a request failed.")
        if i >= options.num_iters_warmup:
            runs.append(run)
    result = _result(llm, config, options, runs)
    roofline = None if measure_roofline is None else measure_roofline()
    return result | _compared(_Costs(llm, config, options), runs, roofline), runs


def latency_sections(result: Mapping[str, Any]) -> list[Section]:
    interval = result["confidence_intervals"].get("avg_latency")
    shown = "" if interval is None else f"[{interval[0]:.4f}, {interval[1]:.4f}]"
    latency = [Row("Mean (s)", f"{result['avg_latency']:.4f}", shown)]
    latency += [Row("Standard deviation (s)", f"{result['std_latency']:.4f}")]
    latency += [Row(f"P{p} (s)", f"{value:.4f}") for p, value in result["percentiles"].items()]
    return [
        Section(f"Latency of a batch of {result['batch_size']}", latency),
        Section(
            "Prefill",
            rows(
                result,
                (
                    ("prefill_s", "Until every first token (s)", 4, 1),
                    ("prefill_tokens_per_second", "Prompt tokens (1/s)", 1, 1),
                    ("prefill_gb_s", "Weights and KV read (GB/s)", 2, 1),
                    ("prefill_bandwidth_share", "Share of the measured bandwidth (%)", 1, 100),
                    ("prefill_gflop_s", "GFLOP/s", 1, 1),
                    ("prefill_flop_share", "Share of the measured peak (%)", 1, 100),
                    ("prefill_peak_gflop_s", "Measured peak (GFLOP/s)", 1, 1),
                ),
            ),
        ),
        Section(
            "Decode",
            rows(
                result,
                (
                    ("decode_tokens_per_second", "Output tokens (1/s)", 1, 1),
                    ("decode_step_ms", "Median step (ms)", 3, 1),
                    ("decode_gb_s", "Weights and KV read (GB/s)", 2, 1),
                    ("decode_bandwidth_share", "Share of the measured bandwidth (%)", 1, 100),
                    ("decode_gflop_s", "GFLOP/s", 1, 1),
                    ("decode_flop_share", "Share of the measured peak (%)", 1, 100),
                ),
            ),
        ),
        Section(
            "Cost",
            rows(
                result,
                (
                    ("peak_rss_bytes", "Peak RSS (MiB)", 1, 1 / 2**20),
                    ("cpu_s_per_1k_output_tokens", "CPU s per 1,000 output tokens", 3, 1),
                    ("cpu_s_per_1k_tokens", "CPU s per 1,000 tokens", 3, 1),
                    ("step_bytes", "Bytes of a decode step, at least (MB)", 2, 1e-6),
                    ("roofline_read_gb_s", "Measured bandwidth (GB/s)", 2, 1),
                ),
            ),
        ),
    ]


def latency_figures(runs: Sequence[OfflineRun]) -> list[Figure]:
    """Distributions over all runs, and the steps of the first."""
    from octavo.bench.html_report import draw_cdf, new_figure

    figure, axes = new_figure(3)
    draw_cdf(axes[0], [run.duration_s for run in runs], "latency of the batch", "s")
    decodes = [1000 * step.duration_s for run in runs for step in run.steps[Phases.of(run).num_prefill_steps :]]
    draw_cdf(axes[1], decodes, "one decode step", "ms")
    first = runs[0]
    axes[2].plot(
        [step.began_s - first.began_s for step in first.steps], [1000 * s.duration_s for s in first.steps], "."
    )
    axes[2].set(title="steps of the first run", xlabel="s", ylabel="ms", ylim=(0, None))
    return [figure]


def _check(llm: TimedLLM, options: LatencyOptions) -> None:
    info, num_choices = llm.info, options.batch_size * options.n
    if num_choices > info.max_num_seqs:
        raise ConfigError(
            f"--batch-size {options.batch_size} with --n {options.n} makes {num_choices} choices, but "
            f"{info.max_num_seqs} run at once. Raise --max-num-seqs."
        )
    length = options.input_len + options.output_len
    if length > info.max_model_len:
        raise ConfigError(
            f"--input-len {options.input_len} and --output-len {options.output_len} make {length} tokens; the context "
            f"has {info.max_model_len}. Lower them, or raise --max-model-len."
        )


def _result(llm: TimedLLM, config: Config, options: LatencyOptions, runs: Sequence[OfflineRun]) -> dict[str, Any]:
    info = llm.info
    phases = [Phases.of(run) for run in runs]
    latencies = [run.duration_s for run in runs]
    num_prompt_tokens = options.batch_size * options.input_len
    num_output_tokens = sum(run.num_output_tokens for run in runs)
    decode_s, num_decoded = sum(p.decode_s for p in phases), sum(p.num_decode_tokens for p in phases)
    decode_steps_ms = [
        1000 * s.duration_s for run, p in zip(runs, phases, strict=True) for s in run.steps[p.num_prefill_steps :]
    ]
    prefill_s, cpu_s = mean([p.prefill_s for p in phases]), sum(run.cpu_s for run in runs)
    result: dict[str, Any] = {
        "model_id": config.model.model,
        "backend": info.backend,
        "dtype": info.dtype,
        "input_len": options.input_len,
        "output_len": options.output_len,
        "batch_size": options.batch_size,
        "n": options.n,
        "avg_latency": mean(latencies),
        "std_latency": std(latencies),
        "latencies": latencies,
        "percentiles": {p: percentile(latencies, p) for p in PERCENTILES},
        "confidence_intervals": {},
        "prefill_s": prefill_s,
        "prefill_tokens_per_second": num_prompt_tokens / prefill_s,
        "decode_tokens_per_second": num_decoded / decode_s if num_decoded else None,
        "decode_step_ms": percentile(decode_steps_ms, 50) if decode_steps_ms else None,
        "peak_rss_bytes": usage_of([os.getpid()]).peak_rss_bytes,
        "cpu_s_per_1k_output_tokens": 1000 * cpu_s / num_output_tokens,
        "cpu_s_per_1k_tokens": 1000 * cpu_s / sum(run.num_prompt_tokens + run.num_output_tokens for run in runs),
    }
    if len(latencies) > 1:
        interval = confidence_interval(latencies)
        result["confidence_intervals"]["avg_latency"] = [interval.low, interval.high]
    return result


class _Costs:
    """What the batch must read and compute at least, in its prefill and in its decode.

    The plan of the native backend knows it to the byte. The reference backend holds every weight in float32 and
    multiplies in it; KV is in the dtype. `knows_bytes` is false where the native backend made no plan of weights that
    it keeps in a form of its own.
    """

    def __init__(self, llm: TimedLLM, config: Config, options: LatencyOptions) -> None:
        self._options, self._program = options, llm.program
        self.knows_bytes = True
        if not isinstance(self._program, Program):
            checkpoint = open_checkpoint(find_model(config))
            self._spec = build_spec(checkpoint.config, rope_scaling=config.model.rope_scaling)
            is_reference, quantization = llm.info.backend == "reference", config.model.quantization
            is_plain = quantization == "none" or (quantization == "auto" and not checkpoint.has_block_types)
            self.knows_bytes = is_reference or is_plain
            self._kv_value_bytes = dtype_bytes(llm.info.dtype)
            self._weight_value_bytes = _FLOAT32_BYTES if is_reference else self._kv_value_bytes

    def prefill(self) -> StepCost:
        n = self._options.input_len
        return self._step([StepRequest(n, n)] * self._options.batch_size)

    def decode_step(self, num_decoded: int) -> StepCost:
        num_choices = self._options.batch_size * self._options.n
        return self._step([StepRequest(1, self._options.input_len + num_decoded)] * num_choices)

    def decode(self) -> StepCost:
        return sum(map(self.decode_step, range(1, self._options.output_len)), StepCost())

    def _step(self, requests: Sequence[StepRequest]) -> StepCost:
        if isinstance(self._program, Program):
            return plan_cost(self._program, requests)
        return step_cost(
            self._spec,
            requests,
            weight_value_bytes=self._weight_value_bytes,
            kv_value_bytes=self._kv_value_bytes,
        )


def _compared(costs: _Costs, runs: Sequence[OfflineRun], roofline: Roofline | None) -> dict[str, Any]:
    phases = [Phases.of(run) for run in runs]
    prefill_s, decode_s = mean([p.prefill_s for p in phases]), mean([p.decode_s for p in phases])
    return {
        "step_bytes": costs.decode_step(1).bytes if costs.knows_bytes else None,
        **_phase("prefill", costs.prefill(), prefill_s, costs.knows_bytes, roofline),
        **_phase("decode", costs.decode(), decode_s, costs.knows_bytes, roofline),
        "roofline": None if roofline is None else asdict(roofline) | {"read_gb_s": roofline.read_gb_s},
        "roofline_read_gb_s": None if roofline is None else roofline.read_gb_s,
    }


def _phase(
    name: str, cost: StepCost, taken_s: float, knows_bytes: bool, roofline: Roofline | None
) -> dict[str, float | None]:
    """A share is the time that the machine would need at least, over the time taken: each number format at its peak.

    `taken_s` is 0 where a run has no such phase.
    """
    has_bytes = bool(taken_s) and knows_bytes
    return {
        f"{name}_gb_s": cost.bytes / taken_s / 1e9 if has_bytes else None,
        f"{name}_gflop_s": cost.flops / taken_s / 1e9 if taken_s else None,
        f"{name}_bandwidth_share": cost.read_s(roofline) / taken_s if roofline is not None and has_bytes else None,
        f"{name}_flop_share": cost.products_s(roofline) / taken_s if roofline is not None and taken_s else None,
        f"{name}_peak_gflop_s": cost.flops / cost.products_s(roofline) / 1e9
        if roofline is not None and taken_s
        else None,
    }
