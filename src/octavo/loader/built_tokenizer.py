"""What the tokenizer of a GGUF file becomes, and files of it that later starts read instead of the metadata.

A file belongs to one GGUF file as it lies on disk, and to the versions that made it; its name says so. Whatever is
wrong with it costs the time to build the tokenizer again, and nothing else.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import Tokenizer, processors

from octavo import __version__
from octavo.loader.file_digest import file_identity, has_settled

MAX_FILES = 32
_LAYOUT = 1
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """A tokenizer with what a GGUF file says around it."""

    tokenizer: Tokenizer  # adds BOS and EOS as `add_bos` and `add_eos` say
    bos_token_id: int | None
    eos_token_id: int | None
    unk_token_id: int | None
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]  # all that end a turn, `eos_token_id` first
    add_bos: bool
    add_eos: bool


class _Stored(msgspec.Struct, array_like=True, frozen=True):
    tokenizer_json: str
    ids: tuple[int | None, int | None, int | None, int | None]
    eos_token_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    chat_templates: dict[str, str]


Built = tuple[GgufTokenizer, dict[str, str]]  # and its chat templates


def kept_tokenizer(path: Path, folder: Path, build: Callable[[], Built]) -> Built:
    """What `build` makes of the GGUF file `path`, or made at an earlier start: `folder` keeps it."""
    identity = f"{_LAYOUT} {__version__} {tokenizers.__version__} {file_identity(path)}"
    entry = folder / f"{hashlib.sha256(identity.encode()).hexdigest()}.tokenizer"
    known = _read(entry)
    if known is not None:
        return known
    built, templates = build()
    if has_settled(path):
        with suppress(OSError):  # a read-only or full cache only costs the time to build it again
            _write(entry, _stored(built, templates))
    return built, templates


def _stored(built: GgufTokenizer, templates: dict[str, str]) -> _Stored:
    ids = (built.bos_token_id, built.eos_token_id, built.unk_token_id, built.pad_token_id)
    return _Stored(built.tokenizer.to_str(), ids, built.eos_token_ids, built.add_bos, built.add_eos, templates)


def _read(entry: Path) -> Built | None:
    try:
        data = entry.read_bytes()
    except OSError:
        return None
    content = memoryview(data)[_DIGEST_BYTES:]
    if hashlib.sha256(content).digest() != data[:_DIGEST_BYTES]:
        return None
    stored = msgspec.msgpack.decode(content, type=_Stored)
    tokenizer = Tokenizer.from_str(stored.tokenizer_json)
    built = GgufTokenizer(tokenizer, *stored.ids, stored.eos_token_ids, stored.add_bos, stored.add_eos)
    return built, stored.chat_templates


def _write(entry: Path, stored: _Stored) -> None:
    content = msgspec.msgpack.encode(stored)
    entry.parent.mkdir(parents=True, exist_ok=True)
    draft = entry.with_name(f"{entry.name}.{os.getpid()}")
    draft.write_bytes(hashlib.sha256(content).digest() + content)
    draft.replace(entry)
    newest_first = sorted(entry.parent.glob("*.tokenizer"), key=lambda path: -path.stat().st_mtime)
    for path in newest_first[MAX_FILES:]:
        path.unlink(missing_ok=True)


def surrounding(before: Sequence[int], after: Sequence[int]) -> processors.PostProcessor:
    """Puts token ids before and after each text."""
    names = {token_id: f"[{token_id}]" for token_id in (*before, *after)}
    single = [*(f"{names[token_id]}:0" for token_id in before), "$A:0", *(f"{names[token_id]}:0" for token_id in after)]
    special_tokens = [(name, token_id) for token_id, name in names.items()]
    return processors.TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=special_tokens)
