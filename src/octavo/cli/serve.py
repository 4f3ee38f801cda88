"""`octavo serve`: the HTTP server."""

from __future__ import annotations

import argparse

from octavo.cli.flags import Parser, add_config_flags, config_from


def add_flags(parser: Parser) -> None:
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    from octavo.server.run import serve  # heavy: --help and mistakes in flags answer without it

    return serve(config)
