"""GGUF metadata as a Hugging Face config.json and generation_config.json.

Inverts llama.cpp's converter: the result is what the converter read, except that floats went through float32 (their
shortest decimal form is restored). Every key of the architecture has one reader here; a key that would change the
model's output and has none is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_names import GgufArchitecture

MAX_VALUE = 2**31 - 1
NO_TOKEN = (2**32 - 1, -1)  # how converters write an absent token id
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

# Keys that change nothing here, or only if they differ from a value.
IGNORED_KEYS = {"tensor_data_layout", "vocab_size", "expert_used_count", "attention.layer_norm_epsilon"}
NEUTRAL_KEYS = {"expert_count": 0, "attention.causal": True, "pooling_type": 0, "attention.max_alibi_bias": 0}
NEUTRAL_KEYS |= {"attention.clamp_kqv": 0, "nextn_predict_layers": 0}

# Control tokens that end a turn in the chat formats of the families above: files converted before the `eot` key
# existed name only the end of the document.
END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
CONTROL = 3  # tokenizer.ggml.token_type

SAMPLING = {
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "temp": "temperature",
    "penalty_repeat": "repetition_penalty",
}


class _Keys:
    """Typed access to `{architecture}.*`, which remembers what was read."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.prefix = architecture + "."
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        self.read.add(key)
        return self.file.metadata.get(self.prefix + key)

    def fail(self, key: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {self.prefix}{key} {problem}.")

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.get(key)
        if isinstance(value, np.ndarray) and value.ndim == 1 and value.size and (value == value[0]).all():
            value = value[0].item()  # one entry a layer, all alike
        if value is None:
            if default is None:
                raise self.fail(key, "is missing")
            return default
        if isinstance(value, np.ndarray):
            raise UnsupportedModel(
                f"{self.file.path}: {self.prefix}{key} differs between layers, which Octavo does not serve."
            )
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_VALUE:
            raise self.fail(key, f"is {value!r}; it must be an integer from {least} to {MAX_VALUE}")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.fail(key, f"is {value!r}; it must be a finite number")
        return _shortest(float(value))

    def refuse_unread(self) -> None:
        for full_key, value in self.file.metadata.items():
            key = full_key.removeprefix(self.prefix)
            if key == full_key or key in self.read or key in IGNORED_KEYS:
                continue
            if isinstance(value, np.ndarray) or key not in NEUTRAL_KEYS or value != NEUTRAL_KEYS[key]:
                raise UnsupportedModel(
                    f"{self.file.path}: {full_key} is {_brief(value)}, which Octavo does not implement for "
                    f"{self.prefix[:-1]} models."
                )


def config_of(file: GgufFile, architecture: GgufArchitecture) -> dict[str, Any]:
    """The config.json that the file was converted from, as far as its metadata and tensors tell."""
    keys = _Keys(file, architecture.name)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(
            f"{file.path} holds no matrix token_embd.weight: it is not a language model, or incomplete."
        )
    hidden_size = keys.integer("embedding_length")
    num_heads = keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", default=max(1, hidden_size // num_heads))
    if keys.integer("attention.value_length", default=head_dim) != head_dim:
        raise UnsupportedModel(f"{file.path}: keys and values of different sizes are not implemented.")
    num_layers = keys.integer("block_count")
    stored_layers = 1 + max(
        (int(m[1]) for name in file.tensors if (m := re.match(r"blk\.(\d{1,9})\.", name))), default=-1
    )
    if num_layers != stored_layers:
        raise CheckpointError(
            f"{file.path}: the metadata counts {num_layers} layers; the tensors make {stored_layers}."
        )
    config: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", default=num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "torch_dtype": {"F16": "float16", "BF16": "bfloat16"}.get(embedding.type_name, "float32"),
    }
    rope_dim = keys.integer("rope.dimension_count", default=head_dim)
    config["rope_scaling"] = _rope_scaling(file, keys, config, rope_dim)
    config |= _FAMILIES[architecture.name](file, keys, config)
    if rope_dim != head_dim and "partial_rotary_factor" not in config:
        raise UnsupportedModel(f"{file.path}: RoPE over {rope_dim} of {head_dim} dimensions is not implemented here.")
    config |= _special_tokens(file, embedding.shape[0])
    keys.refuse_unread()
    return config


def generation_config_of(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Token ids that end a generation, and the sampling that the model's authors recommend."""
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    sampling: dict[str, Any] = {}
    for key, name in SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            sampling[name] = _shortest(value) if isinstance(value, float) else value
    return ids | sampling | ({"do_sample": True} if sampling else {})


# -- families ------------------------------------------------------------------------------------------------


def _llama(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    extra = {"hidden_act": "silu", "attention_bias": _biases(file, "qkv", "output"), "mlp_bias": _mlp_biases(file)}
    window = keys.integer("attention.sliding_window", default=0, least=0)
    if window and keys.get("attention.sliding_window_pattern") is not None:
        raise UnsupportedModel(f"{file.path}: a llama model with a pattern of sliding windows is not implemented.")
    if window:
        extra |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
    return extra


def _qwen2(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu", "use_sliding_window": False, "sliding_window": None}


def _qwen3(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {**_qwen2(file, keys, config), "attention_bias": _biases(file, "qkv", "output")}


def _gemma(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _gemma2(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    # The largest model of Gemma 2 (46 layers) and of Gemma 3 (62) scale scores by their width per head; no key says so.
    is_largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {
        **_gemma(file, keys, config),
        "query_pre_attn_scalar": per_head if is_largest else config["head_dim"],
        "attn_logit_softcapping": keys.number("attn_logit_softcapping"),
        "final_logit_softcapping": keys.number("final_logit_softcapping"),
        **_windows(file, keys, config, period=2, default_window=4096),
    }


def _gemma3(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {
        **_gemma2(file, keys, config),
        **_windows(file, keys, config, period=6, default_window=None),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }


def _phi3(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    original = keys.integer("rope.scaling.original_context_length", default=config["max_position_embeddings"])
    rope_dim = keys.integer("rope.dimension_count", default=config["head_dim"])
    return {
        "hidden_act": "silu",
        "attention_bias": False,
        "original_max_position_embeddings": original,
        "sliding_window": keys.integer("attention.sliding_window", default=0, least=0) or None,
        "partial_rotary_factor": rope_dim / config["head_dim"],
    }


def _granite(file: GgufFile, keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    if keys.get("rope.scaling.finetuned") is False:
        raise UnsupportedModel(
            f"{file.path}: Granite without RoPE (rope.scaling.finetuned is false) is not implemented."
        )
    return {
        "hidden_act": "silu",
        "attention_bias": _biases(file, "qkv", "output"),
        "mlp_bias": _mlp_biases(file),
        "attention_multiplier": keys.number("attention.scale", config["head_dim"] ** -0.5),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


_FAMILIES: dict[str, Callable[[GgufFile, _Keys, dict[str, Any]], dict[str, Any]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "granite": _granite,
}


def _biases(file: GgufFile, *parts: str) -> bool:
    """Whether the attention has biases, which Hugging Face's configurations give to all four projections or none."""
    found = {part for part in ("q", "k", "v", "output") if f"blk.0.attn_{part}.bias" in file.tensors}
    if found and len(found) < 4:
        raise UnsupportedModel(f"{file.path}: biases on attn_{'/'.join(sorted(found))} alone are not implemented.")
    return bool(found)


def _mlp_biases(file: GgufFile) -> bool:
    return "blk.0.ffn_down.bias" in file.tensors


def _windows(
    file: GgufFile, keys: _Keys, config: dict[str, Any], *, period: int, default_window: int | None
) -> dict[str, Any]:
    """Which layers slide: all but every `period`-th, unless the file has its own pattern."""
    window = keys.integer("attention.sliding_window", default=default_window or 0, least=0)
    pattern, num_layers = keys.get("attention.sliding_window_pattern"), config["num_hidden_layers"]
    if isinstance(pattern, np.ndarray):
        if pattern.shape != (num_layers,):
            raise keys.fail("attention.sliding_window_pattern", f"has {pattern.size} entries for {num_layers} layers")
        slides = [bool(entry) for entry in pattern]
    else:
        period = keys.integer("attention.sliding_window_pattern", default=period)
        slides = [(layer + 1) % period != 0 for layer in range(num_layers)]
    kinds = ["sliding_attention" if window and slide else "full_attention" for slide in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


# -- RoPE ----------------------------------------------------------------------------------------------------


def _rope_scaling(file: GgufFile, keys: _Keys, config: dict[str, Any], rope_dim: int) -> dict[str, Any] | None:
    keys.get("rope.scaling.finetuned")
    long, short, pairs = (
        _factors(file, f"rope_{name}.weight", rope_dim) for name in ("factors_long", "factors_short", "freqs")
    )
    factor = keys.number("rope.scaling.factor") or keys.number("rope.scale_linear") or 0.0
    kind = keys.get("rope.scaling.type") or ("linear" if factor else "none")
    original = keys.integer("rope.scaling.original_context_length", default=config["max_position_embeddings"])
    attention_factor = keys.number("rope.scaling.attn_factor")
    if (long is None) != (short is None):
        raise CheckpointError(
            f"{file.path} holds one of rope_factors_long and rope_factors_short; both belong together."
        )
    if long is not None and short is not None:
        if pairs is not None or kind not in ("none", "longrope"):
            raise UnsupportedModel(f"{file.path}: RoPE factors beside scaling of type {kind!r} are not implemented.")
        return _longrope(long, short, original, config["max_position_embeddings"], attention_factor)
    if pairs is not None:
        if kind != "none":
            raise UnsupportedModel(f"{file.path}: rope_freqs beside scaling of type {kind!r} is not implemented.")
        return _pair_scaling(pairs, config["rope_theta"], config["max_position_embeddings"])
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(file, keys, factor, original)
    raise UnsupportedModel(f"{file.path}: RoPE scaling of type {kind!r} is not implemented without its factors.")


def _factors(file: GgufFile, name: str, rope_dim: int) -> npt.NDArray[np.float32] | None:
    tensor = file.tensors.get(name)
    if tensor is None:
        return None
    if tensor.shape != (rope_dim // 2,):
        raise CheckpointError(f"{file.path}: {name} has shape {list(tensor.shape)}; RoPE turns {rope_dim // 2} pairs.")
    values = np.asarray(tensor.numpy(), np.float32)
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(f"{file.path}: {name} holds factors that are not positive numbers.")
    return values


def _longrope(
    long: npt.NDArray[np.float32], short: npt.NDArray[np.float32], original: int, context: int, stored: float | None
) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [_shortest(float(value)) for value in long],
        "short_factor": [_shortest(float(value)) for value in short],
        "original_max_position_embeddings": original,
    }
    scale = context / original
    usual = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
    if stored is not None and not math.isclose(stored, usual, rel_tol=1e-6):
        scaling["attention_factor"] = stored
    return scaling


def _pair_scaling(divisors: npt.NDArray[np.float32], theta: float, context: int) -> dict[str, Any] | None:
    """The scaling behind `rope_freqs`: one divisor a pair of dimensions, all that Llama 3's rule leaves of itself.

    Its constants are recovered where the divisors are those of a Llama 3 release. Otherwise the divisors are given
    as they are, which 'longrope' with equal lists can say.
    """
    if (divisors == 1).all():
        return None
    factor = _shortest(float(divisors.max()))
    if np.allclose(_llama3_divisors(len(divisors), theta, factor), divisors, rtol=1e-5, atol=0):
        return {"rope_type": "llama3", "factor": factor, **LLAMA3_ROPE}
    listed = [_shortest(float(value)) for value in divisors]
    return {
        "rope_type": "longrope",
        "factor": 1.0,
        "attention_factor": 1.0,
        "long_factor": listed,
        "short_factor": list(listed),
        "original_max_position_embeddings": context,
    }


def _llama3_divisors(num_pairs: int, theta: float, factor: float) -> npt.NDArray[np.float64]:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    low, high, original = LLAMA3_ROPE.values()
    wavelengths = 2 * math.pi * theta ** (np.arange(num_pairs) / num_pairs)
    blend = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - blend) / factor + blend))


def _yarn(file: GgufFile, keys: _Keys, factor: float, original: int) -> dict[str, Any]:
    extrapolation = keys.number("rope.scaling.yarn_ext_factor", 1.0)
    if extrapolation not in (1.0, -1.0):  # -1: llama.cpp's "not set"
        raise UnsupportedModel(f"{file.path}: YaRN with an extrapolation factor of {extrapolation} is not implemented.")
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
    }
    optional = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    for key, name in optional.items():
        value = keys.number(f"rope.scaling.{key}")
        if value is not None:
            scaling[name] = value
    return scaling


# -- tokens --------------------------------------------------------------------------------------------------


def _special_tokens(file: GgufFile, vocab_size: int) -> dict[str, Any]:
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if tokens is not None and len(tokens) > vocab_size:
        raise CheckpointError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens; the embedding has {vocab_size} rows."
        )
    ids = {name: _token_id(file, name, vocab_size) for name in ("bos", "eos", "eot", "eom", "padding")}
    ends = [ids[name] for name in ("eos", "eot", "eom")]
    if isinstance(tokens, list) and isinstance(types, np.ndarray) and types.shape == (len(tokens),):
        controls = np.flatnonzero(types == CONTROL)
        ends += [int(index) for index in controls if tokens[index] in END_OF_TURN]
    distinct = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": ids["bos"],
        "eos_token_id": distinct[0] if len(distinct) == 1 else distinct or None,
        "pad_token_id": ids["padding"],
    }


def _token_id(file: GgufFile, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.metadata.get(key)
    if value is None or value in NO_TOKEN:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < vocab_size:
        raise CheckpointError(f"{file.path}: {key} is {_brief(value)}; the vocabulary has {vocab_size} entries.")
    return value


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 9.99999975e-06 was written as 1e-05."""
    return float(str(np.float32(value))) if float(np.float32(value)) == value else value


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
