"""The result as text for a terminal: sections of a label and a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.options import METRICS

_WIDTH = 64
_LABEL = 42
_MIB = 2**20

_METRIC_TITLES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token after the first (TPOT)",
    "itl": "Gap between tokens (ITL)",
    "e2el": "Whole request (E2EL)",
}
# Key, label, decimals, factor.
_TOTALS = (
    ("completed", "Successful requests", 0, 1),
    ("failed", "Failed requests", 0, 1),
    ("num_truncated", "Cut to the context", 0, 1),
    ("max_concurrency", "Limit of concurrent requests", 0, 1),
    ("duration", "Duration (s)", 2, 1),
    ("total_input_tokens", "Input tokens", 0, 1),
    ("total_output_tokens", "Output tokens", 0, 1),
    ("request_throughput", "Requests (1/s)", 3, 1),
    ("request_goodput", "Good requests (1/s)", 3, 1),
    ("output_throughput", "Output tokens (1/s)", 2, 1),
    ("max_output_tokens_per_s", "Output tokens in the best second", 2, 1),
    ("total_token_throughput", "All tokens (1/s)", 2, 1),
    ("max_concurrent_requests", "Most requests in flight", 0, 1),
)
_COSTS = (
    ("server_peak_rss_bytes", "Server: peak RSS (MiB)", 1, 1 / _MIB),
    ("server_pss_bytes", "Server: PSS at the end (MiB)", 1, 1 / _MIB),
    ("server_cpu_s_per_1k_output_tokens", "Server: CPU s per 1,000 output tokens", 3, 1),
    ("server_cpu_s_per_1k_tokens", "Server: CPU s per 1,000 tokens", 3, 1),
    ("prefix_hit_rate", "Prompt tokens from the prefix cache (%)", 1, 100),
    ("client_cpu_share", "Client: share of one core (%)", 1, 100),
    ("client_max_send_delay_ms", "Client: latest request (ms)", 2, 1),
)


@dataclass(frozen=True, slots=True)
class Row:
    label: str
    value: str
    interval: str = ""  # 95 % confidence


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    rows: Sequence[Row]


def row(result: Mapping[str, Any], key: str, label: str, decimals: int = 2, factor: float = 1) -> Row | None:
    """None where the result has no value."""
    value = result.get(key)
    if value is None:
        return None
    interval = result.get("confidence_intervals", {}).get(key)
    shown = "" if interval is None else f"[{interval[0] * factor:,.{decimals}f}, {interval[1] * factor:,.{decimals}f}]"
    return Row(label, f"{value * factor:,.{decimals}f}", shown)


def rows(result: Mapping[str, Any], layout: Sequence[tuple[str, str, int, float]]) -> list[Row]:
    return [made for entry in layout if (made := row(result, *entry)) is not None]


def serve_sections(result: Mapping[str, Any]) -> list[Section]:
    totals = [made for made in rows(result, _TOTALS) if made.label != "Cut to the context" or made.value != "0"]
    num_runs = len(result.get("runs", ()))
    title = "Serving benchmark" + (f": mean of {num_runs} runs [95 % confidence]" if num_runs else "")
    sections = [Section(title, totals)]
    for metric in METRICS:
        suffix = f"_{metric}_ms"
        keys = [key for key in result if key.endswith(suffix)]
        if keys:
            named = [row(result, key, f"{_statistic(key.removesuffix(suffix))} (ms)") for key in keys]
            sections.append(Section(_METRIC_TITLES[metric], [made for made in named if made is not None]))
    return [*sections, Section("Cost", rows(result, _COSTS))]


def as_text(sections: Sequence[Section]) -> str:
    lines = []
    for number, section in enumerate(sections):
        lines.append(f" {section.title} ".center(_WIDTH, "-" if number else "="))
        lines += [f"{made.label:<{_LABEL}} {made.value:>12}  {made.interval}".rstrip() for made in section.rows]
    return "\n".join([*lines, "=" * _WIDTH])


def _statistic(name: str) -> str:
    return f"P{name[1:]}" if name[0] == "p" else {"mean": "Mean", "median": "Median", "std": "Standard deviation"}[name]
