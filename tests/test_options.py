from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from octavo.config import (
    SECTIONS,
    CacheConfig,
    Config,
    ModelConfig,
    all_options,
    make_config,
    read_config_file,
    read_environment,
)
from octavo.errors import ConfigError
from octavo.options import format_size

OPTIONS = all_options()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("port", "9000", 9000),
        ("seed", "-3", -3),
        ("body_timeout_s", "2.5", 2.5),
        ("kv_cache_memory_bytes", "1024", 1024),
        ("kv_cache_memory_bytes", "64KiB", 65536),
        ("kv_cache_memory_bytes", "512MiB", 512 * 2**20),
        ("kv_cache_memory_bytes", "1.5 GiB", 3 * 2**29),
        ("dtype", "bfloat16", "bfloat16"),
        ("rope_scaling", '{"rope_type": "yarn", "factor": 4.0}', {"rope_type": "yarn", "factor": 4.0}),
        ("api_key", "secret", "secret"),
        ("chat_template", "a.jinja", "a.jinja"),
    ],
)
def test_text_becomes_the_value_that_it_stands_for(name: str, text: str, value: object) -> None:
    assert OPTIONS[name].parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("port", "80a", "--port is 80a; it must be an integer of at least 0 and at most 65535."),
        ("port", "65536", "--port is 65536; it must be an integer of at least 0 and at most 65535."),
        ("max_num_seqs", "0", "--max-num-seqs is 0; it must be an integer of at least 1."),
        ("body_timeout_s", "nan", "--body-timeout-s is nan; it must be a number of at least 0."),
        ("kv_cache_memory_bytes", "4GB", "--kv-cache-memory-bytes is 4GB; it must be a number of bytes, such as"),
        ("kv_cache_memory_bytes", "-1", "--kv-cache-memory-bytes is -1; it must be a number of bytes, such as"),
        ("dtype", "bfloat", "--dtype is bfloat; it must be one of auto, float32, bfloat16, float16; did you mean"),
        ("rope_scaling", "{", "--rope-scaling is {; it is not valid JSON"),
        ("rope_scaling", "[1]", "--rope-scaling is [1]; it must be a JSON object."),
        ("api_key", "", "--api-key is ('',); it must be text, or a list of texts."),
        ("tokenizer", "", "--tokenizer is empty; it must be text that is not empty."),
    ],
)
def test_a_bad_value_is_refused_with_its_limit(name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        OPTIONS[name].parse(text)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("port", True),
        ("port", 8.0),
        ("port", None),
        ("strict_api", "yes"),
        ("strict_api", 1),
        ("api_key", [1]),
        ("host", 1),
    ],
)
def test_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=OPTIONS[name].flag):
        make_config({name: value})


def test_every_default_passes_its_own_check() -> None:
    for option in OPTIONS.values():
        assert option.check(option.default) == option.default, option.name


def test_every_option_explains_itself_and_has_one_owner() -> None:
    fields = [f.name for section in SECTIONS.values() for f in dataclasses.fields(section)]  # type: ignore[arg-type]
    assert list(OPTIONS) == fields, "two sections have an option of the same name"
    assert all(option.help for option in OPTIONS.values())


def test_options_reach_their_sections_and_leave_the_rest_alone() -> None:
    base = make_config({"port": 1})
    config = make_config({"max_model_len": 64, "block_size": 32, "api_key": ["a", "b"]}, base=base)
    assert config.model == ModelConfig(max_model_len=64)
    assert config.cache == CacheConfig(block_size=32)
    assert (config.server.port, config.server.api_key) == (1, ("a", "b"))


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown option 'max_modle_len'; did you mean max_model_len?"):
        make_config({"max_modle_len": 1})


def config_file(folder: Path, text: str) -> Path:
    path = folder / "octavo.toml"
    path.write_text(text)
    return path


def test_a_config_file_may_be_flat_or_in_sections(tmp_path: Path) -> None:
    flat = 'model = "m"\nmax-model-len = 64\nkv_cache_memory_bytes = "1GiB"\nrope_scaling = {factor = 2.0}'
    sections = """
        [model]
        model = "m"
        max_model_len = 64
        rope_scaling = {factor = 2.0}
        [cache]
        kv-cache-memory-bytes = "1GiB"
    """
    expected = {"model": "m", "max_model_len": 64, "kv_cache_memory_bytes": 2**30, "rope_scaling": {"factor": 2.0}}
    assert read_config_file(config_file(tmp_path, flat)) == expected
    assert read_config_file(config_file(tmp_path, sections)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"unknown option 'prot' in .*octavo.toml; did you mean port\?"),
        ("[server]\nprot = 1", r"unknown option 'prot' in \[server\] in .*; did you mean port\?"),
        ("[sever]\nport = 1", r"unknown section \[sever\] in .*; did you mean server\?"),
        ("[cache]\nport = 1", r"option 'port' stands under \[cache\] in .*; it belongs under \[server\]"),
        ("port = 1\n[server]\nport = 2", r"option 'port' in \[server\] in .* is given twice"),
        ('port = "1"', r"octavo.toml: --port is 1; it must be an integer"),
        ("port =", r"is not valid TOML"),
    ],
)
def test_a_bad_config_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config_file(config_file(tmp_path, text))


def test_a_missing_config_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.toml: No such file"):
        read_config_file(tmp_path / "nowhere.toml")


def test_unknown_environment_variables_are_warned_about() -> None:
    environ = {"OCTAVO_API_KEY": "k", "OCTAVO_API_KEYS": "k", "PATH": "/bin"}
    options, warnings = read_environment(environ)
    assert options == {"api_key": ("k",)}
    assert warnings == ["environment variable OCTAVO_API_KEYS is not known; did you mean OCTAVO_API_KEY?"]


@pytest.mark.parametrize(("size", "text"), [(0, "0"), (1000, "1000"), (1536, "1536"), (2048, "2KiB"), (2**33, "8GiB")])
def test_sizes_are_shown_in_the_largest_unit_that_divides_them(size: int, text: str) -> None:
    assert format_size(size) == text


def all_sections(config: Config) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SECTIONS}


def test_no_options_give_the_defaults() -> None:
    assert all_sections(make_config({})) == all_sections(Config())
