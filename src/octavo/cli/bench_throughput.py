"""`octavo bench throughput`: offline, all requests at once."""

from __future__ import annotations

import argparse

from octavo.bench.options import DatasetOptions, SamplingOptions, ThroughputOptions
from octavo.cli.bench_flags import add_bench_flags, check_outputs, note, options_from, show, write_outputs
from octavo.cli.flags import Parser, add_config_flags, config_from
from octavo.config import all_options


def add_flags(parser: Parser) -> None:
    add_bench_flags(parser, DatasetOptions, SamplingOptions, ThroughputOptions)
    add_config_flags(parser, [option.name for option in all_options().values() if option.section != "server"])


def run(args: argparse.Namespace) -> int:
    config = config_from(args)
    dataset, sampling = options_from(DatasetOptions, args), options_from(SamplingOptions, args)
    options = options_from(ThroughputOptions, args)
    check_outputs(options.html, options.output_json)
    # Heavy: --help and mistakes in flags answer without them.
    from octavo.bench.throughput import run_throughput, throughput_figures, throughput_sections

    result, runs = run_throughput(config, dataset, sampling, options, note)
    sections = throughput_sections(result)
    show(sections)
    title = f"octavo bench throughput: {config.model.model}"
    write_outputs(
        title, result, sections, lambda: throughput_figures(runs), html=options.html, output=options.output_json
    )
    return 0
