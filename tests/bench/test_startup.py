"""`octavo bench startup`: the moments of a start, and starts that fail."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from octavo.bench import startup
from octavo.bench.options import StartupOptions
from octavo.bench.report import as_text
from octavo.bench.startup import Start, run_startup, startup_figures, startup_sections
from octavo.errors import StartError


def test_the_measured_starts_are_those_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = [Start(float(i), i + 1.0, i + 2.0, i * 2**20, i * 0.5) for i in (9, 1, 2, 3)]
    left = iter(starts)

    async def start(flags: Sequence[str], headers: Mapping[str, str], timeout_s: float) -> Start:
        assert (list(flags), dict(headers), timeout_s) == (["m"], {"X": "y"}, 7.0)
        return next(left)

    monkeypatch.setattr(startup, "_start", start)
    options = StartupOptions(num_iters=3, num_iters_warmup=1, disable_tqdm=True, start_timeout_sec=7.0)
    result, measured = run_startup(["m"], {"X": "y"}, options)
    assert measured == starts[1:]
    assert result["health_times"] == [1.0, 2.0, 3.0] and result["first_token_times"] == [3.0, 4.0, 5.0]
    assert (result["avg_ready_time"], result["ready_percentiles"][50]) == (3.0, 3.0)
    low, high = result["confidence_intervals"]["avg_health_time"]
    assert (low, high) == pytest.approx((2 - 2.4841, 2 + 2.4841), abs=1e-3)
    assert result["peak_rss_bytes"] == 3 * 2**20
    assert result["avg_cpu_s"] == pytest.approx(1.0)
    json.dumps(result, allow_nan=False)


def test_a_server_that_ends_is_shown_with_what_it_said(tmp_path: Path) -> None:
    options = StartupOptions(num_iters=1, num_iters_warmup=0, disable_tqdm=True)
    with pytest.raises(StartError) as error:
        run_startup([str(tmp_path / "nothing.gguf")], {}, options)
    assert str(error.value).startswith("the server ended with 2 before it was ready. It said:\n")
    assert "nothing.gguf" in str(error.value)


def test_a_start_that_takes_too_long_is_given_up() -> None:
    options = StartupOptions(num_iters=1, num_iters_warmup=0, disable_tqdm=True, start_timeout_sec=0.05)
    with pytest.raises(StartError, match=r"the server was not ready within 0.05 s \(--start-timeout-sec\)"):
        run_startup(["smollm2-135m-instruct"], {}, options)


def test_the_table_and_the_plot_have_each_moment() -> None:
    starts = [Start(0.1, 0.5, 0.7, 2**28, 1.5)]
    result = {"num_iters": 1, "confidence_intervals": {}, "peak_rss_bytes": 2**28, "avg_cpu_s": 1.5}
    for name in ("health", "ready", "first_token"):
        result |= {f"avg_{name}_time": 0.5, f"{name}_percentiles": {50: 0.5}}
    text = as_text(startup_sections(result))
    assert "First token: mean (s)" in text and "256.0" in text
    (figure,) = startup_figures(starts)
    assert [line.get_label() for line in figure.axes[0].get_lines()] == [
        "First answer of /health",
        "Ready",
        "First token",
    ]
