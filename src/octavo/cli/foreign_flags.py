"""Flags of other engines that have no twin of the same meaning here, and what to use instead."""

from __future__ import annotations

_KV_MEMORY = "use --kv-cache-memory-bytes BYTES"
_MODEL = "give the model without a flag: octavo serve MODEL"
_CONTEXT = "use --max-model-len N"
_THREADS = "use --threads N"
_PREFIX = "prefix caching is on by default; --no-enable-prefix-caching turns it off"
_PARALLEL = "one engine on one machine is what there is so far"
_BATCH = "use --max-num-batched-tokens N"
_LORA = "adapters are not served yet"
_SPECULATION = "speculative decoding is not there yet"
_TOOLS = "tool calls are not parsed yet"
_GRAMMAR = "structured output is not there yet"
_LOG = "one line a request is logged, never its text"
_GPU = "the model runs on the CPU"

FOREIGN_FLAGS = {
    # vLLM
    "--gpu-memory-utilization": _KV_MEMORY,
    "--swap-space": "a preempted request is computed again; nothing is swapped",
    "--cpu-offload-gb": _GPU,
    "--tensor-parallel-size": _PARALLEL,
    "-tp": _PARALLEL,
    "--pipeline-parallel-size": _PARALLEL,
    "-pp": _PARALLEL,
    "--data-parallel-size": _PARALLEL,
    "-dp": _PARALLEL,
    "--device": "use --backend",
    "--disable-log-requests": _LOG,
    "--enable-log-requests": _LOG,
    "--hf-overrides": "use --rope-scaling JSON for RoPE; other fields of config.json cannot be overridden",
    "--load-format": "the format is found out from the model's files",
    "--override-generation-config": "use --generation-config vllm and set the values in the request",
    "--trust-remote-code": "no code of a model repository is ever run",
    "--uds": "use --host and --port",
    "--enable-lora": _LORA,
    "--lora-modules": _LORA,
    "--speculative-config": _SPECULATION,
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-call-parser": _TOOLS,
    "--reasoning-parser": "reasoning is not split off yet",
    "--guided-decoding-backend": _GRAMMAR,
    "--structured-outputs-config": _GRAMMAR,
    # SGLang
    "--model-path": _MODEL,
    "--tokenizer-path": "use --tokenizer",
    "--context-length": _CONTEXT,
    "--mem-fraction-static": _KV_MEMORY,
    "--max-running-requests": "use --max-num-seqs N",
    "--chunked-prefill-size": _BATCH,
    "--schedule-policy": "use --scheduling-policy",
    "--disable-radix-cache": _PREFIX,
    "--page-size": "use --block-size N",
    "--tp-size": _PARALLEL,
    "--random-seed": "use --seed N",
    # llama.cpp
    "-m": _MODEL,
    "-hf": _MODEL,
    "--hf-repo": _MODEL,
    "-a": "use --served-model-name NAME",
    "--alias": "use --served-model-name NAME",
    "-c": _CONTEXT,
    "--ctx-size": _CONTEXT,
    "-t": _THREADS,
    "-tb": _THREADS,
    "--threads-batch": _THREADS,
    "-np": "use --max-num-seqs N",
    "--parallel": "use --max-num-seqs N",
    "-b": _BATCH,
    "--batch-size": _BATCH,
    "-ub": _BATCH,
    "--ubatch-size": _BATCH,
    "-ngl": _GPU,
    "--gpu-layers": _GPU,
    "--n-gpu-layers": _GPU,
    "-cb": "use --batching continuous, the default",
    "--cont-batching": "use --batching continuous, the default",
    "-ctk": "the KV cache is kept in the type of --dtype",
    "-ctv": "the KV cache is kept in the type of --dtype",
    "--cache-type-k": "the KV cache is kept in the type of --dtype",
    "--cache-type-v": "the KV cache is kept in the type of --dtype",
    "--kv-cache-dtype": "the KV cache is kept in the type of --dtype",
    "--cache-reuse": _PREFIX,
    "--cache-prompt": _PREFIX,
    "--jinja": "the model's own Jinja chat template is always used; --chat-template FILE replaces it",
    "--chat-template-file": "use --chat-template FILE",
    "--api-key-file": "use --api-key KEY, or OCTAVO_API_KEY",
    "--ssl-key-file": "use --ssl-keyfile FILE",
    "--ssl-cert-file": "use --ssl-certfile FILE",
    "--lora": _LORA,
    "-md": _SPECULATION,
    "--model-draft": _SPECULATION,
    "--grammar": _GRAMMAR,
}

# Of vLLM's benchmarks, for `octavo bench`.
FOREIGN_BENCH_FLAGS = {
    "--endpoint-type": "use --backend",
    "--self-timed": "a trace is sent at its own times unless --request-rate is given",
    "--timed-trace-sec-multiplier": "the unit of a trace's times is known; --trace-speedup X makes it faster",
    "--no-oversample": "no prompt is sent twice: a short file makes a short benchmark",
    "--skip-chat-template": "prompts are sent as they are; --backend openai-chat leaves the template to the server",
    "--ramp-up-strategy": "the rate of requests is constant: --request-rate X",
    "--num-iters-cold": "use --num-iters N",
    "--num-iters-warm": "use --num-iters N",
}
