"""Text to token ids, token ids to bytes.

`Tokenizer` wraps a Rust `tokenizers.Tokenizer` from a model folder or from GGUF metadata. Encoding is the
library's. Decoding is ours, over bytes, so that text can be produced token by token: `decode` here and
`IncrementalDetokenizer` read the same table and always agree. The server and the engine's clients call it;
a tokenizer is immutable once built, `encode` releases the GIL, and both may run in any thread.

Byte tokens (`<0xE2>`) are bytes of the text like any others: a run that is not valid UTF-8 becomes one
U+FFFD per broken character, where the library writes one per byte of the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from octavo.engine.chat_template import ChatTemplate
from octavo.errors import ContextLengthExceeded, InvalidRequest, TokenizerError
from octavo.loader.built_tokenizer import GgufTokenizer, surrounding
from octavo.loader.json_files import read_text
from octavo.loader.tokenizer_files import (
    DEFAULT_TEMPLATE,
    MAX_TEMPLATE_BYTES,
    TokenizerFiles,
    chat_templates_at,
    tokenizer_files_in,
    tokenizer_files_in_gguf,
    tokenizer_files_of_gguf,
)

NAMED_SPECIAL_TOKENS: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class Tokenizer:
    """The tokenizer of one model.

    `vocab_size` is one more than the largest token id; logit rows beyond it are padding and are no tokens.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Sequence[int] = (),
        chat_templates: Mapping[str, str] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """`special_tokens` maps names such as "bos_token" to texts of the vocabulary.

        Raises TokenizerError for a decoder that cannot work token by token, and for a template with an error.
        """
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._codec = _Codec.of(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_tokens: dict[str, str] = dict(special_tokens or {})
        self.chat_template = ChatTemplate(chat_templates, self.special_tokens) if chat_templates else None
        if vocab_size is None:  # the library counts tokens, which is less where ids have gaps
            vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.vocab_size: int = vocab_size
        if self.vocab_size == 0:
            raise TokenizerError("The tokenizer has no tokens.")
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")
        self.pad_token_id = self._id_of("pad_token")
        self.unk_token_id = self._id_of("unk_token")
        first = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*first, *eos_token_ids]))
        around = tokenizer.encode("").ids
        self.adds_bos = self.bos_token_id is not None and around[:1] == [self.bos_token_id]
        self._bytes = _ByteTable(self._read_bytes)
        self._visible_bytes = _ByteTable(
            lambda token_id: b"" if token_id in self._special_ids else self._bytes[token_id]
        )

    @classmethod
    def from_files(cls, files: TokenizerFiles, chat_templates: Mapping[str, str] | None = None) -> Tokenizer:
        """`chat_templates` replace those of the files."""
        templates = files.chat_templates if chat_templates is None else chat_templates
        if files.gguf is not None:
            return cls._from_gguf(files.gguf, templates)
        assert files.tokenizer_json is not None, "tokenizer files without a tokenizer"
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
        except Exception as error:  # the library raises bare exceptions
            raise TokenizerError(f"{files.tokenizer_json} cannot be read: {error}") from error
        config = {**files.special_tokens_map, **files.tokenizer_config}
        _add_configured_tokens(tokenizer, config, files.tokenizer_json)
        special_tokens = _special_texts(tokenizer, config)
        _apply_bos_eos_flags(tokenizer, config, special_tokens)
        return cls(tokenizer, special_tokens=special_tokens, chat_templates=templates)

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """From a model folder with a tokenizer.json and what stands beside it."""
        return cls.from_files(tokenizer_files_in(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any]) -> Tokenizer:
        """From the metadata of a GGUF file."""
        return cls.from_files(tokenizer_files_of_gguf(metadata, Path("GGUF metadata")))

    @classmethod
    def _from_gguf(cls, built: GgufTokenizer, chat_templates: Mapping[str, str]) -> Tokenizer:
        ids = {
            "bos_token": built.bos_token_id,
            "eos_token": built.eos_token_id,
            "unk_token": built.unk_token_id,
            "pad_token": built.pad_token_id,
        }
        texts = {
            name: text
            for name, token_id in ids.items()
            if token_id is not None and (text := built.tokenizer.id_to_token(token_id)) is not None
        }
        return cls(
            built.tokenizer,
            special_tokens=texts,
            eos_token_ids=built.eos_token_ids,
            chat_templates=chat_templates,
            vocab_size=built.tokenizer.get_vocab_size(with_added_tokens=True),
        )

    @property
    def has_chat_template(self) -> bool:
        return self.chat_template is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """`ChatTemplate.render`: the prompt text of a conversation. Encode it with add_special_tokens=False."""
        if self.chat_template is None:
            raise InvalidRequest(
                "This model is a base model without a chat template. Use completions, or start the server with "
                "--chat-template FILE.",
                param="messages",
            )
        return self.chat_template.render(messages, **options)

    def encode(self, text: str, add_special_tokens: bool = True, *, max_tokens: int | None = None) -> list[int]:
        """The ids of `text`; special tokens that it spells out are recognized.

        `add_special_tokens` adds BOS (and EOS) where the model wants one, never a second BOS before one that the
        text begins with. Text that a chat template made is encoded without. With `max_tokens`, a text too long
        to fit into so many tokens is refused without encoding it. Raises InvalidRequest for a lone surrogate.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    f"The text holds a lone surrogate (U+{ord(text[error.start]):04X} at character {error.start}), "
                    "which is not Unicode text."
                ) from error
        if max_tokens is not None and len(text) > 16 * max_tokens and len(text) > max_tokens * self._max_token_chars:
            raise ContextLengthExceeded(
                f"The text has {len(text)} characters, which cannot fit into {max_tokens} tokens. Shorten it."
            )
        # The batch call, unlike the single one, releases the GIL.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if add_special_tokens and self.adds_bos and ids[1:2] == [self.bos_token_id]:
            del ids[0]
        return ids

    def decode(
        self,
        token_ids: Iterable[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """The text of `token_ids`, whatever bytes they are: broken characters become U+FFFD.

        `spaces_between_special_tokens` matters to the rare tokenizers that put spaces between all tokens.
        Raises InvalidRequest for an id outside the vocabulary.
        """
        token_ids = list(token_ids)
        for token_id in token_ids:
            self.check_id(token_id)
        reader = TokenReader(self, skip_special_tokens, spaces_between_special_tokens)
        text = b"".join(map(reader.read, token_ids)).decode("utf-8", "replace")
        return text[1:] if self.strips_leading_space and text.startswith(" ") else text

    def check_id(self, token_id: int, param: str | None = None) -> None:
        """Raises InvalidRequest unless `token_id` is one of this vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise InvalidRequest(
                f"Token id {token_id} is outside the vocabulary of {self.vocab_size} tokens.", param=param
            )

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds in the middle of a text: a part of a character perhaps. Special tokens: their text."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """`token_bytes` as text, with U+FFFD for a part of a character."""
        return self._bytes[token_id].decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_id(self, text: str) -> int | None:
        """The id of the token spelled `text` in the vocabulary."""
        return self._tokenizer.token_to_id(text)

    @property
    def special_token_ids(self) -> frozenset[int]:
        return self._special_ids

    @property
    def strips_leading_space(self) -> bool:
        """Whether the first space of a text is no part of it (SentencePiece's dummy prefix)."""
        return self._codec.strips_leading_space

    def bad_words_token_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The id sequences that must not be generated, as vLLM makes them.

        Each word counts without a space before it, and with one where that gives another first token and as
        many tokens.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            plain = tuple(self.encode(word.lstrip(), add_special_tokens=False))
            if not plain:
                raise InvalidRequest(f"bad_words holds {word!r}, which has no tokens. Leave it out.", param="bad_words")
            spaced = tuple(self.encode(" " + word.lstrip(), add_special_tokens=False))
            sequences[plain] = None
            if spaced[0] != plain[0] and len(spaced) == len(plain):
                sequences[spaced] = None
        return tuple(sequences)

    def byte_table(self, skip_special_tokens: bool) -> Mapping[int, bytes]:
        """`token_bytes` by id, filled as it is read; empty for what is no token, or special and skipped."""
        return self._visible_bytes if skip_special_tokens else self._bytes

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._tokenizer.token_to_id(text)

    def _read_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else self._codec.encode(token)

    def _read_first_bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None
        return b"" if token is None else self._codec.encode_first(token)

    @cached_property
    def _max_token_chars(self) -> int:
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))


class TokenReader:
    """Reads the bytes of one token after the other, from the start of a text or from within it."""

    __slots__ = ("_is_after_added", "_is_at_start", "_joins_added", "_table", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
        is_at_start: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._table = tokenizer.byte_table(skip_special_tokens)
        self._is_at_start = is_at_start
        self._joins_added = tokenizer._codec.puts_spaces and not spaces_between_special_tokens
        self._is_after_added = False

    def read(self, token_id: int) -> bytes:
        data = self._table[token_id]
        if not data:
            return data
        if self._is_at_start:
            self._is_at_start = False
            data = self._tokenizer._read_first_bytes(token_id)
        elif self._joins_added and self._is_after_added and token_id in self._tokenizer._added_ids:
            data = self._tokenizer._read_first_bytes(token_id)
        self._is_after_added = token_id in self._tokenizer._added_ids
        return data

    @property
    def is_plain(self) -> bool:
        """Whether from here on every token reads as its entry in the table."""
        return not self._is_at_start and not self._joins_added


def load_tokenizer(
    path: str | Path,
    override: str | Path | None = None,
    chat_template: str | Path | None = None,
    *,
    cache: Path | None = None,
) -> Tokenizer:
    """The tokenizer of the model at `path`, a folder or a .gguf file.

    `override`: a folder, tokenizer.json or .gguf file to take the tokenizer from instead; the model's chat
    template stays where that has none. `chat_template`: a file with a template to use instead of any. `cache`: a folder
    that keeps what GGUF files hold, so that the next time takes less.
    """
    files = _files_at(Path(path if override is None else override), cache)
    templates = files.chat_templates
    if chat_template is not None:
        file = Path(chat_template)
        templates = {DEFAULT_TEMPLATE: read_text(file, error=TokenizerError, max_bytes=MAX_TEMPLATE_BYTES)}
    elif override is not None and not templates:
        templates = chat_templates_at(_model_at(Path(path)))
    return Tokenizer.from_files(files, templates)


def _files_at(path: Path, cache: Path | None) -> TokenizerFiles:
    path = _model_at(path)
    return tokenizer_files_in_gguf(path, cache=cache) if path.suffix == ".gguf" else tokenizer_files_in(path)


def _model_at(path: Path) -> Path:
    """The folder or .gguf file that `path` means: it may name a tokenizer.json, or the folder around a .gguf file."""
    if path.name == "tokenizer.json":
        path = path.parent
    if path.is_dir() and not (path / "tokenizer.json").exists():
        path = next(iter(sorted(path.glob("*.gguf"))), path)
    return path


def _add_configured_tokens(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Add what only tokenizer_config.json knows: each token must get the id that it is given there."""
    wanted: dict[int, AddedToken] = {}
    decoder = config.get("added_tokens_decoder", {})
    if not isinstance(decoder, dict):
        raise TokenizerError(f"{file.parent}: added_tokens_decoder is not an object.")
    for key, entry in decoder.items():
        if not (key.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)):
            raise TokenizerError(f"{file.parent}: added_tokens_decoder holds a bad entry at {key!r}.")
        flags = {
            name: bool(entry.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
        }
        wanted[int(key)] = AddedToken(entry["content"], **flags)
    known = tokenizer.get_added_tokens_decoder()
    tokenizer.add_tokens([token for token_id, token in sorted(wanted.items()) if token_id not in known])
    for token_id, token in wanted.items():
        if (got := tokenizer.token_to_id(token.content)) != token_id:
            raise TokenizerError(
                f"{file}: the token {token.content!r} is number {got}, but {token_id} in tokenizer_config.json."
            )


def _special_texts(tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens that the vocabulary holds; each is made special if tokenizer.json forgot it."""
    texts: dict[str, str] = {}
    for name in NAMED_SPECIAL_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str) and tokenizer.token_to_id(text) is not None:
            texts[name] = text
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(texts.values()) if text not in special]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in missing])
    return texts


def _apply_bos_eos_flags(
    tokenizer: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> None:
    """Add the BOS or EOS that tokenizer_config.json wants and tokenizer.json forgot (as DeepSeek's do).

    A flag that is false takes nothing away, as in transformers.
    """
    wanted = {name: config.get(f"add_{name}_token") is True for name in ("bos", "eos")}
    plain, full = tokenizer.encode("a", add_special_tokens=False).ids, tokenizer.encode("a").ids
    at = next(index for index in range(len(full)) if full[index : index + len(plain)] == plain)
    before, after = full[:at], full[at + len(plain) :]
    for name, is_wanted in wanted.items():
        if not is_wanted:
            continue
        text = special_tokens.get(f"{name}_token")
        token_id = None if text is None else tokenizer.token_to_id(text)
        if token_id is None:
            raise TokenizerError(
                f"tokenizer_config.json sets add_{name}_token, but its {name}_token "
                f"{config.get(f'{name}_token')!r} is not in the vocabulary."
            )
        if name == "bos" and before[:1] != [token_id]:
            before.insert(0, token_id)
        elif name == "eos" and after[-1:] != [token_id]:
            after.append(token_id)
    if (before, after) != (full[:at], full[at + len(plain) :]):
        tokenizer.post_processor = surrounding(before, after)


class _ByteTable(dict[int, bytes]):
    """Bytes by token id; what is missing is computed once. Ids beyond the vocabulary are not kept."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        super().__init__()
        self._read = read

    def __missing__(self, token_id: int) -> bytes:
        data = self._read(token_id)
        if data:
            self[token_id] = data
        return data


def _bytes_of_chars() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHAR: Final = _bytes_of_chars()


@dataclass(frozen=True, slots=True)
class _Codec:
    """What a tokenizer's decoder makes of one token, as bytes of the text."""

    encode: Callable[[str], bytes]
    encode_first: Callable[[str], bytes]  # where the first token of a text differs
    strips_leading_space: bool = False
    puts_spaces: bool = False  # between all tokens

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> _Codec:
        """Raises TokenizerError for a decoder whose text cannot be made token by token."""
        if tokenizer.decoder is None:
            return cls(lambda token: b" " + token.encode(), str.encode, puts_spaces=True)
        state = json.loads(tokenizer.decoder.__getstate__())
        steps: list[dict[str, Any]] = state["decoders"] if state["type"] == "Sequence" else [state]
        kinds = [step["type"] for step in steps]
        if kinds == ["ByteLevel"]:
            return cls(_encode_byte_level, _encode_byte_level)
        if kinds == ["Metaspace"]:
            return cls._metaspace(steps[0])
        strips = kinds[-1:] == ["Strip"]
        if strips:
            strip = steps.pop()
            if (strip["content"], strip["start"], strip["stop"]) != (" ", 1, 0) or kinds[-2:-1] != ["Fuse"]:
                raise TokenizerError(f"The tokenizer's decoder strips {strip}; only one leading space is known.")
        replacements: list[tuple[str, str]] = []
        falls_back = False
        for step in steps:
            match step:
                case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)} if (
                    not falls_back
                ):
                    replacements.append((pattern, content))
                case {"type": "ByteFallback"}:
                    falls_back = True
                case {"type": "Fuse"} if step is steps[-1]:
                    pass
                case _:
                    raise TokenizerError(
                        f"The tokenizer's decoder has a step {step['type']!r} ({' > '.join(kinds)}), which is not "
                        "known. Known are ByteLevel, Metaspace, and Replace > ByteFallback > Fuse > Strip."
                    )

        def encode(token: str) -> bytes:
            for pattern, content in replacements:
                token = token.replace(pattern, content)
            byte = _fallback_byte(token) if falls_back else None
            return token.encode() if byte is None else byte

        return cls(encode, encode, strips_leading_space=strips)

    @classmethod
    def _metaspace(cls, step: Mapping[str, Any]) -> _Codec:
        mark = step["replacement"]
        if step.get("prepend_scheme", "always") == "never":
            return cls(lambda token: token.replace(mark, " ").encode(), lambda token: token.replace(mark, " ").encode())
        return cls(lambda token: token.replace(mark, " ").encode(), lambda token: token.replace(mark, "").encode())


def _encode_byte_level(token: str) -> bytes:
    try:
        return bytes(map(_BYTE_OF_CHAR.__getitem__, token))
    except KeyError:
        return token.encode()  # an added token, in plain text


def _fallback_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None
