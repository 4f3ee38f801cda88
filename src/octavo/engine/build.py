"""Builds an engine from a config: opens the checkpoint, resolves the config, loads the model, sizes the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np

from octavo.backends.ops import ForwardBatch, KvCache
from octavo.backends.registry import NativeOptions, available_backends, create_ops
from octavo.config import Config, ModelFacts, cache_dir, dtype_bytes, resolve
from octavo.engine.core import EngineCore
from octavo.engine.events import EngineInfo
from octavo.engine.messages import Vocabulary
from octavo.engine.model_files import find_model, load_model_tokenizer
from octavo.errors import UnsupportedModel
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.cache_spec import KvCacheSpec, LayerKv, make_cache_spec
from octavo.kv_cache.prefix_cache import model_identity
from octavo.loader.checkpoint import Checkpoint, Ledger
from octavo.loader.source import open_checkpoint
from octavo.machine import detect_machine
from octavo.models.decoder import Decoder
from octavo.models.registry import build_spec
from octavo.models.spec import DecoderSpec
from octavo.sampling.sampler import Sampler
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.model_runner import ModelRunner
from octavo.worker.request_table import RequestTable

Progress = Callable[[str, int, int], None]  # phase, done, total (0: unknown)

# What a model's generation_config.json may set of a request's sampling parameters, and its type.
_GENERATION_DEFAULTS: Mapping[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}


def build_engine(
    config: Config,
    progress: Progress = lambda phase, done, total: None,
    vocabulary: Callable[[], Vocabulary] | None = None,
) -> tuple[EngineCore, EngineInfo]:
    """Load the model that `config` names and put an engine around it. Raises StartError with the way out.

    `vocabulary` is asked once the weights are loaded; without one the tokenizer is loaded here.
    """
    progress("opening the model", 0, 0)
    checkpoint = open_checkpoint(find_model(config), digest_cache=cache_dir() / "digests")
    spec = build_spec(checkpoint.config, rope_scaling=config.model.rope_scaling)
    layers = [LayerKv(a.num_kv_heads, a.head_dim, a.window) for a in (layer.attention for layer in spec.layers)]
    config, decisions = resolve(config, _facts(checkpoint, spec, layers), detect_machine(), available_backends())
    model, dtype, max_model_len = config.model, config.model.dtype, config.model.max_model_len
    kv_memory, threads = config.cache.kv_cache_memory_bytes, config.model.threads
    assert dtype != "auto" and max_model_len and kv_memory and threads, "resolve() decides these"

    progress("preparing the backend", 0, 0)
    ops = create_ops(
        model.backend,
        dtype=dtype,
        num_threads=threads,
        native=NativeOptions(
            isa=model.isa,
            quantization=model.quantization,
            quantizes_activations=model.act_dtype == "int8",
            enforce_eager=model.enforce_eager,
            fusion=model.fusion,
            repack_cache=cache_dir() / "packed" if model.repack_cache else None,
            repack_cache_bytes=model.repack_cache_bytes,
            identity=checkpoint.fingerprint,
        ),
    )
    cache_spec = make_cache_spec(layers, block_size=config.cache.block_size, dtype_bytes=dtype_bytes(dtype))
    decoder = Decoder(
        spec,
        ops,
        Ledger(checkpoint, ignore=spec.ignored_prefixes),
        max_model_len=max_model_len,
        kv_places=cache_spec.places,
        progress=lambda done, total: progress("loading weights" if done < total else "making the plan", done, total),
    )
    progress("reserving the KV cache", 0, 0)
    num_blocks = cache_spec.num_blocks_for(kv_memory)
    chunk = min(config.scheduler.max_num_batched_tokens or max_model_len, max_model_len)
    cache = ops.kv_cache(
        num_blocks=num_blocks,
        block_size=cache_spec.block_size,
        layers_per_block=cache_spec.layers_per_block,
        num_kv_heads=cache_spec.num_kv_heads,
        head_dim=cache_spec.head_dim,
    )
    progress("first step", 0, 0)
    _warm_up(decoder, cache, len(cache_spec.groups))
    progress("waiting for the tokenizer", 0, 0)
    known = _load_vocabulary(config) if vocabulary is None else vocabulary()
    vocab_size = min(spec.vocab_size, known.vocab_size)
    eos_token_ids = _eos_token_ids(checkpoint, known, vocab_size)
    scheduler = Scheduler(
        config.scheduler,
        cache_spec,
        BlockPool(num_blocks, cache_spec.block_size),
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        cache_identity=_cache_identity(checkpoint, config, spec),
        enable_prefix_caching=config.cache.enable_prefix_caching,
        rope_native_len=spec.native_context,
    )
    runner = ModelRunner(
        decoder,
        cache,
        Sampler(vocab_size, config.server.logprobs_mode, ops.sampler_kernels(vocab_size)),
        RequestTable(vocab_size=vocab_size, eos_token_ids=eos_token_ids),
    )
    core = EngineCore(scheduler, runner.execute, max_model_len=max_model_len, seed=model.seed, program=decoder.program)
    info = EngineInfo(
        model=model.model,
        served_model_names=model.served_model_name,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        default_sampling=_default_sampling(checkpoint, config),
        max_num_seqs=config.scheduler.max_num_seqs,
        block_size=cache_spec.block_size,
        num_blocks=num_blocks,
        kv_bytes_per_token=cache_spec.bytes_per_token,
        kv_cache_bytes=num_blocks * cache_spec.bytes_per_block,
        max_concurrency=num_blocks / cache_spec.max_blocks_per_request(max_model_len, chunk),
        backend=model.backend,
        dtype=dtype,
        decisions=tuple((line.field, line.value, line.why) for line in decisions),
        notes=tuple(ops.weight_report()),
        created_s=int(time.time()),
    )
    return core, info


def _load_vocabulary(config: Config) -> Vocabulary:
    tokenizer = load_model_tokenizer(config)
    return Vocabulary(tokenizer.vocab_size, tokenizer.eos_token_ids)


def _warm_up(decoder: Decoder, cache: KvCache, num_groups: int) -> None:
    """Compute one token, so that the first request finds weights and buffers in memory. Block 0 belongs to nobody."""
    one = np.zeros(1, np.int32)
    batch = ForwardBatch(
        token_ids=one,
        positions=one,
        query_starts=np.array([0, 1], np.int32),
        context_lens=one + 1,
        block_tables=(np.zeros((1, 1), np.int32),) * num_groups,
        rope_variants=one,
        logits_rows=one,
    )
    decoder.argmax(decoder.forward(batch, cache), one)


def _facts(checkpoint: Checkpoint, spec: DecoderSpec, layers: list[LayerKv]) -> ModelFacts:
    def kv_request_bytes(num_tokens: int, chunk: int, block_size: int, value_bytes: int) -> int:
        cache_spec: KvCacheSpec = make_cache_spec(layers, block_size=block_size, dtype_bytes=value_bytes)
        return cache_spec.max_blocks_per_request(num_tokens, chunk) * cache_spec.bytes_per_block

    return ModelFacts(
        context_len=spec.max_context,
        stored_dtype=checkpoint.dtype_name,
        has_block_types=checkpoint.has_block_types,
        num_parameters=sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        num_head_parameters=spec.tied_head * math.prod(spec.head.shape),
        stored_bytes=checkpoint.size_bytes,
        kv_request_bytes=kv_request_bytes,
    )


def _cache_identity(checkpoint: Checkpoint, config: Config, spec: DecoderSpec) -> bytes:
    """Everything about the model that its KV depends on."""
    model = config.model
    return model_identity(
        weights=checkpoint.fingerprint,
        kv_dtype=f"{model.dtype} by {model.backend}",
        rope=f"{spec.ropes!r} for {model.max_model_len} tokens",
    )


def _eos_token_ids(checkpoint: Checkpoint, known: Vocabulary, vocab_size: int) -> tuple[int, ...]:
    """Every id that ends an answer, whoever says so: generation_config.json, config.json or the tokenizer."""
    ids: dict[int, None] = {}
    for source in (checkpoint.generation_config, checkpoint.config):
        given = source.get("eos_token_id")
        for token_id in given if isinstance(given, list) else [given]:
            if token_id is None:
                continue
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise UnsupportedModel(f"eos_token_id is {token_id!r}; token ids are 0 to {vocab_size - 1}.")
            ids[token_id] = None
    ids.update(dict.fromkeys(known.eos_token_ids))
    return tuple(ids)


def _default_sampling(checkpoint: Checkpoint, config: Config) -> dict[str, float | int]:
    if config.model.generation_config == "vllm":
        return {}
    given = checkpoint.generation_config
    return {name: kind(given[name]) for name, kind in _GENERATION_DEFAULTS.items() if given.get(name) is not None}
