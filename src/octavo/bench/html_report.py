"""The result as one HTML file: the tables, and plots drawn into it as SVG. Needs matplotlib, of the extra `bench`."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from octavo.bench.load import LoadRun
from octavo.bench.report import Section
from octavo.bench.summary import concurrency, output_tokens, tokens_by_second, tpot_s
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 0 2rem 1rem 0; display: inline-table; vertical-align: top; }
caption { font-weight: 600; text-align: left; padding: .3rem 0; }
td { padding: .1rem 1rem .1rem 0; border-bottom: 1px solid #ddd; }
td + td { text-align: right; font-variant-numeric: tabular-nums; }
svg { max-width: 100%; height: auto; } dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dd { margin: 0; }
"""
_MOST_BARS = 400  # requests in the time line; beyond it they would be hairlines


def check_plotting() -> None:
    """Raises ConfigError where plots cannot be made: before the benchmark, not after it."""
    try:
        import matplotlib  # noqa: F401  an optional dependency
    except ImportError:
        raise ConfigError("--html needs matplotlib: pip install 'octavo[bench]'.") from None


def new_figure(num_plots: int) -> tuple[Figure, list[Axes]]:
    """A figure of `num_plots` plots, two in a row."""
    from matplotlib.figure import Figure

    num_rows = (num_plots + 1) // 2
    figure = Figure(figsize=(11, 3.2 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, 2, squeeze=False).flatten().tolist()
    for unused in axes[num_plots:]:
        unused.set_axis_off()
    for used in axes[:num_plots]:
        used.grid(True, color="#dddddd", linewidth=0.6)
    return figure, axes[:num_plots]


def draw_cdf(axes: Axes, values: Sequence[float], title: str, unit: str) -> None:
    """The share of values up to each value."""
    ordered = np.sort(np.asarray(values, dtype=float))
    axes.step(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), where="post")
    axes.set(title=title, xlabel=unit, ylabel="share", ylim=(0, 1.02))
    if len(ordered):
        axes.set_xlim(left=0)


def serve_figures(runs: Sequence[LoadRun]) -> list[Figure]:
    """Distributions over all runs, and the course of the first."""
    good = [record for run in runs for record in run.records if record.has_succeeded]
    lens = [output_tokens(record, None) for record in good]
    distributions, axes = new_figure(4)
    draw_cdf(axes[0], [1000 * record.ttft_s for record in good], "time to first token", "ms")
    tpots = [1000 * tpot_s(record, num_tokens) for record, num_tokens in zip(good, lens, strict=True) if num_tokens > 1]
    draw_cdf(axes[1], tpots, "time per output token", "ms")
    draw_cdf(axes[2], [1000 * gap for record in good for gap in record.itls_s], "gap between tokens", "ms")
    draw_cdf(axes[3], [record.latency_s for record in good], "whole request", "s")

    first = runs[0]
    began_s = first.began_s
    records = [record for record in first.records if record.has_succeeded]
    course, axes = new_figure(3)
    buckets = tokens_by_second(records, [output_tokens(record, None) for record in records])
    axes[0].step(range(len(buckets)), buckets, where="post")
    axes[0].set(title="output tokens in each second", xlabel="s", ylabel="tokens", ylim=(0, None))
    steps = concurrency(first.records)
    axes[1].step([time_s - began_s for time_s, _ in steps], [number for _, number in steps], where="post")
    axes[1].set(title="requests in flight", xlabel="s", ylabel="requests", ylim=(0, None))
    shown = records[:_MOST_BARS]
    waits = [(record.start_s - began_s, record.ttft_s) for record in shown]
    streams = [(record.start_s - began_s + record.ttft_s, record.latency_s - record.ttft_s) for record in shown]
    for spans, color, label in ((waits, "#f0b37e", "until the first token"), (streams, "#4c78a8", "streaming")):
        axes[2].barh(
            range(len(spans)), [length for _, length in spans], left=[start for start, _ in spans],
            height=1.0, color=color, label=label,
        )  # fmt: skip
    axes[2].invert_yaxis()
    axes[2].legend(loc="upper right", fontsize="small")
    axes[2].set(title=f"the first {len(shown)} requests", xlabel="s", ylabel="request")
    return [distributions, course]


def write_html(
    path: str, title: str, settings: Mapping[str, Any], sections: Sequence[Section], figures: Sequence[Figure]
) -> None:
    """Raises ConfigError when the file cannot be written."""
    listed = "".join(f"<dt>{escape(str(name))}</dt><dd>{escape(str(value))}</dd>" for name, value in settings.items())
    page = (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n<dl>{listed}</dl>\n"
        + "\n".join(map(_table, sections))
        + "\n".join(map(_svg, figures))
        + "</body></html>\n"
    )
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {path}: {error.strerror}.") from None


def _table(section: Section) -> str:
    rows = "".join(
        f"<tr><td>{escape(row.label)}</td><td>{escape(row.value)}</td><td>{escape(row.interval)}</td></tr>"
        for row in section.rows
    )
    return f"<table><caption>{escape(section.title)}</caption>{rows}</table>"


def _svg(figure: Figure) -> str:
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "octavo"}):  # text as text: smaller, and searchable
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return re.sub(r"^.*?(?=<svg)", "", buffer.getvalue(), flags=re.DOTALL)
