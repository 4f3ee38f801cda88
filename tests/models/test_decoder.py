"""Loading a model through the ledger, and the forward pass where families differ from it."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.backends import definitions
from tests.backends.definitions import Rows, make_batch
from tests.golden.architectures import ARCHITECTURES, SHAPE, random_model

from octavo.backends.ops import DType
from octavo.backends.registry import create_ops
from octavo.errors import CheckpointError, ConfigError
from octavo.kv_cache.cache_spec import LayerKv, make_cache_spec
from octavo.loader.checkpoint import Ledger
from octavo.loader.source import open_checkpoint, resolve_source
from octavo.models.decoder import Decoder
from octavo.models.registry import build_spec
from octavo.models.spec import DecoderSpec

PROMPT = list(np.random.default_rng(0).integers(0, SHAPE["vocab_size"], 20))


def save(folder: Path, name: str = "llama", **options) -> transformers.PreTrainedModel:
    entry = ARCHITECTURES[name]
    model = random_model(dataclasses.replace(entry, options={**entry.options, **options}).config(), seed=1)
    model.save_pretrained(folder)
    return model


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value != "absent"}))


class Loaded:
    """A decoder with room for one request."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: DType = "float32",
        change: Callable[[DecoderSpec], DecoderSpec] = lambda spec: spec,
        progress=lambda done, total: None,
    ) -> None:
        checkpoint = open_checkpoint(resolve_source(str(folder), cache=folder))
        self.spec = change(build_spec(checkpoint.config))
        attention = self.spec.layers[0].attention
        layers = [LayerKv(attention.num_kv_heads, attention.head_dim)] * len(self.spec.layers)
        cache_spec = make_cache_spec(layers, block_size=8, dtype_bytes=4)
        ops = create_ops("reference", dtype=dtype, num_threads=1)
        self.ops = ops
        self.decoder = Decoder(
            self.spec,
            ops,
            Ledger(checkpoint, ignore=self.spec.ignored_prefixes),
            max_model_len=64,
            kv_places=cache_spec.places,
            progress=progress,
        )
        self.cache = ops.kv_cache(
            num_blocks=8,
            block_size=8,
            layers_per_block=cache_spec.layers_per_block,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
        )

    def logits(self, token_ids: list[int], *, chunks: list[int] | None = None) -> np.ndarray:
        """Behind every token, computed in chunks of these sizes. [T, V]"""
        parts, start = [], 0
        for count in chunks or [len(token_ids)]:
            end = start + count
            batch = make_batch(
                [Rows(count, end, np.arange(8)[None])], token_ids=np.array(token_ids[start:end], np.int32)
            )
            hidden = self.decoder.forward(batch, self.cache)
            assert self.ops.to_numpy(hidden).shape == (count, self.spec.hidden_size)
            parts.append(self.decoder.logits(hidden, np.arange(count, dtype=np.int32)))
            start = end
        return np.concatenate(parts)


def oracle_logits(model: transformers.PreTrainedModel, token_ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0].float().numpy()


# -- loading -----------------------------------------------------------------------------------------------


# LOD-10: flag and tensor in every combination.
def test_a_tied_head_is_the_embedding_whether_it_is_stored_or_not(tmp_path, caplog):
    model = save(tmp_path, tie_word_embeddings=True)
    expected = oracle_logits(model, PROMPT)
    for store in (None, lambda table: table.clone(), lambda table: table + 1.0):
        if store is not None:
            change_tensors(
                tmp_path,
                lambda tensors, store=store: tensors.update(
                    {"lm_head.weight": store(tensors["model.embed_tokens.weight"])}
                ),
            )
        with caplog.at_level(logging.WARNING):
            np.testing.assert_allclose(Loaded(tmp_path).logits(PROMPT), expected, rtol=0, atol=1e-4)
    assert [record.getMessage() for record in caplog.records] == [
        "lm_head.weight differs from the embedding, and is ignored: tie_word_embeddings is true."
    ]


def test_an_untied_head_must_be_stored(tmp_path):
    model = save(tmp_path)
    np.testing.assert_allclose(Loaded(tmp_path).logits(PROMPT), oracle_logits(model, PROMPT), rtol=0, atol=1e-4)
    change_tensors(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head.weight \[128, 64\] is missing"):
        Loaded(tmp_path)


def test_without_the_flag_the_family_decides_about_the_head(tmp_path):
    model = save(tmp_path, "gemma")
    change_config(tmp_path, tie_word_embeddings="absent")
    np.testing.assert_allclose(Loaded(tmp_path).logits(PROMPT), oracle_logits(model, PROMPT), rtol=0, atol=1e-4)


def test_everything_that_does_not_fit_is_in_one_error(tmp_path):
    save(tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.norm.weight"] = torch.ones(65)
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)

    change_tensors(tmp_path, spoil)
    with pytest.raises(CheckpointError) as caught:
        Loaded(tmp_path)
    message = str(caught.value)
    assert "model.layers.1.mlp.up_proj.weight [96, 64] is missing" in message
    assert "model.norm.weight has shape [65]; the configuration makes it [64]" in message
    assert "1 tensors have no use in this model: model.layers.0.self_attn.q_proj.bias" in message


def test_progress_counts_parameters_up_to_their_number(tmp_path):
    model = save(tmp_path)
    seen: list[tuple[int, int]] = []
    Loaded(tmp_path, progress=lambda done, total: seen.append((done, total)))
    total = sum(parameter.numel() for parameter in model.parameters())
    assert {entry[1] for entry in seen} == {total}
    assert [entry[0] for entry in seen] == sorted({entry[0] for entry in seen})
    assert seen[-1] == (total, total)


# -- Gemma 3 with images -----------------------------------------------------------------------------------


def test_gemma3_with_images_says_what_its_text_part_says(tmp_path):
    text = ARCHITECTURES["gemma3"].config()
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 8, "patch_size": 4,
        },
        mm_tokens_per_image=4, boi_token_index=120, eoi_token_index=121, image_token_index=122,
    )  # fmt: skip
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    source = random_model(text, seed=2)
    model.model.language_model.load_state_dict(source.model.state_dict())
    model.tie_weights()
    model.save_pretrained(tmp_path)
    loaded = Loaded(tmp_path)
    expected = oracle_logits(source, PROMPT)
    assert expected.std() > 0.3
    np.testing.assert_allclose(loaded.logits(PROMPT), expected, rtol=0, atol=1e-4)


# -- number formats ----------------------------------------------------------------------------------------


# What is left against float32 is rounding, and no more of it than transformers has, which rounds more often.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name in ("llama", "granite", "starcoder2") for dtype in ("bfloat16", "float16")]
    + [("gemma3", "bfloat16")],
)
def test_half_precision_stays_as_near_to_float32_as_transformers(tmp_path, name, dtype):
    model = save(tmp_path, name)
    expected = oracle_logits(model, PROMPT)
    got = Loaded(tmp_path, dtype=dtype).logits(PROMPT)
    assert got.dtype == np.float32
    in_half = oracle_logits(model.to(getattr(torch, dtype)), PROMPT)
    error, usual = (np.abs(logits - expected).mean() for logits in (got, in_half))
    assert 0 < error < 1.1 * usual


# ATT-11: Gemma's residuals pass 65504. bfloat16 and float32 hold them, float16 is refused before anything is read.
@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_gemma_with_large_residuals_is_finite_and_refused_in_float16(tmp_path, name):
    model = save(tmp_path, name)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if name == "gemma" and key.endswith("down_proj.weight"):
                value.mul_(1e5)
            elif name != "gemma" and key.endswith("post_feedforward_layernorm.weight"):
                value.add_(1e5)
        hidden = model(torch.tensor([PROMPT]), output_hidden_states=True).hidden_states[-2]
    assert hidden.abs().max() > 65504
    model.save_pretrained(tmp_path)
    for dtype in ("float32", "bfloat16"):
        assert np.isfinite(Loaded(tmp_path, dtype=dtype).logits(PROMPT)).all()
    with pytest.raises(ConfigError, match=r"overflows in float16.*Use --dtype bfloat16 or float32"):
        Loaded(tmp_path, dtype="float16")


# -- windows -----------------------------------------------------------------------------------------------


# ATT-05: exactly W keys reach the last logit, in one prefill, in chunks and in decode.
@pytest.mark.parametrize("length", [7, 8, 9, 24])
@pytest.mark.parametrize("chunks", ["whole", "chunks", "decode"])
def test_exactly_the_last_window_of_tokens_reaches_the_last_logit(tmp_path, length, chunks):
    window = 8
    model = save(tmp_path, "mistral-window", num_hidden_layers=1, sliding_window=window)
    loaded = Loaded(tmp_path)
    sizes = {"whole": [length], "chunks": [5, length - 5], "decode": [1] * length}[chunks]
    token_ids = PROMPT[:20] + PROMPT[:4]
    token_ids = token_ids[:length]
    before = loaded.logits(token_ids, chunks=sizes)[-1]
    for i in range(length - 1):
        changed = list(token_ids)
        changed[i] = (changed[i] + 1) % SHAPE["vocab_size"]
        reaches = bool(np.any(loaded.logits(changed, chunks=sizes)[-1] != before))
        assert reaches == (i > length - 1 - window), i
    np.testing.assert_allclose(before, oracle_logits(model, token_ids)[-1], rtol=0, atol=1e-4)


# -- parts that no family has yet --------------------------------------------------------------------------


def test_sinks_and_layers_without_rope(tmp_path):
    """One layer of attention alone, computed by hand."""
    model = save(tmp_path, num_hidden_layers=1)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    change_tensors(tmp_path, lambda tensors: tensors.update({"sinks": torch.from_numpy(sinks)}))

    def change(spec: DecoderSpec) -> DecoderSpec:
        (layer,) = spec.layers
        name = dataclasses.replace(spec.final_norm.weight, names=("sinks",), shapes=((4,),))
        attention = dataclasses.replace(layer.attention, rope=None, sinks=name)
        return dataclasses.replace(spec, layers=(dataclasses.replace(layer, attention=attention),))

    got = Loaded(tmp_path, change=change).logits(PROMPT)

    weights = {key: value.double().numpy() for key, value in model.state_dict().items()}

    def product(x: np.ndarray, name: str) -> np.ndarray:
        return x @ weights[f"model.layers.0.{name}.weight"].T

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return definitions.rms_norm(x, weights[f"model.{name}.weight"], 1e-6, 0.0)

    x = weights["model.embed_tokens.weight"][PROMPT]
    h = norm(x, "layers.0.input_layernorm")
    q, k, v = (product(h, f"self_attn.{name}_proj").reshape(len(PROMPT), -1, 16) for name in "qkv")
    params = build_spec(model.config.to_dict()).layers[0].attention.params
    y = definitions.attend(q, k, v, params, sinks.astype(np.float64)).reshape(len(PROMPT), -1)
    x = x + product(y, "self_attn.o_proj")
    h = norm(x, "layers.0.post_attention_layernorm")
    gate, up = product(h, "mlp.gate_proj"), product(h, "mlp.up_proj")
    x = x + product(definitions.activation(gate, "silu") * up, "mlp.down_proj")
    expected = norm(x, "norm") @ weights["lm_head.weight"].T
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-4)
