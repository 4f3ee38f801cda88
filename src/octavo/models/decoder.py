"""Runs a `DecoderSpec` over the operators of a backend. The one forward pass of every architecture.

Knows no request, no scheduler and no tensor library: batches are index arrays, tensors belong to the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from octavo.backends.ops import (
    AttentionParams,
    ForwardBatch,
    HostTensor,
    KvCache,
    Ops,
    RopeTable,
    Tensor,
    Weight,
    WeightKind,
)
from octavo.errors import ConfigError
from octavo.loader.checkpoint import Ledger
from octavo.models.rope import RopeSpec
from octavo.models.spec import AttentionSpec, DecoderSpec, LayerSpec, LinearSpec, MlpSpec, NormSpec, Parameter

Progress = Callable[[int, int], None]  # parameters loaded, of how many


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Weight
    bias: Weight | None


@dataclass(frozen=True, slots=True)
class _Norm:
    spec: NormSpec
    weight: Weight
    bias: Weight | None


@dataclass(frozen=True, slots=True)
class _Attention:
    spec: AttentionSpec
    params: AttentionParams
    group: int  # of KV blocks
    layer_in_block: int
    rope: RopeTable | None
    qkv: _Linear
    output: _Linear
    q_norm: _Norm | None
    k_norm: _Norm | None
    sinks: Weight | None


@dataclass(frozen=True, slots=True)
class _Mlp:
    spec: MlpSpec
    up: _Linear
    down: _Linear


@dataclass(frozen=True, slots=True)
class _Layer:
    residual_scale: float
    attention_norm: _Norm
    attention: _Attention
    attention_post_norm: _Norm | None
    mlp_norm: _Norm
    mlp: _Mlp
    mlp_post_norm: _Norm | None


class Decoder:
    """A loaded model on one backend.

    `kv_places` gives each layer its (KV group, layer within the block). RoPE kinds that depend on the longest
    sequence are made for `max_model_len`. Nothing is read from disk before the ledger found every tensor.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        ops: Ops,
        ledger: Ledger,
        *,
        max_model_len: int,
        kv_places: Sequence[tuple[int, int]],
        progress: Progress = lambda done, total: None,
    ) -> None:
        if ops.dtype == "float16" and spec.float16_overflows:
            raise ConfigError(
                f"{spec.architecture} overflows in float16: its activations exceed 65504. "
                "Use --dtype bfloat16 or float32."
            )
        assert len(kv_places) == len(spec.layers), (len(kv_places), len(spec.layers))
        self.spec = spec
        self._ops = ops
        weights = _Weights(spec, ops, ledger, progress)
        ropes = {rope: rope.table(max_model_len) for rope in spec.ropes}
        self._embedding = weights.load(spec.embedding, "embedding")
        self._layers = tuple(
            _load_layer(layer, weights, ropes, place) for layer, place in zip(spec.layers, kv_places, strict=True)
        )
        self._final_norm = weights.norm(spec.final_norm)
        self._head = self._embedding if weights.head is None else weights.load(spec.head, "head")
        self.program = ops.compile(self._forward, self._logits)

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Compute the tokens of `batch` and write their KV. The hidden states behind the final norm, [T, E]."""
        return self.program.forward(batch, cache)

    def logits(self, hidden: Tensor, rows: np.ndarray) -> np.ndarray:
        """The logits behind packed tokens `rows` of the last forward pass. float32, [N, V]"""
        return self.program.logits(hidden, rows)

    def argmax(self, hidden: Tensor, rows: np.ndarray) -> np.ndarray:
        """The tokens of the largest logits behind packed tokens `rows`; see `Program.argmax`. int32, [N]"""
        return self.program.argmax(hidden, rows)

    def _forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        ops = self._ops
        x = ops.embedding(batch, self._embedding, scale=self.spec.embedding_scale)
        for layer in self._layers:
            y = self._attention(self._norm(x, layer.attention_norm), layer.attention, batch, cache)
            if layer.attention_post_norm is not None:
                y = self._norm(y, layer.attention_post_norm)
            x = ops.add(x, y, scale=layer.residual_scale)
            y = self._mlp(self._norm(x, layer.mlp_norm), layer.mlp)
            if layer.mlp_post_norm is not None:
                y = self._norm(y, layer.mlp_post_norm)
            x = ops.add(x, y, scale=layer.residual_scale)
        return self._norm(x, self._final_norm)

    def _logits(self, hidden: Tensor, rows: np.ndarray) -> Tensor:
        ops, spec = self._ops, self.spec
        return ops.logits(ops.rows(hidden, rows), self._head, scale=spec.logit_scale, softcap=spec.logit_softcap)

    def _attention(self, x: Tensor, layer: _Attention, batch: ForwardBatch, cache: KvCache) -> Tensor:
        ops, spec = self._ops, layer.spec
        query_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        packed = ops.linear(x, layer.qkv.weight, layer.qkv.bias)
        q, k, v = (ops.split_heads(part, spec.head_dim) for part in ops.split(packed, (query_size, kv_size, kv_size)))
        if layer.q_norm is not None:
            q = self._norm(q, layer.q_norm)
        if layer.k_norm is not None:
            k = self._norm(k, layer.k_norm)
        if layer.rope is not None:
            q, k = ops.rope(q, batch, layer.rope), ops.rope(k, batch, layer.rope)
        y = ops.attend(
            q,
            k,
            v,
            cache,
            batch,
            layer.params,
            group=layer.group,
            layer_in_block=layer.layer_in_block,
            sinks=layer.sinks,
        )
        return ops.linear(y, layer.output.weight, layer.output.bias)

    def _mlp(self, x: Tensor, layer: _Mlp) -> Tensor:
        ops, spec = self._ops, layer.spec
        y = ops.linear(x, layer.up.weight, layer.up.bias)
        y = ops.gated_activation(y, spec.activation) if spec.gated else ops.activation(y, spec.activation)
        return ops.linear(y, layer.down.weight, layer.down.bias)

    def _norm(self, x: Tensor, norm: _Norm) -> Tensor:
        if norm.spec.kind == "layer":
            return self._ops.layer_norm(x, norm.weight, norm.bias, eps=norm.spec.eps)
        return self._ops.rms_norm(x, norm.weight, eps=norm.spec.eps, offset=norm.spec.offset)


class _Weights:
    """Claims every parameter of a spec from the ledger, then hands them to the backend one by one."""

    def __init__(self, spec: DecoderSpec, ops: Ops, ledger: Ledger, progress: Progress) -> None:
        self._ops = ops
        self._progress = progress
        self._claimed = {
            parameter: [ledger.take(*each) for each in zip(parameter.names, parameter.shapes, strict=True)]
            for parameter in parameters(spec)
        }
        self.head = ledger.take_head(
            spec.head.shape, tied=spec.tied_head, embedding=self._claimed[spec.embedding][0], name=spec.head.names[0]
        )
        ledger.finish()
        if self.head is not None:
            self._claimed[spec.head] = [self.head]
        self._total = sum(math.prod(parameter.shape) for parameter in self._claimed)
        self._loaded = 0

    def load(self, parameter: Parameter, kind: WeightKind) -> Weight:
        tensors: list[HostTensor] = self._claimed[parameter]
        weight = self._ops.weight(tensors, kind=kind)
        self._loaded += math.prod(parameter.shape)
        self._progress(self._loaded, self._total)
        return weight

    def vector(self, parameter: Parameter | None) -> Weight | None:
        return None if parameter is None else self.load(parameter, "vector")

    def linear(self, spec: LinearSpec, kind: WeightKind = "linear") -> _Linear:
        return _Linear(self.load(spec.weight, kind), self.vector(spec.bias))

    def norm(self, spec: NormSpec) -> _Norm:
        return _Norm(spec, self.load(spec.weight, "vector"), self.vector(spec.bias))

    def optional_norm(self, spec: NormSpec | None) -> _Norm | None:
        return None if spec is None else self.norm(spec)


def parameters(spec: DecoderSpec) -> list[Parameter]:
    """Every parameter but the head, which may be tied."""
    found = [spec.embedding]

    def add(part: LinearSpec | NormSpec | None) -> None:
        if part is not None:
            found.extend(parameter for parameter in (part.weight, part.bias) if parameter is not None)

    for layer in spec.layers:
        attention, mlp = layer.attention, layer.mlp
        add(layer.attention_norm)
        for part in (attention.qkv, attention.output, attention.q_norm, attention.k_norm):
            add(part)
        if attention.sinks is not None:
            found.append(attention.sinks)
        for part in (layer.attention_post_norm, layer.mlp_norm, mlp.up, mlp.down, layer.mlp_post_norm):
            add(part)
    add(spec.final_norm)
    return found


def _load_layer(
    layer: LayerSpec, weights: _Weights, ropes: dict[RopeSpec, RopeTable], place: tuple[int, int]
) -> _Layer:
    attention, mlp = layer.attention, layer.mlp
    return _Layer(
        residual_scale=layer.residual_scale,
        attention_norm=weights.norm(layer.attention_norm),
        attention=_Attention(
            spec=attention,
            params=attention.params,
            group=place[0],
            layer_in_block=place[1],
            rope=None if attention.rope is None else ropes[attention.rope],
            qkv=weights.linear(attention.qkv),
            output=weights.linear(attention.output),
            q_norm=weights.optional_norm(attention.q_norm),
            k_norm=weights.optional_norm(attention.k_norm),
            sinks=weights.vector(attention.sinks),
        ),
        attention_post_norm=weights.optional_norm(layer.attention_post_norm),
        mlp_norm=weights.norm(layer.mlp_norm),
        mlp=_Mlp(mlp, weights.linear(mlp.up, "gated" if mlp.gated else "linear"), weights.linear(mlp.down)),
        mlp_post_norm=weights.optional_norm(layer.mlp_post_norm),
    )
