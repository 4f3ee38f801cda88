"""A GGUF file as a checkpoint."""

from __future__ import annotations

from pathlib import Path

from octavo.loader.checkpoint import Checkpoint
from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_config import config_of, generation_config_of
from octavo.loader.gguf_names import architecture_of, hugging_face_tensors


def open_gguf(path: Path, *, digest_cache: Path | None = None) -> Checkpoint:
    """Open `path`, or the split model that it is a part of, under Hugging Face's names."""
    file = GgufFile.open(path)
    architecture = architecture_of(file)
    config = config_of(file, architecture)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    return Checkpoint(
        format="gguf",
        config=config,
        generation_config=generation_config_of(file, config),
        tensors=hugging_face_tensors(file, architecture, num_heads=heads, num_kv_heads=kv_heads),
        files=file.files,
        digest_cache=digest_cache,
    )
