"""StarCoder 2: layer norms with biases, an MLP without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.models.config_reader import ConfigReader
from octavo.models.pieces import linear, parameter, read_shape
from octavo.models.rope_config import RopeFamily, read_rope
from octavo.models.spec import DecoderSpec, LayerSpec, MlpSpec, NormSpec


def build(config: ConfigReader, rope_scaling: Mapping[str, Any] | None) -> DecoderSpec:
    shape = read_shape(config, kv_heads=2, eps=1e-5, eps_key="norm_epsilon")
    activation = config.activation("hidden_act", "gelu_pytorch_tanh")
    bias = config.boolean("use_bias", True)
    window = config.optional_integer("sliding_window")
    config.refuse("mlp_type", unless=(None, "default"))
    config.refuse("norm_type", unless=(None, "layer_norm"))
    config.ignore("activation_function", "layer_norm_epsilon")  # older names beside hidden_act and norm_epsilon
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights")
    max_position = config.integer("max_position_embeddings", 4096)
    rope = read_rope(config, RopeFamily(max_position=max_position, head_dim=shape.head_dim), override=rope_scaling)

    def norm(name: str) -> NormSpec:
        weight, shift = (parameter(f"{name}.{part}", shape.hidden_size) for part in ("weight", "bias"))
        return NormSpec(weight, shape.eps, kind="layer", bias=shift)

    def layer(name: str) -> LayerSpec:
        return LayerSpec(
            attention_norm=norm(f"{name}.input_layernorm"),
            attention=shape.attention(f"{name}.self_attn", rope, window=window, qkv_bias=bias, output_bias=bias),
            mlp_norm=norm(f"{name}.post_attention_layernorm"),
            mlp=MlpSpec(
                up=linear(f"{name}.mlp", {"c_fc": shape.intermediate_size}, shape.hidden_size, bias=bias),
                down=linear(f"{name}.mlp", {"c_proj": shape.hidden_size}, shape.intermediate_size, bias=bias),
                activation=activation,
                gated=False,
            ),
        )

    return shape.decoder(
        "Starcoder2ForCausalLM",
        [layer(name) for name in shape.layer_names()],
        max_context=rope.context_len,
        tied_head=config.boolean("tie_word_embeddings", True),
        final_norm=norm("model.norm"),
    )
