"""Results as a table: medians over the rounds, and Octavo against the best peer of each class."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "octavo"
QUIET_CORES = 0.1
Cell = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """A measure of one workload; `workload` is empty for what belongs to the server as a whole."""

    workload: str
    measure: str
    title: str
    higher_is_better: bool
    digits: int = 0


COLUMNS = (
    Column("W1", "output_tokens_per_s", "W1 tok/s", True, 1),
    Column("W1", "ttft_p50_ms", "W1 TTFT ms", False),
    Column("W1", "itl_p50_ms", "W1 ITL p50 ms", False, 1),
    Column("W1", "itl_p99_ms", "W1 ITL p99 ms", False, 1),
    Column("W2", "output_tokens_per_s", "W2 tok/s", True, 1),
    Column("W2", "ttft_p50_ms", "W2 TTFT p50 ms", False),
    Column("W2", "ttft_p99_ms", "W2 TTFT p99 ms", False),
    Column("W2", "itl_p50_ms", "W2 ITL p50 ms", False, 1),
    Column("W2", "itl_p99_ms", "W2 ITL p99 ms", False, 1),
    Column("W3", "output_tokens_per_s", "W3 tok/s", True, 1),
    Column("W3", "ttft_p50_ms", "W3 TTFT p50 ms", False),
    Column("W4", "output_tokens_per_s", "W4 tok/s", True, 1),
    Column("W4", "ttft_p50_ms", "W4 TTFT p50 ms", False),
    Column("W5", "prompt_tokens_per_s", "W5 prefill tok/s", True),
    *(Column(f"C{n}", "output_tokens_per_s", f"C{n} tok/s", True, 1) for n in (1, 2, 4, 8, 16, 32, 64)),
    Column("start", "cold_start_s", "cold start s", False, 2),
    Column("start", "peak_rss_mb", "peak RSS MB", False),
)


@dataclass(frozen=True)
class Row:
    label: str
    values: tuple[float | None, ...]  # a median a column


class Results:
    """The cells of a run, looked up by what they are of. A failed cell has an `error` and no measures."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._values: dict[tuple[str, str, str, str, str], dict[int, float]] = {}
        self.failures: list[Cell] = []
        self.groups: list[tuple[str, str]] = []
        self._labels: dict[tuple[str, str], list[str]] = {}
        for cell in cells:
            group = cell["model"], cell["class"]
            if group not in self._labels:
                self.groups.append(group)
            labels = self._labels.setdefault(group, [])
            if cell["label"] not in labels:
                labels.append(cell["label"])
            if cell.get("error"):
                self.failures.append(cell)
                continue
            for measure, value in cell["measures"].items():
                key = (*group, cell["label"], cell["workload"], measure)
                self._values.setdefault(key, {})[cell["round"]] = value

    def labels(self, group: tuple[str, str]) -> list[str]:
        """Octavo first."""
        return sorted(self._labels[group], key=lambda label: not is_ours(label))

    def rounds(self, group: tuple[str, str], label: str, column: Column) -> dict[int, float]:
        return self._values.get((*group, label, column.workload, column.measure), {})

    def median(self, group: tuple[str, str], label: str, column: Column) -> float | None:
        values = self.rounds(group, label, column).values()
        return statistics.median(values) if values else None

    def ratio(self, group: tuple[str, str], column: Column) -> tuple[float, str] | None:
        """Octavo over the best peer, and which that is: the median of the ratios within each round."""
        ours = [label for label in self.labels(group) if is_ours(label)]
        medians = {label: self.median(group, label, column) for label in self.labels(group) if not is_ours(label)}
        peers = {label: median for label, median in medians.items() if median is not None}
        if not ours or not peers or not (mine := self.rounds(group, ours[0], column)):
            return None
        best = (max if column.higher_is_better else min)(peers, key=lambda label: peers[label])
        theirs = self.rounds(group, best, column)
        ratios = [mine[number] / theirs[number] for number in mine.keys() & theirs.keys() if theirs[number]]
        return (statistics.median(ratios), best) if ratios else None


def is_ours(label: str) -> bool:
    return label.split(" ")[0] == OURS


def markdown(content: dict[str, Any]) -> str:
    """The whole report of a results file."""
    results = Results(content["cells"])
    parts = [_machine(content), *(_group(results, group) for group in results.groups)]
    if results.failures:
        parts.append(_failures(results.failures))
    parts.append(_commands(content))
    return "\n\n".join(parts) + "\n"


def _group(results: Results, group: tuple[str, str]) -> str:
    labels = results.labels(group)
    columns = [c for c in COLUMNS if any(results.rounds(group, label, c) for label in labels)]
    header = ["", *labels, "Octavo / best peer", "best peer"]
    rows = []
    for column in columns:
        medians = [results.median(group, label, column) for label in labels]
        ratio = results.ratio(group, column)
        better = "↑" if column.higher_is_better else "↓"
        cells = [f"{value:.{column.digits}f}" if value is not None else "-" for value in medians]
        rows.append([f"{column.title} {better}", *cells, *((f"{ratio[0]:.2f}", ratio[1]) if ratio else ("-", "-"))])
    num_rounds = max((len(results.rounds(group, label, c)) for label in labels for c in columns), default=0)
    title = f"### {group[0]}, {group[1]} weights (median of {num_rounds})"
    return f"{title}\n\n{_table(header, rows)}" if rows else f"{title}\n\nNothing was measured."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(cells: Sequence[str], pad: Callable[[str, int], str]) -> str:
        first, *others = (
            pad(cell, width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "| " + " | ".join([first, *others]) + " |"

    rule = (
        "|" + "|".join("-" * (width + 2) if i == 0 else "-" * (width + 1) + ":" for i, width in enumerate(widths)) + "|"
    )
    return "\n".join([line(header, str.rjust), rule, *(line(row, str.rjust) for row in rows)])


def _machine(content: dict[str, Any]) -> str:
    machine = content["machine"]
    lines = [
        f"Measured {content['started']} on {machine['cpu']}, {machine['cores']} cores ({machine['features']}), "
        f"{machine['memory_gib']} GiB, {machine['system']}.",
        "",
        *(f"- {name}: {text}" for name, text in content["workloads"].items()),
        "- cold start: from the command to the first token; peak RSS: of all the server's processes, added up",
    ]
    shares = [
        cell["measures"]["foreign_cores"] for cell in content["cells"] if "foreign_cores" in cell.get("measures", {})
    ]
    noisy = [share for share in shares if share > QUIET_CORES]
    if noisy:
        lines += [
            "",
            f"**Not a quiet machine**: in {len(noisy)} of {len(shares)} cells other programs used more than "
            f"{QUIET_CORES:g} cores, up to {max(noisy):.1f}. Engines suffer from that unequally (those whose "
            "threads wait for each other suffer most), so these ratios say little.",
        ]
    return "\n".join(lines)


def _failures(failures: Sequence[Cell]) -> str:
    lines = ["### What failed", ""]
    for cell in failures:
        reason = " ".join(cell["error"].split())
        lines.append(f"- {cell['label']}, {cell['model']} {cell['class']}, {cell['workload']}: {reason[:600]}")
    return "\n".join(dict.fromkeys(lines))


def _commands(content: dict[str, Any]) -> str:
    versions = [
        f"- {engine}: {', '.join(f'{name} {version}' for name, version in found.items())}"
        for engine, found in content["versions"].items()
    ]
    commands = [f"{key}:\n    {command}" for key, command in content["commands"].items()]
    return "\n".join(["### Versions and commands", "", *versions, "", "```", *commands, "```"])
