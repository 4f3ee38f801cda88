"""Conversations: what is remembered, what a stop leaves, and talking to a server over real HTTP."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.chat import Conversation
from octavo.cli.main import main
from octavo.cli.talk import Message, ServerTalker, Settings, Usage
from octavo.errors import ConfigError, InvalidRequest, RequestError, Unavailable


class Parrot:
    """Answers with the number of messages that it was given and the last of them, word by word."""

    model = "parrot"

    def __init__(self) -> None:
        self.usage = Usage(prompt_tokens=7, cached_tokens=4, output_tokens=3, finish_reason="stop")
        self.asked: list[list[Message]] = []

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        self.asked.append(list(messages))
        yield f"{len(messages)} "
        for word in messages[-1]["content"].split():
            if word == "refuse":
                raise InvalidRequest("not that")
            if word == "interrupt":
                raise KeyboardInterrupt
            yield word

    def close(self) -> None:
        pass


def roles(messages: Sequence[Message]) -> str:
    return "".join(message["role"][0] for message in messages)


def talk(monkeypatch: pytest.MonkeyPatch, conversation: Conversation, *lines: str) -> None:
    typed = iter(lines)

    def answer_prompt(_: str) -> str:
        line = next(typed, None)
        if line is None:
            raise EOFError
        if line == "^C":
            raise KeyboardInterrupt
        return line

    monkeypatch.setattr("builtins.input", answer_prompt)
    conversation.interact()


def test_every_turn_sees_the_turns_before(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parrot = Parrot()
    talk(monkeypatch, Conversation(parrot, "be brief", show_stats=False), "one", "", "two", "/exit", "three")
    assert [roles(messages) for messages in parrot.asked] == ["su", "suau"]
    assert parrot.asked[1][2] == {"role": "assistant", "content": "2 one"}
    assert capsys.readouterr().out.splitlines()[1:] == ["2 one", "4 two"]


def test_reset_keeps_the_system_message_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    parrot = Parrot()
    talk(monkeypatch, Conversation(parrot, "be brief", show_stats=False), "one", "/reset", "two")
    assert [roles(messages) for messages in parrot.asked] == ["su", "su"]


def test_a_stopped_answer_stays_in_the_conversation_as_far_as_it_was_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = Parrot()
    conversation = Conversation(parrot, None, show_stats=False)
    talk(monkeypatch, conversation, "half interrupt never", "next")
    assert conversation.messages[1] == {"role": "assistant", "content": "1 half"}
    assert "1 half ... (stopped)" in capsys.readouterr().out
    assert roles(parrot.asked[1]) == "uau"


def test_a_refused_turn_is_told_and_the_conversation_goes_on_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Refusing(Parrot):
        def answer(self, messages: Sequence[Message]) -> Iterator[str]:
            if "refuse" in messages[-1]["content"]:
                raise InvalidRequest("not that")
            return super().answer(messages)

    parrot = Refusing()
    talk(monkeypatch, Conversation(parrot, None, show_stats=False), "refuse", "one")
    assert capsys.readouterr().err == "error: not that\n"
    assert [roles(messages) for messages in parrot.asked] == ["u"]


def test_an_interrupt_at_the_prompt_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = Parrot()
    talk(monkeypatch, Conversation(parrot, None, show_stats=False), "^C", "one", "/what")
    assert len(parrot.asked) == 1
    shown = capsys.readouterr().out
    assert "(/exit or Ctrl-D ends)" in shown
    assert shown.count("/reset forgets") == 2  # at the start, and for a command that is not known


def test_stats_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    Conversation(Parrot(), None, show_stats=True).read(["hello"])
    out, err = capsys.readouterr()
    assert out == "1 hello\n"
    assert "[7 prompt tokens, 4 of them cached; first token after" in err and "ended by stop]" in err


# -- a server ----------------------------------------------------------------------------------------


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}]})


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 5}}
GOOD = (
    b": keep-alive\n\n"
    + delta("Hel")
    + delta("lo", "stop")
    + event({"choices": [], "usage": USAGE})
    + b"data: [DONE]\n\n"
)


@contextmanager
def server(status: int, answer: bytes) -> Iterator[tuple[str, list[tuple[str, str | None, Any]]]]:
    """An HTTP server that answers every POST so; yields its URL and what it was sent."""
    seen: list[tuple[str, str | None, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, b'{"object": "list", "data": [{"id": "first"}, {"id": "second"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, self.headers["Authorization"], body))
            self.reply(status, answer)

        def reply(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}", seen
        finally:
            http.shutdown()
            thread.join()


HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_server_streams_its_answer_and_its_usage(suffix: str) -> None:
    with server(200, GOOD) as (url, seen):
        talker = ServerTalker(url + suffix, None, "key", Settings(max_tokens=5, temperature=0.0))
        assert list(talker.answer(HELLO)) == ["Hel", "lo"]
    assert talker.model == "first"
    assert talker.usage == Usage(prompt_tokens=9, cached_tokens=5, output_tokens=2, finish_reason="stop")
    ((path, key, body),) = seen
    assert (path, key) == ("/v1/chat/completions", "Bearer key")
    assert body == {
        "model": "first",
        "messages": HELLO,
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 5,
        "temperature": 0.0,
    }


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (400, b'{"error": {"message": "too long"}}', "answered 400: too long"),
        (502, b"<html>Bad gateway</html>", "answered 502: <html>Bad gateway</html>"),
        (200, delta("Hel") + event({"error": {"message": "it died"}}), "it died"),
        (200, delta("Hel"), "ended the answer before it was complete"),
    ],
)
def test_an_answer_that_fails_says_why(status: int, answer: bytes, message: str) -> None:
    with server(status, answer) as (url, _):
        talker = ServerTalker(url, "m", None, Settings())
        with pytest.raises(RequestError, match=message):
            list(talker.answer(HELLO))


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(Unavailable, match=r"http://127.0.0.1:1 cannot be reached"):
        ServerTalker("http://127.0.0.1:1", None, None, Settings())


@pytest.mark.parametrize("url", ["ftp://x", "http://", "/path"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="it must be like http://127.0.0.1:8000"):
        ServerTalker(url, "m", None, Settings())


def test_options_of_an_engine_are_refused_beside_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "--dtype", "float32"]) == 2
    assert capsys.readouterr().err == "octavo: error: --dtype has no effect with --url: the server has its own.\n"
    assert main(["chat", "--api-key", "k"]) == 2
    assert "--api-key is for a server; it needs --url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "typed", "prompts"),
    [([], "two\nlines\n", ["two\nlines"]), (["--lines"], "two\n\nlines\n", ["two", "lines"]), ([], "", [])],
)
def test_piped_input_is_one_prompt_or_a_turn_a_line(
    flags: list[str],
    typed: str,
    prompts: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    with server(200, GOOD) as (url, seen):
        assert main(["chat", "m", "--url", url, *flags]) == 0
    assert [body["messages"][-1]["content"] for _, _, body in seen] == prompts
    assert capsys.readouterr().out == "Hello\n" * len(prompts)


def test_piped_input_that_fails_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    with server(429, b'{"error": {"message": "slow down"}}') as (url, _):
        assert main(["chat", "m", "--url", url]) == 1
    assert capsys.readouterr().err.endswith("answered 429: slow down\n")


# -- a model in this process ---------------------------------------------------------------------------

SMALL = ["--max-model-len", "512", "--kv-cache-memory-bytes", "64MiB", "--threads", "1"]


def test_a_second_turn_reuses_the_kv_of_the_first(smollm2_path: Path) -> None:
    from octavo.cli.local_talker import LocalTalker
    from octavo.config import make_config

    options = {"model": str(smollm2_path), "max_model_len": 512, "kv_cache_memory_bytes": 2**26, "threads": 1}
    options["act_dtype"] = "bf16"  # the answer is known for activations that are not rounded
    with closing(LocalTalker(make_config(options), Settings(max_tokens=12, temperature=0.0))) as talker:
        conversation = Conversation(talker, None, show_stats=False)
        first = "".join(conversation.turn("What is the capital of France?"))
        first_prompt = talker.usage.prompt_tokens
        assert "Paris" in first
        assert talker.usage.cached_tokens == 0
        assert "".join(conversation.turn("And of Italy?"))
        assert talker.usage.prompt_tokens > first_prompt
        assert talker.usage.cached_tokens >= first_prompt // 16 * 16
        with pytest.raises(InvalidRequest, match="512"):
            list(conversation.turn("many words " * 400))


class Terminal:
    """The far end of a pseudo-terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""

    def type(self, text: bytes) -> None:
        os.write(self._descriptor, text)

    def wait_for(self, expected: bytes, within_s: float = 60) -> None:
        """Read up to the end of `expected`."""
        deadline = time.monotonic() + within_s
        while expected not in self._unread:
            left_s = max(0.0, deadline - time.monotonic())
            assert select.select([self._descriptor], [], [], left_s)[0], f"no {expected!r} in {self._unread!r}"
            self._unread += os.read(self._descriptor, 4096)
        self._unread = self._unread.partition(expected)[2]


def test_ctrl_c_stops_the_answer_and_not_the_program(smollm2_path: Path) -> None:
    outside, inside = pty.openpty()
    command = [sys.executable, "-m", "octavo.cli", "chat", str(smollm2_path), *SMALL, "--temperature", "0"]
    process = subprocess.Popen(command, stdin=inside, stdout=inside, stderr=inside, start_new_session=True)
    os.close(inside)
    terminal = Terminal(outside)
    try:
        terminal.wait_for(b">>> ")
        terminal.type(b"Tell me a very long story.\n")
        terminal.wait_for(b"story.\r\n")
        terminal.wait_for(b" ")  # the answer has begun
        process.send_signal(signal.SIGINT)
        terminal.wait_for(b"(stopped)")
        terminal.wait_for(b">>> ")
        terminal.type(b"/exit\n")
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(outside)
