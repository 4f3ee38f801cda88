"""The catalogue's models, as `octavo pull` leaves them."""

import gguf
import numpy as np
import pytest

from octavo.config import cache_dir
from octavo.loader.catalogue import CATALOGUE, model_path
from octavo.loader.checkpoint import Checkpoint, Ledger
from octavo.loader.gguf import GgufFile
from octavo.loader.source import open_checkpoint, resolve_source
from octavo.quantization.gguf_blocks import dequantize

pytestmark = pytest.mark.model

SMOLLM2, GEMMA3 = "smollm2-135m-instruct", "gemma3-270m"
ROWS = 200  # of a tensor that are compared


def pulled(name: str) -> Checkpoint:
    if not model_path(CATALOGUE[name], cache_dir()).is_file():
        pytest.skip(f"{name} is not in {cache_dir()}: octavo pull {name}")
    return open_checkpoint(resolve_source(name, cache=cache_dir()))


@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
def test_every_tensor_dequantizes_as_in_the_gguf_package(name):
    checkpoint = pulled(name)
    seen = set()
    for tensor in GgufFile.open(checkpoint.files[0]).tensors.values():
        seen.add(tensor.type_name)
        if tensor.type.is_block:
            rows = tensor.blocks[np.linspace(0, len(tensor.blocks) - 1, ROWS).astype(int)]
            expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.type_name])
            assert np.array_equal(dequantize(tensor.type_name, rows), expected), tensor.name
    assert seen == ({"F32", "Q4_1", "Q8_0"} if name == SMOLLM2 else {"F32", "Q5_0", "Q4_K", "Q8_0", "Q6_K"})


def test_smollm2_has_the_configuration_of_its_release():
    checkpoint = pulled(SMOLLM2)
    expected = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.dtype_name == "Q4_1"


def test_gemma3_has_the_configuration_of_its_release():
    checkpoint = pulled(GEMMA3)
    expected = {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "head_dim": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rms_norm_eps": 1e-06,
        "final_logit_softcapping": None,
        "tie_word_embeddings": True,
        "eos_token_id": [1, 106],
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    full = [layer for layer, kind in enumerate(checkpoint.config["layer_types"]) if kind == "full_attention"]
    assert full == [5, 11, 17]


def test_every_parameter_of_smollm2_is_in_the_file_once():
    checkpoint = pulled(SMOLLM2)
    config, ledger = checkpoint.config, Ledger(checkpoint)
    hidden, wide, kv = config["hidden_size"], config["intermediate_size"], 3 * 64
    embedding = ledger.take("model.embed_tokens.weight", (49152, hidden))
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden),
        }
        shapes |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden)}
        shapes |= {"mlp.down_proj": (hidden, wide), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
        for part, shape in shapes.items():
            ledger.take(f"model.layers.{layer}.{part}.weight", shape)
    ledger.take("model.norm.weight", (hidden,))
    assert ledger.take_head((49152, hidden), tied=True, embedding=embedding) is None
    ledger.finish()
