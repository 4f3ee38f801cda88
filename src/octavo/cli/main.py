"""The entry point: finds the command, runs it, and turns errors into one line and an exit code.

Exit codes: 0 done, 1 ran but failed, 2 a mistake in flags, configuration or model, 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence

from octavo import __version__
from octavo.cli.flags import Parser
from octavo.config import read_environment
from octavo.errors import ConfigError, OctavoError, StartError
from octavo.options import did_you_mean

# Command, of one word or two -> (usage, what it does). Its module is imported only when it runs: `octavo pull` needs
# no server.
COMMANDS = {
    "serve": ("[MODEL] [options]", "Serve a model over HTTP, with the API of OpenAI."),
    "chat": ("[MODEL] [options]", "Talk to a model in the terminal, here or on a running server."),
    "run-batch": ("[MODEL] -i INPUT -o OUTPUT [options]", "Answer a file of requests in OpenAI's batch format."),
    "bench serve": ("[options]", "Put load on a server, ours or another, and measure what it does."),
    "bench throughput": ("[MODEL] [options]", "Measure an engine in this process with everything to do at once."),
    "bench latency": ("[MODEL] [options]", "Measure one batch in this process, against what the machine could do."),
    "bench startup": ("[MODEL] [options]", "Measure how long a server takes to start."),
    "pull": ("[NAME ...] [options]", "Fetch models by name, or list the catalogue."),
    "info": ("[--plan [MODEL]] [options]", "Show what this machine has; with --plan, what a model costs on it."),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except StartError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 2
    except OctavoError as error:
        print(f"octavo: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of stdout has gone; the interpreter must not fail again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview(), end="")
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"octavo {__version__}")
        return 0
    name, rest = words[0].replace("_", "-"), words[1:]
    if any(command.startswith(f"{name} ") for command in COMMANDS):
        if not rest or rest[0] in ("-h", "--help", "help"):
            print(_overview(f"{name} "), end="")
            return 0 if rest else 2
        name, rest = f"{name} {rest[0].replace('_', '-')}", rest[1:]
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}{did_you_mean(name, COMMANDS)} (see octavo --help).")
    for warning in read_environment()[1]:
        print(f"octavo: warning: {warning}", file=sys.stderr)
    command = importlib.import_module(module_of(name))
    parser = command_parser(name)
    command.add_flags(parser)
    status: int = command.run(parser.parse(rest))
    return status


def module_of(name: str) -> str:
    return "octavo.cli." + name.replace("-", "_").replace(" ", "_")


def command_parser(name: str) -> Parser:
    usage, description = COMMANDS[name]
    return Parser(prog=f"octavo {name}", usage=usage, description=description)


def _overview(prefix: str = "") -> str:
    """The commands that begin with `prefix`."""
    shown = {name: description for name, (_, description) in COMMANDS.items() if name.startswith(prefix)}
    width = max(map(len, shown))
    lines = [f"usage: octavo {prefix}COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<{width}}  {description}" for name, description in shown.items()]
    return "\n".join([*lines, "", "octavo COMMAND --help lists a command's options; octavo --version.", ""])
