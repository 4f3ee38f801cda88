"""The models that are compared, and their variants, all derived from one checkpoint so that every engine has the
same weights.

    python bench/peers/models.py --model smollm2-135m --variant hf --variant gguf-q8_0

A checkpoint is a GGUF file: of Octavo's catalogue, or made here from random numbers. From it come a Hugging Face folder
in bfloat16 (`hf`), GGUF files (`gguf-bf16`, `gguf-q8_0` ...) and OpenVINO folders (`openvino-fp16` ...). Variants
are made once and kept below `--envs`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from places import add_envs_option, engine_folder, models_folder
from safetensors.numpy import save_file

from octavo.loader.catalogue import CATALOGUE, model_path
from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_model import open_gguf
from octavo.loader.gguf_tokenizer import build_tokenizer
from octavo.loader.tokenizer_files import tokenizer_files_of_gguf

VARIANTS = (
    "hf", "gguf-source", "gguf-bf16", "gguf-q8_0", "gguf-q4_0", "gguf-q4_1",
    "openvino-fp16", "openvino-int8", "openvino-int4",
)  # fmt: skip
EXPORT_TIMEOUT_S = 3600
INT4_GROUP = "64"  # divides every hidden size here; 576 and 640 rule out 128, optimum's own


@dataclass(frozen=True)
class Shape:
    """A Llama of random weights."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Model:
    """`catalogue` names the checkpoint; with a `shape`, only its tokenizer is taken and the weights are random."""

    name: str
    catalogue: str
    shape: Shape | None = None


MODELS = {
    model.name: model
    for model in (
        Model("smollm2-135m", "smollm2-135m-instruct"),
        Model("gemma3-270m", "gemma3-270m"),
        Model("random-1b", "smollm2-135m-instruct", Shape(2048, 8192, 16, 32, 8, 64)),
    )
}


def default_cache() -> Path:
    return Path.home() / ".cache" / "octavo"


class Variants:
    """The variants of one model below `envs`, made when they are first asked for."""

    def __init__(self, model: Model, envs: Path, *, cache: Path | None = None) -> None:
        self.model = model
        self._envs = envs
        self._cache = cache or default_cache()
        self._folder = models_folder(envs) / model.name

    @property
    def source(self) -> Path:
        """The GGUF file that all others come from."""
        checkpoint = model_path(CATALOGUE[self.model.catalogue], self._cache)
        if not checkpoint.is_file():
            raise FileNotFoundError(f"{checkpoint} is missing; fetch it with: octavo pull {self.model.catalogue}")
        if self.model.shape is None:
            return checkpoint
        shape = self.model.shape
        return self._once("gguf-source.gguf", lambda target: write_random_llama(checkpoint, shape, target))

    @property
    def tokenizer_json(self) -> Path:
        return self.get("hf") / "tokenizer.json"

    def get(self, variant: str) -> Path:
        if variant == "gguf-source":
            return self.source
        if variant == "hf":
            return self._once("hf", lambda target: write_hugging_face(self.source, target))
        family, _, kind = variant.partition("-")
        if family == "gguf":
            return self._once(f"{variant}.gguf", lambda target: self._quantize(kind, target))
        if family == "openvino":
            return self._once(variant, lambda target: self._export(kind, target))
        raise ValueError(f"there is no variant {variant!r}; variants: {', '.join(VARIANTS)}")

    def _once(self, name: str, make: Callable[[Path], None]) -> Path:
        """What `make` writes, moved into place when it is whole."""
        final = self._folder / name
        if final.exists():
            return final
        self._folder.mkdir(parents=True, exist_ok=True)
        partial = self._folder / f"partial-{os.getpid()}-{name}"
        try:
            make(partial)
            partial.replace(final)
        finally:
            if partial.is_dir():
                shutil.rmtree(partial)
            partial.unlink(missing_ok=True)
        return final

    def _quantize(self, kind: str, target: Path) -> None:
        """Blocks of 8 and 4 bits are made from the bfloat16 weights, which are those of every other engine."""
        tool = engine_folder(self._envs, "llama.cpp") / "build" / "bin" / "llama-quantize"
        source = self.source if kind == "bf16" else self.get("gguf-bf16")
        if kind == "bf16" and GgufFile.open(source).tensors["token_embd.weight"].type_name == "BF16":
            os.link(source, target)
            return
        run_quiet([tool, "--allow-requantize", source, target, kind.upper(), "2"], EXPORT_TIMEOUT_S)

    def _export(self, kind: str, target: Path) -> None:
        program = engine_folder(self._envs, "openvino") / "bin" / "optimum-cli"
        options = ["--task", "text-generation-with-past", "--weight-format", kind]
        if kind == "int4":
            options += ["--group-size", INT4_GROUP, "--ratio", "1.0"]
        command = [program, "export", "openvino", "--model", self.get("hf"), *options, target]
        run_quiet(command, EXPORT_TIMEOUT_S, PATH=f"{program.parent}:{os.environ['PATH']}", HF_HUB_OFFLINE="1")


def run_quiet(command: Sequence[str | Path], timeout_s: float, **environment: str) -> None:
    """Run to the end; the output is shown only when it fails."""
    words = [str(word) for word in command]
    print("+", " ".join(words), file=sys.stderr, flush=True)
    done = subprocess.run(
        words,
        env={**os.environ, **environment},
        timeout=timeout_s,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        raise RuntimeError(f"{words[0]} ended with {done.returncode}:\n{done.stdout[-4000:]}")


# -- Hugging Face --------------------------------------------------------------------------------------------


def write_hugging_face(source: Path, target: Path) -> None:
    """The folder of a GGUF file as Hugging Face has it: bfloat16 weights, configuration, tokenizer."""
    target.mkdir(parents=True)
    checkpoint = open_gguf(source)
    config = {**checkpoint.config, "torch_dtype": "bfloat16", "dtype": "bfloat16"}
    tensors: dict[str, np.ndarray] = {}
    for name in checkpoint.names():
        tensors[name] = np.ascontiguousarray(checkpoint.tensor(name).numpy().astype(ml_dtypes.bfloat16))
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", checkpoint.generation_config)
    _write_tokenizer(source, target)


def _write_tokenizer(source: Path, target: Path) -> None:
    metadata = GgufFile.open(source).metadata
    built = build_tokenizer(metadata)
    built.tokenizer.save(str(target / "tokenizer.json"))
    ids = {"bos": built.bos_token_id, "eos": built.eos_token_id, "unk": built.unk_token_id, "pad": built.pad_token_id}
    named = {f"{name}_token": built.tokenizer.id_to_token(i) for name, i in ids.items() if i is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **named}
    _write_json(target / "tokenizer_config.json", config)
    for name, template in tokenizer_files_of_gguf(metadata, source).chat_templates.items():
        if name == "default":
            (target / "chat_template.jinja").write_text(template)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


# -- random weights ------------------------------------------------------------------------------------------


def write_random_llama(tokenizer_source: Path, shape: Shape, target: Path) -> None:
    """A Llama of `shape` in bfloat16 with another model's tokenizer, the same bits each time."""
    template = gguf.GGUFReader(tokenizer_source)
    writer = gguf.GGUFWriter(target, "llama")
    for field in template.fields.values():
        if field.name.startswith("tokenizer."):
            value_type = field.types[0]
            inner = field.types[-1] if value_type is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), value_type, sub_type=inner)
    writer.add_name("random-llama")
    writer.add_context_length(8192)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    vocab_size = len(template.fields["tokenizer.ggml.tokens"].data)
    writer.add_vocab_size(vocab_size)
    for name, dims in _llama_tensors(shape, vocab_size).items():
        if len(dims) == 1:
            writer.add_tensor(name, np.ones(dims, np.float32))
        else:
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
            values = np.random.default_rng(seed).standard_normal(dims, np.float32) / np.float32(math.sqrt(dims[-1]))
            packed = values.astype(ml_dtypes.bfloat16).view(np.uint8)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama_tensors(shape: Shape, vocab_size: int) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    q_rows, kv_rows = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocab_size, hidden), "output_norm.weight": (hidden,)}
    for layer in range(shape.num_layers):
        parts = {
            "attn_norm": (hidden,),
            "attn_q": (q_rows, hidden),
            "attn_k": (kv_rows, hidden),
            "attn_v": (kv_rows, hidden),
            "attn_output": (hidden, q_rows),
            "ffn_norm": (hidden,),
            "ffn_gate": (inner, hidden),
            "ffn_up": (inner, hidden),
            "ffn_down": (hidden, inner),
        }
        tensors |= {f"blk.{layer}.{part}.weight": dims for part, dims in parts.items()}
    return tensors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="may be given several times; all")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="may be given several times; all")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="Octavo's cache folder")
    add_envs_option(parser)
    arguments = parser.parse_args()
    for name in arguments.model or MODELS:
        variants = Variants(MODELS[name], arguments.envs, cache=arguments.cache)
        for variant in arguments.variant or VARIANTS:
            print(variants.get(variant), flush=True)


if __name__ == "__main__":
    main()
