"""Phi-3 and Phi-4-mini: q, k, v and gate, up stored as one; LongRoPE; perhaps only a part of each head rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config_reader import ConfigReader
from octavo.models.pieces import read_shape
from octavo.models.rope_config import RopeFamily, read_rope
from octavo.models.spec import DecoderSpec, LayerSpec


def build(config: ConfigReader, rope_scaling: Mapping[str, Any] | None) -> DecoderSpec:
    shape = read_shape(config, eps=1e-5)
    activation = config.activation("hidden_act", "silu")
    window = config.optional_integer("sliding_window")
    for key in ("attention_bias", "mlp_bias", "lm_head_bias", "layer_types"):
        config.refuse(key)
    for key in ("full_attn_mod", "interpolate_factor"):
        config.refuse(key, unless=(None, 1))
    family = RopeFamily(
        max_position=config.integer("max_position_embeddings", 4096),
        head_dim=shape.head_dim,
        default_native=4096,
        partial_rotary=True,
        aliases={"su": "longrope", "yarn": "longrope"},  # what LongRoPE was called in the first checkpoints
    )
    rope = read_rope(config, family, override=rope_scaling)

    def layer(name: str) -> LayerSpec:
        return LayerSpec(
            attention_norm=shape.norm(f"{name}.input_layernorm"),
            attention=shape.attention(f"{name}.self_attn", rope, window=window, fused_qkv="qkv_proj"),
            mlp_norm=shape.norm(f"{name}.post_attention_layernorm"),
            mlp=shape.gated_mlp(f"{name}.mlp", activation, fused_up="gate_up_proj"),
        )

    return shape.decoder(
        "Phi3ForCausalLM",
        [layer(name) for name in shape.layer_names()],
        max_context=rope.context_len,
        tied_head=config.boolean("tie_word_embeddings", False),
    )
