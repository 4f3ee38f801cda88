"""Names become local files; pickles and code are refused or never touched."""

import json
import pickle
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.errors import CheckpointError, LoadError
from octavo.loader.source import LocalModel, open_checkpoint, resolve_source


def gguf_file(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": 64,
        "embedding_length": 8,
        "feed_forward_length": 8,
        "block_count": 1,
    }.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_head_count(2)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def safetensors_folder(folder: Path, **config) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    save_file({"x": np.zeros(2, np.float32)}, folder / "model.safetensors")
    return folder


def resolve(name: object, tmp_path: Path, **options) -> LocalModel:
    return resolve_source(str(name), cache=tmp_path / "cache", **options)


def test_a_gguf_file_and_a_folder_with_one_are_models(tmp_path):
    path = gguf_file(tmp_path / "model.gguf")
    (tmp_path / "mmproj-model.gguf").write_bytes(b"a vision part")
    assert resolve(path, tmp_path) == LocalModel(str(path), path, "gguf")
    local = resolve(tmp_path, tmp_path)
    assert local.path == path
    assert open_checkpoint(local).config["model_type"] == "llama"


def test_a_folder_of_several_gguf_models_asks_which_one(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        gguf_file(tmp_path / name)
    with pytest.raises(LoadError, match=r"holds 2 GGUF models: a\.gguf, b\.gguf\. Name one"):
        resolve(tmp_path, tmp_path)


def test_the_parts_of_a_split_model_are_one(tmp_path):
    for part in (1, 2):
        (tmp_path / f"m-{part:05d}-of-00002.gguf").write_bytes(b"")
    assert resolve(tmp_path, tmp_path).path.name == "m-00001-of-00002.gguf"


def test_a_folder_of_safetensors_is_a_model(tmp_path):
    folder = safetensors_folder(tmp_path / "m")
    local = resolve(folder, tmp_path)
    assert (local.format, local.path) == ("safetensors", folder)
    assert open_checkpoint(local).names() == ["x"]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ([], "holds no weights"),
        (["adapter_config.json", "adapter_model.safetensors"], "holds a LoRA adapter"),
        (["model.safetensors"], "holds weights without their config.json"),
    ],
)
def test_folders_that_are_no_model_say_what_they_are(tmp_path, files, problem):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(LoadError, match=problem):
        resolve(tmp_path, tmp_path)


def test_other_files_and_missing_paths_are_refused(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(LoadError, match="not a model: give a folder, or a file that ends in .gguf"):
        resolve(tmp_path / "model.onnx", tmp_path)
    for missing in (tmp_path / "absent", "./absent", "absent.gguf"):
        with pytest.raises(LoadError, match="no file or folder"):
            resolve(missing, tmp_path)


class Marker:
    """A pickle of it writes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "ran")


# SEC-05
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_a_folder_of_pickles_is_refused_and_not_read(tmp_path, name):
    marker = tmp_path / "marker"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / name).write_bytes(pickle.dumps(Marker(marker)))
    with pytest.raises(CheckpointError, match=f"{name}.*can run code.*safetensors"):
        resolve(tmp_path, tmp_path)
    assert not marker.exists()


# SEC-05
def test_code_that_comes_with_a_model_is_not_run(tmp_path):
    marker = tmp_path / "marker"
    auto_map = {"auto_map": {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}}
    folder = safetensors_folder(tmp_path / "m", **auto_map)
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w').write('ran')")
    (folder / "generation_config.json").write_text('{"custom_generate": "modeling.generate", "eos_token_id": [1, 2]}')
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["modeling.Tokenizer", null]}}')
    (folder / "tokenizer.model").write_bytes(pickle.dumps(Marker(marker)))
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(marker)))
    checkpoint = open_checkpoint(resolve(folder, tmp_path))
    assert checkpoint.tensor("x").numpy().tolist() == [0, 0]
    assert checkpoint.generation_config["eos_token_id"] == [1, 2]
    assert not marker.exists()


def test_a_catalogue_model_that_is_not_here_names_the_command(tmp_path):
    with pytest.raises(LoadError, match="Fetch it with: octavo pull smollm2-135m-instruct"):
        resolve("smollm2-135m-instruct", tmp_path)


def test_a_catalogue_model_is_found_or_fetched(tmp_path, monkeypatch):
    pulled = []

    def fake_pull(name, *, cache, progress, notice):
        pulled.append((name, cache))
        notice("the terms")
        (cache / "models" / name).mkdir(parents=True)
        return gguf_file(cache / "models" / name / "gemma-3-270m-q4_k_m.gguf")

    said = []
    monkeypatch.setattr("octavo.loader.pull.pull", fake_pull)
    local = resolve("gemma3-270m", tmp_path, fetch=True, notice=said.append)
    assert (local.name, local.format) == ("gemma3-270m", "gguf")
    assert said == ["the terms"]
    assert resolve("gemma3-270m", tmp_path) == local
    assert pulled == [("gemma3-270m", tmp_path / "cache")]


def test_unknown_names_list_the_forms_and_the_nearest(tmp_path):
    with pytest.raises(LoadError, match=r"did you mean smollm2-135m-instruct\?.*OWNER/NAME"):
        resolve("smollm2-135m-instuct", tmp_path)


def test_a_revision_belongs_to_a_hub_id(tmp_path):
    for name in (safetensors_folder(tmp_path / "m"), "gemma3-270m"):
        with pytest.raises(LoadError, match="revision 'main' is given"):
            resolve(name, tmp_path, revision="main")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Stands in for the Hugging Face client; returns its calls and the answers it gives."""
    import huggingface_hub

    calls, answer = [], {}

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        if "error" in answer:
            raise answer["error"]
        return str(answer["folder"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls, answer


def test_a_hub_id_is_fetched_only_when_asked(tmp_path, hub):
    calls, answer = hub
    answer["folder"] = safetensors_folder(tmp_path / "snapshot")
    local = resolve("owner/name", tmp_path, revision="v1", fetch=True)
    assert local == LocalModel("owner/name", tmp_path / "snapshot", "safetensors", "v1")
    resolve("owner/name", tmp_path)
    assert [(repo, options["local_files_only"], options["revision"]) for repo, options in calls] == [
        ("owner/name", False, "v1"),
        ("owner/name", True, None),
    ]


# SEC-05
def test_neither_pickles_nor_code_are_fetched_from_the_hub(tmp_path, hub):
    from huggingface_hub.utils import filter_repo_objects

    calls, answer = hub
    answer["folder"] = safetensors_folder(tmp_path / "snapshot")
    resolve("owner/name", tmp_path, fetch=True)
    options = calls[0][1]
    wanted = [
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
    ]
    refused = [
        "pytorch_model.bin",
        "modeling.py",
        "x.pt",
        "model.gguf",
        "onnx/model.safetensors",
        "consolidated.safetensors",
    ]
    patterns = {name: options[name] for name in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + refused, **patterns)) == wanted


def test_errors_of_the_hub_are_clear(tmp_path, hub):
    from huggingface_hub.errors import LocalEntryNotFoundError

    _, answer = hub
    answer["error"] = LocalEntryNotFoundError("nothing cached")
    with pytest.raises(LoadError, match="Fetch it with: octavo pull owner/name --revision v2"):
        resolve("owner/name", tmp_path, revision="v2")
    with pytest.raises(LoadError, match="owner/name could not be fetched: nothing cached"):
        resolve("owner/name", tmp_path, fetch=True)
    answer["error"] = ConnectionError("no route")
    with pytest.raises(LoadError, match="could not be fetched from Hugging Face: ConnectionError: no route"):
        resolve("owner/name", tmp_path, fetch=True)
    answer.clear()
    (tmp_path / "snapshot").mkdir()
    answer["folder"] = tmp_path / "snapshot"
    with pytest.raises(LoadError, match="holds no weights"):
        resolve("owner/name", tmp_path, fetch=True)
