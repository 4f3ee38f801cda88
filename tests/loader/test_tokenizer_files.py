"""Where a model's tokenizer and chat templates are, with damaged files named."""

import json

import pytest

from octavo.errors import TokenizerError
from octavo.loader import tokenizer_files as module
from octavo.loader.source import LocalModel
from octavo.loader.tokenizer_files import tokenizer_files, tokenizer_files_in, tokenizer_files_of_gguf


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def test_a_folder_gives_its_files(folder):
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "chat_template": "old"}')
    (folder / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    files = tokenizer_files(LocalModel("m", folder, "safetensors"))
    assert files.tokenizer_json == folder / "tokenizer.json"
    assert files.metadata is None
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
        "tokenizer.chat_template": "a",
        "tokenizer.chat_template.tool_use": "b",
        "tokenizer.chat_templates": ["tool_use"],
    }
    files = tokenizer_files_of_gguf(metadata, tmp_path / "m.gguf")
    assert files.chat_templates == {"default": "a", "tool_use": "b"}
    assert files.metadata is metadata
    with pytest.raises(TokenizerError, match=r"m\.gguf: tokenizer\.chat_template is a int"):
        tokenizer_files_of_gguf({"tokenizer.chat_template": 1}, tmp_path / "m.gguf")
