"""The catalogue's models through the whole engine: 20 prompts of 64 greedy tokens, against `transformers`.

The oracle gets its configuration and dequantized weights from our loader, whose values tests/loader holds to the
`gguf` package bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from octavo.engine.llm import LLM
from octavo.loader.gguf_model import open_gguf
from octavo.request import SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PROMPTS = [
    "The capital of Norway is",
    "1, 2, 3, 4, 5,",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "Die Hauptstadt von Frankreich ist",
    "El perro",
    "Q: What is the largest planet?\nA:",
    "My favourite season is autumn because",
    "SELECT name FROM users WHERE",
    "The three laws of motion are",
    "<h1>Welcome</h1>\n<p>",
    "日本の首都は",
    "🦚",
    "To make bread, you need flour, water,",
    "In 1969, the first",
    "Dear Sir or Madam,\n\n",
    "x",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "import numpy as np\n\n",
]


def oracle_of(path: Path) -> transformers.PreTrainedModel:
    checkpoint = open_gguf(path)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    weights = {name: torch.from_numpy(checkpoint.tensor(name).numpy().copy()) for name in checkpoint.names()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model.eval()


@pytest.fixture(params=["smollm2", "gemma3"])
def path(request: pytest.FixtureRequest) -> Iterator[Path]:
    yield request.getfixturevalue(f"{request.param}_path")


def test_greedy_answers_are_those_of_transformers(path: Path) -> None:
    assert len(PROMPTS) == 20
    # Integer weights as they are, nothing else rounded: the dequantized model that the oracle computes.
    exact = {"dtype": "float32", "act_dtype": "bf16"}
    llm = LLM(str(path), max_model_len=512, kv_cache_memory_bytes="512MiB", max_num_batched_tokens=100, **exact)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    oracle = oracle_of(path)
    for output in outputs:
        tokens = output.outputs[0].token_ids
        assert len(tokens) == 64
        with torch.no_grad():
            logits = oracle(torch.tensor([output.prompt_token_ids + tokens])).logits[0]
        assert logits[len(output.prompt_token_ids) - 1 : -1].argmax(-1).tolist() == tokens, output.prompt
