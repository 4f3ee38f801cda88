"""Reads config.json key by key: each value has the expected type and range, or the error names the key.

A family reads what it implements and refuses the rest by name. `unread()` are the keys that nobody asked for,
less those that cannot matter to inference; the registry warns about them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from octavo.backends.ops import Activation
from octavo.errors import CheckpointError, StartError, UnsupportedModel

T = TypeVar("T")

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

# Training, initialisation, tokens (generation's business), bookkeeping: none of them changes the function.
HARMLESS = frozenset(
    "architectures attention_dropout auto_map bos_token_id cache_implementation chunk_size_feed_forward dtype "
    "embd_pdrop embedding_dropout eos_token_id hidden_dropout id2label initializer_range label2id model_type "
    "output_attentions output_hidden_states pad_token_id pretraining_tp problem_type resid_pdrop residual_dropout "
    "return_dict tokenizer_class torch_dtype transformers.js_config transformers_version unsloth_fixed "
    "unsloth_version use_bfloat16 use_cache".split()
)


class _Required:
    pass


REQUIRED: Final = _Required()


class ConfigReader:
    def __init__(
        self, values: Mapping[str, Any], *, where: str = "config.json", error: type[StartError] = CheckpointError
    ) -> None:
        self.where = where
        self._values = values
        self._error = error
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def keys(self) -> set[str]:
        return set(self._values)

    def value(self, key: str) -> Any:
        """The value of `key` unchecked, None if absent."""
        self._read.add(key)
        return self._values.get(key)

    def integer(self, key: str, default: int | _Required = REQUIRED, *, low: int = 1, high: int = 2**31 - 1) -> int:
        value = self._value_or(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, value, "an integer")
        if not low <= value <= high:
            raise self.bad(key, value, f"between {low} and {high}")
        return value

    def number(self, key: str, default: float | _Required = REQUIRED, *, low: float = -math.inf) -> float:
        value = self._value_or(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.bad(key, value, "a finite number")
        if value < low:
            raise self.bad(key, value, f"at least {low:g}")
        return float(value)

    def positive(self, key: str, default: float | _Required = REQUIRED) -> float:
        value = self.number(key, default)
        if value <= 0:
            raise self.bad(key, value, "above 0")
        return value

    def boolean(self, key: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._value_or(key, default)
        if not isinstance(value, bool):
            raise self.bad(key, value, "true or false")
        return value

    def text(self, key: str, default: str | _Required = REQUIRED) -> str:
        value = self._value_or(key, default)
        if not isinstance(value, str):
            raise self.bad(key, value, "a string")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive numbers."""
        value = self._value_or(key, REQUIRED)
        if not isinstance(value, list | tuple):
            raise self.bad(key, value, "a list of numbers")
        for item in value:
            if isinstance(item, bool) or not isinstance(item, int | float) or not (0 < item < math.inf):
                raise self.bad(key, item, "a list of numbers above 0")
        return tuple(float(item) for item in value)

    def optional_integer(self, key: str, default: int | None = None, *, low: int = 1) -> int | None:
        """As `integer`, but null is an answer of its own: None, whereas an absent key gives `default`."""
        value = self._present(key, default)
        return None if value is None else self.integer(key, value, low=low)

    def optional_number(self, key: str, default: float | None = None, *, low: float = -math.inf) -> float | None:
        """As `number`, with null as an answer of its own."""
        value = self._present(key, default)
        return None if value is None else self.number(key, value, low=low)

    def _present(self, key: str, default: T) -> T | Any:
        value = self.value(key)
        return value if key in self._values else default

    def section(self, key: str) -> ConfigReader | None:
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, value, "an object")
        return ConfigReader(value, where=f"{self.where}: {key}", error=self._error)

    def activation(self, key: str, default: str | _Required = REQUIRED) -> Activation:
        return ACTIVATIONS[self.one_of(key, ACTIVATIONS, default)]

    def one_of(self, key: str, known: Collection[str], default: str | _Required = REQUIRED) -> str:
        value = self.text(key, default)
        if value not in known:
            raise self.unsupported(f"{key} {value!r}", f"known: {', '.join(known)}")
        return value

    def refuse(self, key: str, *, unless: Sequence[Any] = (None, False)) -> None:
        """The key is not implemented: it must be absent or hold one of the values that mean 'off'."""
        value = self.value(key)
        if key in self._values and value not in unless:
            raise self.unsupported(f"{key} {value!r}", "this family has no such option here")

    def ignore(self, *keys: str) -> None:
        """These keys are known, and mean nothing here."""
        self._read.update(keys)

    def updated(self, *, defaults: Mapping[str, Any], values: Mapping[str, Any]) -> ConfigReader:
        """The same section with `defaults` under its values and `values` over them."""
        return ConfigReader({**defaults, **self._values, **values}, where=self.where, error=self._error)

    def bad(self, key: str, value: object, expected: str) -> StartError:
        return self._error(f"{self.where}: {key} is {_short(value)}; it must be {expected}.")

    def unsupported(self, what: str, why: str) -> StartError:
        error = UnsupportedModel if self._error is CheckpointError else self._error
        return error(f"{self.where}: {what} is not supported ({why}).")

    def unread(self) -> list[str]:
        """Keys that are set to something and that nobody asked for, without what is known not to matter."""
        unread = self._values.keys() - self._read - HARMLESS
        return sorted(key for key in unread if not key.startswith("_") and self._values[key] not in (None, False))

    def _value_or(self, key: str, default: T | _Required) -> T | Any:
        value = self.value(key)
        if value is not None:
            return value
        if isinstance(default, _Required):
            raise self._error(f"{self.where} lacks {key!r}.")
        return default


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
