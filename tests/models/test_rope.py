"""RoPE frequencies against `transformers`, kind by kind, and what each kind says about the context."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.backends.definitions import Rows, heads, make_batch
from transformers import LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from octavo.backends.registry import create_ops
from octavo.errors import ConfigError, StartError, UnsupportedModel
from octavo.models.config_reader import ConfigReader
from octavo.models.rope import RopeSpec
from octavo.models.rope_config import RopeFamily, read_rope

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SHORT, LONG = [1.0 + i / 20 for i in range(48)], [1.0 + i for i in range(48)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}

# ATT-01: the config is the authority, a factor of 32 included.
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8192},
    "llama3 32": {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "llama3 without native": LLAMA3,
    "yarn": YARN,
    "yarn without native": {"rope_type": "yarn", "factor": 4.0},
    "yarn whose factor is null": {**YARN, "factor": None, "original_max_position_embeddings": 4096},
    "yarn mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.3},
    "yarn mscale alone": {**YARN, "mscale": 0.707},
    "yarn attention factor": {**YARN, "attention_factor": 1.1},
    "yarn betas": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn not truncated": {**YARN, "truncate": False},
    "longrope": {**LONGROPE, "original_max_position_embeddings": 4096},
    "longrope factor": {**LONGROPE, "original_max_position_embeddings": 4096, "factor": 16.0},
    "longrope attention factor": {**LONGROPE, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
}


def read(rope: dict, *, max_position: int = 131072, head_dim: int = 96, override: dict | None = None) -> RopeSpec:
    config = {"max_position_embeddings": max_position, "rope_parameters": rope}
    return read_rope(ConfigReader(config), RopeFamily(max_position=max_position, head_dim=head_dim), override=override)


def transformers_config(rope: dict, max_position: int = 131072, head_dim: int = 96) -> LlamaConfig:
    return LlamaConfig(
        rope_parameters=dict(rope), max_position_embeddings=max_position, head_dim=head_dim, hidden_size=head_dim * 4,
        num_attention_heads=4,
    )  # fmt: skip


def assert_same(got: tuple[np.ndarray, float], expected: tuple[torch.Tensor, float]) -> None:
    assert got[0].dtype == np.float32
    np.testing.assert_allclose(got[0], expected[0].numpy(), rtol=1e-6)
    assert got[1] == pytest.approx(expected[1], rel=1e-6)


@pytest.mark.parametrize("rope", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_frequencies_equal_those_of_transformers(rope, theta):
    rope = {"rope_theta": theta, **rope}
    config = transformers_config(rope)
    function = ROPE_INIT_FUNCTIONS.get(rope["rope_type"], LlamaRotaryEmbedding.compute_default_rope_parameters)
    variants = read(rope).variants(131072)
    assert_same(variants[0], function(config))
    if rope["rope_type"] == "longrope":
        assert_same(variants[1], function(config, seq_len=131072))
    else:
        assert len(variants) == 1


@pytest.mark.parametrize("max_model_len", [2048, 2049, 5000, 8192])
def test_dynamic_ntk_scales_for_the_longest_sequence_served(max_model_len):
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = transformers_config(rope, max_position=2048)
    spec = read(rope, max_position=2048)
    assert (spec.native_len, spec.context_len) == (2048, 8192)
    as_trained, scaled = spec.variants(max_model_len)
    function = ROPE_INIT_FUNCTIONS["dynamic"]
    assert_same(as_trained, function(config))
    assert_same(scaled, function(config, seq_len=max_model_len))


# ATT-01: at the far end of the context too. A float32 frequency is known to 6e-8, an angle of 60000 to 4e-3.
@pytest.mark.parametrize("factor", [8.0, 32.0])
@pytest.mark.parametrize("position", [0, 8000, 60000])
def test_rotations_equal_those_of_transformers_at_far_positions(factor, position):
    rope = {**LLAMA3, "factor": factor, "original_max_position_embeddings": 8192, "rope_theta": 500000.0}
    oracle = LlamaRotaryEmbedding(transformers_config(rope))
    cos, sin = oracle(torch.zeros(1, 1, 96), torch.tensor([[position]]))
    unit = np.zeros((1, 1, 96))
    unit[..., :48] = 1.0  # rotates into (cos, sin)
    ops = create_ops("reference", dtype="float32", num_threads=1)
    batch = make_batch([Rows(1, position + 1, np.zeros((1, 1)))])
    got = ops.to_numpy(ops.rope(heads(ops, unit), batch, read(rope).table(131072))).ravel()
    expected = np.concatenate([cos[0, 0, :48], sin[0, 0, :48]])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6 + 1.2e-7 * position)


def test_partial_rotary_dimensions_follow_the_fraction_in_either_place():
    inside = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.75}}
    outside = {"rope_scaling": None, "partial_rotary_factor": 0.75, "rope_theta": 10000.0}
    family = RopeFamily(max_position=4096, head_dim=128, partial_rotary=True)
    for config in (inside, outside):
        assert read_rope(ConfigReader(config), family).rotary_dim == 96


# ATT-03: max_position_embeddings may count YaRN's factor already; it is never multiplied twice.
@pytest.mark.parametrize(
    ("rope", "max_position", "context_len"),
    [
        (YARN, 131072, 131072),
        (YARN, 32768, 131072),
        ({**YARN, "factor": 40.0, "original_max_position_embeddings": 4096}, 163840, 163840),
        ({"rope_type": "default"}, 4096, 4096),
        ({"rope_type": "linear", "factor": 4.0}, 4096, 16384),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, 8192),
        ({**LLAMA3, "original_max_position_embeddings": 8192}, 131072, 131072),
        ({**LONGROPE, "original_max_position_embeddings": 4096}, 131072, 131072),
    ],
)
def test_the_context_counts_scaling_once(rope, max_position, context_len):
    assert read(rope, max_position=max_position).context_len == context_len


@pytest.mark.parametrize(
    ("override", "native_len", "context_len"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, None, 32768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}, None, 16384),
        ({"rope_type": "linear", "factor": 2.0}, None, 16384),
        ({"rope_type": "dynamic", "factor": 3.0}, 8192, 24576),
        ({**LLAMA3, "factor": 2.0}, None, 16384),
        ({**LONGROPE, "factor": 4.0}, 8192, 32768),
        ({"rope_type": "default"}, None, 8192),
    ],
)
def test_an_override_replaces_the_checkpoints_scaling_and_starts_from_its_native_context(
    override, native_len, context_len
):
    own = {**LLAMA3, "original_max_position_embeddings": 8192, "rope_theta": 12345.0}
    spec = read(own, override=override)
    assert (spec.native_len, spec.context_len, spec.theta) == (native_len, context_len, 12345.0)


def test_an_override_may_set_the_base_too():
    assert read({"rope_theta": 1e4}, override={"rope_type": "default", "rope_theta": 1e6}).theta == 1e6


def test_an_override_equals_the_same_scaling_in_config_json():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192, "beta_fast": 20.0}
    assert read({"rope_type": "default"}, max_position=8192, override=scaling) == read(scaling, max_position=8192)


BAD = [
    ({"rope_type": "ntk"}, "rope_type 'ntk'"),
    ({"factor": 2.0}, "factor with rope_type 'default'"),
    ({"rope_type": "linear"}, "lacks 'factor'"),
    ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5"),
    ({"rope_type": "linear", "factor": "4"}, "factor is '4'"),
    ({"rope_type": "linear", "factor": True}, "factor is True"),
    ({"rope_type": "linear", "factor": float("nan")}, "factor is nan"),
    ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "beta_fast with rope_type 'linear'"),
    ({"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 2.0}, "beta_fast is 1.0"),
    ({"rope_type": "yarn", "factor": 2.0, "truncate": 1}, "truncate is 1"),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1}, "position_embeddings is 1"),
    ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor is 1.0"),
    ({**LONGROPE, "factor": 2.0, "short_factor": [1.0]}, "short_factor is"),
    ({**LONGROPE, "factor": 2.0, "long_factor": [0.0] * 48}, "long_factor is"),
    ({"rope_type": "default", "rope_theta": 0}, "rope_theta is 0"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section with rope_type 'default'"),
]


@pytest.mark.parametrize(("rope", "message"), BAD, ids=[message for _, message in BAD])
def test_what_makes_no_sense_or_is_not_implemented_is_refused_by_name(rope, message):
    with pytest.raises(StartError, match="config.json: rope_parameters.*" + message.replace("(", r"\(")):
        read(rope)
    with pytest.raises(ConfigError, match="--rope-scaling.*" + message):
        read({"rope_type": "default"}, override=rope)


def test_an_empty_override_is_refused():
    with pytest.raises(ConfigError, match="--rope-scaling is empty; it needs a rope_type: default, linear"):
        read({"rope_type": "default"}, override={})


def test_settings_for_each_kind_of_layer_are_refused_where_all_layers_share_one():
    nested = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(UnsupportedModel, match="rope_parameters for each kind of layer"):
        read(nested)


def test_longrope_with_equal_lists_has_one_variant():
    spec = read({**LONGROPE, "long_factor": SHORT, "original_max_position_embeddings": 4096})
    assert spec.native_len is None
    assert len(spec.table(8192).inv_freq) == 1


# The first Phi-3 checkpoints said "su" and "yarn" for what became longrope; the native length stands beside it.
@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_names_of_longrope(name):
    scaling = {"type": name, "short_factor": SHORT, "long_factor": LONG}
    config = {"rope_scaling": scaling, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
    family = RopeFamily(
        max_position=131072, head_dim=96, default_native=4096, aliases={"su": "longrope", "yarn": "longrope"}
    )
    spec = read_rope(ConfigReader(config), family)
    oracle = Phi3Config(**config | {"rope_scaling": scaling | {"type": "longrope"}}, max_position_embeddings=131072)
    assert_same(spec.variants(131072)[1], ROPE_INIT_FUNCTIONS["longrope"](oracle, seq_len=5000))
    assert spec.native_len == 4096
