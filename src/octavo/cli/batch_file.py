"""The two files of a batch: requests in, one record a request out, and how a stopped run is continued.

Both are read and written line by line. A record's id holds the number of its input line and a digest of it, so
the output itself tells which lines are done. Records are appended whole and synced; a torn last line is cut
off before a run continues. Records come in the order in which they finish.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from octavo.errors import ConfigError, InvalidRequest

URLS = ("/v1/chat/completions", "/v1/completions")
_FIELDS = ("custom_id", "method", "url", "body")
_BOM = b"\xef\xbb\xbf"
_ID = re.compile(r"batch_req_(\d+)_([0-9a-f]{16})")

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input that is not blank. `raw` is None when it was longer than the limit."""

    number: int  # from 1
    record_id: str
    raw: bytes | None


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]


def read_lines(path: Path, max_line_bytes: int) -> Iterator[Line]:
    """The lines of `path` without their ends; blank ones are counted, not given."""
    with open(path, "rb") as file:
        number = 0
        while raw := file.readline(max_line_bytes + 2):
            number += 1
            if not raw.endswith(b"\n") and len(raw) > max_line_bytes:
                _skip_line(file)
            content = (raw.removeprefix(_BOM) if number == 1 else raw).strip()
            if content:
                digest = hashlib.blake2b(content, digest_size=8).hexdigest()
                yield Line(number, f"batch_req_{number}_{digest}", content if len(content) <= max_line_bytes else None)


def _skip_line(file: BinaryIO) -> None:
    while (part := file.readline(1 << 20)) and not part.endswith(b"\n"):
        pass


class CustomIds:
    """The custom_ids of the input so far, as digests: millions of them fit in memory."""

    def __init__(self) -> None:
        self._line_of: dict[bytes, int] = {}

    def claim(self, custom_id: str, line_number: int) -> None:
        """Raises InvalidRequest when an earlier line has the same id."""
        digest = hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=12).digest()
        first = self._line_of.setdefault(digest, line_number)
        if first != line_number:
            raise InvalidRequest(
                f"custom_id {custom_id[:80]!r} was used on line {first} already.",
                param="custom_id",
                code="duplicate_custom_id",
            )


def parse_line(line: Line, custom_ids: CustomIds, max_line_bytes: int) -> BatchRequest:
    """The request on a line. Raises InvalidRequest, with its custom_id claimed only when it is in order."""
    if line.raw is None:
        raise InvalidRequest(
            f"the line is longer than {max_line_bytes} bytes (--max-body-bytes).", code="line_too_long"
        )
    try:
        value = _decode(line.raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the line is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the line must be a JSON object.", code="invalid_json")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise InvalidRequest("custom_id must be a text that is not empty.", param="custom_id", code="invalid_custom_id")
    custom_ids.claim(custom_id, line.number)
    return BatchRequest(custom_id, *_target(value))


def _target(value: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    for name in value:
        if name not in _FIELDS:
            raise InvalidRequest(f"unknown field {name[:80]!r}; a line has {', '.join(_FIELDS)}.", param=name[:80])
    method, url, body = value.get("method"), value.get("url"), value.get("body")
    if method != "POST":
        raise InvalidRequest(f"method is {method!r}; it must be 'POST'.", param="method", code="invalid_method")
    if url not in URLS:
        raise InvalidRequest(f"url is {url!r}; it must be one of {', '.join(URLS)}.", param="url", code="invalid_url")
    if not isinstance(body, dict):
        raise InvalidRequest("body must be a JSON object.", param="body", code="invalid_body")
    if body.get("stream"):
        raise InvalidRequest(
            "a record holds the whole answer; leave stream out.", param="body.stream", code="invalid_body"
        )
    return url, body


def custom_id_of(line: Line) -> str | None:
    """The custom_id of a line that could not be used, as far as it has one."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        value = _decode(line.raw or b"")
        if isinstance(value, dict) and isinstance(value.get("custom_id"), str):
            return value["custom_id"] or None
    return None


class Output:
    """The output file, open for one run. Holds what earlier runs finished: line number -> digest of the line."""

    def __init__(self, path: Path) -> None:
        """Open, lock, repair and read `path`. Raises ConfigError when it is not the output of a batch."""
        self._path = path
        self.num_failed_before = 0
        self._done: dict[int, str] = {}
        try:
            self._file = open(path, "a+b", buffering=0)
        except OSError as error:
            raise ConfigError(f"-o {path}: {error.strerror}.") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read_back()
        except BlockingIOError:
            self._file.close()
            raise ConfigError(f"-o {path}: another run is writing it.") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def num_done_before(self) -> int:
        return len(self._done)

    def has(self, line: Line) -> bool:
        """Whether an earlier run finished `line`. Raises ConfigError when the input is not the one it read."""
        digest = self._done.get(line.number)
        if digest is None:
            return False
        if line.record_id != f"batch_req_{line.number}_{digest}":
            raise ConfigError(
                f"-o {self._path} holds the answers to another input: line {line.number} differs. "
                "Choose another output."
            )
        return True

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Write records whole and sync them: after this returns, they survive whatever happens."""
        data = memoryview(b"".join(_encode(record) + b"\n" for record in records))
        while data:
            data = data[self._file.write(data) :]
        os.fsync(self._file.fileno())

    def _read_back(self) -> None:
        self._file.seek(0)
        end = 0  # behind the last whole line
        with open(self._file.fileno(), "rb", closefd=False) as lines:
            for number, raw in enumerate(lines, 1):
                if not raw.endswith(b"\n"):
                    break
                self._note(number, raw)
                end += len(raw)
        self._file.truncate(end)

    def _note(self, number: int, raw: bytes) -> None:
        try:
            record = _decode(raw)
            found = _ID.fullmatch(record["id"])
            failed = record["error"] is not None
        except (msgspec.MsgspecError, KeyError, TypeError):
            found = None
        if found is None:
            raise ConfigError(f"-o {self._path}: line {number} is not a record of a batch. Choose another output.")
        self._done[int(found[1])] = found[2]
        self.num_failed_before += failed


def record(
    record_id: str, custom_id: str | None, response: Mapping[str, Any] | None, code: str | None, message: str | None
) -> dict[str, Any]:
    """A line of the output. `error` is null exactly when the request was answered: then `message` is None."""
    error = None if message is None else {"code": code, "message": message}
    return {"id": record_id, "custom_id": custom_id, "response": response, "error": error}
