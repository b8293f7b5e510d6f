"""`--layerzero --layerzero-config FILE` for command lines that already have an argparse parser."""

from __future__ import annotations

import argparse
import warnings

from layerzero.config import LayerZeROConfig
from layerzero.errors import ConfigError

_OPTIONS = {"--layerzero": "layerzero", "--layerzero-config": "layerzero_config"}


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the options `--layerzero` and `--layerzero-config PATH` to `parser` in a group of their own.

    Returns the parser, so that the function can serve as an `extra_args_provider` of Megatron's. A parser
    that has both options already, from an earlier call or from a framework that defines the same two, is left
    as it is.

    Raises:
        ConfigError: the parser has one of the two options, or has them for something else.
    """
    # argparse offers no public way to ask for an option; trying to add it would leave half a group behind.
    existing = {option: parser._option_string_actions.get(option) for option in _OPTIONS}
    if all(action is not None and action.dest == _OPTIONS[option] for option, action in existing.items()):
        return parser
    if taken := [option for option, action in existing.items() if action is not None]:
        raise ConfigError(
            f"the parser already has {', '.join(taken)} for something else. Rename that option, or pass the "
            "file to LayerZeROConfig.from_file without layerzero.add_arguments."
        )
    group = parser.add_argument_group("layerzero", "sharded data-parallel training")
    group.add_argument("--layerzero", action="store_true", help="shard the model, by default with hierarchical ZeRO")
    group.add_argument(
        "--layerzero-config",
        metavar="PATH",
        help="YAML or JSON file of LayerZeROConfig keys; needs --layerzero",
    )
    return parser


def config_from_args(args: argparse.Namespace) -> LayerZeROConfig | None:
    """The configuration that a command line asks for, or None without `--layerzero`.

    `--layerzero` alone gives the defaults. `--layerzero-config` alone gives None: launch scripts keep the
    file's path and switch the feature with the flag. A `UserWarning` says that the file was not used.

    Raises:
        ConfigError: the file cannot be used, or `args` comes from a parser without these options.
    """
    if missing := [option for option, dest in _OPTIONS.items() if not hasattr(args, dest)]:
        raise ConfigError(
            f"the parsed arguments lack {', '.join(missing)}. Call layerzero.add_arguments(parser) before parsing."
        )
    if not args.layerzero:
        if args.layerzero_config is not None:
            warnings.warn(
                f"--layerzero-config {args.layerzero_config} is not used without --layerzero: "
                "the model stays unsharded.",
                stacklevel=2,
            )
        return None
    if args.layerzero_config is None:
        return LayerZeROConfig()
    return LayerZeROConfig.from_file(args.layerzero_config)
