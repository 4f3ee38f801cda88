"""How one option is described, parsed and checked, wherever it comes from.

A config section is a frozen dataclass whose fields are made by `option()`. `options_of()` reads such a class
back as data: the command line, the TOML file, `LLM(**options)` and the generated docs all go through it, so a
value is refused with the same words everywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.errors import ConfigError

Kind = Literal["text", "integer", "number", "switch", "bytes", "choice", "list", "json"]

BYTES = "BYTES"  # the metavar of an integer that takes KiB, MiB ... suffixes
_METAVARS: dict[Kind, str] = {"text": "TEXT", "integer": "N", "number": "X", "list": "TEXT", "json": "JSON"}
_SIZE_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def option(
    default: Any,
    help: str,
    *,
    metavar: str | None = None,
    aliases: tuple[str, ...] = (),
    at_least: float | None = 0,
    at_most: float | None = None,
) -> Any:
    """A config field that is also the flag --field-name. The bounds are those of numbers, both included.

    A number may be infinite where `at_most` is math.inf.
    """
    metadata = {"help": help, "metavar": metavar, "aliases": aliases, "at_least": at_least, "at_most": at_most}
    if isinstance(default, list | dict | tuple):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Option:
    """One field of a section. `parse` takes what a person typed, `check` what a program or a TOML file holds."""

    name: str
    section: str
    kind: Kind
    default: Any
    help: str
    metavar: str
    is_optional: bool  # None is a value
    choices: tuple[str, ...]
    aliases: tuple[str, ...]
    at_least: float | None
    at_most: float | None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value that `text` stands for; of a list, one entry. Raises ConfigError."""
        match self.kind:
            case "integer" | "number":
                try:
                    return self.check(int(text) if self.kind == "integer" else float(text))
                except ValueError:
                    raise self._refuse(text, f"it must be {self._wanted()}") from None
            case "json":
                try:
                    return self.check(json.loads(text))
                except ValueError as error:
                    raise self._refuse(text, f"it is not valid JSON ({error})") from None
            case "list":
                return self.check((text,))[0]
            case _:
                return self.check(text)

    def check(self, value: Any) -> Any:
        """`value` in the field's own type; raises ConfigError when it is of another one or out of bounds."""
        if value is None and self.is_optional:
            return None
        match self.kind:
            case "bytes" if isinstance(value, str):
                return self._bounded(self._size(value))
            case "integer" | "bytes" if isinstance(value, int) and not isinstance(value, bool):
                return self._bounded(value)
            case "number" if isinstance(value, int | float) and not isinstance(value, bool) and self._is_number(value):
                return self._bounded(float(value))
            case "switch" if isinstance(value, bool):
                return value
            case "text" if isinstance(value, str) and value:
                return value
            case "choice" if value in self.choices:
                return value
            case "choice" if isinstance(value, str):
                raise self._refuse(value, f"it must be {self._wanted()}" + did_you_mean(value, self.choices))
            case "list" if isinstance(value, str | list | tuple):
                values = (value,) if isinstance(value, str) else tuple(value)
                if all(isinstance(entry, str) and entry for entry in values):
                    return values
            case "json" if isinstance(value, Mapping):
                return dict(value)
        raise self._refuse(value, f"it must be {self._wanted()}")

    def show(self, value: Any) -> str:
        """`value` as a person would type it; empty for what is not set."""
        if value is None or value == () or value == {}:
            return ""
        if self.kind == "bytes":
            return format_size(value)
        if self.kind == "list":
            return ", ".join(value)
        if self.kind == "json":
            return json.dumps(value)
        if self.kind == "switch":
            return "on" if value else "off"
        return f"{value:g}" if self.kind == "number" else str(value)

    def _is_number(self, value: float) -> bool:
        return math.isfinite(value) or value == self.at_most

    def _bounded(self, value: float) -> Any:
        below = self.at_least is not None and value < self.at_least
        above = self.at_most is not None and value > self.at_most
        if below or above:
            raise self._refuse(value, f"it must be {self._wanted()}")
        return value

    def _size(self, text: str) -> int:
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
        if found is None or found[2] not in _SIZE_UNITS:
            raise self._refuse(text, f"it must be {self._wanted()}")
        return (
            round(float(found[1]) * _SIZE_UNITS[found[2]]) if "." in found[1] else int(found[1]) * _SIZE_UNITS[found[2]]
        )

    def _wanted(self) -> str:
        match self.kind:
            case "integer" | "number":
                noun = "an integer" if self.kind == "integer" else "a number"
                low = "" if self.at_least is None else f" of at least {self.at_least:g}"
                return noun + low + ("" if self.at_most is None else f" and at most {self.at_most:g}")
            case "bytes":
                return "a number of bytes, such as 1073741824, 512MiB or 1.5GiB"
            case "choice":
                return ("one of " if len(self.choices) > 1 else "") + ", ".join(self.choices)
            case "switch":
                return "true or false"
            case "list":
                return "text, or a list of texts"
            case "json":
                return "a JSON object"
            case "text":
                return "text that is not empty"

    def _refuse(self, value: Any, why: str) -> ConfigError:
        shown = value if isinstance(value, str) else repr(value)
        end = "" if why.endswith("?") else "."
        return ConfigError(f"{self.flag} is {shown}; {why}{end}" if shown else f"{self.flag} is empty; {why}{end}")


@functools.cache
def options_of(section: type, section_name: str) -> tuple[Option, ...]:
    """The options of a section class, in order."""
    hints = typing.get_type_hints(section)
    return tuple(_option(f, hints[f.name], section_name) for f in dataclasses.fields(section))


def _option(f: dataclasses.Field[Any], hint: Any, section_name: str) -> Option:
    default = f.default if isinstance(f.default_factory, dataclasses._MISSING_TYPE) else f.default_factory()
    kind, is_optional, choices = _kind(f.name, hint)
    metavar = f.metadata["metavar"]
    if kind == "integer" and metavar == BYTES:
        kind = "bytes"
    return Option(
        name=f.name,
        section=section_name,
        kind=kind,
        default=default,
        help=f.metadata["help"],
        metavar=metavar or _METAVARS.get(kind, ""),
        is_optional=is_optional,
        choices=choices,
        aliases=f.metadata["aliases"],
        at_least=f.metadata["at_least"],
        at_most=f.metadata["at_most"],
    )


def _kind(name: str, hint: Any) -> tuple[Kind, bool, tuple[str, ...]]:
    """What a field's type means: its kind, whether None is a value, and the values of a Literal."""
    if isinstance(hint, types.UnionType):
        inner = [part for part in typing.get_args(hint) if part is not types.NoneType]
        assert len(inner) == 1, f"option {name} has the type {hint}; only X | None is understood"
        kind, _, choices = _kind(name, inner[0])
        return kind, True, choices
    origin = typing.get_origin(hint)
    if origin is Literal:
        return "choice", False, typing.get_args(hint)
    kinds: dict[Any, Kind] = {str: "text", int: "integer", float: "number", bool: "switch", tuple: "list", dict: "json"}
    return kinds[origin or hint], False, ()


def format_size(size_bytes: int) -> str:
    """A size in the largest unit that divides it: 8MiB, 1536KiB, 1000."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _SIZE_UNITS[unit] == 0:
            return f"{size_bytes // _SIZE_UNITS[unit]}{unit}"
    return str(size_bytes)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the nearest of `known`, or nothing when none is near."""
    import difflib  # only ever needed for a mistake

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
