"""Runs the same workloads against Octavo and its peers in turn, and prints how they compare.

    python bench/peers/compare.py --check
    python bench/peers/compare.py --models smollm2-135m --workloads W1,W2 --rounds 3
    python bench/peers/compare.py --render results.json

Each round starts every engine once, in an order that rotates, so that a change of the machine's mood meets them all.
An engine that fails is reported and left out. The results are saved after every cell; `--resume` goes on from there.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import report
from client import RequestFailed, Stream, encode_request, run_load, send
from environments import versions
from places import add_envs_option
from servers import (
    CLASSES,
    CORES,
    ENGINES,
    ENTRIES,
    EngineUnavailable,
    Entry,
    Launch,
    Server,
    launch_of,
    machine_busy_s,
    running,
    tail,
)
from workloads import BASE_SLOTS, GROUPS, WORKLOADS, PromptSource, Workload, choose

from models import MODELS, Variants, default_cache

T = TypeVar("T")

CHECK_PROMPT = "The capital of France is"
CHECK_TOKENS = 24
WARM_UP_TOKENS = 8
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


class Run:
    """One comparison: what has been measured so far, and where it is saved."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.deadline_s = time.monotonic() + arguments.time_limit_s
        self.content = self._previous() or {
            "started": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": machine(),
            "versions": {},
            "workloads": {},
            "commands": {},
            "cells": [],
        }

    def _previous(self) -> dict[str, Any] | None:
        path = self.arguments.out
        if not self.arguments.resume:
            return None
        if not path.is_file():
            raise SystemExit(f"--resume: there is no {path}")
        content = json.loads(path.read_text())
        content["cells"] = [cell for cell in content["cells"] if not cell.get("error")]
        return content

    def save(self) -> None:
        path: Path = self.arguments.out
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(self.content, indent=1) + "\n")
        partial.replace(path)

    def execute(self) -> None:
        arguments = self.arguments
        workloads = choose(arguments.workloads, arguments.requests_scale)
        self.content["workloads"] |= {workload.name: workload.description for workload in workloads}
        for engine in arguments.engines:
            self.content["versions"][engine] = (
                octavo_version() if engine == "octavo" else versions(arguments.envs, engine)
            )
        for name in arguments.models:
            variants = Variants(MODELS[name], arguments.envs, cache=arguments.cache)
            source = PromptSource(variants.tokenizer_json)
            for number_class in arguments.classes:
                entries = [e for e in ENTRIES if e.number_class == number_class and e.engine in arguments.engines]
                for number in range(arguments.rounds):
                    turn = number % len(entries) if entries else 0
                    for entry in (*entries[turn:], *entries[:turn]):
                        self._visit(entry, variants, source, workloads, number)

    def _visit(
        self, entry: Entry, variants: Variants, source: PromptSource, workloads: Sequence[Workload], number: int
    ) -> None:
        """One engine in one round. Workloads share a server unless its command depends on their streams."""
        what = {"model": variants.model.name, "class": entry.number_class, "label": entry.label, "round": number}
        todo = [workload for workload in workloads if self._is_open(what, workload.name)]
        if not todo or self._has_failed(what):
            return
        entry = self._with_flags(entry)
        by_slots = sorted(todo, key=lambda workload: workload.num_slots)
        try:
            launches = [(launch_of(entry, variants, self.arguments.envs, w.num_slots), w) for w in by_slots]
            for launch, group in itertools.groupby(launches, key=lambda pair: pair[0]):
                pending = [workload for _, workload in group]
                while pending:
                    self._check_time()
                    self._serve(launch, what, source, pending)
        except EngineUnavailable as error:
            self._record({**what, "workload": "start", "error": str(error)})

    def _serve(self, launch: Launch, what: dict[str, Any], source: PromptSource, pending: list[Workload]) -> None:
        """Take workloads from `pending` and measure them on one server, until one fails or none is left."""
        self.content["commands"][f"{what['model']} {what['class']} {what['label']}"] = str(launch)
        arguments = self.arguments
        with running(launch, self._log(what), arguments.start_timeout_s) as server:
            start = {**what, "workload": "start", "measures": {}}
            try:
                stream = within(60, send(server.port, encode_request(CHECK_PROMPT, CHECK_TOKENS), CHECK_TOKENS))
                start["measures"]["cold_start_s"] = stream.times_s[0] - server.started_s
                start["text"] = stream.text
                self._warm_up(server, source, max(workload.concurrency for workload in pending))
            except RequestFailed as error:
                raise EngineUnavailable(f"it does not answer: {error}; {tail(self._log(what))}") from error
            if self._is_open(what, "start"):
                self._record(start)
            while pending:
                self._check_time()
                workload = pending.pop(0)
                cell = {**what, "workload": workload.name}
                try:
                    cell["measures"] = self._measure(server, source, workload, what["round"])
                except RequestFailed as error:
                    self._record({**cell, "error": f"{error}; {tail(self._log(what))}"})
                    return
                start["measures"]["peak_rss_mb"] = cell["measures"]["peak_rss_mb"]
                self._record(cell)

    def _warm_up(self, server: Server, source: PromptSource, concurrency: int) -> None:
        prompts = source.warm_up(min(concurrency, BASE_SLOTS) + 1, WARM_UP_TOKENS)
        requests = [encode_request(prompt, WARM_UP_TOKENS) for prompt in prompts]
        within(self.arguments.cell_timeout_s, run_load(server.port, requests[:1], WARM_UP_TOKENS, 1))
        within(self.arguments.cell_timeout_s, run_load(server.port, requests[1:], WARM_UP_TOKENS, BASE_SLOTS))

    def _measure(self, server: Server, source: PromptSource, workload: Workload, number: int) -> dict[str, float]:
        prompts = source.prompts(workload, seed=number)
        requests = [encode_request(prompt, workload.max_tokens) for prompt in prompts]
        before = machine_busy_s(), server.cpu_s(), time.process_time()
        load = run_load(server.port, requests, workload.max_tokens, workload.concurrency)
        streams, wall_s = within(self.arguments.cell_timeout_s, load)
        busy_s, server_s, own_s = (
            now - then
            for now, then in zip((machine_busy_s(), server.cpu_s(), time.process_time()), before, strict=True)
        )
        return {
            **measures(streams, sum(map(len, prompts)), wall_s),
            "server_cores": server_s / wall_s,
            "foreign_cores": max(0.0, busy_s - server_s - own_s) / wall_s,
            "peak_rss_mb": server.peak_rss_bytes() / 1e6,
        }

    def _is_open(self, what: dict[str, Any], workload: str) -> bool:
        """Whether this has yet to be measured: it has no result in this round, and has not failed in any."""
        cells = [
            cell
            for cell in self.content["cells"]
            if cell["workload"] == workload and all(cell[key] == what[key] for key in ("model", "class", "label"))
        ]
        return not any(cell.get("error") or cell["round"] == what["round"] for cell in cells)

    def _has_failed(self, what: dict[str, Any]) -> bool:
        """Whether its server did not start in an earlier round."""
        return any(
            cell["workload"] == "start"
            and cell.get("error")
            and all(cell[key] == what[key] for key in ("model", "class", "label"))
            for cell in self.content["cells"]
        )

    def _record(self, cell: dict[str, Any]) -> None:
        self.content["cells"].append(cell)
        self.save()
        print(one_line(cell), flush=True)

    def _check_time(self) -> None:
        if time.monotonic() > self.deadline_s:
            raise OutOfTime

    def _log(self, what: dict[str, Any]) -> Path:
        name = f"{what['model']}-{what['class']}-{what['label']}-{what['round']}.log".replace(" ", "-")
        return self.arguments.out.with_suffix("") / name

    def _with_flags(self, entry: Entry) -> Entry:
        return replace(entry, flags=(*entry.flags, *self.arguments.octavo_flags)) if entry.engine == "octavo" else entry


class OutOfTime(Exception):
    """--time-limit-s has passed."""


def within(timeout_s: float, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; RequestFailed when it takes longer."""

    async def limited() -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError:
            raise RequestFailed(f"not done within {timeout_s:g} s") from None

    return asyncio.run(limited())


def measures(streams: Sequence[Stream], num_prompt_tokens: int, wall_s: float) -> dict[str, float]:
    ttft_ms = [1000 * stream.ttft_s for stream in streams]
    gaps_ms = [1000 * gap for stream in streams for gap in stream.gaps_s]
    found = {
        "wall_s": wall_s,
        "output_tokens_per_s": sum(stream.num_tokens for stream in streams) / wall_s,
        "prompt_tokens_per_s": num_prompt_tokens / wall_s,
        "ttft_p50_ms": float(np.percentile(ttft_ms, 50)),
        "ttft_p99_ms": float(np.percentile(ttft_ms, 99)),
    }
    if gaps_ms:
        found["itl_p50_ms"] = float(np.percentile(gaps_ms, 50))
        found["itl_p99_ms"] = float(np.percentile(gaps_ms, 99))
    return found


def one_line(cell: dict[str, Any]) -> str:
    head = f"{cell['model']:14} {cell['class']:7} {cell['label']:16} round {cell['round']} {cell['workload']:6}"
    if cell.get("error"):
        return f"{head} FAILED: {cell['error']}"
    shown = {name: value for name, value in cell["measures"].items() if name not in ("wall_s", "server_cores")}
    return head + "".join(f" {name}={value:.4g}" for name, value in shown.items())


def machine() -> dict[str, Any]:
    """What a reader needs to know of the machine."""
    info = dict(
        tuple(part.strip() for part in line.split(":", 1))
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if ":" in line
    )
    flags = info.get("flags", "").split()
    return {
        "cpu": info.get("model name", platform.processor()),
        "cores": len(CORES),
        "features": ", ".join(feature for feature in FEATURES if feature in flags),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.release()}",
    }


def octavo_version() -> dict[str, str]:
    found = {"octavo": importlib.metadata.version("octavo")}
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], check=True, capture_output=True, text=True)
        found["commit"] = commit.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return found


def check(arguments: argparse.Namespace) -> None:
    """Start every engine once and show what it says, without measuring."""
    failed = []
    for name in arguments.models:
        variants = Variants(MODELS[name], arguments.envs, cache=arguments.cache)
        for entry in ENTRIES:
            if entry.engine not in arguments.engines or entry.number_class not in arguments.classes:
                continue
            if entry.engine == "octavo":
                entry = replace(entry, flags=(*entry.flags, *arguments.octavo_flags))
            head = f"{name:14} {entry.number_class:7} {entry.label:16}"
            log = arguments.out.with_suffix("") / f"check-{name}-{entry.number_class}-{entry.label}.log".replace(
                " ", "-"
            )
            try:
                launch = launch_of(entry, variants, arguments.envs, BASE_SLOTS)
                with running(launch, log, arguments.start_timeout_s) as server:
                    request = encode_request(CHECK_PROMPT, CHECK_TOKENS)
                    stream = within(arguments.cell_timeout_s, send(server.port, request, CHECK_TOKENS))
                    ids = PromptSource(variants.tokenizer_json).warm_up(1, 2)[0]
                    by_ids = within(arguments.cell_timeout_s, send(server.port, encode_request(ids, 2), 2))
                    cold_s, peak_mb = stream.times_s[0] - server.started_s, server.peak_rss_bytes() / 1e6
                    print(
                        f"{head} {cold_s:.1f} s to the first token, {peak_mb:.0f} MB, {len(ids)} ids read as "
                        f"{by_ids.num_prompt_tokens}, {len(stream.times_s)} events: {stream.text!r}",
                        flush=True,
                    )
            except (EngineUnavailable, RequestFailed) as error:
                failed.append(entry.label)
                print(f"{head} FAILED: {error}", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(dict.fromkeys(failed))}")


def arguments_of(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=names_of(ENGINES), default=list(ENGINES), help="with commas; all")
    parser.add_argument("--models", type=names_of(MODELS), default=list(MODELS), help="with commas; all")
    parser.add_argument("--classes", type=names_of(CLASSES), default=list(CLASSES), help="with commas; all")
    parser.add_argument(
        "--workloads", type=names_of((*WORKLOADS, *GROUPS)), default=["all"], help="with commas; all is W1 to W5"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often the engines take turns (default: 3)")
    parser.add_argument("--requests-scale", type=float, default=1.0, help="multiplies the numbers of requests")
    parser.add_argument("--cell-timeout-s", type=float, default=600, help="for one workload (default: 600)")
    parser.add_argument("--start-timeout-s", type=float, default=600, help="for a server's start (default: 600)")
    parser.add_argument("--time-limit-s", type=float, default=1e9, help="for all; the run ends before the next cell")
    parser.add_argument("--octavo-flags", type=shlex.split, default=[], help="further flags of octavo serve, in quotes")
    parser.add_argument("--out", type=Path, help="results, JSON (default: a new file below --envs)")
    parser.add_argument("--markdown", type=Path, help="write the report there as well")
    parser.add_argument("--resume", action="store_true", help="go on with the run that --out holds")
    parser.add_argument(
        "--render", type=Path, metavar="JSON", help="print the report of an earlier run, measure nothing"
    )
    parser.add_argument("--check", action="store_true", help="start each engine once and show what it answers")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="Octavo's cache folder, with its models")
    add_envs_option(parser)
    arguments = parser.parse_args(words)
    if arguments.resume and arguments.out is None:
        parser.error("--resume needs --out")
    if arguments.out is None:
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        arguments.out = arguments.envs / "results" / f"{stamp}.json"
    return arguments


def names_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """A parser of names with commas between them, each one of `known`."""
    known = list(known)

    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is none of {', '.join(known)}")
        return names

    return parse


def publish(content: dict[str, Any], markdown: Path | None) -> None:
    text = report.markdown(content)
    print("\n" + text)
    if markdown is not None:
        markdown.write_text(text)


def main() -> None:
    arguments = arguments_of()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are stopped
    if arguments.render is not None:
        publish(json.loads(arguments.render.read_text()), arguments.markdown)
    elif arguments.check:
        check(arguments)
    else:
        run = Run(arguments)
        try:
            run.execute()
        except OutOfTime:
            print(f"stopped after --time-limit-s {arguments.time_limit_s:g}", file=sys.stderr)
        finally:
            run.save()
            publish(run.content, arguments.markdown)
            print(f"results: {arguments.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
