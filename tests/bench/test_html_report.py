"""The report as one file: nothing is loaded from elsewhere, and what was measured is in it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from octavo.bench.client import Record
from octavo.bench.html_report import check_plotting, draw_cdf, new_figure, serve_figures, write_html
from octavo.bench.load import LoadRun
from octavo.bench.report import Row, Section
from octavo.errors import ConfigError


def run(*records: Record) -> LoadRun:
    return LoadRun(list(records), 10.0, 3.0, 0.1, 0.0, None, None)


GOOD = [Record(5, 10.0 + i, [10.5 + i, 10.7 + i, 11.0 + i], ["a", "b", "c"], 11.0 + i, 3) for i in range(2)]
FAILED = Record(5, 11.0, end_s=12.0, error="status 500")


def test_the_page_stands_alone(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    sections = [Section("Totals & more", [Row("Requests", "2", "[1, 3]")])]
    write_html(str(path), "A <title>", {"model": "a&b"}, sections, serve_figures([run(*GOOD, FAILED)]))
    page = path.read_text()
    assert page.startswith("<!DOCTYPE html>") and page.rstrip().endswith("</html>")
    assert "<script" not in page and "<link" not in page and "@import" not in page
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "A &lt;title&gt;" in page and "a&amp;b" in page and "Totals &amp; more" in page
    assert page.count("<svg") == 2
    for title in ("time to first token", "gap between tokens", "output tokens in each second", "requests in flight"):
        assert title in page


def test_the_distribution_is_the_share_up_to_each_value() -> None:
    _, (axes,) = new_figure(1)
    draw_cdf(axes, [3.0, 1.0, 2.0, 2.0], "t", "ms")
    (line,) = axes.get_lines()
    assert [list(values) for values in line.get_data()] == [[1.0, 2.0, 2.0, 3.0], [0.25, 0.5, 0.75, 1.0]]


def test_what_failed_is_not_drawn_and_nothing_at_all_can_be() -> None:
    distributions, course = serve_figures([run(*GOOD, FAILED)])
    assert list(distributions.axes[0].get_lines()[0].get_xdata()) == pytest.approx([500.0, 500.0])
    assert len(course.axes[2].patches) == 4  # two requests, each waiting and streaming
    assert len(serve_figures([run(FAILED)])) == 2


def test_the_same_numbers_make_the_same_file(tmp_path: Path) -> None:
    pages = []
    for name in ("one", "two"):
        figure, (axes,) = new_figure(1)
        draw_cdf(axes, [1.0, 2.0], "t", "ms")
        write_html(str(tmp_path / name), "t", {}, [], [figure])
        pages.append((tmp_path / name).read_bytes())
    assert pages[0] == pages[1]


def test_a_file_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--html .*: Is a directory"):
        write_html(str(tmp_path), "t", {}, [], [])


def test_without_matplotlib_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plotting()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"--html needs matplotlib: pip install 'octavo\[bench\]'"):
        check_plotting()
