"""Reading a batch's lines, and an output that survives being killed at any byte."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.batch_file import CustomIds, Line, Output, custom_id_of, parse_line, read_lines, record
from octavo.errors import ConfigError, InvalidRequest

LIMIT = 1000


def line_of(value: object) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def request(custom_id: str = "a", **changes: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}} | changes


def write(path: Path, *lines: object, end: bytes = b"\n") -> Path:
    path.write_bytes(b"".join(line_of(line) + end for line in lines))
    return path


def read(path: Path, limit: int = LIMIT) -> list[Line]:
    return list(read_lines(path, limit))


def refusal(value: object) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        parse_line(Line(1, "batch_req_1_0", line_of(value)), CustomIds(), LIMIT)
    return error.value


# BAT-01
def test_blank_lines_a_byte_order_mark_crlf_and_a_missing_last_newline_are_no_matter(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    one, two = line_of(request("a")), line_of(request("b"))
    path.write_bytes(b"\xef\xbb\xbf" + one + b"\r\n\r\n   \n" + two)
    lines = read(path)
    assert [(line.number, line.raw) for line in lines] == [(1, one), (4, two)]
    assert parse_line(lines[0], CustomIds(), LIMIT).custom_id == "a"


def test_the_identity_of_a_line_is_its_place_and_content_not_its_ending(tmp_path: Path) -> None:
    unix = read(write(tmp_path / "unix", request("a"), request("b")))
    dos = read(write(tmp_path / "dos", request("a"), request("b"), end=b"\r\n"))
    assert [line.record_id for line in unix] == [line.record_id for line in dos]
    swapped = read(write(tmp_path / "swapped", request("b"), request("a")))
    assert not {line.record_id for line in unix} & {line.record_id for line in swapped}


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT, LIMIT + 1, 5 * LIMIT])
@pytest.mark.parametrize("end", [b"", b"\n", b"\nnext\n"])
def test_a_line_beyond_the_limit_is_given_without_its_content_and_the_next_one_whole(
    tmp_path: Path, length: int, end: bytes
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * length + end)
    lines = read(path)
    assert lines[0].raw == (b"x" * length if length <= LIMIT else None)
    assert [line.raw for line in lines[1:]] == ([b"next"] if b"next" in end else [])
    if length > LIMIT:
        with pytest.raises(InvalidRequest, match="longer than 1000 bytes"):
            parse_line(lines[0], CustomIds(), LIMIT)


def test_a_huge_file_is_never_held_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    with open(path, "wb") as file:
        for _ in range(100):
            file.write(b"y" * 200_000 + b"\n")
        file.write(b"z" * 8_000_000)
    tracemalloc.start()
    count = sum(1 for _ in read_lines(path, 250_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 101
    assert peak < 4_000_000


# BAT-01
@pytest.mark.parametrize(
    ("value", "code", "part"),
    [
        (b"{", "invalid_json", "not valid JSON"),
        (b"\xff\xfe{}", "invalid_json", "not valid JSON"),
        (b"[" * 100_000, "invalid_json", "not valid JSON"),
        (b"[]", "invalid_json", "must be a JSON object"),
        (request(custom_id=None), "invalid_custom_id", "custom_id must be a text"),
        ({"method": "POST"}, "invalid_custom_id", "custom_id must be a text"),
        (request(custom_id=""), "invalid_custom_id", "custom_id must be a text"),
        (request(custom_id=7), "invalid_custom_id", "custom_id must be a text"),
        (request(url="/v1/embeddings"), "invalid_url", "must be one of /v1/chat/completions, /v1/completions"),
        (request(url=["/v1/completions"]), "invalid_url", "must be one of"),
        (request(url="/v1/completions/"), "invalid_url", "must be one of"),
        (request(method="GET"), "invalid_method", "must be 'POST'"),
        (request(body="text"), "invalid_body", "body must be a JSON object"),
        (request(body={"stream": True}), "invalid_body", "leave stream out"),
        (request(priority=1), None, "unknown field 'priority'"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_name(value: object, code: str | None, part: str) -> None:
    error = refusal(value)
    assert error.code == code
    assert part in error.message


def test_a_repeated_custom_id_names_the_line_that_has_it() -> None:
    ids = CustomIds()
    first, second = (Line(number, f"batch_req_{number}_0", line_of(request("same"))) for number in (3, 9))
    assert parse_line(first, ids, LIMIT).custom_id == "same"
    with pytest.raises(InvalidRequest, match="custom_id 'same' was used on line 3 already") as error:
        parse_line(second, ids, LIMIT)
    assert error.value.code == "duplicate_custom_id"
    assert parse_line(first, ids, LIMIT).custom_id == "same"  # reading a line twice is no repetition


@pytest.mark.parametrize(
    ("raw", "custom_id"),
    [(line_of(request("a", url="?")), "a"), (b"{", None), (b'{"custom_id": 3}', None), (b"[]", None)],
)
def test_a_refused_line_keeps_its_custom_id_where_it_has_one(raw: bytes, custom_id: str | None) -> None:
    assert custom_id_of(Line(1, "batch_req_1_0", raw)) == custom_id


def answered(line: Line, custom_id: str = "a") -> dict[str, Any]:
    return record(line.record_id, custom_id, {"status_code": 200, "request_id": None, "body": {}}, None, None)


def test_an_output_knows_what_was_done_and_what_failed(tmp_path: Path) -> None:
    lines = read(write(tmp_path / "in", *(request(str(n)) for n in range(4))))
    path = tmp_path / "out"
    with Output(path) as output:
        assert not any(map(output.has, lines))
        output.append([answered(lines[0])])
        output.append([answered(lines[2]), record(lines[3].record_id, None, None, "c", "m")])
    with Output(path) as output:
        assert [output.has(line) for line in lines] == [True, False, True, True]
        assert (output.num_done_before, output.num_failed_before) == (3, 1)


# BAT-03
def test_a_record_torn_at_any_byte_is_cut_off_and_nothing_else(tmp_path: Path) -> None:
    lines = read(write(tmp_path / "in", request("a"), request("b")))
    path = tmp_path / "out"
    with Output(path) as output:
        output.append([answered(lines[0])])
        whole = path.read_bytes()
        output.append([answered(lines[1], "b")])
    both = path.read_bytes()
    for size in range(len(whole), len(both)):
        path.write_bytes(both[:size])
        with Output(path) as output:
            assert [output.has(line) for line in lines] == [True, False]
            output.append([answered(lines[1], "b")])
        assert path.read_bytes() == both


def test_an_output_of_another_input_is_refused(tmp_path: Path) -> None:
    mine = read(write(tmp_path / "mine", request("a")))[0]
    other = read(write(tmp_path / "other", request("b")))[0]
    with Output(tmp_path / "out") as output:
        output.append([answered(other)])
    with Output(tmp_path / "out") as output, pytest.raises(ConfigError, match="line 1 differs"):
        output.has(mine)


@pytest.mark.parametrize("content", [b"hello\n", b"{}\n", b'{"id": "batch_req_1", "error": null}\n', b"[]\n", b"\n"])
def test_a_file_that_is_no_output_of_a_batch_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="line 1 is not a record of a batch"):
        Output(path)
    assert path.read_bytes() == content


def test_two_runs_cannot_write_one_output(tmp_path: Path) -> None:
    with Output(tmp_path / "out"), pytest.raises(ConfigError, match="another run is writing it"):
        Output(tmp_path / "out")
    with Output(tmp_path / "out"):
        pass


def test_an_output_that_cannot_be_opened_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="-o .*: No such file or directory"):
        Output(tmp_path / "none" / "out")


def test_records_reach_the_disk_before_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    line = read(write(tmp_path / "in", request("a")))[0]
    with Output(tmp_path / "out") as output:
        output.append([answered(line)])
    assert synced == [(tmp_path / "out").stat().st_size]
