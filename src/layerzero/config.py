"""LayerZeROConfig: how a model is sharded, as one frozen value read from YAML, JSON or Python.

The keys of a MindSpeed LayerZeRO file keep their names, meaning and defaults, so that such a file works
unchanged; the keys after `autocast_output` are layerzero's own. Reading a configuration never imports or
runs anything that it names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from layerzero._config_checks import (
    DEGREES,
    TORCH_DTYPES,
    Accumulate,
    ClassNames,
    Count,
    CountOrAll,
    DType,
    Flag,
    InitFunction,
    ModuleNames,
    NonNegative,
    OptionalCount,
    OptionalDType,
    OptionalPath,
    ShardingChoice,
    Timing,
    nearest,
)
from layerzero._config_file import read_json, read_yaml, show
from layerzero.errors import ConfigError
from layerzero.sharding import Sharding


def _key(default: Any, description: str) -> Any:
    return Field(default=default, description=description)


class LayerZeROConfig(BaseModel):
    """How a model is sharded and trained; immutable, comparable, equal after a round trip.

    Read one with `from_yaml`, `from_json`, `from_file` or `from_dict`, or pass keys by name. Dtypes are held
    as "fp16", "bf16" or "fp32" and accepted in torch's spellings or as `torch.dtype`; lists are held as
    tuples, and an empty list is the same as null. `LayerZeROConfig.model_fields[key].description` says what a
    key means.

    Raises:
        ConfigError: unknown keys or unusable values, all of them listed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    zero3_size: Count = _key(8, "Ranks in a ZeRO-3 group, usually one node; divides the data-parallel size.")
    transformer_layers: ClassNames = _key(None, "Classes that become units, matched by name, never imported.")
    backward_prefetch: Timing = _key("BACKWARD_PRE", "Gather the next unit before or after this backward.")
    backward_reduce_scatter: Timing = _key("BACKWARD_PRE", "When the reduction of a unit is issued.")
    param_dtype: DType = _key("fp16", "Compute dtype of parameters; null means fp32, no mixed precision.")
    reduce_dtype: DType = _key("fp16", "Dtype of gradients on the wire; null means the same as param_dtype.")
    buffer_dtype: OptionalDType = _key(None, "Dtype of floating-point buffers; null leaves them as they are.")
    ignored_modules: ModuleNames = _key(None, "Dotted attribute names that are not sharded, cast or reduced.")
    param_init_fn: InitFunction = _key(None, "How to materialise meta parameters; from Python only.")
    forward_prefetch: Flag = _key(True, "Gather the next units while the current one computes its forward.")
    limit_all_gathers: Flag = _key(True, "Bound the number of unsharded units alive at once.")
    offload_grads: Flag = _key(False, "Keep accumulated gradients in host memory between micro-batches.")
    ckpt_load_path: OptionalPath = _key(None, "Checkpoint to resume from.")
    autocast_input: Flag = _key(True, "Cast floating-point inputs to param_dtype.")
    autocast_output: Flag = _key(True, "Cast floating-point outputs to fp32.")

    sharding: ShardingChoice = _key(
        "layerzero",
        "A strategy, or the three degrees {params, grads, optimizer}, each a number of ranks or all.",
    )
    accumulate: Accumulate = _key("shard", "Accumulate gradient shards or full gradients between micro-batches.")
    min_num_params: OptionalCount = _key(None, "Modules with at least this many parameters become units.")
    node_size: OptionalCount = _key(None, "Ranks per node; null finds it from the launcher.")
    prefetch_depth: NonNegative = _key(1, "How many units ahead are gathered; 0 gathers on demand.")
    keep_num_params: CountOrAll = _key(
        0, "Up to so many parameters, or all, stay unsharded between uses within an optimizer step."
    )
    sync_module_states: Flag = _key(True, "Broadcast rank 0's parameters and buffers at the start.")
    desync_check: Flag = _key(False, "Compare the order of units between ranks always, not only at first.")

    def __init__(self, **values: Any) -> None:
        # Wider than the fields' types on purpose: a torch.dtype, a Path or a single name is accepted too.
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _config_error(_problems(error), None) from None

    @field_validator("param_dtype", "reduce_dtype", mode="before")
    @classmethod
    def _fill_null_dtype(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("param_dtype", "fp32") if value is None else value

    @model_validator(mode="after")
    def _accumulate_agrees_with_degrees(self) -> LayerZeROConfig:
        if isinstance(self.sharding, Sharding) and self.accumulate == "full" and self.sharding.grads != 1:
            raise ValueError(
                f"accumulate: expected shard beside three degrees, got 'full' with grads "
                f"{self.sharding.grads!r}. Write grads: 1 in sharding to accumulate full gradients."
            )
        return self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str | os.PathLike[str] | None = None) -> LayerZeROConfig:
        """Build a configuration from a mapping of keys to values.

        Args:
            values: keys that are absent take their defaults.
            source: the file the mapping came from, named in errors.

        Raises:
            ConfigError: not a mapping, unknown keys or unusable values, all of them listed.
        """
        if not isinstance(values, Mapping):
            raise _config_error([_not_a_mapping(values)], source)
        problems = [
            f"{show(key)}: expected keys to be text, got {type(key).__name__}. Quote or remove it."
            for key in values
            if not isinstance(key, str)
        ]
        try:
            config = cls(**{key: value for key, value in values.items() if isinstance(key, str)})
        except ConfigError as error:
            raise _config_error([*problems, *error.problems], source) from None
        if problems:
            raise _config_error(problems, source)
        return config

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> LayerZeROConfig:
        """Read a YAML file; an empty one gives the defaults.

        Raises:
            ConfigError: the file cannot be read, is not YAML, repeats a key, or holds unknown keys or unusable
                values.
        """
        return cls._from_document(read_yaml(path), path)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> LayerZeROConfig:
        """Read a JSON file; an empty one gives the defaults.

        Raises:
            ConfigError: the file cannot be read, is not JSON, repeats a key, or holds unknown keys or unusable
                values.
        """
        return cls._from_document(read_json(path), path)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> LayerZeROConfig:
        """Read a `.yml`, `.yaml` or `.json` file.

        Raises:
            ConfigError: another suffix, or what `from_yaml` and `from_json` raise.
        """
        suffix = Path(path).suffix.lower()
        if suffix in (".yml", ".yaml"):
            return cls.from_yaml(path)
        if suffix == ".json":
            return cls.from_json(path)
        raise ConfigError(f"{path}: expected a .yml, .yaml or .json file, got suffix {suffix!r}. Rename the file.")

    @classmethod
    def _from_document(cls, document: Any, path: str | os.PathLike[str]) -> LayerZeROConfig:
        return cls.from_dict({} if document is None else document, path)

    def replace(self, **changes: Any) -> LayerZeROConfig:
        """A copy with some keys changed, validated like a new configuration.

        Raises:
            ConfigError: unknown keys or unusable values, all of them listed.
        """
        return type(self)(**{**{name: getattr(self, name) for name in self.model_fields_set}, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Every key with its value as plain text, numbers, booleans, lists and dicts; `from_dict` inverts it.

        Raises:
            ConfigError: `param_init_fn` is a callable, which cannot be written.
        """
        if self.param_init_fn is not None:
            raise ConfigError(
                f"param_init_fn: expected null, got {show(self.param_init_fn)}. A callable cannot be written: "
                "write config.replace(param_init_fn=None), and give it again from Python after reading."
            )
        return {name: _plain(getattr(self, name)) for name in type(self).model_fields}

    def to_yaml(self, path: str | os.PathLike[str] | None = None) -> str:
        """The configuration as YAML text, also written to `path` (UTF-8) if given; `from_yaml` inverts it.

        Raises:
            ConfigError: `param_init_fn` is a callable, which cannot be written.
        """
        # ASCII: PyYAML writes some non-ASCII characters, such as U+0085, in a way it does not read back.
        text = yaml.safe_dump(self.to_dict(), sort_keys=False)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text

    @property
    def param_torch_dtype(self) -> torch.dtype:
        """`param_dtype` as a `torch.dtype`."""
        return TORCH_DTYPES[self.param_dtype]

    @property
    def reduce_torch_dtype(self) -> torch.dtype:
        """`reduce_dtype` as a `torch.dtype`."""
        return TORCH_DTYPES[self.reduce_dtype]

    @property
    def buffer_torch_dtype(self) -> torch.dtype | None:
        """`buffer_dtype` as a `torch.dtype`, or None where buffers keep theirs."""
        return None if self.buffer_dtype is None else TORCH_DTYPES[self.buffer_dtype]

    def resolve_sharding(self) -> Sharding:
        """The three degrees that `sharding`, `zero3_size` and `accumulate` stand for.

        A strategy with groups takes their size from `zero3_size`; explicit degrees are returned as they are.
        """
        if isinstance(self.sharding, Sharding):
            return self.sharding
        return Sharding.named(self.sharding, size=self.zero3_size, accumulate=self.accumulate)


def _plain(value: Any) -> Any:
    if isinstance(value, Sharding):
        return {degree: getattr(value, degree) for degree in DEGREES}
    return list(value) if isinstance(value, tuple) else value


def _not_a_mapping(value: object) -> str:
    return f"expected a mapping of keys to values, got {show(value)}. Write one `key: value` per line."


def _problems(error: ValidationError) -> list[str]:
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = tuple(LayerZeROConfig.model_fields)
            advice = nearest(key, known, f"Remove it; the known keys are {', '.join(known)}.")
            lines.append(f"{key}: unknown key, got {show(item['input'])}. {advice}")
            continue
        cause = item.get("ctx", {}).get("error")
        text = str(cause) if cause is not None else f"{item['msg']}, got {show(item['input'])}"
        lines.append(f"{key}: {text}" if key else text)
    return lines


def _config_error(problems: Sequence[str], source: str | os.PathLike[str] | None) -> ConfigError:
    where = "LayerZeROConfig" if source is None else os.fspath(source)
    if len(problems) == 1:
        return ConfigError(f"{where}: {problems[0]}", problems=problems)
    listed = "".join(f"\n  - {problem}" for problem in problems)
    return ConfigError(f"{where}: {len(problems)} problems:{listed}", problems=problems)
