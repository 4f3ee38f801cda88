"""A batch as a whole: every line answered once, whatever it holds and however often the run is stopped."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from octavo.cli import batch
from octavo.cli.batch import Batch, batch_config
from octavo.cli.batch_file import Output
from octavo.cli.main import main
from octavo.config import make_config

MAX_NUM_SEQS = 4
Answer = Callable[[dict[str, Any]], Any]


class Stopped(Exception):
    pass


class FakeClient:
    """An engine that starts at once; the answers come from the application of the test."""

    def __init__(self) -> None:
        self.num_starts = self.num_waits = self.num_closes = 0

    async def start(self) -> None:
        self.num_starts += 1

    async def wait_ready(self) -> SimpleNamespace:
        self.num_waits += 1
        return SimpleNamespace(max_num_seqs=MAX_NUM_SEQS)

    async def close(self) -> None:
        self.num_closes += 1


def error_response(status: int, code: str) -> Response:
    return JSONResponse(
        {"error": {"message": f"because {code}", "type": "some_error", "param": None, "code": code}}, status
    )


async def echo(request: Request) -> Response:
    """What the body asks for: an answer, a refusal, a wait."""
    body = await request.json()
    await asyncio.sleep(body.get("sleep", 0))
    if body["prompt"] == "too long":
        return error_response(400, "context_length_exceeded")
    if body["prompt"] == "wrong model":
        return error_response(404, "model_not_found")
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    headers = {"X-Request-Id": f"req-{body['prompt']}"}
    return JSONResponse({"choices": [{"text": body["prompt"]}], "usage": usage}, headers=headers)


class Run:
    """Runs batches in a folder, with `app` in the place of the server."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.client = FakeClient()
        self._monkeypatch = monkeypatch
        self.use(echo)

    def use(self, endpoint: Callable[[Request], Any]) -> None:
        routes = [Route(path, endpoint, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")]
        self._monkeypatch.setattr(batch, "create_app", lambda client, config: Starlette(routes=routes))

    def write(self, *lines: bytes | dict[str, Any], end: bytes = b"\n") -> None:
        raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.source.write_bytes(b"".join(line + end for line in raw))

    def __call__(self) -> Batch:
        config = batch_config(make_config({"max_body_bytes": 2000}))
        with Output(self.target) as output:
            made = Batch(self.source, output, config, self.client)  # type: ignore[arg-type]
            asyncio.run(made.run())
        return made

    @property
    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_bytes().splitlines()]

    @property
    def custom_ids(self) -> list[str]:
        return sorted(record["custom_id"] for record in self.records)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


def request(custom_id: str, prompt: str | None = None, **changes: Any) -> dict[str, Any]:
    body = {"prompt": custom_id if prompt is None else prompt} | changes
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


# BAT-01
def test_one_bad_line_of_each_kind_spoils_no_good_one(run: Run) -> None:
    good_chat = request("chat") | {"url": "/v1/chat/completions"}
    run.write(
        b"\xef\xbb\xbf" + json.dumps(request("first")).encode(),
        b"",
        b"{broken",
        {"method": "POST", "url": "/v1/completions", "body": {}},  # no custom_id
        request("unknown url") | {"url": "/v1/images"},
        request("over-long", "too long"),
        request("wrong model", "wrong model"),
        request("first"),  # a repetition
        request("huge", "x" * 3000),
        good_chat,
        end=b"\r\n",
    )
    run.source.write_bytes(run.source.read_bytes() + json.dumps(request("last")).encode())  # no final newline
    made = run()
    by_line = {int(record["id"].split("_")[2]): record for record in run.records}
    assert sorted(by_line) == [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    codes = {number: record["error"] and record["error"]["code"] for number, record in by_line.items()}
    assert codes == {
        1: None,
        3: "invalid_json",
        4: "invalid_custom_id",
        5: "invalid_url",
        6: "context_length_exceeded",
        7: "model_not_found",
        8: "duplicate_custom_id",
        9: "line_too_long",
        10: None,
        11: None,
    }
    assert by_line[5]["error"]["message"].startswith("line 5: url is '/v1/images'")
    assert (made.num_lines, made.num_answered, made.num_failed, made.num_output_tokens) == (10, 3, 7, 6)
    assert made.summary().startswith("10 requests: 0 done before, 3 answered now, 7 failed in all. 6 tokens in ")


# BAT-03
def test_every_record_has_one_shape_and_error_is_null_exactly_when_answered(run: Run) -> None:
    run.write(request("a"), request("b", "too long"), b"{", request("a"))
    run()
    for record in run.records:
        assert list(record) == ["id", "custom_id", "response", "error"]
        answered = record["response"] is not None and record["response"]["status_code"] == 200
        assert (record["error"] is None) == answered
        if record["error"] is not None:
            assert set(record["error"]) == {"code", "message"}
    by_id = {record["custom_id"]: record for record in run.records if record["custom_id"]}
    assert by_id["a"]["response"] == {
        "status_code": 200,
        "request_id": "req-a",
        "body": {"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}},
    }
    assert by_id["b"]["response"]["status_code"] == 400
    assert by_id["b"]["error"] == {"code": "context_length_exceeded", "message": "because context_length_exceeded"}
    assert len(by_id) == 2  # the repetition of "a" does not take its id


# BAT-03
def test_a_run_stopped_anywhere_goes_on_without_losing_or_doubling_a_line(run: Run) -> None:
    run.write(*(request(str(number)) for number in range(20)))
    answers = itertools.count(1)

    async def stops(request: Request) -> Response:
        if next(answers) % 7 == 0:
            raise Stopped
        return await echo(request)

    run.use(stops)
    num_stops = 0
    is_complete = False
    while not is_complete:
        try:
            run()
            is_complete = True
        except* Stopped:
            num_stops += 1
    assert num_stops >= 2
    assert run.custom_ids == sorted(map(str, range(20)))


def test_a_finished_batch_starts_no_engine(run: Run) -> None:
    run.write(request("a"), request("b", "too long"))
    run()
    written = run.target.read_bytes()
    again = run()
    assert run.target.read_bytes() == written
    assert run.client.num_starts == run.client.num_closes == 1
    assert (again.num_answered, again.num_failed) == (0, 1)


def test_a_repetition_of_a_line_that_was_done_before_is_still_one(run: Run) -> None:
    run.write(request("a"))
    run()
    run.write(request("a"), request("a"), request("b"))
    run()
    assert [record["error"] and record["error"]["code"] for record in run.records] == [
        None,
        "duplicate_custom_id",
        None,
    ]


def test_an_empty_input_gives_an_empty_output(run: Run) -> None:
    run.write(b"", b"  ")
    assert run().num_lines == 0
    assert run.target.read_bytes() == b""


def test_as_many_requests_run_at_once_as_the_engine_takes_and_no_more(run: Run) -> None:
    running, most = 0, 0

    async def counts(request: Request) -> Response:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return await echo(request)

    run.use(counts)
    run.write(*(request(str(number)) for number in range(15)))
    run()
    assert most == MAX_NUM_SEQS
    assert len(run.records) == 15


def test_a_request_whose_engine_died_is_asked_again_and_then_given_up(run: Run) -> None:
    asked: list[str] = []

    async def dies(request: Request) -> Response:
        prompt = (await request.json())["prompt"]
        asked.append(prompt)
        if prompt == "poison" or (prompt == "unlucky" and asked.count(prompt) == 1):
            return error_response(503, "engine_dead")
        return await echo(request)

    run.use(dies)
    run.write(request("poison"), request("unlucky"))
    made = run()
    assert sorted(asked) == ["poison", "poison", "unlucky", "unlucky"]
    assert run.client.num_waits == 1 + 2  # at the start, and before each second attempt
    outcome = {record["custom_id"]: record["error"] and record["error"]["code"] for record in run.records}
    assert outcome == {"poison": "engine_dead", "unlucky": None}
    assert (made.num_answered, made.num_failed) == (1, 1)


def test_a_slow_request_does_not_hold_back_the_records_of_others(run: Run) -> None:
    run.write(request("slow", sleep=0.3), *(request(str(number)) for number in range(8)))
    run()
    assert [record["custom_id"] for record in run.records][-1] == "slow"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-o", "out"], "the following arguments are required: -i/--input-file (see octavo run-batch --help)."),
        (["-i", "none", "-o", "out"], "-i none: no such file."),
        (["-i", ".", "-o", "out"], "-i .: it is a folder."),
        (["-i", "in", "-o", "in"], "-o in is the input itself. Choose another output."),
        (["-i", "in", "-o", "out", "--port", "1"], "--port is a flag of octavo serve, not of octavo run-batch."),
    ],
)
def test_mistakes_in_files_are_told_before_anything_is_loaded(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").write_text("")
    assert main(["run-batch", *argv]) == 2
    assert capsys.readouterr().err == f"octavo: error: {message}\n"


# -- the real command with a real model ------------------------------------------------------------------


def chat_request(custom_id: str, content: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


# BAT-01, BAT-03
def test_a_killed_run_is_finished_by_the_next(smollm2_path: Path, run: Run) -> None:
    small = "--max-model-len 256 --kv-cache-memory-bytes 64MiB --threads 1 --max-num-seqs 2".split()
    command = [sys.executable, "-m", "octavo.cli", "run-batch", str(smollm2_path), *small]
    command += ["-i", str(run.source), "-o", str(run.target)]
    run.write(
        *(chat_request(str(number), f"What is {number} plus one?", 8) for number in range(6)),
        chat_request("over-long", "word " * 400, 8),
        request("text", "The capital of France is", max_tokens=4, temperature=0),
    )
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 90
    while not (run.target.exists() and run.target.stat().st_size) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert 0 < len(run.records)
    finished = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert finished.returncode == 1, finished.stderr  # one request is over-long
    assert "1 failed in all" in finished.stderr
    assert run.custom_ids == sorted([*map(str, range(6)), "over-long", "text"])
    by_id = {record["custom_id"]: record for record in run.records}
    assert by_id["over-long"]["error"]["code"] == "context_length_exceeded"
    assert by_id["text"]["response"]["body"]["choices"][0]["text"].startswith(" Paris")
