"""What a benchmark asks: prompts with their output lengths, and for a trace the times at which they came."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.bench.options import DatasetOptions
from octavo.bench.prompt_files import read_custom, read_sharegpt
from octavo.bench.prompts import PromptMaker
from octavo.bench.trace import TraceEntry, cut_to_context, read_trace
from octavo.errors import ConfigError

MADE_UP = ("random", "prefix_repetition", "trace", "timed_trace")  # text that no model would end by itself


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt: str
    prompt_len: int | None  # tokens, as the server will count them; None without a tokenizer
    output_len: int
    arrival_s: float | None = None  # after the first one, as the trace has it


@dataclass(frozen=True, slots=True)
class Workload:
    requests: list[BenchRequest]
    notes: tuple[str, ...] = ()  # what a reader of the result should know
    num_truncated: int = 0


def with_general_lengths(options: DatasetOptions) -> DatasetOptions:
    """--input-len and --output-len put into the options of each data set."""
    changes: dict[str, Any] = {}
    if options.input_len is not None:
        changes |= dict.fromkeys(("random_input_len", "prefix_repetition_suffix_len"), options.input_len)
    if options.output_len is not None:
        names = ("random_output_len", "prefix_repetition_output_len", "sharegpt_output_len", "custom_output_len")
        changes |= dict.fromkeys(names, options.output_len)
    return dataclasses.replace(options, **changes)


def make_workload(
    options: DatasetOptions, maker: PromptMaker | None, *, seed: int, context_len: int | None
) -> Workload:
    """The requests that `options` describe. The same seed gives the same; another one shares no random text.

    `maker` is None where the tokenizer is not known. Raises ConfigError for a file that cannot be used, and where a
    tokenizer is needed and there is none.
    """
    options = with_general_lengths(options)
    name = options.dataset_name
    rng = np.random.default_rng(seed)
    if name in ("random", "prefix_repetition"):
        if options.dataset_path is not None:
            raise ConfigError(
                f"--dataset-path {options.dataset_path} has no effect on --dataset-name {name}, which is made up. "
                "Choose sharegpt, custom or trace."
            )
    elif options.dataset_path is None:
        raise ConfigError(f"--dataset-name {name} needs a file: --dataset-path FILE.")
    match name:
        case "random":
            return Workload(_random(options, _needed(maker, name), rng))
        case "prefix_repetition":
            return Workload(_prefix_repetition(options, _needed(maker, name), rng))
        case "trace" | "timed_trace":
            assert options.dataset_path is not None
            entries = read_trace(options.dataset_path)[: options.num_prompts]
            return _trace(options, entries, _needed(maker, name), rng, seed, context_len)
        case "sharegpt":
            assert options.dataset_path is not None
            pairs = read_sharegpt(options.dataset_path, maker, options.sharegpt_output_len)
        case "custom":
            assert options.dataset_path is not None
            pairs = read_custom(options.dataset_path, options.custom_output_len)
    if not options.disable_shuffle:
        pairs = [pairs[i] for i in rng.permutation(len(pairs))]
    requests = [
        BenchRequest(prompt, None if maker is None else maker.count(prompt), output_len)
        for prompt, output_len in pairs[: options.num_prompts]
    ]
    return Workload(requests, _shortage(options, len(requests)))


def make_probe(request: BenchRequest, maker: PromptMaker | None, rng: np.random.Generator) -> BenchRequest:
    """A request as large as `request` that shares nothing with it: what it leaves in a prefix cache helps nobody."""
    if maker is None or request.prompt_len is None:
        words = " ".join(map(str, rng.integers(1_000_000, size=max(1, len(request.prompt) // 8))))
        return dataclasses.replace(request, prompt=words, prompt_len=None)
    ids = maker.draw(max(1, request.prompt_len - maker.num_special), rng)
    return dataclasses.replace(request, prompt=maker.text(ids, rng))


def _needed(maker: PromptMaker | None, name: str) -> PromptMaker:
    if maker is None:
        raise ConfigError(
            f"--dataset-name {name} makes prompts of a given number of tokens, but the server's model has no "
            "tokenizer on this machine. Give one: --tokenizer PATH."
        )
    return maker


def _random(options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator) -> list[BenchRequest]:
    prefix = maker.draw(options.random_prefix_len, rng)
    ratio, count = options.random_range_ratio, options.num_prompts
    input_lens = _vary(max(1, options.random_input_len - maker.num_special), ratio, count, rng)
    output_lens = _vary(options.random_output_len, ratio, count, rng)
    requests = []
    for input_len, output_len in zip(input_lens, output_lens, strict=True):
        ids = prefix + maker.draw(input_len, rng)
        requests.append(BenchRequest(maker.text(ids, rng), len(ids) + maker.num_special, output_len))
    return requests


def _vary(length: int, ratio: float, count: int, rng: np.random.Generator) -> list[int]:
    """Whole numbers from length * (1 - ratio) to length * (1 + ratio), at least 1."""
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    drawn: list[int] = rng.integers(low, high, count, endpoint=True).tolist()
    return drawn


def _prefix_repetition(options: DatasetOptions, maker: PromptMaker, rng: np.random.Generator) -> list[BenchRequest]:
    """Request i begins with prefix i modulo their number; the order is shuffled."""
    num_prefixes = options.prefix_repetition_num_prefixes
    if num_prefixes > options.num_prompts:
        raise ConfigError(
            f"--prefix-repetition-num-prefixes is {num_prefixes}, more than the {options.num_prompts} requests of "
            "--num-prompts: no prefix would be repeated."
        )
    prefixes = [maker.draw(options.prefix_repetition_prefix_len, rng) for _ in range(num_prefixes)]
    requests = []
    for i in rng.permutation(options.num_prompts):
        ids = prefixes[i % num_prefixes] + maker.draw(options.prefix_repetition_suffix_len, rng)
        output_len = options.prefix_repetition_output_len
        requests.append(BenchRequest(maker.text(ids, rng), len(ids) + maker.num_special, output_len))
    return requests


def _trace(
    options: DatasetOptions,
    entries: Sequence[TraceEntry],
    maker: PromptMaker,
    rng: np.random.Generator,
    seed: int,
    context_len: int | None,
) -> Workload:
    """Prompts of the recorded lengths. Where the trace names blocks, equal names are equal text."""
    requests = []
    num_truncated = 0
    blocks: dict[int, list[int]] = {}
    for entry in entries:
        if options.output_len is not None:
            entry = dataclasses.replace(entry, output_len=options.output_len)
        fitting = entry if context_len is None else cut_to_context(entry, context_len)
        num_truncated += fitting != entry
        length = max(1, fitting.input_len - maker.num_special)
        ids: list[int] = []
        for block in entry.block_ids[: math.ceil(length / options.trace_block_size)]:
            if block not in blocks:
                blocks[block] = maker.draw(options.trace_block_size, np.random.default_rng((seed, block)))
            ids += blocks[block]
        ids = ids[:length] + maker.draw(max(0, length - len(ids)), rng)
        arrival_s = (entry.time_s - entries[0].time_s) / options.trace_speedup
        text = maker.text(ids, rng)
        requests.append(BenchRequest(text, length + maker.num_special, fitting.output_len, arrival_s))
    notes = _shortage(options, len(requests))
    if num_truncated:
        notes += (f"{num_truncated} of {len(requests)} requests were cut to the context of {context_len} tokens",)
    return Workload(requests, notes, num_truncated)


def _shortage(options: DatasetOptions, count: int) -> tuple[str, ...]:
    if count >= options.num_prompts:
        return ()
    return (f"{options.dataset_path} has {count} usable entries; --num-prompts asks for {options.num_prompts}",)
