"""Qwen 3, dense: a norm on every query and key head, heads of a size of their own, biases only by request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config_reader import ConfigReader
from octavo.models.pieces import qwen_windows, read_shape
from octavo.models.rope_config import RopeFamily, read_rope
from octavo.models.spec import DecoderSpec, LayerSpec


def build(config: ConfigReader, rope_scaling: Mapping[str, Any] | None) -> DecoderSpec:
    shape = read_shape(config, kv_heads=32, head_dim=128)
    activation = config.activation("hidden_act", "silu")
    attention_bias = config.boolean("attention_bias", False)
    windows = qwen_windows(config, shape.num_layers)
    config.refuse("mlp_bias")
    max_position = config.integer("max_position_embeddings", 32768)
    rope = read_rope(config, RopeFamily(max_position=max_position, head_dim=shape.head_dim), override=rope_scaling)

    def layer(name: str, window: int | None) -> LayerSpec:
        return LayerSpec(
            attention_norm=shape.norm(f"{name}.input_layernorm"),
            attention=shape.attention(
                f"{name}.self_attn",
                rope,
                window=window,
                qkv_bias=attention_bias,
                output_bias=attention_bias,
                head_norms=True,
            ),
            mlp_norm=shape.norm(f"{name}.post_attention_layernorm"),
            mlp=shape.gated_mlp(f"{name}.mlp", activation),
        )

    return shape.decoder(
        "Qwen3ForCausalLM",
        [layer(name, window) for name, window in zip(shape.layer_names(), windows, strict=True)],
        max_context=rope.context_len,
        tied_head=config.boolean("tie_word_embeddings", False),
    )
