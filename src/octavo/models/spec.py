"""What a decoder is, as frozen data: shapes, choices and the checkpoint's name of every parameter.

A family file builds it from config.json, `Decoder` runs it, and nothing else of the checkpoint's configuration
reaches the computation. Two equal specs with equal weights compute the same function.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.backends.ops import Activation, AttentionParams
from octavo.models.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class Parameter:
    """Checkpoint tensors that are concatenated along their first dimension into one parameter."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])


@dataclass(frozen=True, slots=True)
class LinearSpec:
    weight: Parameter  # [out, in]
    bias: Parameter | None = None  # [out]


@dataclass(frozen=True, slots=True)
class NormSpec:
    weight: Parameter
    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0  # 1 where the checkpoint stores weight - 1 (Gemma); rms only
    bias: Parameter | None = None  # layer only


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Self-attention of one layer. The rows of `qkv` are the query heads, then the key and the value heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # of the scores
    qkv: LinearSpec
    output: LinearSpec
    rope: RopeSpec | None
    window: int | None = None  # a query sees at most this many keys, itself included
    softcap: float | None = None
    q_norm: NormSpec | None = None  # of each head, before RoPE
    k_norm: NormSpec | None = None
    sinks: Parameter | None = None  # [num_heads]

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(
            self.num_heads, self.num_kv_heads, self.head_dim, self.scale, window=self.window, softcap=self.softcap
        )


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """down(act(up(x))), or down(act(gate(x)) * up(x)) when gated: then `up` is gate and up in one."""

    up: LinearSpec
    down: LinearSpec
    activation: Activation
    gated: bool = True


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """x += post_norm(attention(norm(x))), then the same with the MLP; each sum times `residual_scale`."""

    attention_norm: NormSpec
    attention: AttentionSpec
    mlp_norm: NormSpec
    mlp: MlpSpec
    attention_post_norm: NormSpec | None = None  # Gemma 2 and 3
    mlp_post_norm: NormSpec | None = None
    residual_scale: float = 1.0  # Granite


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    architecture: str
    hidden_size: int
    vocab_size: int
    max_context: int  # tokens; what the positions are meant for, RoPE scaling included
    embedding: Parameter
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    head: Parameter  # what the output matrix is called; a tied head may be stored all the same
    tied_head: bool
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    float16_overflows: bool = False  # activations of released checkpoints exceed 65504
    ignored_prefixes: tuple[str, ...] = ()  # tensors of parts that are not run, such as a vision tower

    @property
    def native_context(self) -> int | None:
        """Requests longer than this run in RoPE variant 1 for life; None where one variant serves all."""
        return min((n for rope in self.ropes if (n := rope.native_len) is not None), default=None)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different ones, in the order of the layers."""
        return tuple(dict.fromkeys(layer.attention.rope for layer in self.layers if layer.attention.rope is not None))
