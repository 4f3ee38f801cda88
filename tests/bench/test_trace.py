"""Recorded traffic: reading the two forms, and cutting requests to a context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.bench.trace import TraceEntry, cut_to_context, read_trace
from octavo.errors import ConfigError

DATA = Path(__file__).parents[3] / "shared" / "data"


def shared(name: str) -> str:
    path = DATA / name
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    return str(path)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "trace"
    path.write_text(text)
    return str(path)


def test_an_azure_trace_has_dates_and_lengths(tmp_path: Path) -> None:
    entries = read_trace(
        written(
            tmp_path,
            "TIMESTAMP,ContextTokens,GeneratedTokens\n"
            "2023-11-16 18:15:46.6805900,374,44\n"
            "2023-11-16 18:15:50.9951690,396,109\n",
        )
    )
    assert entries[1].time_s - entries[0].time_s == pytest.approx(4.314579, abs=1e-5)
    assert [(entry.input_len, entry.output_len, entry.block_ids) for entry in entries] == [
        (374, 44, ()),
        (396, 109, ()),
    ]


def test_a_csv_may_have_seconds_and_other_columns(tmp_path: Path) -> None:
    text = "Timestamp,Model,Request tokens,Response tokens,Total tokens\n5,x,472,18,490\n45.5,y,1087,0,1087\n"
    assert read_trace(written(tmp_path, text)) == [TraceEntry(5.0, 472, 18), TraceEntry(45.5, 1087, 1)]


def test_a_mooncake_trace_has_milliseconds_and_blocks(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 2500, "input_length": 700, "output_length": 5, "hash_ids": [0, 7]},
        {"timestamp": 0, "input_length": 20, "output_length": 3},
    ]
    entries = read_trace(written(tmp_path, "\n".join(map(json.dumps, rows)) + "\n\n"))
    assert entries == [TraceEntry(0.0, 20, 3), TraceEntry(2.5, 700, 5, (0, 7))]  # in the order of time


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column timestamp or arrival_timestamp; it has none"),
        ("TIMESTAMP,ContextTokens\n1,2\n", "has no column generatedtokens or response tokens or output_length; it has"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\nnoon,2,3\n", "line 3: Invalid isoformat string: 'noon'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2\n", "line 2: int() argument must be"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,-2,3\n", "line 2: a length is -2; it must be a whole number"),
        ('{"timestamp": 0, "input_length": 3}\n', "line 1: not a request with timestamp (ms), input_length"),
        ('{"timestamp": 0, "input_length": 3.5, "output_length": 1}', "a length is 3.5"),
        ('{"timestamp": 0, "input_length": 3, "output_length": 1, "hash_ids": [-1]}', "hash_ids are (-1,)"),
        ('{"timestamp": 0, "inp', "line 1: not a request"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_trace(written(tmp_path, text))
    assert message in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--dataset-path .*none: No such file or directory"):
        read_trace(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("lengths", "context_len", "fitting"),
    [
        ((100, 20), 120, (100, 20)),  # fits exactly
        ((101, 20), 120, (100, 20)),  # the prompt loses its end
        ((1000, 90), 120, (60, 60)),  # the output keeps at most half
        ((10, 1000), 120, (10, 60)),
    ],
)
def test_a_request_is_cut_to_the_context(lengths: tuple[int, int], context_len: int, fitting: tuple[int, int]) -> None:
    cut = cut_to_context(TraceEntry(1.0, *lengths), context_len)
    assert cut == TraceEntry(1.0, *fitting)


def test_the_azure_conversation_trace_is_read_whole() -> None:
    entries = read_trace(shared("azure_llm_2023_conv.csv"))
    assert len(entries) == 19366
    assert entries[-1].time_s - entries[0].time_s == pytest.approx(3501.7, abs=0.1)
    assert max(entry.input_len for entry in entries) == 14050


def test_the_mooncake_trace_shares_blocks() -> None:
    entries = read_trace(shared("mooncake_conversation_3000.jsonl"))
    assert len(entries) == 3000
    assert all(len(entry.block_ids) == -(-entry.input_len // 512) for entry in entries)
    assert sum(entry.block_ids[0] == 0 for entry in entries) == 3000
