"""Tiny random models of every architecture and variant, made with `transformers`, which then is the oracle.

    for name in ARCHITECTURES:
        model = golden_model(name)     # a fixture; made once per session
        model.path                     # a folder with config.json and model.safetensors, float32
        model.prompts                  # token ids of a few requests of different lengths
        model.max_model_len            # serve it with this, where RoPE depends on the longest sequence
        model.check_greedy(prompt, tokens)  # raises unless transformers continues the prompt like this

A mechanism that must not change what a model says runs these models along its own path.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

NUM_GENERATED = 24
VOCAB_SIZE = 128
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Architecture:
    family: str  # prefix of the classes in transformers
    options: dict[str, Any] = field(default_factory=dict)
    prompt_lens: tuple[int, ...] = (9, 21, 40)
    max_model_len: int = 96
    older: bool = False  # write config.json as before transformers 5

    def config(self) -> PreTrainedConfig:
        return getattr(transformers, f"{self.family}Config")(**(SHAPE | self.options))


def _llama_rope(rope: dict[str, Any], *, max_position: int = 256, older: bool = False, **options: Any) -> Architecture:
    options |= {"rope_parameters": {"rope_theta": 500.0, **rope}, "max_position_embeddings": max_position}
    return Architecture("Llama", options, BEYOND if rope["rope_type"] == "dynamic" else (9, 21, 40), older=older)


NATIVE = 48  # of the models whose RoPE has two variants: requests of 21 + 24 tokens fit, those of 60 do not
BEYOND = (9, 21, 60)
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.5, 2.0, 3.5, 5.0],
}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("Llama"),
    "llama-mha-biases-tied": Architecture(
        "Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    ),
    "llama-mqa-wide-heads": Architecture("Llama", {"num_key_value_heads": 1, "head_dim": 24}),
    "llama-linear": _llama_rope({"rope_type": "linear", "factor": 3.0}, older=True),
    "llama-dynamic": _llama_rope({"rope_type": "dynamic", "factor": 2.0}, max_position=NATIVE),
    "llama-yarn": _llama_rope(
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, max_position=64, older=True
    ),
    "llama-yarn-mscale": _llama_rope(
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "truncate": False,
        }
    ),
    "llama-yarn-attention-factor": _llama_rope(
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3}
    ),
    "llama-3": _llama_rope(
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        older=True,
    ),
    "mistral-window": Architecture("Mistral", {"sliding_window": 8}, older=True),
    "mistral-full": Architecture("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": Architecture("Qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen2-window": Architecture(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "tie_word_embeddings": True},
        older=True,
    ),
    "qwen2-layer-types": Architecture(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 17,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": Architecture("Qwen3", {"head_dim": 32}),
    "qwen3-bias-tied": Architecture(
        "Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}
    ),
    "gemma": Architecture(
        "Gemma", {"head_dim": 32, "num_key_value_heads": 1, "hidden_act": "gelu", "tie_word_embeddings": True}
    ),
    "gemma2": Architecture(
        "Gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 10,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
        },
        older=True,
    ),
    "gemma3": Architecture(
        "Gemma3Text",
        {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "sliding_window": 12,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        },
        older=True,
    ),
    "gemma3-scaled": Architecture(
        "Gemma3Text",
        {
            "head_dim": 16,
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 4.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
            "tie_word_embeddings": True,
        },
    ),
    "phi3": Architecture("Phi3", {"sliding_window": None}),
    "phi3-window": Architecture("Phi3", {"sliding_window": 13, "num_key_value_heads": 4}),
    "phi3-longrope": Architecture(
        "Phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "short_factor": [1.0, 1.1, 1.3, 1.5],
                "long_factor": [1.5, 2.0, 3.5, 5.0],
                "partial_rotary_factor": 0.5,
            },
            "original_max_position_embeddings": NATIVE,
            "tie_word_embeddings": True,
        },
        BEYOND,
        older=True,
    ),
    "granite": Architecture(
        "Granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "starcoder2": Architecture("Starcoder2", {"use_bias": True, "tie_word_embeddings": True}),
    "starcoder2-window": Architecture("Starcoder2", {"use_bias": False, "sliding_window": 9}),
}


@dataclass(eq=False)
class GoldenModel:
    name: str
    path: Path
    prompts: list[list[int]]
    max_model_len: int
    oracle: PreTrainedModel

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """What `transformers` says behind every token. [T, V] float32"""
        with torch.no_grad():
            if _rope_type(self.oracle.config) == "dynamic":
                # Its frequencies are those of the longest sequence seen since a short one: show it our longest.
                self.oracle(torch.zeros((1, self.max_model_len), dtype=torch.long))
            return self.oracle(torch.tensor([list(token_ids)])).logits[0].numpy()

    def check_greedy(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Raises unless `tokens` are the greedy continuation of `prompt`: each is the argmax behind those before it."""
        logits = self.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(tokens)


def make_golden_model(name: str, folder: Path) -> GoldenModel:
    """Make the model `name` and save it in `folder`. The same on every machine and in every run."""
    architecture = ARCHITECTURES[name]
    oracle = random_model(architecture.config(), seed=sum(name.encode()))
    oracle.save_pretrained(folder)
    if architecture.older:
        path = folder / "config.json"
        path.write_text(json.dumps(older_layout(json.loads(path.read_text())), indent=2))
    rng = np.random.default_rng(sum(name.encode()))
    prompts = [rng.integers(0, VOCAB_SIZE, length).tolist() for length in architecture.prompt_lens]
    return GoldenModel(name, folder, prompts, architecture.max_model_len, oracle)


def older_layout(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers 5 as older versions wrote it: what most files on the hub look like."""
    config = dict(config, torch_dtype=config["dtype"], rope_scaling=None)
    parameters = config.pop("rope_parameters")
    config.pop("layer_types", None)
    if "_sliding_window_pattern" in config:
        config["sliding_window_pattern"] = config.pop("_sliding_window_pattern")
    if "sliding_attention" in parameters:
        config["rope_local_base_freq"] = parameters["sliding_attention"]["rope_theta"]
        parameters = parameters["full_attention"]
    parameters = dict(parameters)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in parameters:
            config[key] = parameters.pop(key)
    if parameters["rope_type"] != "default":
        config["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    return config


def random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """A model whose every parameter matters: norms and biases are random too, logits have a spread of about one."""
    config.architectures = [_class_name(config)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model = model.eval().float()
    generator = torch.Generator().manual_seed(seed)
    is_gemma = "gemma" in config.model_type
    # A tied embedding must not outweigh the layers: the model would only repeat its last token.
    embedding_std = 0.06 if is_gemma else 0.12 if config.tie_word_embeddings else 1.0
    with torch.no_grad():
        for key, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if "norm" in key and key.endswith("weight"):
                value.copy_(0.2 * noise if is_gemma else 1 + 0.2 * noise)
            elif value.ndim == 1:
                value.copy_(0.2 * noise)
            elif "embed_tokens" in key:
                value.copy_(embedding_std * noise)
            else:
                value.copy_(1.5 * noise / value.shape[1] ** 0.5)
    return model


def _class_name(config: PreTrainedConfig) -> str:
    return transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]


def _rope_type(config: PreTrainedConfig) -> str | None:
    return config.rope_parameters.get("rope_type")


Maker = Callable[[str], GoldenModel]
