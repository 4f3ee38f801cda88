"""`octavo bench startup`: `octavo serve` started again and again."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from octavo.bench.options import StartupOptions
from octavo.cli.bench_flags import add_bench_flags, check_outputs, options_from, show, write_outputs
from octavo.cli.flags import Parser, add_config_flags, config_from, given_options
from octavo.config import all_options

# The server listens on a free port of this machine, without TLS.
_CHOSEN_HERE = ("host", "port", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs")


def add_flags(parser: Parser) -> None:
    add_bench_flags(parser, StartupOptions)
    add_config_flags(parser, [name for name in all_options() if name not in _CHOSEN_HERE])


def run(args: argparse.Namespace) -> int:
    config, options = config_from(args), options_from(StartupOptions, args)
    check_outputs(options.html, options.output_json)
    flags = serve_flags(given_options(args))
    if args.config is not None:
        flags += ["--config", args.config]
    keys = config.server.api_key
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    # Heavy: --help and mistakes in flags answer without them.
    from octavo.bench.startup import run_startup, startup_figures, startup_sections

    result, starts = run_startup(flags, headers, options)
    result = {"model_id": config.model.model, **result}
    sections = startup_sections(result)
    show(sections)
    title = f"octavo bench startup: {config.model.model}"
    write_outputs(
        title, result, sections, lambda: startup_figures(starts), html=options.html, output=options.output_json
    )
    return 0


def serve_flags(given: Mapping[str, Any]) -> list[str]:
    """The options as a command line that means the same."""
    words = []
    for name, value in given.items():
        option = all_options()[name]
        if option.kind == "switch":
            words.append(option.flag if value else f"--no-{option.flag[2:]}")
        else:
            texts = value if option.kind == "list" else (option.show(value),)
            words += [f"{option.flag}={text}" for text in texts]
    return words
