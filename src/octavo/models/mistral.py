"""Mistral: Llama without biases, with a sliding window in every layer unless sliding_window is null."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config_reader import ConfigReader
from octavo.models.pieces import read_shape
from octavo.models.rope_config import RopeFamily, read_rope
from octavo.models.spec import DecoderSpec, LayerSpec


def build(config: ConfigReader, rope_scaling: Mapping[str, Any] | None) -> DecoderSpec:
    shape = read_shape(config, kv_heads=8)
    activation = config.activation("hidden_act", "silu")
    window = config.optional_integer("sliding_window", 4096)
    for key in ("attention_bias", "mlp_bias", "layer_types"):
        config.refuse(key)
    max_position = config.integer("max_position_embeddings", 131072)
    rope = read_rope(config, RopeFamily(max_position=max_position, head_dim=shape.head_dim), override=rope_scaling)

    def layer(name: str) -> LayerSpec:
        return LayerSpec(
            attention_norm=shape.norm(f"{name}.input_layernorm"),
            attention=shape.attention(f"{name}.self_attn", rope, window=window),
            mlp_norm=shape.norm(f"{name}.post_attention_layernorm"),
            mlp=shape.gated_mlp(f"{name}.mlp", activation),
        )

    return shape.decoder(
        "MistralForCausalLM",
        [layer(name) for name in shape.layer_names()],
        max_context=rope.context_len,
        tied_head=config.boolean("tie_word_embeddings", False),
    )
