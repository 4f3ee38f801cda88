"""Llama 1 to 3.x and what is built like it: SmolLM 1 and 2, TinyLlama, Yi, DeepSeek-Coder 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config_reader import ConfigReader
from octavo.models.pieces import read_shape
from octavo.models.rope_config import RopeFamily, read_rope
from octavo.models.spec import DecoderSpec, LayerSpec


def build(config: ConfigReader, rope_scaling: Mapping[str, Any] | None) -> DecoderSpec:
    shape = read_shape(config)
    activation = config.activation("hidden_act", "silu")
    attention_bias = config.boolean("attention_bias", False)
    mlp_bias = config.boolean("mlp_bias", False)
    config.refuse("rope_interleaved")
    config.ignore("is_llama_config")  # SmolLM
    max_position = config.integer("max_position_embeddings", 2048)
    rope = read_rope(config, RopeFamily(max_position=max_position, head_dim=shape.head_dim), override=rope_scaling)

    def layer(name: str) -> LayerSpec:
        return LayerSpec(
            attention_norm=shape.norm(f"{name}.input_layernorm"),
            attention=shape.attention(f"{name}.self_attn", rope, qkv_bias=attention_bias, output_bias=attention_bias),
            mlp_norm=shape.norm(f"{name}.post_attention_layernorm"),
            mlp=shape.gated_mlp(f"{name}.mlp", activation, bias=mlp_bias),
        )

    return shape.decoder(
        "LlamaForCausalLM",
        [layer(name) for name in shape.layer_names()],
        max_context=rope.context_len,
        tied_head=config.boolean("tie_word_embeddings", False),
    )
