"""Every flag of every command, by name: a new one is a decision, and a renamed one breaks somebody's script."""

from __future__ import annotations

import importlib

import pytest

from octavo.cli.main import COMMANDS, command_parser, module_of
from octavo.config import ENVIRONMENT, all_options

MODEL = """
    --model --served-model-name --revision --tokenizer --chat-template --generation-config --dtype --quantization
    --act-dtype --max-model-len --rope-scaling --backend --isa --threads --enforce-eager --no-enforce-eager --fusion
    --repack-cache --no-repack-cache --repack-cache-bytes --seed
""".split()
CACHE = "--block-size --kv-cache-memory-bytes --enable-prefix-caching --no-enable-prefix-caching".split()
SCHEDULER = """
    --max-num-batched-tokens --max-num-seqs --enable-chunked-prefill --no-enable-chunked-prefill
    --long-prefill-token-threshold --scheduling-policy --batching --async-scheduling --no-async-scheduling
""".split()
SERVER = """
    --host --port --api-key --ssl-keyfile --ssl-certfile --ssl-ca-certs --allowed-origins --max-queued-requests
    --max-body-bytes --max-header-bytes --max-prompts --max-n --max-logprobs --logprobs-mode
    --strict-api --no-strict-api --enable-prompt-tokens-details --no-enable-prompt-tokens-details
    --sse-keep-alive-s --body-timeout-s --drain-timeout-s --engine-start-timeout-s --served-requests-kept
    --startup-report --no-startup-report
""".split()
ENGINE = [*MODEL, *CACHE, *SCHEDULER]
HELP = "-h --help".split()

# `octavo bench`.
TARGET = """
    --base-url --host --port --endpoint --backend --model --served-model-name --tokenizer --max-model-len --api-key
    --header --logprobs --extra-body --connections --ready-check-timeout-sec --request-timeout-sec --server-pid
""".split()
DATASET = """
    --dataset-name --dataset-path --num-prompts --input-len --output-len --disable-shuffle --no-disable-shuffle
    --random-input-len --random-output-len --random-range-ratio --random-prefix-len
    --prefix-repetition-prefix-len --prefix-repetition-suffix-len --prefix-repetition-num-prefixes
    --prefix-repetition-output-len --sharegpt-output-len --custom-output-len
    --trace-speedup --trace-block-size --timed-trace-chunk-hash-size
""".split()
LOAD = """
    --request-rate --burstiness --max-concurrency --num-warmups --repeats --seed --disable-tqdm --no-disable-tqdm
""".split()
SAMPLING = """
    --ignore-eos --no-ignore-eos --temperature --top-p --top-k --min-p --frequency-penalty --presence-penalty
    --repetition-penalty
""".split()
RESULT = """
    --percentile-metrics --metric-percentiles --goodput --save-result --no-save-result --save-detailed
    --no-save-detailed --append-result --no-append-result --result-dir --result-filename --label --metadata --html
""".split()
OUTPUT = "--disable-tqdm --no-disable-tqdm --output-json --html".split()

FLAGS = {
    "serve": [*HELP, "--config", *ENGINE, *SERVER],
    "chat": [
        *HELP,
        *"--url --api-key --system --max-tokens --temperature --top-p --lines --stats --config".split(),
        *ENGINE,
    ],
    "run-batch": [
        *HELP,
        *"-i --input-file -o --output-file --config".split(),
        *ENGINE,
        *"--max-body-bytes --max-prompts --max-n --max-logprobs --logprobs-mode --strict-api --no-strict-api".split(),
    ],
    "bench serve": [*HELP, *TARGET, *DATASET, *LOAD, *SAMPLING, *RESULT],
    "bench throughput": [*HELP, *DATASET, *SAMPLING, *"--n --repeats".split(), *OUTPUT, "--config", *ENGINE],
    "bench latency": [
        *HELP,
        *"--input-len --output-len --batch-size --n --num-iters --num-iters-warmup".split(),
        *OUTPUT,
        "--config",
        *ENGINE,
    ],
    "bench startup": [
        *HELP,
        *"--num-iters --num-iters-warmup --start-timeout-sec".split(),
        *OUTPUT,
        "--config",
        *ENGINE,
        *(flag for flag in SERVER if flag not in ("--host", "--port") and not flag.startswith("--ssl-")),
    ],
    "pull": [*HELP, "--revision", "--quiet"],
    "info": [
        *HELP,
        *"--json --plan --config --model --revision --dtype --quantization --act-dtype --max-model-len".split(),
        *"--rope-scaling --isa --threads --fusion --repack-cache --no-repack-cache --repack-cache-bytes".split(),
        "--kv-cache-memory-bytes",
    ],
}


def test_the_commands_are_these() -> None:
    assert list(COMMANDS) == list(FLAGS)


@pytest.mark.parametrize("command", FLAGS)
def test_the_flags_are_these(command: str) -> None:
    parser = command_parser(command)
    importlib.import_module(module_of(command)).add_flags(parser)
    assert list(parser.flags) == FLAGS[command]


def test_the_environment_variables_are_these() -> None:
    assert list(ENVIRONMENT) == ["OCTAVO_API_KEY", "OCTAVO_ISA", "OCTAVO_CACHE"]


# Flags that vLLM has too, with the same meaning and the same kind of value.
SAME_AS_VLLM = """
    model served_model_name revision tokenizer chat_template generation_config dtype max_model_len seed
    block_size kv_cache_memory_bytes enable_prefix_caching
    max_num_batched_tokens max_num_seqs enable_chunked_prefill long_prefill_token_threshold scheduling_policy
    async_scheduling
    host port api_key ssl_keyfile ssl_certfile ssl_ca_certs max_logprobs
    enable_prompt_tokens_details
""".split()

# Flags of `vllm bench serve` that mean the same here.
SAME_AS_VLLM_BENCH = """
    --base-url --host --port --endpoint --backend --model --served-model-name --tokenizer --header --logprobs
    --extra-body --ready-check-timeout-sec --dataset-name --dataset-path --num-prompts --input-len --output-len
    --disable-shuffle --random-input-len --random-output-len --random-range-ratio --random-prefix-len
    --prefix-repetition-prefix-len --prefix-repetition-suffix-len --prefix-repetition-num-prefixes
    --prefix-repetition-output-len --sharegpt-output-len --custom-output-len --timed-trace-chunk-hash-size
    --request-rate --burstiness --max-concurrency --num-warmups --seed --disable-tqdm --ignore-eos --temperature
    --top-p --top-k --min-p --frequency-penalty --presence-penalty --repetition-penalty --percentile-metrics
    --metric-percentiles --goodput --save-result --save-detailed --append-result --result-dir --result-filename
    --label --metadata
""".split()


def test_flags_shared_with_vllms_benchmark_stay() -> None:
    assert set(SAME_AS_VLLM_BENCH) <= set(FLAGS["bench serve"])


def test_names_shared_with_vllm_stay() -> None:
    assert set(SAME_AS_VLLM) <= set(all_options())
