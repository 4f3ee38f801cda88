"""What the metadata of a GGUF file becomes in config.json and generation_config.json."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octavo.errors import CheckpointError, UnsupportedModel
from octavo.loader.gguf import GgufFile
from octavo.loader.gguf_config import config_of, generation_config_of
from octavo.loader.gguf_names import ARCHITECTURES, architecture_of

BASE = {"context_length": 4096, "embedding_length": 64, "feed_forward_length": 96, "block_count": 2}
TYPES = gguf.GGUFValueType


@pytest.fixture
def read(tmp_path: Path):
    """Writes metadata and a few tensors, and reads config and generation config back."""

    def write_and_read(arch: str = "llama", extra: dict | None = None, *, tensors: dict | None = None, layers: int = 2):
        path = tmp_path / "model.gguf"
        writer = gguf.GGUFWriter(path, arch)
        values = {f"{arch}.{name}": value for name, value in (BASE | {"block_count": layers}).items()}
        values |= {f"{arch}.attention.head_count": 4, f"{arch}.attention.head_count_kv": 2}
        for name, value in (values | (extra or {})).items():
            if value is None:
                continue
            kind = {int: TYPES.INT64, bool: TYPES.BOOL, float: TYPES.FLOAT32, str: TYPES.STRING}.get(type(value))
            if kind is None:
                writer.add_array(name, value)
            else:
                writer.add_key_value(name, value, kind)
        writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
        for layer in range(layers):
            writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(64, np.float32))
        for name, tensor in (tensors or {}).items():
            writer.add_tensor(name, np.asarray(tensor, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        file = GgufFile.open(path)
        config = config_of(file, architecture_of(file))
        return config, generation_config_of(file, config)

    return write_and_read


def rope_of(config: dict) -> tuple[torch.Tensor, float]:
    parsed = transformers.AutoConfig.for_model(**config)
    return ROPE_INIT_FUNCTIONS[parsed.rope_parameters["rope_type"]](parsed, device="cpu")


def llama3_divisors(**parameters) -> np.ndarray:
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, rope_theta=500000.0, rope_scaling={"rope_type": "llama3", **parameters}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    return (1.0 / 500000.0 ** (torch.arange(0, 16, 2).float() / 16) / scaled).numpy()


def test_floats_come_back_as_they_were_written(read):
    config, _ = read(extra={"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 123456.7})
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 123456.7


# ATT-01
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_factors_are_those_of_the_file(read, factor):
    parameters = {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config, _ = read(
        extra={"llama.rope.freq_base": 500000.0, "llama.context_length": 131072},
        tensors={"rope_freqs.weight": llama3_divisors(**parameters)},
    )
    assert config["rope_scaling"] == {"rope_type": "llama3", **parameters}


# ATT-01
def test_divisors_of_no_known_release_are_applied_as_they_are(read):
    parameters = {
        "factor": 4.0,
        "low_freq_factor": 2.0,
        "high_freq_factor": 6.0,
        "original_max_position_embeddings": 1024,
    }
    divisors = llama3_divisors(**parameters)
    config, _ = read(extra={"llama.rope.freq_base": 500000.0}, tensors={"rope_freqs.weight": divisors})
    frequencies, attention_factor = rope_of(config)
    expected = 1.0 / 500000.0 ** (np.arange(0, 16, 2) / 16) / divisors
    assert np.allclose(frequencies.numpy(), expected, rtol=1e-6)
    assert attention_factor == 1.0


def test_divisors_of_one_are_no_scaling(read):
    assert read(tensors={"rope_freqs.weight": np.ones(8)})[0]["rope_scaling"] is None


# ATT-03
def test_yarn_does_not_multiply_the_context_again(read):
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32768, "yarn_beta_fast": 16.0}
    extra = {f"qwen2.rope.scaling.{name}": value for name, value in scaling.items()}
    config, _ = read("qwen2", extra | {"qwen2.context_length": 131072})
    assert config["max_position_embeddings"] == 131072
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 16.0,
    }


@pytest.mark.parametrize("extra", [{"llama.rope.scale_linear": 4.0}, {"llama.rope.scaling.factor": 4.0}])
def test_a_factor_without_a_type_is_linear(read, extra):
    assert read(extra=extra)[0]["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}


def test_longrope_keeps_its_lists_and_an_unusual_attention_factor(read):
    factors = {"rope_factors_short.weight": [1.0] * 8, "rope_factors_long.weight": [1.1, 2, 3, 4, 5, 6, 7, 8]}
    usual = float(np.sqrt(1 + np.log(4096 / 512) / np.log(512)))
    for stored, expected in ((usual, None), (1.5, 1.5), (None, None)):
        extra = {"phi3.rope.scaling.original_context_length": 512, "phi3.rope.scaling.attn_factor": stored}
        config, _ = read("phi3", extra, tensors=factors)
        assert config["rope_scaling"]["long_factor"] == [1.1, 2, 3, 4, 5, 6, 7, 8]
        assert config["rope_scaling"].get("attention_factor") == expected
        assert config["original_max_position_embeddings"] == 512


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"rope_freqs.weight": np.ones(7)}, r"shape \[7\]; RoPE turns 8 pairs"),
        ({"rope_freqs.weight": np.zeros(8)}, "not positive numbers"),
        ({"rope_freqs.weight": np.full(8, np.nan)}, "not positive numbers"),
        ({"rope_factors_long.weight": np.ones(8)}, "both belong together"),
    ],
)
def test_unusable_rope_factors_are_refused(read, tensors, problem):
    with pytest.raises(CheckpointError, match=problem):
        read(tensors=tensors)


# ATT-08
def test_no_window_means_full_attention(read):
    assert read("phi3", {"phi3.attention.sliding_window": 0})[0]["sliding_window"] is None
    assert read("phi3", {"phi3.attention.sliding_window": 2047})[0]["sliding_window"] == 2047
    qwen2, _ = read("qwen2")
    assert (qwen2["use_sliding_window"], qwen2["sliding_window"]) == (False, None)
    gemma3, _ = read("gemma3", layers=7)
    assert gemma3["sliding_window"] is None
    assert set(gemma3["layer_types"]) == {"full_attention"}
    llama, _ = read(extra={"llama.attention.sliding_window": 64})
    assert (llama["model_type"], llama["sliding_window"]) == ("mistral", 64)


# ATT-07
def test_layer_patterns_follow_the_family_or_the_file(read):
    window = {"gemma3.attention.sliding_window": 512}
    slides, full = "sliding_attention", "full_attention"
    assert read("gemma3", window, layers=7)[0]["layer_types"] == [slides] * 5 + [full, slides]
    period = {"gemma3.attention.sliding_window_pattern": 3}
    assert read("gemma3", window | period, layers=4)[0]["layer_types"] == [slides, slides, full, slides]
    pattern = {"gemma3.attention.sliding_window_pattern": [True, False, False]}
    assert read("gemma3", window | pattern, layers=3)[0]["layer_types"] == [slides, full, full]
    with pytest.raises(CheckpointError, match="has 3 entries for 4 layers"):
        read("gemma3", window | pattern, layers=4)
    gemma2, _ = read("gemma2", layers=3)
    assert (gemma2["sliding_window"], gemma2["layer_types"]) == (4096, [slides, full, slides])


def test_gemma3_has_two_rope_bases(read):
    config, _ = read("gemma3", {"gemma3.rope.freq_base": 1000000.0, "gemma3.rope.freq_base_swa": 20000.0})
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1000000.0, 20000.0)
    assert read("gemma3", {"gemma3.rope.freq_base": 1000000.0})[0]["rope_local_base_freq"] == 10000.0


@pytest.mark.parametrize(
    ("arch", "layers", "scalar"), [("gemma2", 46, 16), ("gemma2", 26, 32), ("gemma3", 62, 16), ("gemma3", 34, 32)]
)
def test_only_the_largest_gemmas_scale_scores_by_width_per_head(read, arch, layers, scalar):
    keys = {f"{arch}.attention.key_length": 32, f"{arch}.attention.value_length": 32}
    assert read(arch, keys, layers=layers)[0]["query_pre_attn_scalar"] == scalar


def test_granite_multipliers_default_to_neutral(read):
    config, _ = read("granite", {"granite.logit_scale": 8.0})
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")
    assert [config[name] for name in names] == [0.25, 1.0, 1.0, 8.0]
    with pytest.raises(UnsupportedModel, match="without RoPE"):
        read("granite", {"granite.rope.scaling.finetuned": False})


def test_unknown_architectures_are_refused_by_name(tmp_path, read):
    with pytest.raises(UnsupportedModel, match=r"architecture 'mamba'.*llama, qwen2, qwen3, gemma"):
        read("mamba")
    assert list(ARCHITECTURES) == ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "granite"]


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"llama.expert_count": 8}, "llama.expert_count is 8"),
        ({"llama.attention.causal": False}, "llama.attention.causal is False"),
        ({"llama.pooling_type": 3}, "llama.pooling_type is 3"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale is 2.0"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv differs between layers"),
        ({"llama.rope.dimension_count": 8}, "RoPE over 8 of 16 dimensions"),
        ({"llama.attention.key_length": 32, "llama.attention.value_length": 16}, "different sizes"),
        ({"llama.rope.scaling.type": "dynamic", "llama.rope.scaling.factor": 2.0}, "scaling of type 'dynamic'"),
        ({"llama.rope.scaling.type": "longrope"}, "type 'longrope' is not implemented without its factors"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(read, extra, named):
    with pytest.raises(UnsupportedModel, match=named):
        read(extra=extra)


def test_keys_that_change_nothing_are_accepted(read):
    neutral = {"llama.expert_count": 0, "llama.expert_used_count": 0, "llama.attention.causal": True}
    neutral |= {"llama.tensor_data_layout": "Meta AI original pth", "llama.attention.head_count_kv": [2, 2]}
    assert read(extra=neutral)[0]["num_key_value_heads"] == 2


# LOD-01: numbers of the metadata size loops and arrays later
@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"llama.block_count": 2**31}, "block_count is 2147483648"),
        ({"llama.block_count": 2**31 - 1}, "counts 2147483647 layers; the tensors make 2"),
        ({"llama.attention.head_count": 0}, "head_count is 0"),
        ({"llama.attention.head_count": "4"}, "head_count is '4'"),
        ({"llama.attention.head_count": True}, "head_count is True"),
        ({"llama.embedding_length": -64}, "embedding_length is -64"),
        ({"llama.context_length": 1.5}, "context_length is 1.5"),
        ({"llama.context_length": None}, "context_length is missing"),
        ({"llama.rope.freq_base": float("nan")}, "freq_base is nan"),
        ({"llama.rope.freq_base": "big"}, "freq_base is 'big'"),
    ],
)
def test_numbers_out_of_their_domain_are_refused(read, extra, problem):
    with pytest.raises(CheckpointError, match=problem):
        read(extra=extra)


def tokenizer(tokens: list[str], **ids: int) -> dict:
    types = [3 if token.startswith("<") else 1 for token in tokens]
    keys = {f"tokenizer.ggml.{name}_token_id": value for name, value in ids.items()}
    return {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, **keys}


# LOD-11
def test_every_token_that_ends_a_turn_is_in_the_generation_config(read):
    tokens = ["a", "<eos>", "<eot>", "<eom>", "<end_of_turn>", "<|im_start|>"]
    config, generation = read(extra=tokenizer(tokens, bos=0, eos=1, eot=2, eom=3, padding=5))
    assert generation == {"bos_token_id": 0, "eos_token_id": [1, 2, 3, 4], "pad_token_id": 5}
    assert config["eos_token_id"] == [1, 2, 3, 4]
    _, single = read(extra=tokenizer(["a", "b", "<|im_end|>"], eos=2, eot=2))
    assert single["eos_token_id"] == 2
    _, plain_text = read(extra=tokenizer(["a", "b", "c"], eos=2) | {"tokenizer.ggml.tokens": ["a", "<|im_end|>", "c"]})
    assert plain_text["eos_token_id"] == 2


# LOD-03
@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ({"eos": 32}, "eos_token_id is 32; the vocabulary has 32"),
        ({"eot": -2}, "eot_token_id is -2"),
        ({"bos": 2**40}, "bos_token_id"),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused(read, ids, problem):
    with pytest.raises(CheckpointError, match=problem):
        read(extra=tokenizer(["a"], **ids))


# LOD-03
def test_a_tokenizer_larger_than_the_embedding_is_refused(read):
    with pytest.raises(CheckpointError, match="has 33 tokens; the embedding has 32 rows"):
        read(extra=tokenizer(["t"] * 33))


def test_absent_token_ids_are_none_and_a_file_without_a_tokenizer_loads(read):
    config, generation = read(extra=tokenizer(["a"], bos=2**32 - 1))
    assert config["bos_token_id"] is None
    assert generation == {}
    assert read()[0]["eos_token_id"] is None


def test_recommended_sampling_is_in_the_generation_config(read):
    keys = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.top_p": 0.95}
    _, generation = read(extra=keys)
    assert generation == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True}
