"""The frozen config tree, its pure `resolve()`, and the only reader of environment variables.

Every option is one dataclass field: the command-line flag, its help text and the docs row are made from it
(options.py).
Each component receives its own section. `resolve()` fills in what depends on the model and the machine and
returns (field, value, why) lines, which `serve` prints.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ConfigError
from octavo.machine import Machine
from octavo.options import BYTES, Option, did_you_mean, option, options_of

MIB = 1024 * 1024
GIB = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which number format, on which backend."""

    model: str = option("smollm2-135m-instruct", "local folder, .gguf file, Hugging Face id or catalogue name")
    served_model_name: tuple[str, ...] = option(
        (), "names that requests may use for the model (default: MODEL as given)"
    )
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face model")
    tokenizer: str | None = option(None, "folder or tokenizer.json to use instead of the model's own")
    chat_template: str | None = option(None, "file with a Jinja chat template, instead of the model's own")
    generation_config: Literal["auto", "vllm"] = option(
        "auto", "sampling defaults: from the model's generation_config.json (auto), or neutral ones (vllm)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "number format of weights and activations; auto takes the checkpoint's own, float32 for GGUF block types",
    )
    quantization: Literal["auto", "none", "int8", "int4"] = option(
        "auto",
        "auto: serve the weights as the checkpoint holds them; none: serve a quantized checkpoint dequantized; "
        "int8, int4: round the weights to integers while loading",
    )
    act_dtype: Literal["auto", "int8", "bf16"] = option(
        "auto",
        "activations that meet integer weights: int8 for each token and group of weights, or as they are in --dtype "
        "(bf16); auto: int8",
    )
    max_model_len: int | None = option(
        None, "longest prompt plus output, in tokens (default: the model's own context)", at_least=1
    )
    rope_scaling: dict[str, Any] | None = option(
        None, 'RoPE scaling as JSON, as in config.json: {"rope_type": "yarn", "factor": 4.0}', metavar="JSON"
    )
    backend: Literal["auto", "native", "reference"] = option("auto", "who computes: see octavo info")
    isa: Literal["auto", "portable", "avx2", "avx512", "amx"] = option(
        "auto", "instruction set of the native backend's kernels (also: OCTAVO_ISA); all give the same results"
    )
    threads: int | None = option(None, "threads that compute (default: the cores of the affinity mask)", at_least=1)
    enforce_eager: bool = option(False, "run operator by operator instead of a recorded plan; the same results, slower")
    fusion: str = option(
        "on", "which operators the native backend's plan fuses: on, off, or passes (octavo info --plan lists them)"
    )
    repack_cache: bool = option(True, "keep packed weights in the cache folder, so that the next start only maps them")
    repack_cache_bytes: int = option(
        16 * GIB, "disk that packed weights may take; the least recently used go first", metavar=BYTES, at_least=1
    )
    seed: int | None = option(None, "makes the seeds that requests without one receive reproducible", at_least=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = option(16, "tokens in a KV block", at_least=1)
    kv_cache_memory_bytes: int | None = option(
        None,
        "memory for the KV cache; suffixes KiB, MiB, GiB (default: a share of the memory that is free)",
        metavar=BYTES,
        at_least=1,
    )
    enable_prefix_caching: bool = option(True, "keep the KV of finished prompts and reuse it for equal prefixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What shares a step."""

    max_num_batched_tokens: int | None = option(
        None, "most tokens that one step computes (default: what keeps a step short on the chosen backend)", at_least=1
    )
    max_num_seqs: int = option(64, "most requests that run at once", at_least=1)
    enable_chunked_prefill: bool = option(True, "split long prompts over steps, beside running decodes")
    long_prefill_token_threshold: int = option(
        0, "most prompt tokens that one request computes in a step; 0: no limit of its own"
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "who goes first: the earliest, or the lowest priority value"
    )
    batching: Literal["continuous", "static"] = option(
        "continuous",
        "continuous: requests join and leave at every step; static: a batch runs until its last request ends",
    )
    async_scheduling: bool = option(True, "plan the next step while one runs, where that pays")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server: addresses, trust, limits."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one", at_most=65535)
    api_key: tuple[str, ...] = option(
        (),
        "key that clients must send as a bearer token, on every route but /health; may be given several times "
        "(also: OCTAVO_API_KEY)",
    )
    ssl_keyfile: str | None = option(None, "TLS key")
    ssl_certfile: str | None = option(None, "TLS certificate")
    ssl_ca_certs: str | None = option(None, "CA certificates that client certificates must chain to")
    allowed_origins: tuple[str, ...] = option((), "origins that browsers may call from (CORS); none by default")
    max_queued_requests: int = option(
        256, "requests that may wait; beyond it the answer is 503 with Retry-After (n counts as n)"
    )
    max_body_bytes: int = option(8 * MIB, "largest request body", metavar=BYTES)
    max_header_bytes: int = option(64 * 1024, "largest request head", metavar=BYTES)
    max_prompts: int = option(256, "most prompts in one completions request", at_least=1)
    max_n: int = option(128, "most choices in one request", at_least=1)
    max_logprobs: int = option(20, "most alternatives per token in logprobs")
    logprobs_mode: Literal["raw", "processed"] = option(
        "raw", "logprobs of the model's own distribution, or after penalties, temperature and filters"
    )
    strict_api: bool = option(
        False, "answer 400 to unknown request fields, instead of ignoring them with a warning header"
    )
    enable_prompt_tokens_details: bool = option(True, "report cached prompt tokens in usage")
    sse_keep_alive_s: float = option(15.0, "seconds of silence after which a stream sends a comment; 0 turns it off")
    body_timeout_s: float = option(30.0, "seconds that a client may take to send its request body")
    drain_timeout_s: float = option(
        30.0, "seconds that running requests may take to finish after SIGTERM or Ctrl-C; a second one ends them"
    )
    engine_start_timeout_s: float = option(600.0, "seconds that the engine may take to load the model")
    served_requests_kept: int = option(256, "finished requests whose timeline /v1/requests/{id} still shows")
    startup_report: bool = option(False, "print how long each phase of the start took, of both processes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything, section by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)


SECTIONS = {f.name: f.default_factory for f in dataclasses.fields(Config)}  # name -> class


@functools.cache
def all_options() -> dict[str, Option]:
    """Every option by field name, section by section."""
    return {o.name: o for name, section in SECTIONS.items() for o in options_of(section, name)}  # type: ignore[arg-type]


def make_config(options: Mapping[str, Any], *, base: Config | None = None) -> Config:
    """A Config with `options` (field name -> value, whatever the section) over `base` or the defaults.

    Raises ConfigError for a name that is no option, suggesting the nearest, and for a value that cannot be.
    """
    config = base or Config()
    sections: dict[str, dict[str, Any]] = {}
    for name, value in options.items():
        found = all_options().get(name)
        if found is None:
            raise ConfigError(f"unknown option {name!r}{did_you_mean(name, all_options()) or '.'}")
        sections.setdefault(found.section, {})[name] = found.check(value)
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The options of a TOML file, checked: at the top level or under [model], [cache], [scheduler], [server].

    Names may be spelled with hyphens or underscores. Raises ConfigError for what is not an option.
    """
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid TOML: {error}.") from None
    options: dict[str, Any] = {}
    for key, value in tables.items():
        if isinstance(value, dict) and key in SECTIONS:
            for name, entry in value.items():
                _take(options, name, entry, section=key, where=f"[{key}] in {path}")
        elif isinstance(value, dict) and _field_name(key) not in all_options():
            raise ConfigError(f"unknown section [{key}] in {path}{did_you_mean(key, SECTIONS) or '.'}")
        else:
            _take(options, key, value, section=None, where=str(path))
    return options


def _take(options: dict[str, Any], key: str, value: Any, *, section: str | None, where: str) -> None:
    name = _field_name(key)
    found = all_options().get(name)
    if found is None:
        raise ConfigError(f"unknown option {key!r} in {where}{did_you_mean(name, all_options()) or '.'}")
    if section is not None and found.section != section:
        raise ConfigError(f"option {key!r} stands under {where}; it belongs under [{found.section}].")
    if name in options:
        raise ConfigError(f"option {key!r} in {where} is given twice.")
    try:
        options[name] = found.check(value)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _field_name(key: str) -> str:
    return key.replace("-", "_")


# Every environment variable that Octavo reads, and what it is for.
ENVIRONMENT = {
    "OCTAVO_API_KEY": "the key that clients must send, where --api-key is not given",
    "OCTAVO_ISA": "the instruction set of the native backend's kernels, where --isa is not given",
    "OCTAVO_CACHE": "the folder for fetched models and derived files (default: octavo in the user's cache folder)",
}


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The folder for fetched models and derived files: $OCTAVO_CACHE, or octavo/ in the user's cache folder."""
    if given := environ.get("OCTAVO_CACHE"):
        return Path(given).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "octavo"


def read_environment(environ: Mapping[str, str] = os.environ) -> tuple[dict[str, Any], list[str]]:
    """The options that the environment sets, and a warning for each OCTAVO_ variable that means nothing."""
    options: dict[str, Any] = {}
    if environ.get("OCTAVO_API_KEY"):
        options["api_key"] = (environ["OCTAVO_API_KEY"],)
    if environ.get("OCTAVO_ISA"):
        options["isa"] = all_options()["isa"].check(environ["OCTAVO_ISA"])
    unknown = [name for name in sorted(environ) if name.startswith("OCTAVO_") and name not in ENVIRONMENT]
    return options, [
        f"environment variable {name} is not known{did_you_mean(name, ENVIRONMENT) or '.'}" for name in unknown
    ]


@dataclass(frozen=True, slots=True)
class Decision:
    """One line of what `resolve()` chose; `field` is the flag's name."""

    field: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `resolve()` must know of a checkpoint before its weights are read."""

    context_len: int  # as trained, or as extended by its own RoPE scaling
    stored_dtype: str  # "F32", "BF16" ..., the type of most weights
    has_block_types: bool  # some weights are GGUF blocks
    num_parameters: int
    num_head_parameters: int  # of a tied head, which is not counted above: some backends pack it separately
    stored_bytes: int  # of all weights in the file
    # (tokens, most of them in one step, block size, bytes a value) -> KV of one request
    kv_request_bytes: Callable[[int, int, int, int], int]


_DTYPE_OF_STORED = {"F32": "float32", "F64": "float32", "BF16": "bfloat16", "F16": "float16"}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KV_SHARE = 0.4  # of the memory that is left beside the weights
_CPU_STEP_TOKENS = 512
_INTEGER_BYTES = {"int8": 1.0, "int4": 0.75}  # a weight, its share of scales and of the wider head included


def dtype_bytes(dtype: str) -> int:
    return _DTYPE_BYTES[dtype]


def resolve(
    config: Config, facts: ModelFacts, machine: Machine, backends: Sequence[str]
) -> tuple[Config, list[Decision]]:
    """Fill in what depends on the model and the machine. Pure: the same inputs give the same config.

    `backends` are those that can run here, best first, at least one. Raises ConfigError with the way out.
    """
    decisions: list[Decision] = []

    def decide(field_name: str, value: object, why: str) -> None:
        decisions.append(Decision(field_name, str(value), why))

    model, cache, scheduler = config.model, config.cache, config.scheduler
    backend: Any = model.backend
    if backend == "auto":
        backend = backends[0]
        decide("backend", backend, "the best one available here")
    dtype: Any = model.dtype
    if dtype == "auto":
        dtype, why = _auto_dtype(facts, backend)
        decide("dtype", dtype, why)
    threads = model.threads
    if threads is None:
        threads = machine.num_cores
        decide("threads", threads, "cores in the affinity mask")
    quantization, act_dtype = _integers(model, facts, backend, decide)

    budget = scheduler.max_num_batched_tokens
    if budget is None:
        budget = max(_CPU_STEP_TOKENS, scheduler.max_num_seqs)
        why = "short steps keep the gaps between tokens short while prompts are computed"
        decide("max-num-batched-tokens", budget, why)
    max_num_seqs = scheduler.max_num_seqs
    if scheduler.enable_chunked_prefill and budget < max_num_seqs:
        max_num_seqs = budget
        decide("max-num-seqs", budget, f"a step of {budget} tokens has one for no more requests")
    chunk = budget if scheduler.enable_chunked_prefill else facts.context_len
    kv_request_bytes = partial(_kv_request_bytes, facts, chunk, cache.block_size, dtype)
    weight_bytes = _weight_bytes(facts, backend, dtype, quantization)
    free_bytes = machine.memory_available_bytes - weight_bytes
    max_model_len = model.max_model_len
    context_len = facts.context_len
    if max_model_len is not None and max_model_len > context_len:
        raise ConfigError(
            f"--max-model-len is {max_model_len}, but the model's context is {context_len} tokens. "
            "Lower it, or extend the context with --rope-scaling."
        )
    wanted_len = context_len if max_model_len is None else max_model_len
    kv_bytes = cache.kv_cache_memory_bytes
    if kv_bytes is None:
        if free_bytes <= 0:
            raise ConfigError(
                f"the weights need {_gib(weight_bytes)} on the {backend} backend, but "
                f"{_gib(machine.memory_available_bytes)} of memory are free. Use a smaller model."
            )
        share = int(free_bytes * _KV_SHARE)
        most = kv_request_bytes(wanted_len) * max_num_seqs
        kv_bytes = min(share, most)
        why = (
            f"{_KV_SHARE:.0%} of the {_gib(free_bytes)} left beside the weights"
            if share < most
            else f"room for {max_num_seqs} requests of {wanted_len} tokens"
        )
        decide("kv-cache-memory-bytes", _gib(kv_bytes), why)
    if max_model_len is None:
        max_model_len = _longest_fit(context_len, kv_bytes, kv_request_bytes)
        why = "the model's context" if max_model_len == context_len else f"what {_gib(kv_bytes)} of KV cache hold"
        decide("max-model-len", max_model_len, why)
    if max_model_len < 1 or kv_request_bytes(max_model_len) > kv_bytes:
        raise ConfigError(
            f"one request of {max(max_model_len, 1)} tokens needs {_gib(kv_request_bytes(max(max_model_len, 1)))} of "
            f"KV cache, but it has {_gib(kv_bytes)}. Raise --kv-cache-memory-bytes or lower --max-model-len."
        )

    if not scheduler.enable_chunked_prefill and budget < max_model_len:
        budget = max_model_len
        decide("max-num-batched-tokens", budget, "without chunked prefill a step must hold the longest prompt")

    names = model.served_model_name or (model.model,)
    resolved = dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            backend=backend,
            dtype=dtype,
            threads=threads,
            quantization=quantization,
            act_dtype=act_dtype,
            max_model_len=max_model_len,
            served_model_name=names,
        ),
        cache=dataclasses.replace(cache, kv_cache_memory_bytes=kv_bytes),
        scheduler=dataclasses.replace(scheduler, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs),
    )
    return resolved, decisions


def _auto_dtype(facts: ModelFacts, backend: str) -> tuple[str, str]:
    if facts.has_block_types and backend == "native":
        return "bfloat16", "for activations and the KV cache of quantized weights"
    if facts.has_block_types:
        return "float32", "what the checkpoint's quantized blocks stand for"
    dtype = _DTYPE_OF_STORED.get(facts.stored_dtype, "float32")
    return dtype, f"the checkpoint stores {facts.stored_dtype}"


def _integers(
    model: ModelConfig, facts: ModelFacts, backend: str, decide: Callable[[str, object, str], None]
) -> tuple[Any, Any]:
    """Which weights are integers, and what the activations are that meet them."""
    quantization: Any = model.quantization
    if backend == "reference":
        if quantization not in ("auto", "none") or model.act_dtype == "int8":
            flag = "--act-dtype int8" if model.act_dtype == "int8" else f"--quantization {quantization}"
            raise ConfigError(
                f"{flag} needs the native backend; the reference backend computes with dequantized weights."
            )
        if quantization == "auto" and facts.has_block_types:
            quantization = "none"
            decide("quantization", quantization, "the reference backend computes with dequantized weights")
        return quantization, "bf16"
    has_integers = quantization in _INTEGER_BYTES or (quantization == "auto" and facts.has_block_types)
    if model.act_dtype != "auto":
        return quantization, model.act_dtype
    if not has_integers:
        return quantization, "bf16"
    decide("act-dtype", "int8", "rounded where they meet integer weights; --act-dtype bf16 leaves them as they are")
    return quantization, "int8"


def _weight_bytes(facts: ModelFacts, backend: str, dtype: str, quantization: str) -> int:
    """About what the weights take in memory."""
    if backend == "reference":  # every weight in float32, whatever it computes in
        return 4 * (facts.num_parameters + facts.num_head_parameters)
    if quantization in _INTEGER_BYTES:
        return int(_INTEGER_BYTES[quantization] * facts.num_parameters)
    if quantization == "auto" and facts.has_block_types:
        return int(1.25 * facts.stored_bytes)
    return dtype_bytes(dtype) * facts.num_parameters


def _kv_request_bytes(facts: ModelFacts, chunk: int, block_size: int, dtype: str, num_tokens: int) -> int:
    return facts.kv_request_bytes(num_tokens, min(chunk, num_tokens), block_size, dtype_bytes(dtype))


def _longest_fit(longest: int, kv_bytes: int, kv_request_bytes: Callable[[int], int]) -> int:
    """The largest length up to `longest` whose KV fits; 0 when none does."""
    return bisect.bisect_right(range(1, longest + 1), kv_bytes, key=kv_request_bytes)


def _gib(size_bytes: int) -> str:
    if size_bytes < MIB:
        return f"{size_bytes} bytes"
    return f"{size_bytes / GIB:.2f} GiB" if size_bytes >= GIB else f"{size_bytes / MIB:.1f} MiB"
