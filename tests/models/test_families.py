"""From config.json to a spec: names and shapes of every parameter, layer by layer choices, defaults, refusals."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import transformers
from tests.golden.architectures import ARCHITECTURES, SHAPE, older_layout, random_model

from octavo.errors import CheckpointError, LoadError, UnsupportedModel
from octavo.models.decoder import parameters
from octavo.models.registry import BUILDERS, build_spec
from octavo.models.spec import DecoderSpec

SLIDING = {"use_sliding_window": True}
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}


def config_of(architecture: str, **changes: Any) -> dict[str, Any]:
    shape = {key: value for key, value in SHAPE.items() if value is not None and key != "tie_word_embeddings"}
    return {"architectures": [architecture], **shape, **changes}


def windows(spec: DecoderSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.layers]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_are_those_of_transformers_by_name_and_shape(name):
    model = random_model(ARCHITECTURES[name].config(), seed=0)
    spec = build_spec(model.config.to_dict())
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items() if key != "lm_head.weight"}
    found = [pair for each in parameters(spec) for pair in zip(each.names, each.shapes, strict=True)]
    assert len(found) == len(dict(found)), "a parameter is claimed twice"
    assert dict(found) == expected
    assert (spec.head.names, spec.head.shape) == (("lm_head.weight",), (spec.vocab_size, spec.hidden_size))
    assert spec.tied_head == model.config.tie_word_embeddings


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("qwen2-layer-types", "gemma3-scaled")])
def test_both_layouts_of_config_json_give_the_same_spec(name):
    config = random_model(ARCHITECTURES[name].config(), seed=0).config.to_dict()
    older = older_layout(copy.deepcopy(config))
    assert "rope_parameters" not in older and "layer_types" not in older
    assert build_spec(older) == build_spec(config)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_configs_of_transformers_leave_no_key_unread(name, caplog):
    build_spec(random_model(ARCHITECTURES[name].config(), seed=0).config.to_dict())
    assert not caplog.records


def test_a_key_that_nobody_reads_is_named_in_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        build_spec(
            config_of("LlamaForCausalLM", num_local_experts=8, initializer_range=0.1, use_qk_norm=False, _name="x")
        )
    assert [record.getMessage() for record in caplog.records] == [
        "config.json: num_local_experts have no effect on LlamaForCausalLM here."
    ]


# As the releases have them, without what is the same everywhere.
RELEASES = {
    "SmolLM2-135M": ("LlamaForCausalLM", {"is_llama_config": True, "rope_interleaved": False, "rope_scaling": None}),
    "Llama-3.2-1B": (
        "LlamaForCausalLM",
        {
            "head_dim": 64,
            "pretraining_tp": 1,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 32.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
                "rope_type": "llama3",
            },
        },
    ),
    "Phi-4-mini": (
        "Phi3ForCausalLM",
        {
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
            "full_attn_mod": 1,
            "interpolate_factor": 1,
            "lm_head_bias": False,
            "mlp_bias": False,
            "attention_bias": False,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.5] * 6},
        },
    ),
    "gemma-2-2b": ("Gemma2ForCausalLM", {"hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}),
    "gemma-3-1b": (
        "Gemma3ForCausalLM",
        {"sliding_window_pattern": 6, "rope_local_base_freq": 10000, "attn_logit_softcapping": None},
    ),
    "starcoder2-3b": (
        "Starcoder2ForCausalLM",
        {
            "activation_function": "gelu",
            "attention_softmax_in_fp32": True,
            "layer_norm_epsilon": 1e-05,
            "mlp_type": "default",
            "norm_type": "layer_norm",
            "scale_attn_weights": True,
        },
    ),
}


@pytest.mark.parametrize(("architecture", "changes"), RELEASES.values(), ids=RELEASES)
def test_configs_of_releases_leave_no_key_unread(architecture, changes, caplog):
    assert build_spec(config_of(architecture, **changes)).max_context > 0
    assert not caplog.records


# -- windows -----------------------------------------------------------------------------------------------


# ATT-08: null and false mean full attention; else the layers from max_window_layers on slide.
@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 3),
        ("MistralForCausalLM", {"sliding_window": 8}, [8] * 3),
        ("MistralForCausalLM", {}, [4096] * 3),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, [None] * 3),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, [None] * 3),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, [8] * 3),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
            [None, None, 8],
        ),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": True}, [None] * 3),
        ("Qwen2ForCausalLM", {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0}, [None] * 3),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, [None, 8, 8]),
        ("Phi3ForCausalLM", {"sliding_window": None}, [None] * 3),
        ("Phi3ForCausalLM", {"sliding_window": 2047}, [2047] * 3),
        ("Starcoder2ForCausalLM", {}, [None] * 3),
        ("Gemma2ForCausalLM", {"sliding_window": 8}, [8, None, 8]),
    ],
)
def test_which_layers_slide(architecture, changes, expected):
    assert windows(build_spec(config_of(architecture, **changes))) == expected


# ATT-07: the pattern as a number, as a list, absent; each kind of layer with its own RoPE base.
@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window_pattern": 3},
        {"layer_types": ["full_attention", *["sliding_attention"] * 6]},
        {},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
    ids=lambda changes: ",".join(changes) or "absent",
)
def test_gemma3_layers_are_those_of_transformers(changes):
    options = {"num_hidden_layers": 7, "sliding_window": 512, "max_position_embeddings": 32768, "head_dim": 16}
    spec = build_spec(config_of("Gemma3ForCausalLM", **options, **changes))
    oracle = transformers.Gemma3TextConfig(**SHAPE | options | copy.deepcopy(changes))
    assert windows(spec) == [512 if kind == "sliding_attention" else None for kind in oracle.layer_types]
    for layer, kind in zip(spec.layers, oracle.layer_types, strict=True):
        parameters_of_kind = oracle.rope_parameters[kind]
        assert layer.attention.rope.theta == parameters_of_kind["rope_theta"]
        assert getattr(layer.attention.rope, "factor", 1.0) == parameters_of_kind.get("factor", 1.0)
    assert spec.max_context == 32768  # scaling is counted in it


def test_an_override_of_rope_scaling_leaves_gemma3s_sliding_layers_alone():
    spec = build_spec(
        config_of("Gemma3ForCausalLM", num_hidden_layers=6), rope_scaling={"rope_type": "linear", "factor": 2.0}
    )
    assert [getattr(layer.attention.rope, "factor", 1.0) for layer in spec.layers] == [1.0] * 5 + [2.0]
    assert spec.max_context == 512


def test_an_override_of_rope_scaling_reaches_every_family():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    for architecture in BUILDERS:
        config = config_of(architecture)
        if architecture == "Gemma3ForConditionalGeneration":
            config = {"architectures": [architecture], "text_config": config}
        assert build_spec(config, rope_scaling=scaling).max_context == 1024, architecture


# -- defaults ----------------------------------------------------------------------------------------------


# LOD-10: a missing flag means what the family means by it.
@pytest.mark.parametrize(
    ("architecture", "is_tied"),
    [
        ("LlamaForCausalLM", False),
        ("MistralForCausalLM", False),
        ("Qwen2ForCausalLM", False),
        ("Qwen3ForCausalLM", False),
        ("GemmaForCausalLM", True),
        ("Gemma2ForCausalLM", True),
        ("Gemma3ForCausalLM", True),
        ("Phi3ForCausalLM", False),
        ("GraniteForCausalLM", False),
        ("Starcoder2ForCausalLM", True),
    ],
)
def test_family_defaults_of_tying(architecture, is_tied):
    assert build_spec(config_of(architecture)).tied_head == is_tied
    assert not build_spec(config_of(architecture, tie_word_embeddings=False)).tied_head
    assert build_spec(config_of(architecture, tie_word_embeddings=True)).tied_head


def test_absent_keys_take_the_defaults_of_transformers():
    for name, architecture in ARCHITECTURES.items():
        class_name = random_model(architecture.config(), seed=0).config.architectures[0]
        sparse = {key: SHAPE[key] for key in ("hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers")}
        sparse["num_attention_heads"] = 32
        spec = build_spec({"architectures": [class_name], **sparse})
        oracle = getattr(transformers, f"{architecture.family}Config")(**sparse)
        attention = spec.layers[0].attention
        assert attention.num_kv_heads == oracle.num_key_value_heads, name
        assert attention.head_dim == (getattr(oracle, "head_dim", None) or 2), name
        assert spec.max_context == oracle.max_position_embeddings, name
        assert spec.final_norm.eps == getattr(oracle, "rms_norm_eps", None) or oracle.norm_epsilon, name


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
def test_head_size_is_a_share_of_the_hidden_size_unless_it_is_given(absent):
    attention = build_spec(config_of("LlamaForCausalLM", **absent)).layers[0].attention
    assert (attention.head_dim, attention.scale) == (16, 0.25)
    assert build_spec(config_of("LlamaForCausalLM", head_dim=40)).layers[0].attention.head_dim == 40


@pytest.mark.parametrize("name", ["gelu", "gelu_pytorch_tanh"])
def test_gemma_means_the_tanh_form_of_gelu(name):
    for changes in ({"hidden_act": name}, {"hidden_act": name, "hidden_activation": None}, {"hidden_activation": name}):
        assert build_spec(config_of("GemmaForCausalLM", **changes)).layers[0].mlp.activation == "gelu_tanh"


def test_gemma3_with_images_is_served_as_its_text_part():
    # What the 4B model's config.json says of its language model; the rest are defaults of transformers.
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}}
    spec = build_spec(config)
    oracle = transformers.Gemma3TextConfig(**text)
    attention = spec.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.max_context) == (oracle.vocab_size, oracle.max_position_embeddings)
    assert spec.embedding.names == ("language_model.model.embed_tokens.weight",)
    assert spec.ignored_prefixes == ("vision_tower.", "multi_modal_projector.")


# -- refusals ----------------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_named_with_the_known_ones():
    with pytest.raises(UnsupportedModel, match="'MambaForCausalLM' is not supported. Known: Llama.*Granite"):
        build_spec(config_of("MambaForCausalLM"))
    with pytest.raises(UnsupportedModel, match="config.json names no architecture"):
        build_spec({"model_type": "llama"})


REFUSED = [
    ("LlamaForCausalLM", {"hidden_act": "xielu"}, "hidden_act 'xielu' is not supported .*known: silu"),
    ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config 'gptq'"),
    ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope_type 'ntk'"),
    ("LlamaForCausalLM", {"rope_interleaved": True}, "rope_interleaved True"),
    ("LlamaForCausalLM", {"is_encoder_decoder": True}, "is_encoder_decoder True"),
    ("LlamaForCausalLM", {"rope_parameters": {"full_attention": ROPE}}, "rope_parameters for each kind of layer"),
    ("MistralForCausalLM", {"layer_types": ["full_attention"] * 3}, "layer_types"),
    ("MistralForCausalLM", {"attention_bias": True}, "attention_bias True"),
    ("Qwen2ForCausalLM", {"layer_types": ["linear_attention"] * 3}, "layer type 'linear_attention'"),
    ("Qwen2ForCausalLM", {"layer_types": ["sliding_attention"] * 3}, "'sliding_attention' without a window"),
    ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope True"),
    ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("Gemma3ForCausalLM", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    ("Gemma3ForCausalLM", {"rope_parameters": ROPE}, "rope_parameters for all layers"),
    ("Gemma3ForCausalLM", {"layer_types": ["chunked_attention"] * 3}, "layer type 'chunked_attention'"),
    ("Phi3ForCausalLM", {"full_attn_mod": 2}, "full_attn_mod 2"),
    ("Phi3ForCausalLM", {"lm_head_bias": True}, "lm_head_bias True"),
    ("Starcoder2ForCausalLM", {"norm_type": "rms_norm"}, "norm_type 'rms_norm'"),
]


@pytest.mark.parametrize(("architecture", "changes", "message"), REFUSED, ids=[message for *_, message in REFUSED])
def test_what_is_not_implemented_is_refused_by_name(architecture, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        build_spec(config_of(architecture, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config.json lacks 'hidden_size'"),
        ({"hidden_size": "64"}, "hidden_size is '64'; it must be an integer"),
        ({"hidden_size": 66}, "hidden_size is 66; it must be a multiple of num_attention_heads, 4"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3; it must be a divisor of num_attention_heads, 4"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be between 1 and 1024"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06; it must be above 0"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"rope_scaling": [1]}, r"rope_scaling is \[1\]; it must be an object"),
        ({"hidden_act": 3}, "hidden_act is 3; it must be a string"),
        ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776"),
    ],
)
def test_values_that_make_no_sense_are_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        build_spec(config_of("LlamaForCausalLM", **changes))


@pytest.mark.parametrize("architecture", BUILDERS)
def test_any_value_of_a_wrong_type_ends_in_a_load_error(architecture):
    good = random_config(architecture)
    for key in good:
        for value in ({}, [], "x", -1, 1.5, float("nan"), [None]):
            broken = {**good, key: value}
            try:
                build_spec(broken)
            except LoadError:
                continue


def random_config(architecture: str) -> dict[str, Any]:
    if architecture == "Gemma3ForConditionalGeneration":
        return {"architectures": [architecture], "text_config": random_config("Gemma3ForCausalLM")}
    for entry in ARCHITECTURES.values():
        config = random_model(entry.config(), seed=0).config
        if config.architectures == [architecture]:
            return config.to_dict()
    raise AssertionError(architecture)
