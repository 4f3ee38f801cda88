"""The tokenizer inside a GGUF file, rebuilt as a `tokenizers.Tokenizer`.

A GGUF file holds a vocabulary, merges or scores, token types and the name of a pre-tokenizer, but not the
pre-tokenizer itself: `PRE_TOKENIZERS` gives each name the splits of the tokenizer.json that it stands for
(where that is not public, those that llama.cpp applies to it). What the table does not know is refused, as
a wrong split changes the ids without any visible error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from octavo.errors import TokenizerError
from octavo.loader.built_tokenizer import GgufTokenizer, surrounding

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # tokenizer.ggml.token_type
SPACE: Final = "▁"
MAX_SHOWN = 40

# Control tokens that end a turn or a text whatever the file's own eos is.
_END_TEXTS: Final = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <end_of_turn> <turn|>"
    " <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] [EOS] <end_of_utterance> <｜end▁of▁sentence｜>".split(" ")
)


def build_tokenizer(metadata: Mapping[str, Any]) -> GgufTokenizer:
    """The tokenizer that GGUF `metadata` describes.

    Raises TokenizerError when there is none, when its kind or pre-tokenizer is not known, and when its arrays
    or ids contradict each other.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind in ("none", "no_vocab"):
        raise TokenizerError(
            "The GGUF file holds no tokenizer (tokenizer.ggml.model is "
            f"{'absent' if kind is None else repr(kind)}). Name one with --tokenizer FOLDER."
        )
    if kind not in _BUILDERS:
        raise TokenizerError(
            f"tokenizer.ggml.model is {kind!r}; known are {', '.join(sorted(_BUILDERS))}. "
            "Name the model's tokenizer.json with --tokenizer."
        )
    vocabulary = _Vocabulary.read(metadata)
    built = _BUILDERS[kind](vocabulary, metadata)
    ids = {name: vocabulary.special_id(metadata, name) for name in ("bos", "eos", "unknown", "padding")}
    if kind == "llama":
        for name, default in (("bos", 1), ("eos", 2), ("unknown", 0)):
            if f"tokenizer.ggml.{name}_token_id" not in metadata and default < len(vocabulary.texts):
                ids[name] = default
    add_bos = _flag(metadata, "tokenizer.ggml.add_bos_token", built.adds_bos)
    add_eos = _flag(metadata, "tokenizer.ggml.add_eos_token", False)
    around: list[list[int]] = []
    for wanted, name in ((add_bos, "bos"), (add_eos, "eos")):
        token_id = ids[name]
        if wanted and token_id is None:
            raise TokenizerError(
                f"tokenizer.ggml.add_{name}_token is set, but tokenizer.ggml.{name}_token_id is absent."
            )
        around.append([token_id] if wanted and token_id is not None else [])
    tokenizer = built.tokenizer
    tokenizer.add_tokens(vocabulary.added_tokens(built.strips_after_special))
    if (size := tokenizer.get_vocab_size(with_added_tokens=True)) != len(vocabulary.texts):
        raise TokenizerError(f"The GGUF tokenizer holds {len(vocabulary.texts)} tokens, but {size} came out of it.")
    if any(around):
        tokenizer.post_processor = surrounding(*around)
    return GgufTokenizer(
        tokenizer=tokenizer,
        bos_token_id=ids["bos"],
        eos_token_id=ids["eos"],
        unk_token_id=ids["unknown"],
        pad_token_id=ids["padding"],
        eos_token_ids=_end_ids(vocabulary, metadata, ids["eos"]),
        add_bos=add_bos,
        add_eos=add_eos,
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    texts: list[str]
    types: list[int]
    ids: dict[str, int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any]) -> _Vocabulary:
        texts = _strings(metadata, "tokenizer.ggml.tokens")
        if texts is None:
            raise TokenizerError(
                "The GGUF file has no tokenizer.ggml.tokens. Name a tokenizer with --tokenizer FOLDER."
            )
        texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
        ids = {text: index for index, text in enumerate(texts)}
        if len(ids) != len(texts):
            twice = next(text for index, text in enumerate(texts) if ids[text] != index)
            raise TokenizerError(f"tokenizer.ggml.tokens holds {twice[:MAX_SHOWN]!r} twice.")
        types = _numbers(metadata, "tokenizer.ggml.token_type", len(texts))
        if types is None:
            return cls(texts, [NORMAL] * len(texts), ids)
        wrong = types[(types < 0) | (types > BYTE) | (types != np.floor(types))]
        if wrong.size:
            raise TokenizerError(f"tokenizer.ggml.token_type holds {wrong[0]:g}; the types are 0 to {BYTE}.")
        return cls(texts, types.astype(int).tolist(), ids)

    def special_id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = metadata.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TokenizerError(f"{key} is {value!r}, not an integer.")
        if not 0 <= value.__index__() < len(self.texts):
            raise TokenizerError(f"{key} is {value}, but the vocabulary has {len(self.texts)} tokens.")
        return int(value.__index__())

    def added_tokens(self, strips_after_special: bool) -> list[AddedToken]:
        """Tokens that are found in a text before it is split: whole, and longest first."""
        plain = ("<unk>", "<s>", "<|endoftext|>")
        return [
            AddedToken(
                text,
                normalized=False,
                special=kind != USER_DEFINED,
                rstrip=strips_after_special and text not in plain,
            )
            for text, kind in zip(self.texts, self.types, strict=True)
            if kind in (CONTROL, USER_DEFINED, UNKNOWN)
        ]


@dataclass(frozen=True, slots=True)
class _Built:
    tokenizer: Tokenizer
    adds_bos: bool  # unless the file says otherwise
    strips_after_special: bool = False


def _build_byte_level(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> _Built:
    """GPT-2's scheme: every byte is a character of the vocabulary, merges have ranks."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name in _SPACE_MARK_PRE:
        return _build_ranked_space_mark(vocabulary, metadata)
    scheme = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if scheme is None:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}, which is not known, so text would be split wrongly. Known are "
            f"{', '.join(sorted([*PRE_TOKENIZERS, *_SPACE_MARK_PRE]))}. "
            "Name the model's tokenizer.json with --tokenizer."
        )
    tokenizer = _bpe(vocabulary, _ranked_merges(vocabulary, metadata), ignore_merges=scheme.ignores_merges)
    if scheme.is_nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = scheme.build()
    tokenizer.decoder = decoders.ByteLevel()
    return _Built(tokenizer, adds_bos=scheme.adds_bos)


def _build_scored(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> _Built:
    """SentencePiece's BPE: of all neighbours that make a piece, those of the best score merge first."""
    scores = _numbers(metadata, "tokenizer.ggml.scores", len(vocabulary.texts))
    if scores is None:
        raise TokenizerError("tokenizer.ggml.model is 'llama', but tokenizer.ggml.scores is absent.")
    tokenizer = _bpe(vocabulary, _scored_merges(vocabulary, scores.tolist()), space_mark=True)
    has_prefix = _flag(metadata, "tokenizer.ggml.add_space_prefix", True)
    drops_spaces = _flag(metadata, "tokenizer.ggml.remove_extra_whitespaces", False)
    _mark_spaces(tokenizer, has_prefix, drops_spaces)
    model_name = str(metadata.get("general.name", "")).lower()
    return _Built(tokenizer, adds_bos=True, strips_after_special="phi-3" in model_name or "phi3" in model_name)


def _build_ranked_space_mark(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> _Built:
    """SentencePiece's alphabet with merges that have ranks (Gemma 4)."""
    tokenizer = _bpe(vocabulary, _ranked_merges(vocabulary, metadata), space_mark=True)
    _mark_spaces(tokenizer, has_prefix=_flag(metadata, "tokenizer.ggml.add_space_prefix", False), drops_spaces=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    return _Built(tokenizer, adds_bos=True)


_BUILDERS: Final = {"gpt2": _build_byte_level, "llama": _build_scored, "gemma4": _build_ranked_space_mark}
_SPACE_MARK_PRE: Final = frozenset({"gemma4", "sarvam-moe"})


def _bpe(
    vocabulary: _Vocabulary, merges: list[tuple[str, str]], *, ignore_merges: bool = False, space_mark: bool = False
) -> Tokenizer:
    unknown = next(
        (text for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True) if kind == UNKNOWN), None
    )
    if space_mark and unknown is None:
        unknown = "<unk>" if "<unk>" in vocabulary.ids else None
    try:
        model = BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=unknown if space_mark else None,
            fuse_unk=space_mark,
            byte_fallback=space_mark,
            ignore_merges=ignore_merges,
        )
    except Exception as error:  # the library raises bare exceptions
        raise TokenizerError(f"The GGUF tokenizer cannot be built: {error}") from error
    return Tokenizer(model)


def _mark_spaces(tokenizer: Tokenizer, has_prefix: bool, drops_spaces: bool) -> None:
    """Write spaces as ▁ on the way in and back on the way out; `has_prefix`: a text begins with one more."""
    steps = [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")] if drops_spaces else []
    steps += [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    out = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*out, decoders.Strip(" ", 1, 0)] if has_prefix else out)


def _ranked_merges(vocabulary: _Vocabulary, metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The file's merges in their order, each once."""
    lines = _strings(metadata, "tokenizer.ggml.merges")
    if lines is None:
        raise TokenizerError(
            f"tokenizer.ggml.model is {metadata['tokenizer.ggml.model']!r}, but tokenizer.ggml.merges is absent."
        )
    ids = vocabulary.ids
    merges: dict[tuple[str, str], None] = {}
    for line in lines:
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 1 or not right:
            raise TokenizerError(
                f"tokenizer.ggml.merges holds {line[:MAX_SHOWN]!r}, which is not two pieces and a space."
            )
        if left in ids and right in ids and left + right in ids:
            merges[left, right] = None
        elif not _is_respelled(left + right, vocabulary):
            raise TokenizerError(
                f"tokenizer.ggml.merges holds {line[:MAX_SHOWN]!r}, whose pieces are not in the vocabulary."
            )
    return list(merges)


def _is_respelled(piece: str, vocabulary: _Vocabulary) -> bool:
    """Whether a merge leads to an added token, which files spell as plain text: it is found before merges apply."""
    plain = piece.replace("Ġ", " ").replace("Ċ", "\n").replace("ĉ", "\t")
    token_id = vocabulary.ids.get(plain)
    return token_id is not None and vocabulary.types[token_id] in (CONTROL, USER_DEFINED)


def _scored_merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes a piece, best score of the product first."""
    pieces = {
        text: scores[index]
        for index, (text, kind) in enumerate(zip(vocabulary.texts, vocabulary.types, strict=True))
        if kind in (NORMAL, UNUSED, 0)
    }
    merges: list[tuple[str, str]] = []
    for text in sorted(pieces, key=pieces.__getitem__, reverse=True):
        for cut in range(1, len(text)):
            left = text[:cut]
            if left in pieces and (right := text[cut:]) in pieces:
                merges.append((left, right))
    return merges


def _end_ids(vocabulary: _Vocabulary, metadata: Mapping[str, Any], eos_token_id: int | None) -> tuple[int, ...]:
    ids = [eos_token_id, vocabulary.special_id(metadata, "eot"), vocabulary.special_id(metadata, "eom")]
    texts = {
        text
        for text in _END_TEXTS
        if vocabulary.types[vocabulary.ids.get(text, 0)] == CONTROL and text in vocabulary.ids
    }
    if texts & {"<|return|>", "<|flush|>"} and texts & {"<|call|>", "<|calls|>"}:
        texts.discard("<|end|>")  # there it only ends a message; the turn goes on
    ids += sorted(vocabulary.ids[text] for text in texts)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _strings(metadata: Mapping[str, Any], key: str) -> list[str] | None:
    values = metadata.get(key)
    if values is None:
        return None
    if isinstance(values, str) or not hasattr(values, "__len__"):
        raise TokenizerError(f"{key} is not an array.")
    for value in values:
        if not isinstance(value, str):
            raise TokenizerError(f"{key} holds a {type(value).__name__}, not a string.")
    return list(values)


def _numbers(metadata: Mapping[str, Any], key: str, length: int) -> npt.NDArray[np.float64] | None:
    """The array, whatever its numeric type, exactly `length` long and without NaN."""
    values = metadata.get(key)
    if values is None:
        return None
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iuf":
        raise TokenizerError(f"{key} is not an array of numbers.")
    if array.size != length:
        raise TokenizerError(f"{key} has {array.size} entries for {length} tokens.")
    if np.isnan(array).any():
        raise TokenizerError(f"{key} holds a NaN.")
    return array.astype(np.float64)


def _flag(metadata: Mapping[str, Any], key: str, default: bool) -> bool:
    value = metadata.get(key, default)
    if isinstance(value, bool) or value in (0, 1):
        return bool(value)
    raise TokenizerError(f"{key} is {value!r}, not true or false.")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut before merges apply, and what else a name implies.

    A step is a regular expression whose matches are cut out, or one of the steps of `tokenizers` below. Each
    step cuts the pieces of the one before.
    """

    steps: tuple[str | pre_tokenizers.PreTokenizer, ...]
    is_nfc: bool = False  # the text is NFC-normalized first
    ignores_merges: bool = False  # a piece that is a token is taken whole
    adds_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        steps = [
            pre_tokenizers.Split(Regex(step), "isolated") if isinstance(step, str) else step for step in self.steps
        ]
        if not any(isinstance(step, pre_tokenizers.ByteLevel) for step in steps):
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)


# `'s`, `'ll` ... in either case; letters with at most one leading mark; digits; marks; line ends; spaces.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str, contraction: str = _CONTRACTION + "|") -> str:
    return rf"{contraction}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(digits: str, suffix: str) -> str:
    """Words that end where a lower-case letter is followed by an upper-case one."""
    lead = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{lead}{_UPPER}*{_LOWER}+{suffix}|{lead}{_UPPER}+{_LOWER}*{suffix}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT2_REGEX = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # GPT-2's expression, built in
_EACH_DIGIT = pre_tokenizers.Digits(individual_digits=True)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_ASCII_MARK = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_MARKED_WORDS = rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b"
    "\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b"
    "\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)

_GPT2 = PreTokenizer((_BYTE_LEVEL,))
_GPT_NEOX = PreTokenizer((_BYTE_LEVEL,), is_nfc=True)
_DIGITS_GPT2 = PreTokenizer((_EACH_DIGIT, _BYTE_LEVEL))
_CL100K = PreTokenizer((_words(r"\p{N}{1,3}"),))
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),))
_QWEN2_NFC = PreTokenizer((_words(r"\p{N}"),), is_nfc=True)
_GPT4O = PreTokenizer((_cased_words(r"\p{N}{1,3}", _CONTRACTION + "?"),))
_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_MARKED_WORDS}[\r\n]*|{_SPACES}"))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

_NAMES: Final[tuple[tuple[str, PreTokenizer], ...]] = (
    # llama.cpp's guess for files that name none
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_REGEX, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    ("gpt-2 phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert jina-es jina-de", _GPT2),
    ("jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe", _GPT2),
    ("mpt olmo", _GPT_NEOX),
    ("smollm starcoder refact codeshell exaone minerva-7b mellum2", _DIGITS_GPT2),
    ("command-r", PreTokenizer((_EACH_DIGIT, _BYTE_LEVEL), is_nfc=True)),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA3),
    ("dbrx smaug-bpe glm4 chatglm-bpe", _CL100K),
    ("qwen2", _QWEN2_NFC),
    ("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan grok-2 solar-open", _QWEN2),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
            ),
            is_nfc=True,
        ),
    ),
    ("ufakzeka", PreTokenizer((_words(r"\p{N}", contraction=""),))),
    ("laguna", PreTokenizer((r"[^\n]+|\n+", _words(r"\p{N}")))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words(r"\p{N}+")), ignores_merges=True)),
    (
        "jais-2",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
                + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
                + r"|\s",
            )
        ),
    ),
    (
        "seed-coder",
        PreTokenizer((rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ),
    ("bailingmoe bailingmoe2 llada-moe", _BAILING),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
    ),
    ("tekken", PreTokenizer((_cased_words(r"\p{N}", ""),), ignores_merges=True, adds_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O),
    ("granite-embed-multi-97m", PreTokenizer(_GPT4O.steps, ignores_merges=True)),
    (
        "tiny_aya cohere2moe",
        PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _cased_words(r"\p{N}{1,3}", _CONTRACTION + "?"))),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                "[\uac00-\ud7a3\u3131-\u318e]+|[！…“”‘’—：；，\u3001-\u303f\ufe30-\ufe4f]+|[\u3105-\u312f]+|" + _CJK,
                _cased_words(r"\p{N}", _CONTRACTION + "?"),
            ),
            ignores_merges=True,
        ),
    ),
    (
        "falcon",
        PreTokenizer(
            (
                pre_tokenizers.Punctuation("contiguous"),
                _BYTE_LEVEL,
                pre_tokenizers.Digits(individual_digits=False),
                "[0-9][0-9][0-9]",
            )
        ),
    ),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                "[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                _EACH_DIGIT,
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, _EACH_DIGIT)),
    ),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK3),
    ("spark2_5", PreTokenizer((r"\p{N}{1,3}", _CJK, rf"{_MARKED_WORDS}|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _BYTE_LEVEL,
            ),
            adds_bos=True,
        ),
    ),
)

PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = {
    name: scheme for names, scheme in _NAMES for name in names.split(" ")
}
