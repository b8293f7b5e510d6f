"""The two command line options: a flag that switches, a file that configures."""

import argparse
import warnings

import pytest

from layerzero.arguments import add_arguments, config_from_args
from layerzero.config import LayerZeROConfig
from layerzero.errors import ConfigError


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "config.yml"
    path.write_text("zero3_size: 2\nparam_dtype: bf16\n")
    return str(path)


def parse(*command_line: str) -> LayerZeROConfig | None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-4)
    add_arguments(parser)
    return config_from_args(parser.parse_args(command_line))


def test_nothing_asked_for_gives_none_silently():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parse("--lr", "1") is None


def test_flag_alone_gives_the_defaults():
    assert parse("--layerzero") == LayerZeROConfig()


def test_flag_with_file_reads_it(config_file, tmp_path):
    assert parse("--layerzero", "--layerzero-config", config_file) == LayerZeROConfig(zero3_size=2, param_dtype="bf16")
    (tmp_path / "c.json").write_text('{"zero3_size": 16}')
    assert parse(f"--layerzero-config={tmp_path / 'c.json'}", "--layerzero") == LayerZeROConfig(zero3_size=16)


def test_file_without_flag_is_off_and_says_so(config_file):
    with pytest.warns(UserWarning, match=r"config\.yml is not used without --layerzero") as caught:
        assert parse("--layerzero-config", config_file) is None
    assert len(caught) == 1


def test_bad_file_is_an_error_only_with_the_flag(tmp_path):
    missing = str(tmp_path / "missing.yml")
    with pytest.raises(ConfigError, match=r"missing\.yml: no such file"):
        parse("--layerzero", "--layerzero-config", missing)
    with pytest.warns(UserWarning, match="not used"):
        assert parse("--layerzero-config", missing) is None


def test_returns_the_parser_and_may_be_called_twice():
    parser = argparse.ArgumentParser()
    assert add_arguments(parser) is parser
    assert add_arguments(parser) is parser
    assert parser.format_help().count("--layerzero-config PATH") == 2  # usage line and description
    assert parser.parse_args(["--layerzero"]).layerzero is True


def test_a_framework_that_defines_both_options_is_left_alone(config_file):
    parser = argparse.ArgumentParser()
    parser.add_argument("--layerzero", action="store_true", default=False)
    parser.add_argument("--layerzero-config", type=str)
    before = parser.format_help()
    add_arguments(parser)
    assert parser.format_help() == before
    config = config_from_args(parser.parse_args(["--layerzero", "--layerzero-config", config_file]))
    assert config is not None
    assert config.zero3_size == 2


@pytest.mark.parametrize(
    ("option", "dest"), [("--layerzero", None), ("--layerzero-config", None), ("--layerzero", "something")]
)
def test_an_option_taken_for_something_else_is_an_error(option, dest):
    parser = argparse.ArgumentParser()
    parser.add_argument(option, **({"dest": dest} if dest else {}))
    before = parser.format_help()
    with pytest.raises(ConfigError, match=rf"already has {option} for something else"):
        add_arguments(parser)
    assert parser.format_help() == before


def test_arguments_of_another_parser_are_an_error():
    with pytest.raises(ConfigError, match=r"lack --layerzero, --layerzero-config\. Call layerzero\.add_arguments"):
        config_from_args(argparse.Namespace(lr=1.0))
    with pytest.raises(ConfigError, match=r"lack --layerzero-config\."):
        config_from_args(argparse.Namespace(layerzero=True))


def test_both_options_under_other_names_are_an_error():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layerzero", dest="sharded", action="store_true")
    parser.add_argument("--layerzero-config")
    with pytest.raises(ConfigError, match="already has --layerzero, --layerzero-config for something else"):
        add_arguments(parser)
