"""What a model's files say about its tokenizer and its chat template. Reads them; builds neither."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import TokenizerError
from octavo.loader.built_tokenizer import GgufTokenizer, kept_tokenizer
from octavo.loader.json_files import read_json, read_text

MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
MAX_TEMPLATE_BYTES = 1024 * 1024
DEFAULT_TEMPLATE = "default"


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """`tokenizer_json` is the file for `tokenizers`; a GGUF model has what its metadata became instead.

    `chat_templates` maps names to Jinja texts: "default", and what else the model offers ("tool_use" ...).
    """

    tokenizer_json: Path | None = None
    gguf: GgufTokenizer | None = None
    tokenizer_config: dict[str, Any] = field(default_factory=dict)
    special_tokens_map: dict[str, Any] = field(default_factory=dict)
    chat_templates: dict[str, str] = field(default_factory=dict)


def tokenizer_files_in(folder: Path) -> TokenizerFiles:
    """The files in a folder, which must hold a tokenizer.json."""
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise TokenizerError(
            f"{folder} holds no tokenizer.json. Make one with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...), or name another with --tokenizer."
        )
    if tokenizer.stat().st_size > MAX_TOKENIZER_BYTES:
        raise TokenizerError(f"{tokenizer} has {tokenizer.stat().st_size} bytes; the limit is {MAX_TOKENIZER_BYTES}.")
    config = read_json(folder / "tokenizer_config.json", error=TokenizerError, default={})
    return TokenizerFiles(
        tokenizer_json=tokenizer,
        tokenizer_config=config,
        special_tokens_map=read_json(folder / "special_tokens_map.json", error=TokenizerError, default={}),
        chat_templates=_templates_in(folder, config),
    )


def tokenizer_files_in_gguf(path: Path, *, cache: Path | None = None) -> TokenizerFiles:
    """What the GGUF file holds. `cache` is a folder that makes it cheap for files that were read before.

    Raises CheckpointError for a damaged file, TokenizerError for one without a usable tokenizer.
    """
    built, templates = _built(path) if cache is None else kept_tokenizer(path, cache, lambda: _built(path))
    return TokenizerFiles(gguf=built, chat_templates=templates)


def tokenizer_files_of_gguf(metadata: dict[str, Any], path: Path) -> TokenizerFiles:
    """The same, of metadata that has been read from `path`."""
    from octavo.loader.gguf_tokenizer import build_tokenizer  # needs NumPy, which a warm cache does without

    return TokenizerFiles(gguf=build_tokenizer(metadata), chat_templates=_templates_of_gguf(metadata, path))


def chat_templates_at(path: Path) -> dict[str, str]:
    """The templates of a model whose tokenizer is not wanted: a folder, or a .gguf file."""
    if path.suffix == ".gguf":
        from octavo.loader.gguf import GgufFile

        return _templates_of_gguf(GgufFile.open(path).metadata, path)
    return _templates_in(path, read_json(path / "tokenizer_config.json", error=TokenizerError, default={}))


def _built(path: Path) -> tuple[GgufTokenizer, dict[str, str]]:
    from octavo.loader.gguf import GgufFile  # needs NumPy too

    files = tokenizer_files_of_gguf(GgufFile.open(path).metadata, path)
    assert files.gguf is not None
    return files.gguf, files.chat_templates


def _templates_of_gguf(metadata: dict[str, Any], path: Path) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key == prefix or key.startswith(prefix + "."):
            name = key.removeprefix(prefix).removeprefix(".") or DEFAULT_TEMPLATE
            templates[name] = _checked(value, f"{path}: {key}")
    return templates


def _templates_in(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Files first, as in transformers: chat_template.jinja and additional_chat_templates/NAME.jinja."""
    templates: dict[str, str] = {}
    listed = config.get("chat_template")
    source = folder / "tokenizer_config.json"
    if isinstance(listed, list):
        for entry in listed:
            if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
                raise TokenizerError(f"{source}: chat_template is a list, but not of name and template.")
            templates[entry["name"]] = _checked(entry.get("template"), f"{source}: chat template {entry['name']}")
    elif listed is not None:
        templates[DEFAULT_TEMPLATE] = _checked(listed, f"{source}: chat_template")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = read_text(file, error=TokenizerError, max_bytes=MAX_TEMPLATE_BYTES)
    main = folder / "chat_template.jinja"
    if main.is_file():
        templates[DEFAULT_TEMPLATE] = read_text(main, error=TokenizerError, max_bytes=MAX_TEMPLATE_BYTES)
    return templates


def _checked(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise TokenizerError(f"{where} is a {type(value).__name__}; a chat template is text.")
    if len(value.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE_BYTES:
        raise TokenizerError(f"{where} has more than {MAX_TEMPLATE_BYTES} bytes, the limit.")
    return value
