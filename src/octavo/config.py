"""The frozen config tree, its pure `resolve()`, and the only reader of environment variables.

Every option is one dataclass field: the command-line flag, its help text and the docs row are made from it.
Each component receives its own section. `resolve()` fills in what depends on the model and the machine and
returns (field, value, why) lines, which `serve` prints.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from octavo.errors import ConfigError

MIB = 1024 * 1024
GIB = 1024 * MIB


def option(default: Any, help: str, *, flag: str | None = None, metavar: str | None = None, aliases: tuple[str, ...] = ()) -> Any:
    """A config field that is also a flag: --field-name unless `flag` names it otherwise."""
    metadata = {"help": help, "flag": flag, "metavar": metavar, "aliases": aliases}
    if isinstance(default, list | dict | tuple):
        return field(default_factory=lambda: default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which number format, on which backend."""

    model: str = option("smollm2-135m-instruct", "local folder, .gguf file, Hugging Face id or catalogue name")
    served_model_name: tuple[str, ...] = option((), "names that requests may use for the model (default: MODEL as given)")
    revision: str | None = option(None, "branch, tag or commit of a Hugging Face model")
    tokenizer: str | None = option(None, "folder or tokenizer.json to use instead of the model's own")
    chat_template: str | None = option(None, "file with a Jinja chat template, instead of the model's own")
    generation_config: Literal["auto", "vllm"] = option(
        "auto", "sampling defaults: from the model's generation_config.json (auto), or neutral ones (vllm)"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "number format of weights and activations; auto takes the checkpoint's own, float32 for GGUF block types"
    )
    quantization: Literal["auto", "none"] = option(
        "auto", "auto: serve the weights as the checkpoint holds them; none: serve a quantized checkpoint dequantized"
    )
    max_model_len: int | None = option(None, "longest prompt plus output, in tokens (default: the model's own context)")
    rope_scaling: dict[str, Any] | None = option(
        None, 'RoPE scaling as JSON, as in config.json: {"rope_type": "yarn", "factor": 4.0}', metavar="JSON"
    )
    backend: Literal["auto", "reference"] = option("auto", "who computes: see octavo info")
    threads: int | None = option(None, "threads that compute (default: the cores of the affinity mask)")
    seed: int | None = option(None, "makes the seeds that requests without one receive reproducible")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The KV cache."""

    block_size: int = option(16, "tokens in a KV block")
    kv_cache_memory_bytes: int | None = option(
        None, "memory for the KV cache; suffixes KiB, MiB, GiB (default: a share of the memory that is free)", metavar="BYTES"
    )
    enable_prefix_caching: bool = option(True, "keep the KV of finished prompts and reuse it for equal prefixes")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What shares a step."""

    max_num_batched_tokens: int = option(2048, "most tokens that one step computes")
    max_num_seqs: int = option(64, "most requests that run at once")
    enable_chunked_prefill: bool = option(True, "split long prompts over steps, beside running decodes")
    long_prefill_token_threshold: int = option(0, "most prompt tokens that one request computes in a step; 0: no limit of its own")
    scheduling_policy: Literal["fcfs", "priority"] = option("fcfs", "who goes first: the earliest, or the lowest priority value")
    batching: Literal["continuous", "static"] = option(
        "continuous", "continuous: requests join and leave at every step; static: a batch runs until its last request ends"
    )
    async_scheduling: bool = option(True, "plan the next step while one runs")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP server: addresses, trust, limits."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 takes a free one")
    api_key: tuple[str, ...] = option((), "key that clients must send as a bearer token, on every route but /health; may be given several times (also: OCTAVO_API_KEY)")
    ssl_keyfile: str | None = option(None, "TLS key")
    ssl_certfile: str | None = option(None, "TLS certificate")
    ssl_ca_certs: str | None = option(None, "CA certificates that client certificates must chain to")
    allowed_origins: tuple[str, ...] = option((), "origins that browsers may call from (CORS); none by default")
    max_queued_requests: int = option(256, "requests that may wait; beyond it the answer is 503 with Retry-After (n counts as n)")
    max_body_bytes: int = option(8 * MIB, "largest request body", metavar="BYTES")
    max_header_bytes: int = option(64 * 1024, "largest request head", metavar="BYTES")
    max_prompts: int = option(256, "most prompts in one completions request")
    max_n: int = option(128, "most choices in one request")
    max_logprobs: int = option(20, "most alternatives per token in logprobs")
    logprobs_mode: Literal["raw", "processed"] = option("raw", "logprobs of the model's own distribution, or after penalties, temperature and filters")
    strict_api: bool = option(False, "answer 400 to unknown request fields, instead of ignoring them with a warning header")
    enable_prompt_tokens_details: bool = option(True, "report cached prompt tokens in usage")
    sse_keep_alive_s: float = option(15.0, "seconds of silence after which a stream sends a comment; 0 turns it off")
    body_timeout_s: float = option(30.0, "seconds that a client may take to send its request body")
    drain_timeout_s: float = option(30.0, "seconds that running requests may take to finish after SIGTERM")
    engine_start_timeout_s: float = option(600.0, "seconds that the engine may take to load the model")
    served_requests_kept: int = option(256, "finished requests whose timeline /v1/requests/{id} still shows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything, section by section."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
