"""Every architecture against `transformers`, along every way to cut the work into steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.golden.architectures import ARCHITECTURES, NUM_GENERATED, GoldenModel, Maker
from tests.golden.paged_runner import PagedRunner, PagedSequence

from octavo.backends.registry import BACKENDS, create_ops

REFERENCE_BITS_ARE_KNOWN = torch.backends.cpu.get_cpu_capability() == "AVX2" and torch.backends.mkl.is_available()


def runner(model: GoldenModel, backend: str, block_size: int, seed: int = 0) -> PagedRunner:
    ops = create_ops(backend, dtype="float32", num_threads=1)
    return PagedRunner(model.path, ops, max_model_len=model.max_model_len, block_size=block_size, seed=seed)


def check(model: GoldenModel, prompt: list[int], sequence: PagedSequence) -> None:
    """Logits within 1e-4 of the oracle's, and the same greedy tokens."""
    expected = model.logits(sequence.token_ids)[len(prompt) - 1 : -1]
    assert expected.std() > 0.3, "logits so alike that nothing is tested"
    np.testing.assert_allclose(np.stack(sequence.logits), expected, rtol=0, atol=1e-4)
    assert expected.argmax(-1).tolist() == sequence.generated
    assert len(sequence.generated) == NUM_GENERATED


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_whole_prompt(golden_model: Maker, name: str, backend: str):
    model = golden_model(name)
    for prompt in (model.prompts[0], model.prompts[-1]):
        (sequence,) = runner(model, backend, 16).generate([prompt], NUM_GENERATED)
        check(model, prompt, sequence)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("chunk", "block_size"), [(1, 1), (7, 32)])
def test_prompt_in_chunks(golden_model: Maker, name: str, backend: str, chunk: int, block_size: int):
    model = golden_model(name)
    prompt = model.prompts[-1]
    (sequence,) = runner(model, backend, block_size).generate([prompt], NUM_GENERATED, lambda left: min(left, chunk))
    check(model, prompt, sequence)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("block_size", [1, 16])
def test_ragged_batches(golden_model: Maker, name: str, backend: str, block_size: int):
    model = golden_model(name)
    rng = np.random.default_rng(block_size)
    paged = runner(model, backend, block_size, seed=1)
    sequences = paged.generate(model.prompts, NUM_GENERATED, lambda left: int(rng.integers(0, min(left, 15) + 1)))
    for prompt, sequence in zip(model.prompts, sequences, strict=True):
        check(model, prompt, sequence)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["llama-mha-biases-tied", "gemma2", "gemma3-scaled", "phi3-longrope", "starcoder2"])
def test_every_path_gives_the_same_bits(golden_model: Maker, name: str, backend: str):
    if backend == "reference" and not REFERENCE_BITS_ARE_KNOWN:
        pytest.skip("bits of the reference's products are known for AVX2 with MKL")
    model = golden_model(name)
    rng = np.random.default_rng(0)
    whole = [runner(model, backend, 16).generate([prompt], NUM_GENERATED)[0] for prompt in model.prompts]
    by_token = runner(model, backend, 1).generate(model.prompts, NUM_GENERATED, lambda left: 1)
    ragged = runner(model, backend, 32).generate(
        model.prompts, NUM_GENERATED, lambda left: int(rng.integers(0, left + 1))
    )
    for sequences in zip(whole, by_token, ragged, strict=True):
        logits = [np.stack(sequence.logits) for sequence in sequences]
        assert (logits[0] == logits[1]).all() and (logits[0] == logits[2]).all()
