"""From a checkpoint's RoPE settings, in either layout of config.json, to a `RopeSpec`.

Old layout: `rope_theta` beside `rope_scaling`. New one (transformers 5): `rope_parameters` with both, for the
model or for each kind of layer. Settings given at start (--rope-scaling) replace the checkpoint's scaling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo.models.config_reader import ConfigReader
from octavo.models.rope import (
    DynamicRope,
    LinearRope,
    Llama3Rope,
    LongRope,
    RopeSpec,
    YarnRope,
    longrope_attention_factor,
    yarn_attention_factor,
)

LayerKind = Literal["full_attention", "sliding_attention"]
LAYER_KINDS: tuple[LayerKind, ...] = ("full_attention", "sliding_attention")

_COMMON = {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
_NATIVE = "original_max_position_embeddings"
_KEYS: Mapping[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", _NATIVE, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "llama3": {"factor", _NATIVE, "low_freq_factor", "high_freq_factor"},
    "longrope": {"factor", _NATIVE, "short_factor", "long_factor", "attention_factor"},
}
_LOWEST_THETA = 1.001  # 1 would give every pair of dimensions the same frequency
_NOTES = {"finetuned"}  # says how a checkpoint came about, not what to compute


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeFamily:
    """What a family's RoPE settings mean, where families differ."""

    max_position: int  # max_position_embeddings
    head_dim: int
    default_theta: float = 10000.0
    theta_key: str = "rope_theta"
    default_native: int | None = None  # original_max_position_embeddings, where it has a default
    max_position_counts_linear: bool = False  # Gemma 3: max_position is what linear scaling leads to
    partial_rotary: bool = False
    aliases: Mapping[str, str] | None = None  # older names of rope types


def read_rope(
    config: ConfigReader,
    family: RopeFamily,
    *,
    override: Mapping[str, Any] | None = None,
    layer_kind: LayerKind | None = None,
) -> RopeSpec:
    """The RoPE of the model, or of its layers of `layer_kind` in families that tell them apart."""
    own = _own_settings(config, layer_kind)
    theta = own.number("rope_theta", config.number(family.theta_key, family.default_theta), low=_LOWEST_THETA)
    fraction = own.positive("partial_rotary_factor", config.positive("partial_rotary_factor", 1.0))
    # As in transformers, the value beside the settings wins over the one among them.
    native = config.optional_integer(_NATIVE, family.default_native, low=2) or own.optional_integer(_NATIVE, low=2)
    if override is None:
        kind = _kind(own, family.aliases or {})
        return _scaled(own, kind, theta, _rotary_dim(own, fraction, family), native, family)

    settings = ConfigReader(override, where="--rope-scaling", error=ConfigError)
    if not override:
        raise ConfigError(f"--rope-scaling is empty; it needs a rope_type: {', '.join(_KEYS)}.")
    kind = _kind(settings, {})
    theta = settings.number("rope_theta", theta, low=_LOWEST_THETA)
    native = settings.optional_integer(_NATIVE, low=2) or native or family.max_position
    rotary_dim = _rotary_dim(settings, settings.positive("partial_rotary_factor", fraction), family)
    return _extended(settings, kind, theta, rotary_dim, native)


def _own_settings(config: ConfigReader, layer_kind: LayerKind | None) -> ConfigReader:
    """`rope_scaling` where it is set, else `rope_parameters`, else nothing."""
    scaling, parameters = config.section("rope_scaling"), config.section("rope_parameters")
    if scaling is not None and layer_kind != "sliding_attention":  # the old layout scales full attention only
        return scaling
    if parameters is None:
        return ConfigReader({}, where=config.where)
    is_nested = any(kind in parameters for kind in LAYER_KINDS)
    if is_nested != (layer_kind is not None):
        given, expected = ("each kind of layer", "all layers") if is_nested else ("all layers", "each kind of layer")
        raise config.unsupported(f"rope_parameters for {given}", f"this family has one RoPE for {expected}")
    if layer_kind is None:
        return parameters
    return parameters.section(layer_kind) or ConfigReader({}, where=config.where)


def _kind(settings: ConfigReader, aliases: Mapping[str, str]) -> str:
    name = settings.text("rope_type", settings.text("type", "default"))
    kind = aliases.get(name, name)
    if kind not in _KEYS:
        raise settings.unsupported(f"rope_type {name!r}", f"known: {', '.join(_KEYS)}")
    for key in settings.keys() - _COMMON - _KEYS[kind] - _NOTES:
        known = ", ".join(sorted(_KEYS[kind])) or "none"
        raise settings.unsupported(f"{key} with rope_type {name!r}", f"its parameters: {known}")
    return kind


def _rotary_dim(settings: ConfigReader, fraction: float, family: RopeFamily) -> int:
    if fraction != 1.0 and not family.partial_rotary:
        raise settings.unsupported(f"partial_rotary_factor {fraction:g}", "this family rotates whole heads")
    rotary_dim = int(family.head_dim * fraction)
    if rotary_dim % 2 or not 0 < rotary_dim <= family.head_dim:
        expected = f"what makes an even part of the head size {family.head_dim}"
        raise settings.bad("partial_rotary_factor", fraction, expected)
    return rotary_dim


def _scaled(
    settings: ConfigReader, kind: str, theta: float, rotary_dim: int, native: int | None, family: RopeFamily
) -> RopeSpec:
    """The checkpoint's own scaling: max_position_embeddings is the authority on the context, where it counts it."""
    max_position = family.max_position
    if kind in ("default", "linear", "dynamic"):
        native = max_position  # these have no native length of their own
    native = native or max_position
    factor = _factor(settings, kind, max(1.0, max_position / native))
    context_len = max_position
    if kind in ("linear", "dynamic") and not family.max_position_counts_linear:
        context_len = round(native * factor)
    elif kind == "yarn":
        # 131072 = 32768 x 4 may stand here scaled or not; it is never multiplied twice.
        context_len = max(max_position, round(native * factor))
    return _make(settings, kind, theta, rotary_dim, context_len, native, factor)


def _extended(settings: ConfigReader, kind: str, theta: float, rotary_dim: int, native: int) -> RopeSpec:
    """Scaling chosen at start: it leads from the native context to `factor` times as much."""
    factor = _factor(settings, kind, None)
    return _make(settings, kind, theta, rotary_dim, round(native * factor), native, factor)


def _factor(settings: ConfigReader, kind: str, implied: float | None) -> float:
    """`implied`: max_position_embeddings / native context, which stands in for an absent factor."""
    if kind == "default":
        return 1.0
    if kind in ("yarn", "longrope") and implied is not None:
        return settings.number("factor", implied, low=1.0)
    return settings.number("factor", low=1.0)


def _make(
    settings: ConfigReader, kind: str, theta: float, rotary_dim: int, context_len: int, native: int, factor: float
) -> RopeSpec:
    base: dict[str, Any] = {"theta": theta, "rotary_dim": rotary_dim, "context_len": context_len}
    if kind == "default":
        return RopeSpec(**base)
    if kind == "linear":
        return LinearRope(**base, factor=factor)
    if kind == "dynamic":
        if rotary_dim <= 2:
            raise settings.unsupported(
                "rope_type 'dynamic'", f"it needs a rotary size above 2, here it is {rotary_dim}"
            )
        return DynamicRope(**base, factor=factor, native_context_len=native)
    if kind == "llama3":
        low, high = settings.positive("low_freq_factor"), settings.positive("high_freq_factor")
        if high <= low:
            raise settings.bad("high_freq_factor", high, f"above low_freq_factor, {low:g}")
        return Llama3Rope(**base, factor=factor, native_context_len=native, low_freq_factor=low, high_freq_factor=high)
    if kind == "longrope":
        return LongRope(
            **base,
            native_context_len=native,
            short_factor=_divisors(settings, "short_factor", rotary_dim),
            long_factor=_divisors(settings, "long_factor", rotary_dim),
            attention_factor=settings.positive("attention_factor", longrope_attention_factor(factor, native)),
        )
    beta_fast, beta_slow = settings.positive("beta_fast", 32.0), settings.positive("beta_slow", 1.0)
    if beta_fast < beta_slow:
        raise settings.bad("beta_fast", beta_fast, f"at least beta_slow, {beta_slow:g}")
    mscale, mscale_all_dim = (settings.optional_number(key, low=0.0) for key in ("mscale", "mscale_all_dim"))
    return YarnRope(
        **base,
        factor=factor,
        native_context_len=native,
        attention_factor=settings.positive("attention_factor", yarn_attention_factor(factor, mscale, mscale_all_dim)),
        beta_fast=beta_fast,
        beta_slow=beta_slow,
        truncate=settings.boolean("truncate", True),
    )


def _divisors(settings: ConfigReader, key: str, rotary_dim: int) -> tuple[float, ...]:
    divisors = settings.numbers(key)
    if len(divisors) != rotary_dim // 2:
        raise settings.bad(key, list(divisors), f"a list of {rotary_dim // 2}, one for each pair of rotated dimensions")
    return divisors
