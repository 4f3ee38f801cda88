"""Gemma 1, 2 and 3, the text part: scaled embeddings, norms stored as weight - 1, the head tied.

Gemma 2 adds norms behind attention and MLP, soft caps, and a window in every other layer. Gemma 3 replaces the
soft caps by a norm on every query and key head, and gives its sliding layers a RoPE of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.backends.ops import Activation
from octavo.models.config_reader import ConfigReader
from octavo.models.pieces import DecoderShape, layer_kinds, layer_windows, read_shape
from octavo.models.rope import RopeSpec
from octavo.models.rope_config import LayerKind, RopeFamily, read_rope
from octavo.models.spec import AttentionSpec, DecoderSpec, LayerSpec


def build_gemma(config: ConfigReader, rope_scaling: Mapping[str, Any] | None) -> DecoderSpec:
    shape = read_shape(config, kv_heads=16, head_dim=256, norm_offset=1.0)
    # The releases say "gelu" and mean its tanh form.
    activation: Activation = _gelu_tanh(config.activation("hidden_act", "gelu_pytorch_tanh"))
    if config.value("hidden_activation") is not None:
        activation = _gelu_tanh(config.activation("hidden_activation"))
    attention_bias = config.boolean("attention_bias", False)
    max_position = config.integer("max_position_embeddings", 8192)
    rope = read_rope(config, RopeFamily(max_position=max_position, head_dim=shape.head_dim), override=rope_scaling)

    def layer(name: str) -> LayerSpec:
        return LayerSpec(
            attention_norm=shape.norm(f"{name}.input_layernorm"),
            attention=shape.attention(f"{name}.self_attn", rope, qkv_bias=attention_bias, output_bias=attention_bias),
            mlp_norm=shape.norm(f"{name}.post_attention_layernorm"),
            mlp=shape.gated_mlp(f"{name}.mlp", activation),
        )

    return _decoder("GemmaForCausalLM", config, shape, [layer(name) for name in shape.layer_names()], rope)


def build_gemma2(config: ConfigReader, rope_scaling: Mapping[str, Any] | None) -> DecoderSpec:
    shape = read_shape(config, kv_heads=4, head_dim=256, norm_offset=1.0)
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    attention_bias = config.boolean("attention_bias", False)
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    score_softcap = config.optional_number("attn_logit_softcapping", 50.0, low=1e-6)
    logit_softcap = config.optional_number("final_logit_softcapping", 30.0, low=1e-6)
    alternating: list[LayerKind] = ["full_attention" if i % 2 else "sliding_attention" for i in range(shape.num_layers)]
    kinds = layer_kinds(config, alternating)
    windows = layer_windows(config, kinds, config.optional_integer("sliding_window", 4096))
    max_position = config.integer("max_position_embeddings", 8192)
    rope = read_rope(config, RopeFamily(max_position=max_position, head_dim=shape.head_dim), override=rope_scaling)

    def layer(name: str, window: int | None) -> LayerSpec:
        attention = shape.attention(
            f"{name}.self_attn",
            rope,
            scale=scale,
            window=window,
            softcap=score_softcap,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
        )
        return _sandwich_layer(name, shape, attention, activation)

    layers = [layer(name, window) for name, window in zip(shape.layer_names(), windows, strict=True)]
    return _decoder("Gemma2ForCausalLM", config, shape, layers, rope, logit_softcap=logit_softcap)


def build_gemma3(
    config: ConfigReader, rope_scaling: Mapping[str, Any] | None, *, prefix: str = "", ignored: tuple[str, ...] = ()
) -> DecoderSpec:
    shape = read_shape(config, kv_heads=4, head_dim=256, norm_offset=1.0, prefix=prefix)
    activation = config.activation("hidden_activation", "gelu_pytorch_tanh")
    attention_bias = config.boolean("attention_bias", False)
    scale = config.positive("query_pre_attn_scalar", 256) ** -0.5
    logit_softcap = config.optional_number("final_logit_softcapping", low=1e-6)
    config.refuse("attn_logit_softcapping")  # transformers reads it and does not apply it
    pattern = config.integer("sliding_window_pattern", 6)
    every_nth_full: list[LayerKind] = [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(shape.num_layers)
    ]
    kinds = layer_kinds(config, every_nth_full)
    windows = layer_windows(config, kinds, config.optional_integer("sliding_window", 4096))
    max_position = config.integer("max_position_embeddings", 131072)
    full = read_rope(
        config,
        RopeFamily(
            max_position=max_position,
            head_dim=shape.head_dim,
            default_theta=1e6,
            max_position_counts_linear=True,
        ),
        override=rope_scaling,
        layer_kind="full_attention",
    )
    sliding = read_rope(
        config,
        RopeFamily(
            max_position=max_position, head_dim=shape.head_dim, default_theta=1e4, theta_key="rope_local_base_freq"
        ),
        layer_kind="sliding_attention",
    )

    def layer(name: str, kind: LayerKind, window: int | None) -> LayerSpec:
        attention = shape.attention(
            f"{name}.self_attn",
            full if kind == "full_attention" else sliding,
            scale=scale,
            window=window,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            head_norms=True,
        )
        return _sandwich_layer(name, shape, attention, activation)

    layers = [layer(*each) for each in zip(shape.layer_names(), kinds, windows, strict=True)]
    return _decoder(
        "Gemma3ForCausalLM", config, shape, layers, full, logit_softcap=logit_softcap, ignored_prefixes=ignored
    )


def build_gemma3_text_part(config: ConfigReader, rope_scaling: Mapping[str, Any] | None) -> DecoderSpec:
    """The language model of Gemma 3 with images (4B and up); the vision tower is left out.

    Their text_config leaves out what equals the default of `transformers`.
    """
    text = config.section("text_config")
    if text is None:
        raise config.bad("text_config", None, "the configuration of the language model")
    config.ignore("vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index")
    text = text.updated(
        defaults={"num_attention_heads": 8, "vocab_size": 262208},
        values={"tie_word_embeddings": config.boolean("tie_word_embeddings", True)},
    )
    return build_gemma3(
        text, rope_scaling, prefix="language_model.", ignored=("vision_tower.", "multi_modal_projector.")
    )


def _gelu_tanh(activation: Activation) -> Activation:
    return "gelu_tanh" if activation == "gelu" else activation


def _sandwich_layer(name: str, shape: DecoderShape, attention: AttentionSpec, activation: Activation) -> LayerSpec:
    return LayerSpec(
        attention_norm=shape.norm(f"{name}.input_layernorm"),
        attention=attention,
        attention_post_norm=shape.norm(f"{name}.post_attention_layernorm"),
        mlp_norm=shape.norm(f"{name}.pre_feedforward_layernorm"),
        mlp=shape.gated_mlp(f"{name}.mlp", activation),
        mlp_post_norm=shape.norm(f"{name}.post_feedforward_layernorm"),
    )


def _decoder(
    architecture: str,
    config: ConfigReader,
    shape: DecoderShape,
    layers: list[LayerSpec],
    rope: RopeSpec,
    *,
    logit_softcap: float | None = None,
    ignored_prefixes: tuple[str, ...] = (),
) -> DecoderSpec:
    config.refuse("use_bidirectional_attention")
    config.ignore("hidden_act")  # stands beside hidden_activation in Gemma 2 and 3, which counts
    return shape.decoder(
        architecture,
        layers,
        max_context=rope.context_len,
        tied_head=config.boolean("tie_word_embeddings", True),
        embedding_scale=shape.hidden_size**0.5,
        logit_softcap=logit_softcap,
        float16_overflows=True,
        ignored_prefixes=ignored_prefixes,
    )
