"""Models written by llama.cpp's conventions come back as the Hugging Face model they were."""

import gguf
import numpy as np
import pytest
import torch
import transformers

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.loader.checkpoint import Ledger
from octavo.loader.gguf_model import open_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FACTORS = {"short_factor": [1.0, 1.25, 1.5, 1.75], "long_factor": [2.0, 3.5, 5.0, 6.5]}

VARIANTS = {
    "llama, 8 heads on 2": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "llama, 4 heads on 1": ("llama", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "llama, untied, biases": ("llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, heads wider than the model": ("llama", {"head_dim": 32}),
    "llama, linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama, llama3 by 8": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"factor": 8.0}}),
    "llama, llama3 by 32": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3 | {"factor": 32.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2, yarn": (
        "qwen2",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 32}),
    "gemma2": ("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 3}),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "rope_theta": 1000000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": ("phi3", {"sliding_window": 8, "original_max_position_embeddings": 512}),
    "phi3, longrope on half the head": (
        "phi3",
        {
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 16,
            "rope_scaling": {"rope_type": "longrope", **FACTORS},
        },
    ),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
            "tie_word_embeddings": True,
        },
    ),
}


def rebuilt(checkpoint):
    """A transformers model made of nothing but the checkpoint."""
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    state = {name: torch.from_numpy(np.array(checkpoint.tensor(name).numpy())) for name in checkpoint.names()}
    if checkpoint.config["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    return model


# LOD-04, ATT-01, ATT-07
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_converted_model_is_the_original_bit_for_bit(variant, make_model, to_gguf):
    model_type, changes = VARIANTS[variant]
    model = make_model(model_type, **changes)
    checkpoint = open_gguf(to_gguf(model))

    expected = {name: value.numpy() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(checkpoint.names()) == set(expected)
    for name, values in expected.items():
        tensor = checkpoint.tensor(name)
        assert tensor.shape == values.shape
        assert np.array_equal(tensor.numpy(), values), name

    token_ids = torch.randint(0, 96, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        original, copy = model(token_ids).logits, rebuilt(checkpoint)(token_ids).logits
    assert torch.allclose(original, copy, rtol=1e-5, atol=1e-5)
    assert original.std() > 0.01


# LOD-04: the permutation moves whole rows of blocks
@pytest.mark.parametrize("heads", [(8, 2), (4, 1)])
def test_permuted_rows_of_quantized_blocks_come_back_in_order(heads, make_model, to_gguf):
    model = make_model("llama", num_attention_heads=heads[0], num_key_value_heads=heads[1])
    checkpoint = open_gguf(to_gguf(model, quant="Q8_0"))
    assert checkpoint.has_block_types
    assert checkpoint.dtype_name == "Q8_0"
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for part in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.1.self_attn.{part}.weight"
        blocks = gguf.quants.quantize(model.state_dict()[name].numpy(), q8_0)
        tensor = checkpoint.tensor(name)
        assert tensor.type_name == "Q8_0"
        assert np.array_equal(tensor.raw, blocks)
        assert np.array_equal(tensor.numpy(), gguf.quants.dequantize(blocks, q8_0))


@pytest.mark.parametrize("quant", ["F16", "BF16"])
def test_half_precision_types_come_back_as_stored(quant, make_model, to_gguf):
    model = make_model("qwen2")
    checkpoint = open_gguf(to_gguf(model, quant=quant))
    dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[quant]
    name = "model.layers.0.mlp.up_proj.weight"
    values = checkpoint.tensor(name).numpy()
    assert values.dtype.name == {"F16": "float16", "BF16": "bfloat16"}[quant]
    assert np.array_equal(values.astype(np.float32), model.state_dict()[name].to(dtype).float().numpy())
    assert checkpoint.config["torch_dtype"] == values.dtype.name
    assert not checkpoint.has_block_types
    assert checkpoint.dtype_name == quant


def test_gemma_norms_multiply_by_exactly_what_the_file_holds(make_model, to_gguf):
    model = make_model("gemma")
    weight = model.model.norm.weight.requires_grad_(False)
    with torch.no_grad():
        weight.copy_(torch.linspace(-0.5, 3, len(weight)))  # not bfloat16: 1 + w rounds
    norm = open_gguf(to_gguf(model)).tensor("model.norm.weight").numpy()
    assert norm.dtype == np.float32
    assert np.array_equal(np.float32(1) + norm, weight.numpy() + np.float32(1))


# LOD-10: no output.weight means tied
def test_a_file_without_output_weight_is_tied_and_one_with_it_is_not(make_model, to_gguf):
    for tied in (True, False):
        model = make_model("llama", tie_word_embeddings=tied)
        checkpoint = open_gguf(to_gguf(model))
        assert checkpoint.config["tie_word_embeddings"] is tied
        ledger = Ledger(checkpoint)
        embedding = ledger.take("model.embed_tokens.weight", (96, 64))
        head = ledger.take_head((96, 64), tied=checkpoint.config["tie_word_embeddings"], embedding=embedding)
        assert (head is None) is tied


def test_a_tensor_that_the_architecture_does_not_have_is_refused_by_name(make_model, to_gguf):
    path = to_gguf(make_model("qwen2"), extra=lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)))
    with pytest.raises(UnsupportedModel, match=r"blk\.0\.attn_sinks\.weight \[4\] is not part of the qwen2"):
        open_gguf(path)


def test_derived_rope_buffers_have_no_use_and_are_left_out(make_model, to_gguf):
    path = to_gguf(
        make_model("qwen2"), extra=lambda w: w.add_tensor("blk.0.attn_rot_embd.weight", np.ones(8, np.float32))
    )
    assert not [name for name in open_gguf(path).names() if "rot" in name]


def test_heads_that_do_not_divide_the_rows_are_refused(make_model, to_gguf):
    model = make_model("llama", num_attention_heads=4, num_key_value_heads=4, head_dim=16)

    def other_heads(writer):
        writer.kv_data[0]["llama.attention.head_count"].value = 24

    with pytest.raises(CheckpointError, match=r"attn_q\.weight \[64, 64\].*24 heads"):
        open_gguf(to_gguf(model, extra=other_heads))


def test_a_missing_layer_is_an_error_that_counts_the_layers(make_model, to_gguf):
    def more_layers(writer):
        writer.kv_data[0]["qwen2.block_count"].value = 5

    with pytest.raises(CheckpointError, match="the metadata counts 5 layers; the tensors make 2"):
        open_gguf(to_gguf(make_model("qwen2"), extra=more_layers))
