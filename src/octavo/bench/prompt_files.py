"""Files of real prompts: conversations as ShareGPT has them, and lines of one's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.bench.prompts import PromptMaker
from octavo.errors import ConfigError

# As vLLM's benchmark chooses among ShareGPT's conversations, in tokens.
MIN_LEN = 4
MAX_PROMPT_LEN = 1024
MAX_TOTAL_LEN = 2048


def read_sharegpt(path: str, maker: PromptMaker | None, output_len: int | None) -> list[tuple[str, int]]:
    """(prompt, output length) of each conversation: its first question, and the length of its first answer.

    Left out are conversations without an answer, and those that are shorter or longer than the limits above.
    """
    if maker is None and output_len is None:
        raise ConfigError(
            "--dataset-name sharegpt counts the tokens of the answers, but the server's model has no tokenizer on "
            "this machine. Give --tokenizer PATH, or --sharegpt-output-len N."
        )
    pairs = []
    for row in _rows(path):
        turns = _turns(row)
        if len(turns) < 2:
            continue
        prompt, answer = turns[:2]
        length = output_len or (maker.count(answer) - maker.num_special if maker is not None else 0)
        if maker is not None:
            prompt_len = maker.count(prompt)
            is_short = prompt_len < MIN_LEN or (output_len is None and length < MIN_LEN)
            if is_short or prompt_len > MAX_PROMPT_LEN or prompt_len + length > MAX_TOTAL_LEN:
                continue
        pairs.append((prompt, length))
    if not pairs:
        raise ConfigError(f"--dataset-path {path} holds no conversation of a usable length.")
    return pairs


def read_custom(path: str, output_len: int) -> list[tuple[str, int]]:
    """(prompt, output length) of each line {"prompt": ..., "output_tokens": ...}; the latter may be absent."""
    pairs = []
    for number, row in enumerate(_rows(path), 1):
        prompt, length = row.get("prompt"), row.get("output_tokens", output_len)
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(
                f"{path}, entry {number} has no text under 'prompt'; it has {', '.join(row) or 'nothing'}."
            )
        if type(length) is not int or length < 1:
            raise ConfigError(
                f"{path}, entry {number}: output_tokens is {length!r}; it must be an integer of at least 1."
            )
        pairs.append((prompt, length))
    if not pairs:
        raise ConfigError(f"--dataset-path {path} holds no prompts.")
    return pairs


def _turns(row: Mapping[str, Any]) -> list[str]:
    """The texts of a conversation, from the first of a human on."""
    messages = row.get("conversations") or row.get("conversation") or row.get("messages") or ()
    said = [
        (message.get("from") or message.get("role"), message.get("value") or message.get("content"))
        for message in messages
    ]
    first = next((i for i, (who, _) in enumerate(said) if who in ("human", "user")), len(said))
    texts = [text for _, text in said[first:]]
    return texts if all(isinstance(text, str) for text in texts) else []


def _rows(path: str) -> list[dict[str, Any]]:
    """The objects of a JSON array, or of JSON lines."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: {getattr(error, 'strerror', None) or error}.") from None
    if text.lstrip().startswith("["):
        rows: list[Any] = _json(path, 1, text)
    else:
        rows = [_json(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}, entry {number} is not a JSON object.")
    return rows


def _json(path: str, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path}, line {line} is not JSON: {error}.") from None
