"""Flags: how they are spelled, where their values come from, and what a mistake is told."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from octavo.cli import chat, run_batch, serve
from octavo.cli.flags import Parser, config_from, with_hyphens
from octavo.cli.foreign_flags import FOREIGN_FLAGS
from octavo.cli.main import command_parser
from octavo.config import Config, all_options, make_config
from octavo.errors import ConfigError


def parser(command: str = "serve") -> Parser:
    made = command_parser(command)
    {"serve": serve, "chat": chat, "run-batch": run_batch}[command].add_flags(made)
    return made


def parse(*argv: str) -> argparse.Namespace:
    return parser().parse(argv)


def config(*argv: str) -> Config:
    return config_from(parse(*argv))


def refusal(*argv: str, command: str = "serve") -> str:
    with pytest.raises(ConfigError) as error:
        config_from(parser(command).parse(argv))
    return str(error.value)


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)


def test_no_flags_give_the_defaults() -> None:
    assert config() == Config()


def test_every_option_can_be_set_from_the_command_line() -> None:
    argv, expected = [], {}
    for name, option in all_options().items():
        match option.kind:
            case "switch":
                expected[name] = not option.default
                argv.append(("--no-" if option.default else "--") + name.replace("_", "-"))
                continue
            case "choice":
                text = value = option.choices[-1]
            case "json":
                text, value = '{"a": 1}', {"a": 1}
            case "list":
                text, value = "x", ("x",)
            case "integer":
                text, value = "7", 7
            case "number":
                text, value = "2.5", 2.5
            case "bytes":
                text, value = "2MiB", 2 * 2**20
            case "text":
                text = value = "some"
        expected[name] = value
        argv += [option.flag, text]
    assert config(*argv) == make_config(expected)


@pytest.mark.parametrize(
    "argv",
    [
        ["m", "--max-model-len", "64", "--no-enable-prefix-caching"],
        ["--max_model_len=64", "--no_enable_prefix_caching", "m"],
        ["--model", "m", "--max-model-len=64", "--no-enable-prefix-caching"],
        ["m", "--model=m", "--max-model-len", "1", "--max-model-len", "64", "--no-enable-prefix-caching"],
    ],
)
def test_spellings_of_the_same(argv: list[str]) -> None:
    assert config(*argv) == make_config({"model": "m", "max_model_len": 64, "enable_prefix_caching": False})


def test_a_flag_of_a_list_may_be_repeated() -> None:
    assert config("--api-key", "a", "--api-key", "b").server.api_key == ("a", "b")


def test_underscores_in_values_stay() -> None:
    words = ["--chat_template=my_file", "a_model", "--served-model-name", "a_b", "--", "--x_y"]
    assert with_hyphens(words) == ["--chat-template=my_file", "a_model", "--served-model-name", "a_b", "--", "--x_y"]


def test_the_command_line_wins_over_the_environment_and_both_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text('port = 1\napi_key = "file"\n[cache]\nblock_size = 8\n')
    monkeypatch.setenv("OCTAVO_API_KEY", "environment")
    from_file = config("--config", str(file), "--port", "2")
    assert (from_file.server.port, from_file.cache.block_size) == (2, 8)
    assert from_file.server.api_key == ("environment",)
    assert config("--config", str(file), "--api-key", "flag").server.api_key == ("flag",)


def test_an_option_given_as_its_default_still_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "octavo.toml"
    file.write_text("port = 1\nenable_prefix_caching = false\n")
    chosen = config("--config", str(file), "--port", "8000", "--enable-prefix-caching")
    assert (chosen.server.port, chosen.cache.enable_prefix_caching) == (8000, True)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-modle-len", "1"], "octavo serve has no --max-modle-len; did you mean --max-model-len? (see"),
        (["--max-model"], "octavo serve has no --max-model; did you mean --max-model-len?"),  # no abbreviations
        (["--qqqqqqqq"], "octavo serve has no --qqqqqqqq (see octavo serve --help)."),
        (["--port", "many"], "--port is many; it must be an integer of at least 0 and at most 65535."),
        (["--port"], "argument --port: expected one argument (see octavo serve --help)."),
        (["a", "b"], "unrecognized arguments: b (see octavo serve --help)."),
        (["a", "--model", "b"], "two models are given: a and --model b."),
        (
            ["--gpu-memory-utilization", "0.9"],
            "octavo serve has no --gpu-memory-utilization: use --kv-cache-memory-bytes",
        ),
        (["--gpu_memory_utilization=0.9"], "octavo serve has no --gpu-memory-utilization: use --kv-cache-memory-bytes"),
        (["-m", "x.gguf"], "octavo serve has no -m: give the model without a flag: octavo serve MODEL."),
        (["-hf", "x/y"], "octavo serve has no -hf: give the model without a flag"),
        (["-c", "4096"], "octavo serve has no -c: use --max-model-len N."),
        (["--tensor-parallel-size", "2"], "octavo serve has no --tensor-parallel-size: "),
    ],
)
def test_a_mistake_is_told_with_the_way_out(argv: list[str], message: str) -> None:
    assert refusal(*argv).startswith(message)


def test_a_flag_of_the_server_is_named_as_such_where_there_is_none() -> None:
    assert refusal("--port", "1", command="chat") == "--port is a flag of octavo serve, not of octavo chat."


def test_negative_numbers_are_values_not_flags() -> None:
    assert config("--seed", "-3").model.seed == -3


def test_flags_of_other_engines_do_not_shadow_ours_and_name_flags_that_exist() -> None:
    ours = set(parser().flags)
    assert not ours & set(FOREIGN_FLAGS)
    for flag, advice in FOREIGN_FLAGS.items():
        for word in advice.replace(";", " ").replace(",", " ").split():
            assert not word.startswith("--") or word in ours, f"{flag}: {word} is no flag"


def test_help_shows_defaults_and_bounds_its_width() -> None:
    text = parser().format_help()
    assert "--port N" in text and "(default: 8000)" in text
    assert "--enable-prefix-caching, --no-enable-prefix-caching" in text and "(default: on)" in text
    assert "{auto,float32,bfloat16,float16}" in text
    assert "(default: 8MiB)" in text
    assert max(map(len, text.splitlines())) <= 110


@pytest.mark.parametrize("command", ["serve", "chat", "run-batch"])
def test_every_flag_is_explained(command: str) -> None:
    for action in parser(command)._actions:
        assert action.help and action.help != argparse.SUPPRESS, action.option_strings
