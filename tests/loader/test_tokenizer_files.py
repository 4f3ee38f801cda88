"""Where a model's tokenizer and chat templates are, with damaged files named."""

import json
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests import vocabularies
from tests.texts import LINES

from octavo.errors import TokenizerError
from octavo.loader import built_tokenizer, file_digest
from octavo.loader import tokenizer_files as module
from octavo.loader.tokenizer_files import (
    chat_templates_at,
    tokenizer_files_in,
    tokenizer_files_in_gguf,
    tokenizer_files_of_gguf,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_folder_gives_its_files(folder):
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": "old"}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    files = tokenizer_files_in(folder)
    assert files.tokenizer_json == folder / "tokenizer.json"
    assert files.gguf is None
    assert files.tokenizer_config["bos_token"] == "<s>"
    assert files.special_tokens_map == {"eos_token": "</s>"}
    assert files.chat_templates == {"default": "old"}


def test_template_files_win_over_the_tokenizer_config(folder):
    named = [{"name": "default", "template": "old"}, {"name": "rag", "template": "r"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    (folder / "chat_template.jinja").write_text("new")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    assert tokenizer_files_in(folder).chat_templates == {"default": "new", "rag": "r", "tool_use": "t"}


def test_the_other_files_may_be_absent_but_not_the_tokenizer(folder):
    assert tokenizer_files_in(folder).tokenizer_config == {}
    (folder / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="holds no tokenizer.json.*--tokenizer"):
        tokenizer_files_in(folder)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("tokenizer_config.json", b"{", "is not JSON"),
        ("tokenizer_config.json", b"[]", "holds a JSON list"),
        ("tokenizer_config.json", b'{"chat_template": 5}', "is a int; a chat template is text"),
        ("tokenizer_config.json", b'{"chat_template": [1]}', "not of name and template"),
        ("special_tokens_map.json", b"\xff", "is not UTF-8"),
        ("chat_template.jinja", b"\xff", "is not UTF-8"),
        ("chat_template.jinja", b"x" * (1024 * 1024 + 1), "more than 1048576 bytes"),
    ],
)
def test_damaged_files_are_named(folder, name, content, problem):
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=f"{name}.*{problem}"):
        tokenizer_files_in(folder)


def test_an_oversized_tokenizer_is_refused(folder, monkeypatch):
    monkeypatch.setattr(module, "MAX_TOKENIZER_BYTES", 1)
    with pytest.raises(TokenizerError, match="has 2 bytes; the limit is 1"):
        tokenizer_files_in(folder)


def test_gguf_metadata_holds_templates_by_name(tmp_path):
    metadata = {
        **vocabularies.byte_level(),
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
    }
    files = tokenizer_files_of_gguf(metadata, tmp_path / "m.gguf")
    assert files.chat_templates == {"default": "a", "tool_use": "b"}
    assert files.gguf is not None and files.gguf.tokenizer.encode("Hello").ids
    with pytest.raises(TokenizerError, match=r"m\.gguf: tokenizer\.chat_template is a int"):
        tokenizer_files_of_gguf({**metadata, "tokenizer.chat_template": 1}, tmp_path / "m.gguf")


def test_templates_are_found_without_a_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    (folder / "chat_template.jinja").write_text("new")
    assert chat_templates_at(folder) == {"default": "new"}


# -- tokenizers kept on disk --------------------------------------------------------------------------------


def write_gguf(path: Path, metadata: dict[str, Any], chat_template: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        else:
            writer.add_array(key, value if isinstance(value, list) else value.tolist())
    writer.add_chat_template(chat_template)
    writer.add_tensor("x", np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(params=["byte_level", "scored"])
def gguf_file(request, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, getattr(vocabularies, request.param)(), "{{ messages }}")
    return path


@pytest.fixture
def settled(monkeypatch):
    monkeypatch.setattr(file_digest, "SETTLED_S", -1.0)


def test_a_kept_tokenizer_is_the_one_that_was_built(gguf_file, tmp_path, settled, monkeypatch):
    built = tokenizer_files_in_gguf(gguf_file, cache=tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(module, "_built", None)  # nobody builds any more
    kept = tokenizer_files_in_gguf(gguf_file, cache=tmp_path / "cache")
    assert kept.chat_templates == built.chat_templates == {"default": "{{ messages }}"}
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "eos_token_ids", "add_bos", "add_eos"):
        assert getattr(kept.gguf, name) == getattr(built.gguf, name), name
    assert kept.gguf.tokenizer.to_str() == built.gguf.tokenizer.to_str()
    for line in LINES:
        assert kept.gguf.tokenizer.encode(line).ids == built.gguf.tokenizer.encode(line).ids
    assert list((tmp_path / "cache").iterdir()) == [entry]


def test_a_changed_model_is_read_again(gguf_file, tmp_path, settled):
    first = tokenizer_files_in_gguf(gguf_file, cache=tmp_path / "cache")
    gguf_file.unlink()
    write_gguf(gguf_file, vocabularies.byte_level(), "other")
    again = tokenizer_files_in_gguf(gguf_file, cache=tmp_path / "cache")
    assert (first.chat_templates, again.chat_templates) == ({"default": "{{ messages }}"}, {"default": "other"})


def test_a_file_that_may_still_change_is_not_kept(gguf_file, tmp_path):
    write_gguf(gguf_file, vocabularies.byte_level(), "now")
    tokenizer_files_in_gguf(gguf_file, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("damage", ["cut off", "empty", "changed"])
def test_a_damaged_file_is_made_anew(gguf_file, tmp_path, settled, damage):
    built = tokenizer_files_in_gguf(gguf_file, cache=tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    sound = entry.read_bytes()
    entry.write_bytes({"cut off": sound[:-1], "empty": b"", "changed": sound[:40] + b"\0" + sound[41:]}[damage])
    again = tokenizer_files_in_gguf(gguf_file, cache=tmp_path / "cache")
    assert again.gguf.tokenizer.to_str() == built.gguf.tokenizer.to_str()
    assert entry.read_bytes() == sound


def test_a_cache_that_cannot_be_written_costs_nothing_else(gguf_file, tmp_path, settled):
    (tmp_path / "cache").write_text("a file")
    assert tokenizer_files_in_gguf(gguf_file, cache=tmp_path / "cache").gguf is not None


def test_only_the_latest_files_are_kept(gguf_file, tmp_path, settled, monkeypatch):
    monkeypatch.setattr(built_tokenizer, "MAX_FILES", 2)
    cache = tmp_path / "cache"
    cache.mkdir()
    for age in range(3):
        (cache / f"{age}.tokenizer").write_bytes(b"")
        os.utime(cache / f"{age}.tokenizer", (1000 - age, 1000 - age))
    tokenizer_files_in_gguf(gguf_file, cache=cache)
    assert len(list(cache.iterdir())) == 2 and (cache / "0.tokenizer").exists()
