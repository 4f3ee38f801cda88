"""A tiny random Llama with a byte-level tokenizer and ChatML, written as a Hugging Face folder in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
EOS_TOKEN_ID = VOCAB_SIZE - 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token a byte: every string can be written, and any run of tokens may end inside a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    return tokenizer


# Two layers, untied head.
LLAMA_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def save_tiny_llama(folder: Path, *, seed: int = 0, scale: float = 0.3, **changes: Any) -> Path:
    """Write the model into `folder`; `changes` are config.json keys. A larger `scale` makes sharper distributions."""
    config: dict[str, Any] = {
        **LLAMA_CONFIG,
        "eos_token_id": EOS_TOKEN_ID,
        "torch_dtype": "float32",
        **changes,
    }
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden), "lm_head.weight": (VOCAB_SIZE, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for name, shape in (
            ("self_attn.q_proj", (hidden, hidden)),
            ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)),
            ("self_attn.o_proj", (hidden, hidden)),
            ("mlp.gate_proj", (mlp, hidden)),
            ("mlp.up_proj", (mlp, hidden)),
            ("mlp.down_proj", (hidden, mlp)),
        ):
            shapes[f"{prefix}.{name}.weight"] = shape
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    rng = np.random.default_rng(seed)
    tensors = {
        name: (np.ones(shape) if len(shape) == 1 else rng.normal(0, scale, shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHAT_TEMPLATE, "eos_token": SPECIAL_TOKENS[-1]})
    )
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
