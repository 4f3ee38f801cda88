"""`octavo bench latency`: offline, one batch again and again."""

from __future__ import annotations

import argparse

from octavo.bench.options import LatencyOptions
from octavo.cli.bench_flags import add_bench_flags, check_outputs, options_from, show, write_outputs
from octavo.cli.flags import Parser, add_config_flags, config_from
from octavo.config import all_options
from octavo.machine import detect_machine


def add_flags(parser: Parser) -> None:
    add_bench_flags(parser, LatencyOptions)
    add_config_flags(parser, [option.name for option in all_options().values() if option.section != "server"])


def run(args: argparse.Namespace) -> int:
    config, options = config_from(args), options_from(LatencyOptions, args)
    check_outputs(options.html, options.output_json)
    # Heavy: --help and mistakes in flags answer without them.
    from octavo.backends.native.roofline import measure
    from octavo.bench.latency import latency_figures, latency_sections, run_latency

    threads = config.model.threads or detect_machine().num_cores
    result, runs = run_latency(config, options, lambda: measure(threads, isa=config.model.isa))
    sections = latency_sections(result)
    show(sections)
    title = f"octavo bench latency: {config.model.model}"
    write_outputs(title, result, sections, lambda: latency_figures(runs), html=options.html, output=options.output_json)
    return 0
