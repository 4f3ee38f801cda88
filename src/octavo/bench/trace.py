"""Recorded traffic: when requests came and how long they were, without their text.

Two forms: CSV as the Azure LLM inference traces have it (and BurstGPT), and JSON lines as Mooncake's, whose
`hash_ids` name the blocks of the prompt, so that equal beginnings are known.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

# Column names of the known CSV traces, lower case: time, prompt tokens, output tokens.
_TIME = ("timestamp", "arrival_timestamp")
_INPUT = ("contexttokens", "request tokens", "input_length")
_OUTPUT = ("generatedtokens", "response tokens", "output_length")


@dataclass(frozen=True, slots=True)
class TraceEntry:
    time_s: float  # on the trace's own clock
    input_len: int
    output_len: int
    block_ids: tuple[int, ...] = ()


def read_trace(path: str) -> list[TraceEntry]:
    """The entries in the order of their times. Raises ConfigError naming the line that cannot be read."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: {getattr(error, 'strerror', None) or error}.") from None
    lines = text.split("\n")
    parse = _mooncake(path, lines) if text.lstrip().startswith("{") else _csv(path, lines)
    entries = sorted(parse, key=lambda entry: entry.time_s)
    if not entries:
        raise ConfigError(f"--dataset-path {path} holds no requests.")
    return entries


def cut_to_context(entry: TraceEntry, context_len: int) -> TraceEntry:
    """The entry as it fits into the context: at most half of it for the output, the beginning of the prompt before."""
    if entry.input_len + entry.output_len <= context_len:
        return entry
    output_len = min(entry.output_len, context_len // 2)
    return replace(entry, output_len=output_len, input_len=min(entry.input_len, context_len - output_len))


def _mooncake(path: str, lines: Iterable[str]) -> Iterator[TraceEntry]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield _entry(row["timestamp"] / 1000, row["input_length"], row["output_length"], row.get("hash_ids", ()))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: not a request with timestamp (ms), input_length, output_length and "
                f"hash_ids ({type(error).__name__}: {error})."
            ) from None


def _csv(path: str, lines: Iterable[str]) -> Iterator[TraceEntry]:
    reader = csv.DictReader(lines)
    columns = {name.strip().lower(): name for name in reader.fieldnames or ()}
    time, num_input, num_output = (_column(path, columns, names) for names in (_TIME, _INPUT, _OUTPUT))
    for row in reader:
        try:
            yield _entry(_seconds(row[time]), int(row[num_input]), int(row[num_output]))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}, line {reader.line_num}: {error}.") from None


def _column(path: str, columns: Mapping[str, str], names: tuple[str, ...]) -> str:
    for name in names:
        if name in columns:
            return columns[name]
    raise ConfigError(f"{path} has no column {' or '.join(names)}; it has {', '.join(columns.values()) or 'none'}.")


def _seconds(text: str) -> float:
    """A number of seconds, or a date and time."""
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text.strip()).timestamp()


def _entry(time_s: float, input_len: Any, output_len: Any, block_ids: Iterable[int] = ()) -> TraceEntry:
    for length in (input_len, output_len):
        if type(length) is not int or length < 0:
            raise ValueError(f"a length is {length!r}; it must be a whole number of at least 0")
    blocks = tuple(block_ids)
    if any(type(block) is not int or block < 0 for block in blocks):
        raise ValueError(f"hash_ids are {blocks!r:.80}; they must be whole numbers of at least 0")
    return TraceEntry(float(time_s), max(1, input_len), max(1, output_len), blocks)
