"""Command-line flags from the options of config.py, and errors that say what was meant.

A value on the command line wins over the environment, that over --config, that over the default.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from octavo.cli.foreign_flags import FOREIGN_FLAGS
from octavo.config import SECTIONS, Config, all_options, make_config, read_config_file, read_environment
from octavo.errors import ConfigError
from octavo.options import Option, did_you_mean


class Parser(argparse.ArgumentParser):
    """Takes long flags with hyphens or underscores, no abbreviations, and raises ConfigError for mistakes."""

    def __init__(self, *, prog: str, usage: str, description: str) -> None:
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=_width()),
        )
        self.foreign_flags = dict(FOREIGN_FLAGS)  # of other engines -> what to use instead

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].lower()}{message[1:]} (see {self.prog} --help).")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        words = with_hyphens(argv)
        for word in words:
            if word == "--":
                break
            self._check_known(word.partition("=")[0])
        return self.parse_args(words)

    def _check_known(self, word: str) -> None:
        is_flag = word.startswith("-") and word != "-" and re.fullmatch(r"-[0-9.].*", word) is None
        if not is_flag or word in self.flags:
            return
        if word in self.foreign_flags:
            raise ConfigError(f"{self.prog} has no {word}: {self.foreign_flags[word]}.")
        if not word.startswith("--") and word[:2] in self.flags:  # -iFILE
            return
        if word.removeprefix("--no-").removeprefix("--").replace("-", "_") in all_options():
            raise ConfigError(f"{word} is a flag of octavo serve, not of {self.prog}.")
        raise ConfigError(f"{self.prog} has no {word}{did_you_mean(word, self.flags)} (see {self.prog} --help).")


def _width() -> int:
    return min(110, shutil.get_terminal_size().columns - 2)


def with_hyphens(argv: Sequence[str]) -> list[str]:
    """--max_model_len=8 as --max-model-len=8; values and what follows `--` stay as they are."""
    end = argv.index("--") if "--" in argv else len(argv)
    words = []
    for word in argv[:end]:
        name, equals, value = word.partition("=")
        words.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return words + list(argv[end:])


def add_config_flags(parser: Parser, names: Collection[str] | None = None) -> None:
    """MODEL, --config and a flag for each option, or for those named."""
    options = [option for option in all_options().values() if names is None or option.name in names]
    parser.add_argument(
        "positional_model", nargs="?", metavar="MODEL", help=help_text(all_options()["model"]), default=None
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with options; the command line wins")
    for section, section_class in SECTIONS.items():
        group = parser.add_argument_group(section, (section_class.__doc__ or "").strip().partition("\n")[0])
        for option in options:
            if option.section == section:
                text = "the same as MODEL" if option.name == "model" else help_text(option)
                add_flag(group, option, dest=option.name, text=text)


def add_flag(
    group: argparse._ArgumentGroup, option: Option, *, dest: str, text: str, lists_take_several: bool = False
) -> None:
    """The flag of `option`; what is given is left in `dest` as it was typed, for `parse_given`.

    A list is given entry by entry, one flag each; `lists_take_several` allows several entries after one flag, for
    commands without positional arguments.
    """
    spellings = [option.flag, *option.aliases]
    common: dict[str, Any] = {"dest": dest, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if option.kind == "switch":
        group.add_argument(*spellings, action=argparse.BooleanOptionalAction, **common)
        return
    metavar = "{" + ",".join(option.choices) + "}" if option.choices else option.metavar
    several: dict[str, Any] = {"action": "extend", "nargs": "+"} if lists_take_several else {"action": "append"}
    group.add_argument(*spellings, metavar=metavar, **(several if option.kind == "list" else {}), **common)


def help_text(option: Option) -> str:
    """The option's help with its default, unless the help tells it in words."""
    shown = option.show(option.default)
    if not shown or "(default:" in option.help:
        return option.help
    return f"{option.help} (default: {shown})"


def config_from(args: argparse.Namespace) -> Config:
    """The config that the flags of `add_config_flags`, the environment and --config make together."""
    options = read_config_file(args.config) if args.config is not None else {}
    options |= read_environment()[0]
    return make_config(options | given_options(args))


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options given on the command line, by field name."""
    given = {
        name: parse_given(option, getattr(args, name)) for name, option in all_options().items() if hasattr(args, name)
    }
    if args.positional_model is not None:
        if given.get("model", args.positional_model) != args.positional_model:
            raise ConfigError(f"two models are given: {args.positional_model} and --model {given['model']}.")
        given["model"] = args.positional_model
    return given


def parse_given(option: Option, given: Any) -> Any:
    """The value of `option` that its flag was given. Raises ConfigError."""
    if option.kind == "switch":
        return given
    return tuple(option.parse(text) for text in given) if option.kind == "list" else option.parse(given)
