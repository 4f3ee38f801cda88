"""Where the model that a config names lies on this machine, and its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.config import Config, cache_dir
from octavo.loader.source import LocalModel, resolve_source

if TYPE_CHECKING:
    from octavo.engine.tokenizer import Tokenizer


def find_model(config: Config) -> LocalModel:
    """Where the model is on this machine; nothing is fetched."""
    return resolve_source(config.model.model, cache=cache_dir(), revision=config.model.revision)


def load_model_tokenizer(config: Config) -> Tokenizer:
    """The tokenizer and chat template that requests for this model need. Raises TokenizerError."""
    from octavo.engine.tokenizer import load_tokenizer  # heavy; an engine process does without

    model = config.model
    path, cache = find_model(config).path, cache_dir() / "tokenizers"
    tokenizer = load_tokenizer(path, model.tokenizer, chat_template=model.chat_template, cache=cache)
    _ = tokenizer.chat_template  # compiled here: a broken template is the operator's to hear of, not a client's
    return tokenizer
