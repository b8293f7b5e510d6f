"""Reading configuration files: plain data out, repeated keys refused, nothing constructed or imported."""

from __future__ import annotations

import json
import os
import reprlib
from pathlib import Path
from typing import Any

import yaml

from layerzero.errors import ConfigError

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def show(value: object) -> str:
    """A value as an error names it: its repr, bounded in length whatever the file holds."""
    return _SHORT.repr(value)


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The single YAML document in a file, None if there is none.

    Raises:
        ConfigError: the file cannot be read, is not one safe YAML document, or repeats a key.
    """
    loader: yaml.SafeLoader | None = None
    try:
        loader = yaml.SafeLoader(_read_text(path))
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_repeated_keys(node, path)
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}.") from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a configuration.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}.") from None
    finally:
        if loader is not None:
            loader.dispose()


def read_json(path: str | os.PathLike[str]) -> Any:
    """The JSON value in a file, None if the file is empty.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or repeats a key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _repeated(str(path), key, f"values {show(found[key])} and {show(value)}")
            found[key] = value
        return found

    text = _read_text(path)
    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=unique)
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply to be a configuration.") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}.") from None


def _read_text(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file, seen from {Path.cwd()}. Give the path of a file that every rank can read."
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: expected UTF-8 text, got {error.reason} at byte {error.start}.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}.") from None


def _refuse_repeated_keys(root: yaml.Node, path: str | os.PathLike[str]) -> None:
    # On the nodes, not in the constructor: there, a key that overrides a merged one (`<<: *base`) looks
    # repeated. An alias may point back at a node that contains it, hence `seen`.
    stack, seen = [root], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            stack.extend(node.value)
        elif isinstance(node, yaml.MappingNode):
            first_lines: dict[tuple[str, str], int] = {}
            for key, value in node.value:
                stack.append(value)
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line = key.start_mark.line + 1
                identity = (key.tag, key.value)
                if identity in first_lines:
                    raise _repeated(f"{path}:{line}", key.value, f"lines {first_lines[identity]} and {line}")
                first_lines[identity] = line


def _repeated(where: str, key: str, at: str) -> ConfigError:
    return ConfigError(f"{where}: {key}: expected each key once, got it twice ({at}). Remove one of them.")
