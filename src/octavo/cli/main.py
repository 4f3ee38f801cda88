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

# Command -> (usage, what it does). Its module is imported only when it runs: `octavo pull` needs no server.
COMMANDS = {
    "serve": ("[MODEL] [options]", "Serve a model over HTTP, with the API of OpenAI."),
    "chat": ("[MODEL] [options]", "Talk to a model in the terminal, here or on a running server."),
    "run-batch": ("[MODEL] -i INPUT -o OUTPUT [options]", "Answer a file of requests in OpenAI's batch format."),
    "pull": ("[NAME ...] [options]", "Fetch models by name, or list the catalogue."),
    "info": ("[options]", "Show the version, the processor, memory, backends and models of this machine."),
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
    name = words[0].replace("_", "-")
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {words[0]!r}{did_you_mean(name, COMMANDS)} (see octavo --help).")
    for warning in read_environment()[1]:
        print(f"octavo: warning: {warning}", file=sys.stderr)
    command = importlib.import_module("octavo.cli." + name.replace("-", "_"))
    parser = command_parser(name)
    command.add_flags(parser)
    status: int = command.run(parser.parse(words[1:]))
    return status


def command_parser(name: str) -> Parser:
    usage, description = COMMANDS[name]
    return Parser(prog=f"octavo {name}", usage=usage, description=description)


def _overview() -> str:
    lines = ["usage: octavo COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<10}  {description}" for name, (_, description) in COMMANDS.items()]
    return "\n".join([*lines, "", "octavo COMMAND --help lists a command's options; octavo --version.", ""])
