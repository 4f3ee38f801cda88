"""`octavo bench serve`: load on a server over HTTP, with the flags and the result of `vllm bench serve`."""

from __future__ import annotations

import argparse

from octavo.bench.options import DatasetOptions, LoadOptions, ResultOptions, SamplingOptions, TargetOptions
from octavo.cli.bench_flags import add_bench_flags, check_outputs, note, options_from, show, write_outputs
from octavo.cli.flags import Parser


def add_flags(parser: Parser) -> None:
    add_bench_flags(parser, TargetOptions, DatasetOptions, LoadOptions, SamplingOptions, ResultOptions)


def run(args: argparse.Namespace) -> int:
    target, dataset = options_from(TargetOptions, args), options_from(DatasetOptions, args)
    load, sampling = options_from(LoadOptions, args), options_from(SamplingOptions, args)
    output = options_from(ResultOptions, args)
    check_outputs(output.html)
    # Heavy: --help and mistakes in flags answer without them.
    import asyncio

    from octavo.bench.html_report import serve_figures
    from octavo.bench.report import serve_sections
    from octavo.bench.serving import ServeBenchmark, ServeOptions, new_event_loop, result_path, save_result

    options = ServeOptions(target=target, dataset=dataset, load=load, sampling=sampling, result=output)
    benchmark = ServeBenchmark(options, note)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        outcome = runner.run(benchmark.run())
    result, sections = outcome.result, serve_sections(outcome.result)
    show(sections)
    for reason, count in outcome.failures.items():
        note(f"{count} requests failed: {reason}")
    for warning in outcome.warnings:
        note(f"warning: {warning}")
    if output.save_result or output.append_result:
        path = result_path(options, result)
        save_result(path, result, append=output.append_result)
        note(f"the result is in {path}")
    title = f"octavo bench serve: {result['model_id']}"
    write_outputs(title, result, sections, lambda: serve_figures(outcome.runs), html=output.html, output=None)
    return 1 if result["failed"] else 0
