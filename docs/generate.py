"""Writes docs/cli.md from the command line itself. `make docs` runs it; a test checks that the page is current."""

from __future__ import annotations

import importlib
from argparse import Action, BooleanOptionalAction
from collections.abc import Iterable
from pathlib import Path

from octavo.cli.flags import help_text
from octavo.cli.foreign_flags import FOREIGN_BENCH_FLAGS, FOREIGN_FLAGS
from octavo.cli.main import COMMANDS, command_parser, module_of
from octavo.config import ENVIRONMENT, SECTIONS, all_options
from octavo.options import Option

PAGE = Path(__file__).parent / "cli.md"

_INTRODUCTION = """\
# Command line

This page is made from the program by `make docs`. `octavo COMMAND --help` says the same.

Flags may be spelled with hyphens or underscores; none can be abbreviated. Commands that load a model read their
options from, in this order: the command line, the environment, the TOML file that `--config` names, the defaults. In
the file an option stands at the top level or under its section:

```toml
model = "smollm2-135m-instruct"

[cache]
kv-cache-memory-bytes = "2GiB"

[server]
port = 9000
```

Unknown flags and unknown names in the file are errors. Exit codes: 0 done, 1 ran but failed, 2 a mistake in flags,
configuration or model, 130 interrupted.
"""


def page() -> str:
    parts = [_INTRODUCTION]
    for name in COMMANDS:
        parts += _command(name)
    parts.append("## Options\n")
    for section, section_class in SECTIONS.items():
        options = [option for option in all_options().values() if option.section == section]
        parts.append(f"### {section}\n\n{(section_class.__doc__ or '').strip()}\n")
        parts.append(_table(("flag", "meaning"), [(_spelling(option), help_text(option)) for option in options]))
    parts.append("## Environment variables\n")
    parts.append(_table(("variable", "meaning"), [(f"`{name}`", text) for name, text in ENVIRONMENT.items()]))
    parts.append("Others that begin with `OCTAVO_` are warned about.\n")
    parts.append("## Coming from vLLM, SGLang or llama.cpp\n")
    parts.append("Flags of theirs that have no twin of the same meaning here:\n")
    by_advice: dict[str, list[str]] = {}
    for flag, advice in (FOREIGN_FLAGS | FOREIGN_BENCH_FLAGS).items():
        by_advice.setdefault(advice, []).append(f"`{flag}`")
    parts.append(_table(("flag", "here"), [(", ".join(flags), advice) for advice, flags in by_advice.items()]))
    return "\n".join(parts)


def _command(name: str) -> Iterable[str]:
    parser = command_parser(name)
    importlib.import_module(module_of(name)).add_flags(parser)
    usage, description = COMMANDS[name]
    yield f"## octavo {name}\n\n{description}\n"
    yield f"```\noctavo {name} {usage}\n```\n"
    actions = [action for action in parser._actions if action.dest != "help"]
    own = [action for action in actions if action.dest not in all_options()]
    taken = [all_options()[action.dest] for action in actions if action.dest in all_options()]
    yield _table(
        ("flag", "meaning"), [(_action_spelling(action), (action.help or "").replace("%%", "%")) for action in own]
    )
    if taken:
        yield f"and {', '.join(_sections(taken))}.\n"


def _sections(taken: list[Option]) -> Iterable[str]:
    """Whole sections by link, single options by flag."""
    for section in SECTIONS:
        all_of_it = [option for option in all_options().values() if option.section == section]
        of_it = [option for option in taken if option.section == section]
        if of_it == all_of_it:
            yield f"the [{section}](#{section}) options"
        else:
            yield from (f"`{option.flag}`" for option in of_it)


def _spelling(option: Option) -> str:
    if option.kind == "switch":
        return f"`{option.flag}`<br>`--no-{option.flag[2:]}`"
    return f"`{option.flag} {'{' + ','.join(option.choices) + '}' if option.choices else option.metavar}`"


def _action_spelling(action: Action) -> str:
    if not action.option_strings:
        return f"`{action.metavar}`"
    metavar = "" if isinstance(action, BooleanOptionalAction) or action.nargs == 0 else f" {action.metavar or 'TEXT'}"
    return "<br>".join(f"`{flag}{metavar}`" for flag in action.option_strings)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
