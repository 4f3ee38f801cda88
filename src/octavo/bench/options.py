"""The options of `octavo bench`, as config sections are written: the flags and their help are made from them.

Names are those of `vllm bench` where it has the same thing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from octavo.options import option

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """The server, and how it is asked."""

    base_url: str | None = option(
        None, "address of the server, such as http://127.0.0.1:8000 (default: made of --host and --port)"
    )
    host: str = option("127.0.0.1", "address of the server")
    port: int = option(8000, "port of the server", at_least=1, at_most=65535)
    endpoint: str | None = option(
        None, "path of the API (default: /v1/completions, or /v1/chat/completions with --backend openai-chat)"
    )
    backend: Literal["openai", "openai-chat", "vllm"] = option(
        "openai", "which API is spoken: completions (openai, and vllm as another name) or chat (openai-chat)"
    )
    model: str | None = option(None, "model to ask for (default: the first that the server lists)")
    served_model_name: str | None = option(None, "name of the model in requests, where it is not --model")
    tokenizer: str | None = option(
        None,
        "folder, tokenizer.json, .gguf file or model name whose tokenizer makes and counts prompts "
        "(default: the model's own, where its files are on this machine)",
    )
    max_model_len: int | None = option(
        None, "the server's context, to which a trace is cut (default: as the server says)", at_least=2
    )
    api_key: str | None = option(None, "key to send as a bearer token (also: OCTAVO_API_KEY)", metavar="KEY")
    header: tuple[str, ...] = option((), "headers of every request", metavar="KEY=VALUE")
    logprobs: int | None = option(None, "ask for logprobs of so many alternatives")
    extra_body: dict[str, Any] | None = option(None, "more fields of every request body, as JSON")
    connections: Literal["pooled", "fresh"] = option(
        "pooled", "pooled: connections are kept and used again; fresh: one for each request"
    )
    ready_check_timeout_sec: float = option(
        600.0, "seconds that the server may take to answer a first request; 0 sends none"
    )
    request_timeout_sec: float = option(21600.0, "seconds that one request may take", at_least=0.001)
    server_pid: int | None = option(
        None, "process whose memory and CPU time are measured (default: whoever listens on the port here)", at_least=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """What is asked."""

    dataset_name: Literal["random", "sharegpt", "prefix_repetition", "trace", "timed_trace", "custom"] = option(
        "random", "kind of the prompts; timed_trace is another name of trace"
    )
    dataset_path: str | None = option(None, "file of sharegpt, custom and trace", metavar="FILE")
    num_prompts: int = option(1000, "requests to send, or as many as the file has", at_least=1)
    input_len: int | None = option(None, "sets --random-input-len and --prefix-repetition-suffix-len", at_least=1)
    output_len: int | None = option(None, "sets the output length of whichever data set is used", at_least=1)
    disable_shuffle: bool = option(False, "take sharegpt and custom in the order of the file")
    random_input_len: int = option(1024, "random: tokens in a prompt", at_least=1)
    random_output_len: int = option(128, "random: tokens in an answer", at_least=1)
    random_range_ratio: float = option(
        0.0, "random: lengths vary evenly between (1 - X) and (1 + X) of the given ones", at_most=0.999
    )
    random_prefix_len: int = option(0, "random: tokens that all prompts begin with, added to their length")
    prefix_repetition_prefix_len: int = option(256, "prefix_repetition: tokens of a shared beginning", at_least=1)
    prefix_repetition_suffix_len: int = option(256, "prefix_repetition: tokens that each prompt adds", at_least=1)
    prefix_repetition_num_prefixes: int = option(10, "prefix_repetition: different beginnings", at_least=1)
    prefix_repetition_output_len: int = option(128, "prefix_repetition: tokens in an answer", at_least=1)
    sharegpt_output_len: int | None = option(
        None, "sharegpt: tokens in an answer (default: those of the answer in the file)", at_least=1
    )
    custom_output_len: int = option(256, "custom: tokens in an answer, where its line has no output_tokens", at_least=1)
    trace_speedup: float = option(
        1.0,
        "trace: arrivals come this many times faster than recorded; inf: all at once",
        at_least=0.001,
        at_most=math.inf,
    )
    trace_block_size: int = option(
        512,
        "trace: tokens that one entry of hash_ids stands for",
        aliases=("--timed-trace-chunk-hash-size",),
        at_least=1,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """When requests are sent, and how often."""

    request_rate: float = option(
        math.inf,
        "requests a second; inf: all at once, or a trace at its own times",
        at_least=0.000001,
        at_most=math.inf,
    )
    burstiness: float = option(
        1.0,
        "shape of the gamma distribution of the gaps: 1 is a Poisson process, below it comes in bursts, above it "
        "more evenly, inf at equal gaps",
        at_least=0.001,
        at_most=math.inf,
    )
    max_concurrency: int | None = option(None, "most requests in flight (default: no limit)", at_least=1)
    num_warmups: int = option(0, "requests before the measured ones, with prompts of their own")
    repeats: int = option(
        1,
        "times that the whole is run, with other prompts each time; from 2 on with 95 % confidence intervals",
        at_least=1,
    )
    seed: int = option(0, "of prompts and arrivals; the next repeat takes the next one")
    disable_tqdm: bool = option(False, "show no progress bar")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How answers are sampled."""

    ignore_eos: bool | None = option(
        None, "go on after the end-of-text token (default: on for random, prefix_repetition and trace)"
    )
    temperature: float = option(0.0, "sampling temperature; 0: greedy")
    top_p: float | None = option(None, "as in the API", at_most=1)
    top_k: int | None = option(None, "as in the API", at_least=-1)
    min_p: float | None = option(None, "as in the API", at_most=1)
    frequency_penalty: float | None = option(None, "as in the API", at_least=-2, at_most=2)
    presence_penalty: float | None = option(None, "as in the API", at_least=-2, at_most=2)
    repetition_penalty: float | None = option(None, "as in the API")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """What is reported, and where it is kept."""

    percentile_metrics: str = option(
        "ttft,tpot,itl,e2el", f"metrics to report, a comma-separated list of {', '.join(METRICS)}", metavar="LIST"
    )
    metric_percentiles: str = option("90,99", "percentiles to report, comma-separated", metavar="LIST")
    goodput: tuple[str, ...] = option(
        (),
        "limits that a good request keeps, in ms: ttft:500 tpot:50 e2el:10000; counts good requests a second",
        metavar="METRIC:MS",
    )
    save_result: bool = option(False, "write the result as JSON")
    save_detailed: bool = option(False, "with lengths, times, texts and errors of every request in it")
    append_result: bool = option(False, "add the result to the file, as one more line")
    result_dir: str | None = option(None, "folder of the result (default: the current one)", metavar="FOLDER")
    result_filename: str | None = option(
        None, "file of the result (default: made of label, rate, concurrency, model and time)", metavar="FILE"
    )
    label: str | None = option(None, "what this run is called in the result (default: --backend)")
    metadata: tuple[str, ...] = option((), "more fields of the result", metavar="KEY=VALUE")
    html: str | None = option(None, "write a report with plots; needs the extra octavo[bench]", metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """How the requests are run."""

    n: int = option(1, "choices for each prompt", at_least=1)
    repeats: int = option(
        1,
        "times that the whole is run, with other prompts each time; from 2 on with 95 % confidence intervals",
        at_least=1,
    )
    disable_tqdm: bool = option(False, "show no progress bar")
    output_json: str | None = option(None, "write the result as JSON", metavar="FILE")
    html: str | None = option(None, "write a report with plots; needs the extra octavo[bench]", metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """The batch, and how often it is run."""

    input_len: int = option(32, "tokens in a prompt", at_least=1)
    output_len: int = option(128, "tokens in an answer", at_least=1)
    batch_size: int = option(8, "requests that run together", at_least=1)
    n: int = option(1, "choices for each prompt", at_least=1)
    num_iters: int = option(30, "times that the batch is run", at_least=1)
    num_iters_warmup: int = option(10, "times that it is run before, unmeasured")
    disable_tqdm: bool = option(False, "show no progress bar")
    output_json: str | None = option(None, "write the result as JSON", metavar="FILE")
    html: str | None = option(None, "write a report with plots; needs the extra octavo[bench]", metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class StartupOptions:
    """How often the server is started."""

    num_iters: int = option(5, "measured starts", at_least=1)
    num_iters_warmup: int = option(1, "starts before, unmeasured: they leave the files in the page cache")
    start_timeout_sec: float = option(600.0, "seconds that a start may take", at_least=0.001)
    disable_tqdm: bool = option(False, "show no progress bar")
    output_json: str | None = option(None, "write the result as JSON", metavar="FILE")
    html: str | None = option(None, "write a report with plots; needs the extra octavo[bench]", metavar="FILE")
