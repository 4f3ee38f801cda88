"""Reading the small files beside a model: capped in size, UTF-8, errors that name the file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.errors import LoadError

MAX_JSON_BYTES = 16 * 1024 * 1024


def read_text(path: Path, *, error: type[LoadError], max_bytes: int = MAX_JSON_BYTES) -> str:
    """The file as text. Raises `error` if it is missing, larger than `max_bytes` or not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as reason:
        raise error(f"{path} cannot be read: {reason.strerror}.") from reason
    if len(data) > max_bytes:
        raise error(f"{path} has more than {max_bytes} bytes, the limit for this file.")
    try:
        return data.decode()
    except UnicodeDecodeError as reason:
        raise error(f"{path} is not UTF-8: {reason}.") from reason


def read_json(
    path: Path, *, error: type[LoadError], max_bytes: int = MAX_JSON_BYTES, default: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The object in a JSON file; `default`, if given, where there is no file."""
    if default is not None and not path.is_file():
        return default
    text = read_text(path, error=error, max_bytes=max_bytes)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as reason:
        raise error(f"{path} is not JSON: {reason}.") from reason
    if not isinstance(value, dict):
        raise error(f"{path} holds a JSON {type(value).__name__}; it must be an object.")
    return value


def reject_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads(object_pairs_hook=...): an object with a key twice is an error, not the last value."""
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} occurs twice")
        result[key] = value
    return result
