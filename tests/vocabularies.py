"""Small vocabularies as GGUF metadata, trained on lines in many scripts when they are first asked for."""

import io
import json
from functools import cache
from typing import Any

import numpy as np
import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tests.texts import LINES
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@cache
def byte_level() -> dict[str, Any]:
    """GPT-2's kind, with control and user-defined tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(LINES * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    texts = ["<|endoftext|>", "<|im_end|>", *sorted(model["vocab"], key=model["vocab"].__getitem__), "<think>", "    "]
    kinds = [CONTROL] * 2 + [NORMAL] * (len(texts) - 4) + [USER_DEFINED] * 2
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 1,
    }


@cache
def scored() -> dict[str, Any]:
    """SentencePiece as Llama 2 has it: byte tokens, and a space before every text."""
    return _train_sentencepiece()


@cache
def scored_without_prefix() -> dict[str, Any]:
    """As Gemma has it: no such space, runs of spaces and newlines as tokens of their own."""
    runs = ["▁▁", "▁▁▁", "▁▁▁▁", "\n", "\n\n", "\t"]
    trained = _train_sentencepiece(add_dummy_prefix=False, user_defined_symbols=runs)
    return trained | {"tokenizer.ggml.add_space_prefix": False}


def _train_sentencepiece(**options: Any) -> dict[str, Any]:
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for line in LINES if line and "\x00" not in line] * 3),
        model_writer=file,
        model_type="bpe",
        vocab_size=1100,
        character_coverage=0.99,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_by_whitespace=False,
        num_threads=1,
        minloglevel=3,
        **options,
    )
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(file.getvalue())
    is_added = [piece.type == USER_DEFINED for piece in proto.pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            piece.piece.replace("▁", " ") if added else piece.piece
            for piece, added in zip(proto.pieces, is_added, strict=True)
        ],
        "tokenizer.ggml.scores": np.array([piece.score for piece in proto.pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([piece.type for piece in proto.pieces], np.int32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
