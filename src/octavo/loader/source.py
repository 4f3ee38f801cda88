"""From what the user calls a model to files on this machine, and from those to a checkpoint.

A name is a local path, a model of the catalogue, or a Hugging Face id, in this order. Weights are read from
safetensors and GGUF only: pickles are refused, and code that comes with a model is neither fetched nor run.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from octavo.errors import CheckpointError, LoadError
from octavo.loader.catalogue import CATALOGUE, model_path
from octavo.loader.split_names import SPLIT_NAME
from octavo.options import did_you_mean

if TYPE_CHECKING:
    from octavo.loader.checkpoint import Checkpoint
    from octavo.loader.pull import Progress

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
HUB_IGNORED = ["*/*.safetensors", "*/*.json", "consolidated*.safetensors"]  # other formats' copies of the same weights
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model whose files are on this machine. `path`: the folder, or the (first) .gguf file."""

    name: str
    path: Path
    format: Literal["safetensors", "gguf"]
    revision: str | None = None


def resolve_source(
    name: str,
    *,
    cache: Path,
    revision: str | None = None,
    fetch: bool = False,
    progress: Progress = lambda phase, done, total: None,
    notice: Callable[[str], None] = log.warning,
) -> LocalModel:
    """Find the model called `name`; with `fetch`, download what is not here yet. Raises LoadError with the way out.

    `notice` receives the licence terms of a model that is being fetched.
    """
    path = Path(name).expanduser()
    is_path = path.exists() or name.startswith(("/", ".", "~")) or name.endswith(".gguf")
    if revision is not None and (is_path or name in CATALOGUE):
        raise LoadError(f"revision {revision!r} is given, but {name} is not a Hugging Face id. Leave --revision out.")
    if is_path:
        return _local(name, path)
    if name in CATALOGUE:
        target = model_path(CATALOGUE[name], cache)
        if not target.is_file():
            if not fetch:
                raise LoadError(f"{name} is not on this machine. Fetch it with: octavo pull {name}")
            from octavo.loader.pull import pull

            pull(name, cache=cache, progress=progress, notice=notice)
        return LocalModel(name, target, "gguf")
    if HUB_ID.fullmatch(name):
        progress("download", 0, 0)
        return _from_hub(name, revision, fetch=fetch)
    raise LoadError(
        f"{name!r} is neither a path here nor a model of the catalogue ({', '.join(CATALOGUE)})"
        f"{did_you_mean(name, CATALOGUE)}. A Hugging Face id has the form OWNER/NAME."
    )


def open_checkpoint(local: LocalModel, *, digest_cache: Path | None = None) -> Checkpoint:
    """Map the weights. `digest_cache` is a folder that makes `Checkpoint.fingerprint` free for unchanged files."""
    # What reads weights needs NumPy; a server that only asks where its model is does not.
    if local.format == "gguf":
        from octavo.loader.gguf_model import open_gguf

        return open_gguf(local.path, digest_cache=digest_cache)
    from octavo.loader.safetensors import open_safetensors

    return open_safetensors(local.path, digest_cache=digest_cache)


def _local(name: str, path: Path) -> LocalModel:
    if path.is_file():
        if path.suffix != ".gguf":
            raise LoadError(f"{path} is not a model: give a folder, or a file that ends in .gguf.")
        return LocalModel(name, path, "gguf")
    if not path.is_dir():
        raise LoadError(f"there is no file or folder {path}.")
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        if (path / "config.json").is_file():
            return LocalModel(name, path, "safetensors")
        kind = "a LoRA adapter" if (path / "adapter_config.json").is_file() else "weights without their config.json"
        raise LoadError(f"{path} holds {kind}, not a whole model.")
    found = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))
    firsts = [file for file in found if (match := SPLIT_NAME.fullmatch(file.name)) is None or int(match["part"]) == 1]
    if len(firsts) == 1:
        return LocalModel(name, firsts[0], "gguf")
    if firsts:
        raise LoadError(f"{path} holds {len(firsts)} GGUF models: {', '.join(file.name for file in firsts)}. Name one.")
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{path} holds its weights as {', '.join(pickles[:4])}. Pickle files can run code when they are read, so "
            "Octavo does not. Use the model's safetensors version, or convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
        )
    raise LoadError(f"{path} holds no weights: neither *.safetensors nor *.gguf.")


def _from_hub(name: str, revision: str | None, *, fetch: bool) -> LocalModel:
    from huggingface_hub import snapshot_download  # heavy, and not needed for local models
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED, local_files_only=not fetch
        )
    except LocalEntryNotFoundError as error:
        if not fetch:
            at = f" --revision {revision}" if revision else ""
            raise LoadError(f"{name} is not on this machine. Fetch it with: octavo pull {name}{at}") from error
        raise LoadError(f"{name} could not be fetched: {error}") from error
    except Exception as error:  # what the client raises depends on its HTTP library and version
        raise LoadError(f"{name} could not be fetched from Hugging Face: {type(error).__name__}: {error}") from error
    local = _local(name, Path(folder))
    return LocalModel(name, local.path, local.format, revision)
