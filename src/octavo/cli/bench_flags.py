"""What the `octavo bench` commands share: flags from their option classes, and where a result goes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.cli.flags import Parser, add_flag, help_text, parse_given
from octavo.cli.foreign_flags import FOREIGN_BENCH_FLAGS
from octavo.errors import ConfigError
from octavo.options import options_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octavo.bench.report import Section

Options = TypeVar("Options")

_DEST = "bench_"  # before the names, as some are those of the engine's options too


def add_bench_flags(parser: Parser, *sections: type) -> None:
    """A flag for each option of the classes, in a group for each class."""
    parser.foreign_flags |= FOREIGN_BENCH_FLAGS
    for section in sections:
        group = parser.add_argument_group(_title(section), (section.__doc__ or "").strip().partition("\n")[0])
        for option in options_of(section, _title(section)):
            add_flag(group, option, dest=_DEST + option.name, text=help_text(option), lists_take_several=True)


def options_from(section: type[Options], args: argparse.Namespace) -> Options:
    """An object of the option class `section`, as the command line has it. Raises ConfigError."""
    untyped: type = section
    given = {
        option.name: parse_given(option, getattr(args, _DEST + option.name))
        for option in options_of(untyped, _title(section))
        if hasattr(args, _DEST + option.name)
    }
    return section(**given)


def check_outputs(html: str | None, output: str | None = None) -> None:
    """Raises ConfigError for a file that could not be written, before a long run rather than after it."""
    if html is not None:
        from octavo.bench.html_report import check_plotting

        check_plotting()
    for flag, path in (("--html", html), ("--output-json", output)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ConfigError(f"{flag} {path}: there is no folder {Path(path).absolute().parent}.")


def show(sections: Sequence[Section]) -> None:
    from octavo.bench.report import as_text

    print(as_text(sections))


def note(text: str) -> None:
    print(f"octavo: {text}", file=sys.stderr)


def write_outputs(
    title: str,
    result: Mapping[str, Any],
    sections: Sequence[Section],
    draw: Callable[[], Sequence[Figure]],
    *,
    html: str | None,
    output: str | None,
) -> None:
    """The result as JSON and as HTML, where they are wanted."""
    if output is not None:
        try:
            Path(output).write_text(json.dumps(result, indent=2) + "\n")
        except OSError as error:
            raise ConfigError(f"--output-json {output}: {error.strerror}.") from None
    if html is not None:
        from octavo.bench.html_report import write_html

        settings = {name: value for name, value in result.items() if isinstance(value, str | int) and value != ""}
        write_html(html, title, settings, sections, draw())


def _title(section: type) -> str:
    return section.__name__.removesuffix("Options").lower()
