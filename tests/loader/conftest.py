"""Writes tiny models as llama.cpp's converter would, and opens hostile files in a process of their own."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

torch.set_num_threads(1)

Write = Callable[..., Path]


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's layout of q and k: the two halves of each head's rows alternate."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def write_rope(writer: gguf.GGUFWriter, config, head_dim: int) -> None:
    parameters = config.rope_parameters
    parameters = parameters.get("full_attention", parameters)
    kind = parameters["rope_type"]
    writer.add_rope_freq_base(parameters["rope_theta"])
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(parameters["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(parameters["original_max_position_embeddings"])
        for key, add in {
            "attention_factor": writer.add_rope_scaling_yarn_attn_factor,
            "beta_fast": writer.add_rope_scaling_yarn_beta_fast,
            "beta_slow": writer.add_rope_scaling_yarn_beta_slow,
        }.items():
            if parameters.get(key) is not None:
                add(parameters[key])
    elif kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_tensor("rope_factors_long.weight", np.array(parameters["long_factor"], np.float32))
        writer.add_tensor("rope_factors_short.weight", np.array(parameters["short_factor"], np.float32))
    elif kind == "llama3":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
        plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, head_dim, 2).float() / head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())


def write_config(writer: gguf.GGUFWriter, config) -> None:
    arch, head_dim = (
        config.model_type,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
    )
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(0)
    if arch not in ("granite", "phi3", "qwen2"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if arch in ("llama", "mistral", "granite"):
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    if arch in ("gemma2", "gemma3_text"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0)))
        writer.add_sliding_window(config.sliding_window or 0)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch != "gemma" and arch != "gemma2":
        write_rope(writer, config, head_dim)


def write_model(
    model, path: Path, *, quant: str = "F32", extra: Callable[[gguf.GGUFWriter], None] | None = None
) -> Path:
    """A transformers model as a GGUF file; `quant` is the type of its matrices."""
    config = model.config
    arch = {"mistral": "llama", "gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, arch)
    write_config(writer, config)
    if extra is not None:
        extra(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.detach().float().numpy()
        if arch in ("llama", "granite") and ".q_proj." in name:
            values = permute(values, config.num_attention_heads)
        if arch in ("llama", "granite") and ".k_proj." in name:
            values = permute(values, config.num_key_value_heads)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None, name
        kind = gguf.GGMLQuantizationType[quant if values.ndim == 2 else "F32"]
        writer.add_tensor(target, gguf.quants.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def to_gguf(tmp_path: Path) -> Write:
    return lambda model, **options: write_model(model, tmp_path / "model.gguf", **options)


@pytest.fixture(scope="session")
def make_model():
    """Builds a tiny transformers model whose every parameter is random; norms hold bfloat16 values."""
    import transformers

    def make(model_type: str, **changes):
        small = {
            "vocab_size": 96,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        small |= {"num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0}
        config = transformers.AutoConfig.for_model(model_type, **(small | changes))
        config._attn_implementation = "eager"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in dict(model.named_parameters()).values():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
                if parameter.ndim == 1:
                    parameter.copy_(parameter.bfloat16().float())
        return model

    return make


# Opens every file of a list and reports what happened, how long the slowest took and how far memory grew.
OPEN_ALL = """
import json, sys, time
from pathlib import Path
from octavo.errors import LoadError
from octavo.loader.gguf_model import open_gguf
from octavo.loader.safetensors import read_safetensors

def peak_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

kind, folder = sys.argv[1:]
open_file = {"gguf": open_gguf, "safetensors": read_safetensors}[kind]
before, outcomes, slowest = peak_kib(), {}, 0.0
for path in sorted(Path(folder).iterdir()):
    start = time.perf_counter()
    try:
        open_file(path)
        outcome = ["ok", ""]
    except LoadError as error:
        outcome = [type(error).__name__, str(error)]
    except BaseException as error:
        outcome = ["CRASH", repr(error)]
    slowest = max(slowest, time.perf_counter() - start)
    outcomes[path.name] = outcome
print(json.dumps({"outcomes": outcomes, "slowest_s": slowest, "growth_mib": (peak_kib() - before) / 1024}))
"""


@pytest.fixture(scope="session")
def open_hostile_files():
    """Opens every file in a folder, each within a second and all within 50 MiB; returns name -> (outcome, message)."""

    def open_all(kind: str, folder: Path) -> dict[str, tuple[str, str]]:
        source = Path(__file__).parents[2] / "src"
        command = [sys.executable, "-c", OPEN_ALL, kind, str(folder)]
        result = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(source)}, timeout=100)
        assert result.returncode == 0, result.stderr[-2000:]
        report = json.loads(result.stdout)
        assert report["slowest_s"] < 1.0
        assert report["growth_mib"] < 50
        crashes = {name: message for name, (outcome, message) in report["outcomes"].items() if outcome == "CRASH"}
        assert not crashes
        return {name: tuple(outcome) for name, outcome in report["outcomes"].items()}

    return open_all
