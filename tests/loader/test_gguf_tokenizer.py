"""Tokenizers rebuilt from GGUF metadata against other implementations of the same vocabulary."""

from itertools import pairwise

import numpy as np
import pytest
import regex
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tests import vocabularies
from tests.texts import LINES, english_lines, mixed_lines
from tests.vocabularies import CONTROL, NORMAL, USER_DEFINED

from octavo.errors import TokenizerError
from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_tokenizer import PRE_TOKENIZERS, build_tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_alphabet() -> dict[int, str]:
    plain = [byte for byte in range(256) if 33 <= byte <= 126 or 161 <= byte <= 172 or byte >= 174]
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in plain else next(others)) for byte in range(256)}


ALPHABET = byte_alphabet()


class NaiveBpe:
    """Byte-level BPE as the papers say it: of all neighbours, the pair of the lowest rank merges, again and again."""

    def __init__(self, metadata, *patterns: str) -> None:
        self.ids = {text: index for index, text in enumerate(metadata["tokenizer.ggml.tokens"])}
        self.ranks = {tuple(line.split(" ")): rank for rank, line in enumerate(metadata["tokenizer.ggml.merges"])}
        whole = [
            text
            for text, kind in zip(self.ids, metadata["tokenizer.ggml.token_type"], strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
        self.whole = set(whole)
        self.cut = regex.compile("(" + "|".join(map(regex.escape, sorted(whole, key=len, reverse=True))) + ")")
        self.patterns = [regex.compile(pattern) for pattern in patterns]

    def encode(self, text: str) -> list[int]:
        ids = []
        for part in self.cut.split(text) if self.whole else [text]:
            if part in self.whole:
                ids.append(self.ids[part])
                continue
            pieces = [part]
            for pattern in self.patterns:
                pieces = [cut for piece in pieces for cut in self.isolate(pattern, piece)]
            for piece in pieces:
                ids += [self.ids[symbol] for symbol in self.merge([ALPHABET[byte] for byte in piece.encode()])]
        return ids

    @staticmethod
    def isolate(pattern, text: str) -> list[str]:
        """The matches and what lies between them."""
        pieces, end = [], 0
        for match in pattern.finditer(text):
            pieces += [text[end : match.start()], match[0]]
            end = match.end()
        return [piece for piece in [*pieces, text[end:]] if piece]

    def merge(self, symbols: list[str]) -> list[str]:
        while len(symbols) > 1:
            rank, at = min((self.ranks.get(pair, 10**9), at) for at, pair in enumerate(pairwise(symbols)))
            if rank == 10**9:
                break
            symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
        return symbols


def sentencepiece_model(metadata) -> sentencepiece.SentencePieceProcessor:
    """The same vocabulary in sentencepiece's own file format and program."""
    proto = sentencepiece_model_pb2.ModelProto()
    rows = zip(
        metadata["tokenizer.ggml.tokens"],
        metadata["tokenizer.ggml.scores"],
        metadata["tokenizer.ggml.token_type"],
        strict=True,
    )
    for text, score, kind in rows:
        piece = text.replace(" ", "▁") if kind == USER_DEFINED else text
        proto.pieces.add(piece=piece, score=float(score), type=int(kind))
    trainer = proto.trainer_spec
    trainer.model_type = trainer.BPE
    trainer.byte_fallback = True
    for name, key in {"unk": "unknown", "bos": "bos", "eos": "eos"}.items():
        token_id = metadata[f"tokenizer.ggml.{key}_token_id"]
        setattr(trainer, f"{name}_id", token_id)
        setattr(trainer, f"{name}_piece", metadata["tokenizer.ggml.tokens"][token_id])
    trainer.pad_id = -1
    normalizer = proto.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    normalizer.remove_extra_whitespaces = metadata.get("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer.escape_whitespaces = True
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


@pytest.fixture(scope="module")
def byte_level():
    return vocabularies.byte_level()


@pytest.fixture(scope="module")
def scored():
    return vocabularies.scored()


@pytest.fixture(scope="module")
def scored_without_prefix():
    return vocabularies.scored_without_prefix()


def same_text(line: str) -> bool:
    """Whether both kinds of tokenizer mean the same: special tokens and ▁ in plain text are read differently."""
    return "▁" not in line and "<unk>" not in line and "<s>" not in line and "</s>" not in line


def differences(ours, other, lines):
    return [line for line in lines if ours.encode(line, add_special_tokens=False).ids != other.encode(line)]


def test_byte_level_ids_equal_a_naive_bpe(byte_level):
    tokenizer = build_tokenizer(byte_level).tokenizer
    assert differences(tokenizer, NaiveBpe(byte_level, GPT2), mixed_lines(500)) == []


def test_a_merge_listed_twice_has_its_first_rank(byte_level):
    merges = byte_level["tokenizer.ggml.merges"]
    twice = build_tokenizer(byte_level | {"tokenizer.ggml.merges": [*merges, *merges[:200]]}).tokenizer
    assert differences(twice, NaiveBpe(byte_level, GPT2), LINES) == []


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_gives_a_tokenizer_that_loses_nothing(byte_level, name):
    scheme = PRE_TOKENIZERS[name]
    metadata = byte_level | {"tokenizer.ggml.pre": name, "tokenizer.ggml.bos_token_id": 0}
    built = build_tokenizer(metadata)
    assert built.add_bos == scheme.adds_bos
    for line in LINES:
        ids = built.tokenizer.encode(line, add_special_tokens=False).ids
        if not scheme.is_nfc:
            assert built.tokenizer.decode(ids, skip_special_tokens=False) == line


@pytest.mark.parametrize(
    ("name", "patterns"),
    [
        ("smollm", [r"\p{N}", GPT2]),
        ("starcoder", [r"\p{N}", GPT2]),
        (
            "llama-bpe",
            [
                r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ],
        ),
        ("deepseek-coder", ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"]),
        (
            "deepseek-v3",
            [
                r"\p{N}{1,3}",
                r"[一-龥぀-ゟ゠-ヿ]+",
                r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            ],
        ),
        ("bloom", [r" ?[^(\s|.,!?…。，、।۔،)]+"]),
        ("default", [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
    ],
)
def test_splits_equal_the_same_expressions_in_another_engine(byte_level, name, patterns):
    # ' + ſ is the one contraction where engines differ in folding case.
    metadata = byte_level | {"tokenizer.ggml.pre": name, "tokenizer.ggml.bos_token_id": 0}
    ours = PRE_TOKENIZERS[name].build()
    naive = NaiveBpe(metadata, *patterns)
    for line in mixed_lines(300):
        if "'ſ" in line:
            continue
        pieces = [line]
        for pattern in naive.patterns:
            pieces = [cut for piece in pieces for cut in naive.isolate(pattern, piece)]
        assert [text for text, _ in ours.pre_tokenize_str(line)] == [
            "".join(ALPHABET[byte] for byte in piece.encode()) for piece in pieces
        ]


WORDS = "I'll've 12345 héLLo  日本語\n\n x"


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt-2", ["I", "'ll", "'ve", " 12345", " héLLo", " ", " 日本語", "\n\n", " x"]),
        ("smollm", ["I", "'ll", "'ve", " ", "1", "2", "3", "4", "5", " héLLo", " ", " 日本語", "\n\n", " x"]),
        ("llama-bpe", ["I", "'ll", "'ve", " ", "123", "45", " héLLo", " ", " 日本語", "\n\n", " x"]),
        ("qwen2", ["I", "'ll", "'ve", " ", "1", "2", "3", "4", "5", " héLLo", " ", " 日本語", "\n\n", " x"]),
        ("tekken", ["I", "'ll", "'ve", " ", "1", "2", "3", "4", "5", " hé", "LLo", " ", " 日本語", "\n\n", " x"]),
        ("gpt-4o", ["I'll", "'ve", " ", "123", "45", " hé", "LLo", " ", " 日本語", "\n\n", " x"]),
        ("falcon", ["I", "'", "ll", "'", "ve", " ", "123", "45", " héLLo", " ", " 日本語", "\n\n", " x"]),
        ("deepseek-v3", ["I", "'ll", "'ve", " ", "123", "45", " héLLo", "  ", "日本語", "\n\n", " x"]),
        (
            "deepseek-llm",
            # Its marks are `:-~`, which takes in the ASCII letters.
            ["I", "'", "ll", "'", "ve", " ", *"12345", " h", "é", "LLo", "  ", "日本語", "\n", "\n", " x"],
        ),
        ("bloom", ["I'll've", " 12345", " héLLo", " ", " 日本語", "\n\n", " x"]),
        ("viking", ["I'll've", " ", "1", "2", "3", "4", "5", " héLLo", " ", " 日本語", "\n\n", " x"]),
        ("tiny_aya", ["I'll", "'ve", " ", "12", "345", " hé", "LLo", " ", " 日本語", "\n\n", " x"]),
    ],
)
def test_families_of_pre_tokenizers_cut_where_their_models_were_trained_to(name, pieces):
    alphabet = {char: byte for byte, char in ALPHABET.items()}
    got = [
        bytes(alphabet[char] for char in text).decode()
        for text, _ in PRE_TOKENIZERS[name].build().pre_tokenize_str(WORDS)
    ]
    assert got == pieces


def test_qwen2_normalizes_to_nfc_and_gpt2_does_not(byte_level):
    for name, equal in {"qwen2": True, "gpt-2": False}.items():
        tokenizer = build_tokenizer(byte_level | {"tokenizer.ggml.pre": name}).tokenizer
        assert (tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids) is equal


def test_llama3_takes_a_whole_word_that_no_merge_leads_to(byte_level):
    texts = [*byte_level["tokenizer.ggml.tokens"], "Ġxyzzyq"]
    kinds = np.append(byte_level["tokenizer.ggml.token_type"], NORMAL)
    metadata = byte_level | {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}
    whole = build_tokenizer(metadata | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.bos_token_id": 0}).tokenizer
    assert whole.encode(" xyzzyq", add_special_tokens=False).ids == [len(texts) - 1]
    assert len(build_tokenizer(metadata).tokenizer.encode(" xyzzyq").ids) > 1


def test_the_unknown_pre_tokenizer_is_named_beside_those_that_are_known(byte_level):
    with pytest.raises(TokenizerError, match=r"'my-new-one'.*llama-bpe.*qwen2.*--tokenizer"):
        build_tokenizer(byte_level | {"tokenizer.ggml.pre": "my-new-one"})


def test_scored_ids_equal_sentencepiece(scored):
    lines = [line for line in mixed_lines(500) if same_text(line)]
    assert differences(build_tokenizer(scored).tokenizer, sentencepiece_model(scored), lines) == []


def test_scored_ids_without_a_space_prefix_equal_sentencepiece(scored_without_prefix):
    lines = [line for line in mixed_lines(500) if same_text(line)]
    ours = build_tokenizer(scored_without_prefix).tokenizer
    assert differences(ours, sentencepiece_model(scored_without_prefix), lines) == []


def test_removing_extra_whitespace_equals_sentencepiece(scored):
    metadata = scored | {"tokenizer.ggml.remove_extra_whitespaces": True}
    lines = ["  a   b  ", "one  two", " ", "x" + " " * 9 + "y"]
    assert differences(build_tokenizer(metadata).tokenizer, sentencepiece_model(metadata), lines) == []


def test_scored_text_comes_back(scored, scored_without_prefix):
    for metadata in (scored, scored_without_prefix):
        built = build_tokenizer(metadata)
        for line in LINES:
            if same_text(line):
                ids = built.tokenizer.encode(line).ids
                assert ids[0] == built.bos_token_id
                assert built.tokenizer.decode(ids) == line


def test_control_tokens_are_special_and_user_defined_ones_are_not(byte_level):
    tokenizer = build_tokenizer(byte_level).tokenizer
    encoding = tokenizer.encode("a<|im_end|><think>    b")
    assert encoding.tokens == ["a", "<|im_end|>", "<think>", "    ", "b"]
    assert tokenizer.decode(encoding.ids) == "a<think>    b"


def test_phi3_drops_the_space_behind_its_special_tokens(scored):
    texts = [*scored["tokenizer.ggml.tokens"], "<|end|>"]
    extended = scored | {
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": np.append(scored["tokenizer.ggml.scores"], 0.0),
        "tokenizer.ggml.token_type": np.append(scored["tokenizer.ggml.token_type"], CONTROL),
    }
    for name, rest in {"Phi-3 mini": "x", "Llama": " x"}.items():
        tokenizer = build_tokenizer(extended | {"general.name": name}).tokenizer
        assert tokenizer.encode("<|end|> x").ids == [1, len(texts) - 1, *tokenizer.encode(rest).ids[1:]]


def test_merges_with_ranks_over_sentencepiece_text(scored_without_prefix):
    """Gemma 4's kind: the merges are listed, the alphabet is SentencePiece's."""
    ranked = dict(scored_without_prefix)
    scores = ranked.pop("tokenizer.ggml.scores")
    rows = list(
        zip(ranked["tokenizer.ggml.tokens"], scores.tolist(), ranked["tokenizer.ggml.token_type"].tolist(), strict=True)
    )
    pieces = {text: score for text, score, kind in rows if kind == NORMAL}
    pairs = [
        (score, f"{text[:cut]} {text[cut:]}")
        for text, score in pieces.items()
        for cut in range(1, len(text))
        if text[:cut] in pieces and text[cut:] in pieces
    ]
    ranked["tokenizer.ggml.merges"] = [merge for _, merge in sorted(pairs, key=lambda pair: -pair[0])]
    ranked["tokenizer.ggml.model"] = "gemma4"
    lines = [line for line in mixed_lines(200) if same_text(line)]
    ours, other = build_tokenizer(ranked).tokenizer, build_tokenizer(scored_without_prefix).tokenizer
    for line in lines:
        assert ours.encode(line).ids == other.encode(line).ids


def test_every_token_that_ends_a_turn_is_found(byte_level):
    assert build_tokenizer(byte_level).eos_token_ids == (1, 0)
    assert build_tokenizer(byte_level | {"tokenizer.ggml.eot_token_id": 5}).eos_token_ids == (1, 5, 0)
    texts = ["<|return|>", "<|call|>", "<|end|>", *byte_level["tokenizer.ggml.tokens"][3:]]
    kinds = np.concatenate([[CONTROL] * 3, byte_level["tokenizer.ggml.token_type"][3:]])
    merges = [
        line for line in byte_level["tokenizer.ggml.merges"] if byte_level["tokenizer.ggml.tokens"][2] not in line
    ]
    harmony = byte_level | {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": kinds}
    harmony |= {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.merges": merges}
    assert build_tokenizer(harmony).eos_token_ids == (0, 1)


def test_bos_and_eos_are_added_as_the_file_says(byte_level, scored):
    assert build_tokenizer(scored).tokenizer.encode("a").ids[0] == 1
    both = scored | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True}
    ids = build_tokenizer(both).tokenizer.encode("a").ids
    assert (ids[0] != 1, ids[-1]) == (True, 2)
    with pytest.raises(TokenizerError, match="add_bos_token is set, but tokenizer.ggml.bos_token_id is absent"):
        build_tokenizer(byte_level | {"tokenizer.ggml.add_bos_token": True})


def change(key, value):
    def apply(metadata):
        changed = dict(metadata)
        changed[f"tokenizer.ggml.{key}"] = value(changed) if callable(value) else value
        return changed

    return apply


# LOD-03
BROKEN = {
    "no tokens": (change("tokens", None), "no tokenizer.ggml.tokens"),
    "tokens of a wrong type": (change("tokens", np.arange(5)), "tokenizer.ggml.tokens holds a int64, not a string"),
    "tokens that are text": (change("tokens", "abc"), "tokenizer.ggml.tokens is not an array"),
    "a token twice": (change("tokens", lambda m: [*m["tokenizer.ggml.tokens"][:-1], "a"]), "holds 'a' twice"),
    "types as fractions": (change("token_type", lambda m: np.full(len(m["tokenizer.ggml.tokens"]), 1.5)), "holds 1.5"),
    "types out of range": (change("token_type", lambda m: np.full(len(m["tokenizer.ggml.tokens"]), 9)), "holds 9"),
    "types as text": (
        change("token_type", lambda m: ["1"] * len(m["tokenizer.ggml.tokens"])),
        "not an array of numbers",
    ),
    "too few types": (change("token_type", np.ones(3, np.int32)), "token_type has 3 entries for"),
    "eos beyond the vocabulary": (change("eos_token_id", 10**6), "eos_token_id is 1000000, but the vocabulary has"),
    "eos below zero": (change("eos_token_id", -1), "eos_token_id is -1"),
    "eos as text": (change("eos_token_id", "2"), "eos_token_id is '2', not an integer"),
    "a flag as text": (change("add_eos_token", "yes"), "add_eos_token is 'yes', not true or false"),
}
BROKEN_RANKED = {
    "no merges": (change("merges", None), "tokenizer.ggml.merges is absent"),
    "a merge of one piece": (change("merges", ["ab"]), "holds 'ab', which is not two pieces"),
    "a merge of unknown pieces": (change("merges", ["qqq zzz"]), "holds 'qqq zzz', whose pieces are not"),
    "a pre-tokenizer of a wrong type": (change("pre", 7), "tokenizer.ggml.pre is 7"),
}
BROKEN_SCORED = {
    "no scores": (change("scores", None), "tokenizer.ggml.scores is absent"),
    "scores as text": (change("scores", lambda m: ["x"] * len(m["tokenizer.ggml.tokens"])), "not an array of numbers"),
    "scores as flags": (
        change("scores", lambda m: np.ones(len(m["tokenizer.ggml.tokens"]), bool)),
        "not an array of num",
    ),
    "too many scores": (change("scores", lambda m: np.ones(len(m["tokenizer.ggml.tokens"]) + 1)), "scores has"),
    "a NaN score": (change("scores", lambda m: np.full(len(m["tokenizer.ggml.tokens"]), np.nan)), "holds a NaN"),
}


@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_RANKED])
def test_broken_byte_level_metadata_is_refused(byte_level, name):
    apply, message = {**BROKEN, **BROKEN_RANKED}[name]
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(apply(byte_level))


@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_SCORED])
def test_broken_scored_metadata_is_refused(scored, name):
    apply, message = {**BROKEN, **BROKEN_SCORED}[name]
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(apply(scored))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.float64])
def test_scores_of_another_numeric_type_are_converted(scored, dtype):
    # LOD-03: the values are read in the type that the file declares.
    order = np.argsort(np.argsort(scored["tokenizer.ggml.scores"], kind="stable"))
    coarse = (order // 8).astype(dtype)
    expected = build_tokenizer(scored | {"tokenizer.ggml.scores": coarse.astype(np.float32)}).tokenizer
    got = build_tokenizer(scored | {"tokenizer.ggml.scores": coarse}).tokenizer
    for line in LINES:
        assert got.encode(line).ids == expected.encode(line).ids


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"holds no tokenizer \(tokenizer.ggml.model is absent\).*--tokenizer"),
        ({"tokenizer.ggml.model": "none"}, "holds no tokenizer"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; known are gemma4, gpt2, llama"),
    ],
)
def test_metadata_without_a_usable_tokenizer_is_refused(metadata, message):
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(metadata)


def test_a_vocabulary_with_broken_text_is_refused(byte_level):
    texts = [*byte_level["tokenizer.ggml.tokens"][:-1], "\udcff"]
    with pytest.raises(TokenizerError, match="cannot be built"):
        build_tokenizer(byte_level | {"tokenizer.ggml.tokens": texts})


def test_smollm2_ids_equal_a_naive_bpe(smollm2_path):
    metadata = GgufFile.open(smollm2_path).metadata
    tokenizer = build_tokenizer(metadata).tokenizer
    lines = [*mixed_lines(300), *english_lines(200)]
    assert differences(tokenizer, NaiveBpe(metadata, r"\p{N}", GPT2), lines) == []


def test_gemma3_ids_equal_sentencepiece(gemma3_path):
    metadata = GgufFile.open(gemma3_path).metadata
    tokenizer = build_tokenizer(metadata).tokenizer
    lines = [line for line in (*mixed_lines(400), *english_lines(200)) if same_text(line)]
    assert differences(tokenizer, sentencepiece_model(metadata), lines) == []
    assert tokenizer.encode("a").ids[0] == metadata["tokenizer.ggml.bos_token_id"]
