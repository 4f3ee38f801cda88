"""The catalogue's models against `transformers` on the same dequantized weights, and what they are known to say."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tests.golden.paged_runner import PagedRunner
from transformers.initialization import no_init_weights

from octavo.backends.registry import create_ops
from octavo.loader.checkpoint import Checkpoint
from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_tokenizer import build_tokenizer
from octavo.loader.source import open_checkpoint, resolve_source

TEXT = (
    "The octavo is a book format: a sheet is folded three times, so that it gives eight leaves. In the sixteenth "
    "century, printers in Venice made such books small enough for a pocket, and readers carried them everywhere. "
)
# Greedy continuations of the first 50 characters; `transformers` with its own reader of GGUF gives the same.
KNOWN = {
    "smollm2": 'ice to create an octavo.\n\nThe term "octavo" is a literary term that refers to',
    "gemma3": "\n\nThe octavo is a book format: a sheet is folded thr\n\nThe octavo is a book format:",
}


def oracle_of(checkpoint: Checkpoint) -> transformers.PreTrainedModel:
    config = transformers.CONFIG_MAPPING[checkpoint.config["model_type"]](**checkpoint.config)
    with warnings.catch_warnings(), no_init_weights():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    tensors = {name: torch.from_numpy(tensor.numpy().copy()) for name, tensor in checkpoint.tensors.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    model.tie_weights()
    return model


@pytest.mark.model
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", KNOWN)
def test_logits_and_greedy_tokens_equal_those_of_transformers(request: pytest.FixtureRequest, name: str):
    path: Path = request.getfixturevalue(f"{name}_path")
    tokenizer = build_tokenizer(GgufFile.open(path).metadata).tokenizer
    # The second prompt is longer than Gemma 3's window of 512 tokens.
    prompts = [tokenizer.encode(text).ids for text in (TEXT[:50], TEXT * 12)]
    assert len(prompts[1]) > 512
    ops = create_ops("reference", dtype="float32", num_threads=1)
    runner = PagedRunner(path, ops, max_model_len=1024, block_size=16)
    rng = np.random.default_rng(0)
    sequences = runner.generate(prompts, 24, lambda left: min(left, int(rng.integers(100, 200))))
    assert tokenizer.decode(sequences[0].generated) == KNOWN[name]

    oracle = oracle_of(open_checkpoint(resolve_source(str(path), cache=path.parent)))
    for prompt, sequence in zip(prompts, sequences, strict=True):
        with torch.no_grad():
            output = oracle(torch.tensor([sequence.token_ids]), logits_to_keep=25)
        expected = output.logits[0, :-1].numpy()
        assert sequence.token_ids[: len(prompt)] == prompt
        assert expected.argmax(-1).tolist() == sequence.generated
        np.testing.assert_allclose(np.stack(sequence.logits), expected, rtol=0, atol=2e-3)
