"""Which architectures exist, and the way from config.json to a `DecoderSpec`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from octavo.errors import UnsupportedModel
from octavo.models import gemma, granite, llama, mistral, phi3, qwen2, qwen3, starcoder2
from octavo.models.config_reader import ConfigReader
from octavo.models.spec import DecoderSpec

log = logging.getLogger(__name__)

Builder = Callable[[ConfigReader, Mapping[str, Any] | None], DecoderSpec]

BUILDERS: Mapping[str, Builder] = {
    "LlamaForCausalLM": llama.build,
    "MistralForCausalLM": mistral.build,
    "Qwen2ForCausalLM": qwen2.build,
    "Qwen3ForCausalLM": qwen3.build,
    "GemmaForCausalLM": gemma.build_gemma,
    "Gemma2ForCausalLM": gemma.build_gemma2,
    "Gemma3ForCausalLM": gemma.build_gemma3,
    "Gemma3ForConditionalGeneration": gemma.build_gemma3_text_part,
    "Phi3ForCausalLM": phi3.build,
    "GraniteForCausalLM": granite.build,
    "Starcoder2ForCausalLM": starcoder2.build,
}


def build_spec(config: Mapping[str, Any], *, rope_scaling: Mapping[str, Any] | None = None) -> DecoderSpec:
    """The decoder that a config.json describes; `rope_scaling` replaces its RoPE scaling.

    Raises UnsupportedModel naming what is not implemented, CheckpointError naming a value that makes no sense,
    ConfigError for `rope_scaling`.
    """
    reader = ConfigReader(config)
    reader.refuse("is_encoder_decoder")
    reader.refuse("add_cross_attention")
    quantization = reader.section("quantization_config")
    if quantization is not None:
        method = quantization.text("quant_method", "of an unnamed method")
        raise reader.unsupported(f"quantization_config {method!r}", "checkpoints of plain numbers and GGUF files are")
    spec = BUILDERS[_architecture(reader)](reader, rope_scaling)
    if unread := reader.unread():
        log.warning("config.json: %s have no effect on %s here.", ", ".join(unread), spec.architecture)
    return spec


def _architecture(reader: ConfigReader) -> str:
    listed = reader.value("architectures")
    known = ", ".join(BUILDERS)
    if not isinstance(listed, list) or not listed:
        raise UnsupportedModel(f"{reader.where} names no architecture in 'architectures'. Known: {known}.")
    if listed[0] not in BUILDERS:
        raise UnsupportedModel(f"architecture {listed[0]!r} is not supported. Known: {known}.")
    return str(listed[0])
