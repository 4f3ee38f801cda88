"""`octavo run-batch`: a file of requests in OpenAI's batch format, answered by an engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from octavo.cli.batch_file import Output
from octavo.cli.flags import Parser, add_config_flags, config_from
from octavo.config import all_options
from octavo.errors import ConfigError

_SERVER_OPTIONS = ("max_body_bytes", "max_prompts", "max_n", "max_logprobs", "logprobs_mode", "strict_api")


def add_flags(parser: Parser) -> None:
    group = parser.add_argument_group("files")
    group.add_argument(
        "-i", "--input-file", metavar="FILE", type=Path, required=True, help="requests, one JSON object a line"
    )
    group.add_argument(
        "-o",
        "--output-file",
        metavar="FILE",
        type=Path,
        required=True,
        help="records, one a request; a run that was stopped goes on where it was",
    )
    options = all_options().values()
    add_config_flags(parser, [o.name for o in options if o.section != "server" or o.name in _SERVER_OPTIONS])


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    source, target = args.input_file, args.output_file
    if not source.is_file():
        raise ConfigError(f"-i {source}: {'it is a folder' if source.is_dir() else 'no such file'}.")
    if target.exists() and source.samefile(target):
        raise ConfigError(f"-o {target} is the input itself. Choose another output.")
    # Heavy: --help and mistakes in flags answer without them.
    from octavo.cli.batch import Batch, batch_config
    from octavo.engine.llm import AsyncLLM

    config = batch_config(config)
    with Output(target) as output:
        batch = Batch(source, output, config, AsyncLLM(config=config))
        try:
            asyncio.run(batch.run())
        except KeyboardInterrupt:
            print("octavo: stopped; the same command goes on from here.", file=sys.stderr)
            raise
    print(batch.summary(), file=sys.stderr)
    return 1 if batch.num_failed else 0
