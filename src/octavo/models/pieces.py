"""Pieces of a `DecoderSpec` that families share: parameters by name and shape, and the usual blocks of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.backends.ops import Activation
from octavo.models.config_reader import ConfigReader
from octavo.models.rope import RopeSpec
from octavo.models.rope_config import LAYER_KINDS, LayerKind
from octavo.models.spec import AttentionSpec, DecoderSpec, LayerSpec, LinearSpec, MlpSpec, NormSpec, Parameter

MAX_LAYERS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """The sizes that every family's config.json gives, and blocks of these sizes.

    `eps` and `norm_offset` hold for every norm; `norm_offset` is 1 where the checkpoint stores weight - 1.
    """

    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    norm_offset: float = 0.0
    prefix: str = ""  # of every tensor's name

    def norm(self, name: str, size: int | None = None) -> NormSpec:
        weight = parameter(f"{name}.weight", size or self.hidden_size)
        return NormSpec(weight, self.eps, offset=self.norm_offset)

    def attention(
        self,
        name: str,
        rope: RopeSpec,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        qkv_bias: bool = False,
        output_bias: bool = False,
        head_norms: bool = False,
        fused_qkv: str | None = None,
    ) -> AttentionSpec:
        """q_proj, k_proj, v_proj (or all in `fused_qkv`) and o_proj; `scale` is 1 / sqrt(head_dim) by default."""
        query_size, kv_size = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        if fused_qkv is not None:
            sizes = {fused_qkv: query_size + 2 * kv_size}
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if scale is None else scale,
            qkv=linear(name, sizes, self.hidden_size, bias=qkv_bias),
            output=linear(name, {"o_proj": self.hidden_size}, query_size, bias=output_bias),
            rope=rope,
            window=window,
            softcap=softcap,
            q_norm=self.norm(f"{name}.q_norm", self.head_dim) if head_norms else None,
            k_norm=self.norm(f"{name}.k_norm", self.head_dim) if head_norms else None,
        )

    def gated_mlp(
        self, name: str, activation: Activation, *, bias: bool = False, fused_up: str | None = None
    ) -> MlpSpec:
        """gate_proj and up_proj (or both in `fused_up`), and down_proj."""
        size = self.intermediate_size
        sizes = {"gate_proj": size, "up_proj": size} if fused_up is None else {fused_up: 2 * size}
        up = linear(name, sizes, self.hidden_size, bias=bias)
        return MlpSpec(up, linear(name, {"down_proj": self.hidden_size}, size, bias=bias), activation)

    def layer_names(self) -> list[str]:
        return [f"{self.prefix}model.layers.{i}" for i in range(self.num_layers)]

    def decoder(
        self,
        architecture: str,
        layers: Sequence[LayerSpec],
        *,
        max_context: int,
        tied_head: bool,
        final_norm: NormSpec | None = None,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        float16_overflows: bool = False,
        ignored_prefixes: tuple[str, ...] = (),
    ) -> DecoderSpec:
        return DecoderSpec(
            architecture=architecture,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_context=max_context,
            embedding=parameter(f"{self.prefix}model.embed_tokens.weight", self.vocab_size, self.hidden_size),
            layers=tuple(layers),
            final_norm=final_norm or self.norm(f"{self.prefix}model.norm"),
            head=parameter(f"{self.prefix}lm_head.weight", self.vocab_size, self.hidden_size),
            tied_head=tied_head,
            embedding_scale=embedding_scale,
            logit_scale=logit_scale,
            logit_softcap=logit_softcap,
            float16_overflows=float16_overflows,
            ignored_prefixes=ignored_prefixes,
        )


def read_shape(
    config: ConfigReader,
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
    eps_key: str = "rms_norm_eps",
    norm_offset: float = 0.0,
    prefix: str = "",
) -> DecoderShape:
    """The sizes, with the family's defaults for absent keys as arguments.

    Without `kv_heads` there are as many KV heads as query heads, and without `head_dim` the heads share the
    hidden size; a null means the same, whatever the family.
    """
    hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    absent = num_heads if kv_heads is None or "num_key_value_heads" in config else kv_heads
    num_kv_heads = config.integer("num_key_value_heads", absent)
    if num_heads % num_kv_heads:
        raise config.bad("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
    if config.value("head_dim") is None and head_dim is None and hidden_size % num_heads:
        raise config.bad("hidden_size", hidden_size, f"a multiple of num_attention_heads, {num_heads}, or head_dim set")
    return DecoderShape(
        hidden_size=hidden_size,
        vocab_size=config.integer("vocab_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers", high=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.integer("head_dim", head_dim or hidden_size // num_heads),
        eps=config.positive(eps_key, eps),
        norm_offset=norm_offset,
        prefix=prefix,
    )


def parameter(name: str, *shape: int) -> Parameter:
    return Parameter((name,), (shape,))


def linear(prefix: str, sizes: dict[str, int], in_size: int, *, bias: bool = False) -> LinearSpec:
    """The projections under `prefix`, name -> number of outputs, applied as one."""
    weights = tuple(f"{prefix}.{name}.weight" for name in sizes)
    biases = tuple(f"{prefix}.{name}.bias" for name in sizes)
    return LinearSpec(
        Parameter(weights, tuple((size, in_size) for size in sizes.values())),
        Parameter(biases, tuple((size,) for size in sizes.values())) if bias else None,
    )


def layer_kinds(config: ConfigReader, default: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """layer_types where the config lists them, else `default`."""
    listed: Any = config.value("layer_types")
    if listed is None:
        return tuple(default)
    if not isinstance(listed, list) or len(listed) != len(default):
        raise config.bad("layer_types", listed, f"a list of {len(default)}, one for each layer")
    for kind in listed:
        if kind not in LAYER_KINDS:
            raise config.unsupported(f"layer type {kind!r}", f"known: {', '.join(LAYER_KINDS)}")
    return tuple(listed)


def layer_windows(config: ConfigReader, kinds: Sequence[LayerKind], window: int | None) -> tuple[int | None, ...]:
    """`window` for the sliding layers, which must not be without one."""
    if window is None and "sliding_attention" in kinds:
        raise config.unsupported("layer type 'sliding_attention' without a window", "sliding_window is null or off")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def qwen_windows(config: ConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """The window of each layer: those from max_window_layers on slide, if use_sliding_window says so at all."""
    window = config.optional_integer("sliding_window", 4096)
    if not config.boolean("use_sliding_window", False):
        window = None
    first = config.integer("max_window_layers", 28, low=0)
    rule: list[LayerKind] = [
        "full_attention" if window is None or i < first else "sliding_attention" for i in range(num_layers)
    ]
    return layer_windows(config, layer_kinds(config, rule), window)
