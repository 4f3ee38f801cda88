"""Qwen 2 and 2.5: biases on q, k and v alone; the layers from max_window_layers on may slide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config_reader import ConfigReader
from octavo.models.pieces import qwen_windows, read_shape
from octavo.models.rope_config import RopeFamily, read_rope
from octavo.models.spec import DecoderSpec, LayerSpec


def build(config: ConfigReader, rope_scaling: Mapping[str, Any] | None) -> DecoderSpec:
    shape = read_shape(config, kv_heads=32)
    activation = config.activation("hidden_act", "silu")
    windows = qwen_windows(config, shape.num_layers)
    for key in ("mlp_bias", "use_mrope"):
        config.refuse(key)
    max_position = config.integer("max_position_embeddings", 32768)
    rope = read_rope(config, RopeFamily(max_position=max_position, head_dim=shape.head_dim), override=rope_scaling)

    def layer(name: str, window: int | None) -> LayerSpec:
        return LayerSpec(
            attention_norm=shape.norm(f"{name}.input_layernorm"),
            attention=shape.attention(f"{name}.self_attn", rope, window=window, qkv_bias=True),
            mlp_norm=shape.norm(f"{name}.post_attention_layernorm"),
            mlp=shape.gated_mlp(f"{name}.mlp", activation),
        )

    return shape.decoder(
        "Qwen2ForCausalLM",
        [layer(name, window) for name, window in zip(shape.layer_names(), windows, strict=True)],
        max_context=rope.context_len,
        tied_head=config.boolean("tie_word_embeddings", False),
    )
