"""The architectures that are read from GGUF, and their tensors under Hugging Face's names and conventions.

What llama.cpp's converter did to the weights is undone here: it interleaves the rows of q and k in the llama family,
and stores Gemma's norms with 1 added. Both are views; nothing is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from octavo.errors import UnsupportedModel
from octavo.loader.gguf import GgufFile, GgufTensor

MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}

# Tensors that are part of the RoPE configuration (`gguf_config` reads them), and buffers derived from it.
ROPE_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
DERIVED = re.compile(r"blk\.\d+\.attn_(rot_embd|rot_freqs)(\.weight)?")

LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
MODEL_TENSOR = re.compile(r"(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """How one `general.architecture` maps to Hugging Face."""

    name: str
    model_type: str
    class_name: str
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    interleaves_heads: bool = False
    norm_shift: float = 0.0


# Gemma computes x * (1 + w) and the file holds s, the float32 sum 1 + w. s - 1 is exact in float32 for s >= 0.5, so
# that the model multiplies by s again; w itself comes back unchanged where the sum lost no bit of it, as for
# bfloat16 weights above 2^-16.
GEMMA_SHIFT = -1.0

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        GgufArchitecture("llama", "llama", "LlamaForCausalLM", interleaves_heads=True),
        GgufArchitecture("qwen2", "qwen2", "Qwen2ForCausalLM"),
        GgufArchitecture("qwen3", "qwen3", "Qwen3ForCausalLM", LAYER_NAMES | HEAD_NORMS),
        GgufArchitecture("gemma", "gemma", "GemmaForCausalLM", norm_shift=GEMMA_SHIFT),
        GgufArchitecture("gemma2", "gemma2", "Gemma2ForCausalLM", LAYER_NAMES | SANDWICH_NORMS, norm_shift=GEMMA_SHIFT),
        GgufArchitecture(
            "gemma3",
            "gemma3_text",
            "Gemma3ForCausalLM",
            LAYER_NAMES | SANDWICH_NORMS | HEAD_NORMS,
            norm_shift=GEMMA_SHIFT,
        ),
        GgufArchitecture("phi3", "phi3", "Phi3ForCausalLM", LAYER_NAMES | FUSED),
        GgufArchitecture("granite", "granite", "GraniteForCausalLM", interleaves_heads=True),
    )
}


def architecture_of(file: GgufFile) -> GgufArchitecture:
    """Raises UnsupportedModel naming an architecture that is not in `ARCHITECTURES`."""
    name = file.metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        raise UnsupportedModel(
            f"{file.path} has the GGUF architecture {name!r}. Octavo serves: {', '.join(ARCHITECTURES)}."
        )
    return architecture


def hugging_face_tensors(
    file: GgufFile, architecture: GgufArchitecture, *, num_heads: int, num_kv_heads: int
) -> dict[str, GgufTensor]:
    """The tensors of a model by their Hugging Face name, in Hugging Face's layout."""
    heads = {"attn_q": num_heads, "attn_k": num_kv_heads} if architecture.interleaves_heads else {}
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        if name in ROPE_TENSORS or DERIVED.fullmatch(name):
            continue
        if match := LAYER_TENSOR.fullmatch(name):
            layer, part, kind = match.groups()
            target = architecture.layer_names.get(part)
            target = target and f"model.layers.{int(layer)}.{target}"
        else:
            match = MODEL_TENSOR.fullmatch(name)
            part, kind = match.groups() if match else ("", "")
            target = MODEL_NAMES.get(part)
        if not target:
            raise UnsupportedModel(
                f"{file.path}: tensor {name} {list(tensor.shape)} is not part of the {architecture.name} architecture "
                "as Octavo serves it."
            )
        if part in heads:
            tensor = tensor.with_interleaved_heads(heads[part])
        if architecture.norm_shift and part.endswith("norm"):
            tensor = tensor.with_shift(architecture.norm_shift)
        tensors[f"{target}.{kind}"] = tensor
    return tensors
