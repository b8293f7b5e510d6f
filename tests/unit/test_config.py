"""LayerZeROConfig: a MindSpeed file works unchanged, a mistake is named, a round trip changes nothing."""

import json
import pickle
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from layerzero.config import LayerZeROConfig
from layerzero.errors import ConfigError, LayerZeroError
from layerzero.sharding import STRATEGIES, Sharding

# Every key that MindSpeed documents or reads, each with a value other than its default.
MINDSPEED_FILE = """\
zero3_size: 4  # one node
transformer_layers:
  - mindspeed_mm.models.predictor.dits.sat_dit.VideoDiTBlock
  - mindspeed_mm.models.predictor.dits.mmdit.SingleStreamBlock
backward_prefetch: 'BACKWARD_POST'
backward_reduce_scatter: 'BACKWARD_POST'
param_dtype: "bf16"
reduce_dtype: "fp32"
buffer_dtype: "fp32"
ignored_modules:
  - ae
  - text_encoder
param_init_fn: null
forward_prefetch: False
limit_all_gathers: False
offload_grads: True
ckpt_load_path: /data/checkpoints/iter_100
autocast_input: False
autocast_output: False
"""
MINDSPEED_DEFAULTS = {
    "zero3_size": 8,
    "transformer_layers": None,
    "backward_prefetch": "BACKWARD_PRE",
    "backward_reduce_scatter": "BACKWARD_PRE",
    "param_dtype": "fp16",
    "reduce_dtype": "fp16",
    "buffer_dtype": None,
    "ignored_modules": None,
    "param_init_fn": None,
    "forward_prefetch": True,
    "limit_all_gathers": True,
    "offload_grads": False,
    "ckpt_load_path": None,
    "autocast_input": True,
    "autocast_output": True,
}
OUR_DEFAULTS = {
    "sharding": "layerzero",
    "accumulate": "shard",
    "min_num_params": None,
    "node_size": None,
    "prefetch_depth": 1,
    "keep_num_params": 0,
    "sync_module_states": True,
    "desync_check": False,
}


def write(folder: Path, text: str, name: str = "config.yml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(**values: object) -> str:
    """What the error says about one bad configuration."""
    with pytest.raises(ConfigError) as caught:
        LayerZeROConfig(**values)
    return str(caught.value)


# Reading


def test_mindspeed_file_works_unchanged(tmp_path):
    config = LayerZeROConfig.from_yaml(write(tmp_path, MINDSPEED_FILE))

    expected = yaml.safe_load(MINDSPEED_FILE)
    assert expected.keys() == MINDSPEED_DEFAULTS.keys()
    assert config.to_dict() == {**OUR_DEFAULTS, **expected}
    unchanged = [key for key in expected if expected[key] == MINDSPEED_DEFAULTS[key]]
    assert unchanged == ["param_init_fn"]  # a file cannot give it
    assert config.transformer_layers == tuple(expected["transformer_layers"])


def test_defaults_are_the_documented_ones():
    assert LayerZeROConfig().to_dict() == {**MINDSPEED_DEFAULTS, **OUR_DEFAULTS}


def test_every_key_is_described():
    assert all(field.description for field in LayerZeROConfig.model_fields.values())


@pytest.mark.parametrize("text", ["", "\n  \n", "# only a comment\n", "---\n", "\ufeff", "null\n"])
def test_empty_yaml_gives_defaults(tmp_path, text):
    assert LayerZeROConfig.from_yaml(write(tmp_path, text)) == LayerZeROConfig()


@pytest.mark.parametrize("text", ["", " \n", "{}", "null", "\ufeff{}"])
def test_empty_json_gives_defaults(tmp_path, text):
    assert LayerZeROConfig.from_json(write(tmp_path, text, "c.json")) == LayerZeROConfig()


@pytest.mark.parametrize("name", ["a.yml", "a.yaml", "a.YAML", "a.json"])
def test_from_file_goes_by_suffix(tmp_path, name):
    # Valid in both languages, except for the comment, which only YAML has.
    text = '{"zero3_size": 3}' + ("" if name.endswith("json") else " # c")
    assert LayerZeROConfig.from_file(str(write(tmp_path, text, name))).zero3_size == 3


def test_from_file_refuses_other_suffixes(tmp_path):
    with pytest.raises(ConfigError, match=r"a\.toml: expected a \.yml, \.yaml or \.json file, got suffix '\.toml'"):
        LayerZeROConfig.from_file(write(tmp_path, "zero3_size = 3", "a.toml"))


@pytest.mark.parametrize("reader", [LayerZeROConfig.from_yaml, LayerZeROConfig.from_json])
def test_missing_unreadable_and_binary_files(tmp_path, reader):
    with pytest.raises(ConfigError, match=r"nowhere\.yml: no such file, seen from .*every rank"):
        reader(tmp_path / "nowhere.yml")
    with pytest.raises(ConfigError, match="cannot be read"):
        reader(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        reader("a\0b.yml")
    (tmp_path / "binary.yml").write_bytes(b"zero3_size: \xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yml: expected UTF-8 text.* at byte 12"):
        reader(tmp_path / "binary.yml")


@pytest.mark.parametrize("text", ["- zero3_size", "layerzero", "7", "[]", "true"])
def test_top_level_must_be_a_mapping(tmp_path, text):
    with pytest.raises(ConfigError, match=r"config\.yml: expected a mapping of keys to values, got "):
        LayerZeROConfig.from_yaml(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("zero3_size: [1", r":1:\d+: not valid YAML"),
        ("zero3_size: 1\n\tparam_dtype: bf16", r":2:\d+: not valid YAML"),
        ("a: 1\n--- \nb: 2", r":2:1: not valid YAML"),
        (
            "zero3_size: !!python/object/apply:os.getcwd []",
            "not valid YAML: could not determine a constructor",
        ),
        ("ckpt_load_path: 2024-99-99", "not valid YAML"),
        ("? [zero3_size]\n: 1", "not valid YAML"),
        ("zero3_size: \x01", "not valid YAML"),
        ("[" * 1000, "nested too deeply"),
    ],
)
def test_invalid_yaml(tmp_path, text, where):
    with pytest.raises(ConfigError, match=rf"config\.yml.*{where}"):
        LayerZeROConfig.from_yaml(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("{'zero3_size': 1}", "not valid JSON.*line 1 column 2"),
        ('{"zero3_size": 1', "not valid JSON"),
        ("[" * 200_000, "nested too deeply"),
    ],
)
def test_invalid_json(tmp_path, text, where):
    with pytest.raises(ConfigError, match=rf"c\.json.*{where}"):
        LayerZeROConfig.from_json(write(tmp_path, text, "c.json"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zero3_size: 2\nparam_dtype: bf16\nzero3_size: 4", r"yml:3: zero3_size: .*twice \(lines 1 and 3\)"),
        ("zero3_size: 2\nzero3_size: 2", r"lines 1 and 2"),
        ("{zero3_size: 2, zero3_size: 4}", r"lines 1 and 1"),
        ("sharding:\n  params: 1\n  grads: 1\n  params: 2", r"yml:4: params: .*lines 2 and 4"),
        ('zero3_size: 2\n"zero3_size": 4', r"lines 1 and 2"),
    ],
)
def test_repeated_yaml_keys_are_refused(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        LayerZeROConfig.from_yaml(write(tmp_path, text))


def test_repeated_json_keys_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"c\.json: zero3_size: .*values 2 and 4"):
        LayerZeROConfig.from_json(write(tmp_path, '{"zero3_size": 2, "zero3_size": 4}', "c.json"))
    with pytest.raises(ConfigError, match="grads"):
        LayerZeROConfig.from_json(write(tmp_path, '{"sharding": {"grads": 1, "grads": 1}}', "c.json"))


def test_overriding_a_merged_yaml_key_is_no_repetition(tmp_path):
    text = "sharding:\n  <<: {params: 4, grads: 4, optimizer: all}\n  params: 2\n"
    config = LayerZeROConfig.from_yaml(write(tmp_path, text))
    assert config.sharding == Sharding(2, 4, "all")


def test_cyclic_yaml_alias_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="sharding: unknown degree 'self'"):
        LayerZeROConfig.from_yaml(write(tmp_path, "sharding: &it\n  self: *it\n"))


# Keys and values


@pytest.mark.parametrize(
    ("typo", "key"),
    [
        ("zero3_sise", "zero3_size"),
        ("zero3-size", "zero3_size"),
        ("ZERO3_SIZE", "zero3_size"),
        ("transformer_layer", "transformer_layers"),
        ("reduce_type", "reduce_dtype"),
        ("limit_all_gather", "limit_all_gathers"),
        ("prefetch_dept", "prefetch_depth"),
    ],
)
def test_unknown_key_names_the_nearest(tmp_path, typo, key):
    path = write(tmp_path, f"{typo}: 5\n")
    with pytest.raises(ConfigError) as caught:
        LayerZeROConfig.from_yaml(path)
    assert str(caught.value) == f"{path}: {typo}: unknown key, got 5. Did you mean {key!r}?"


def test_unknown_key_like_no_other_lists_the_known():
    message = refusal(qqqq=1)
    assert "qqqq: unknown key, got 1. Remove it; the known keys are" in message
    assert all(key in message for key in {**MINDSPEED_DEFAULTS, **OUR_DEFAULTS})


def test_all_problems_are_listed_together(tmp_path):
    text = "zero3_sise: 2\nzero3_size: 0\nparam_dtype: bf61\non: 1\nforward_prefetch: sometimes\n"
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        LayerZeROConfig.from_yaml(path)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path}: 5 problems:"
    assert {line.split(":")[0].removeprefix("  - ") for line in lines} == {
        "True",
        "zero3_size",
        "param_dtype",
        "forward_prefetch",
        "zero3_sise",
    }
    assert caught.value.problems == tuple(line.removeprefix("  - ") for line in lines)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("zero3_size", 0, "expected an integer >= 1, got 0"),
        ("zero3_size", -8, "got -8"),
        ("zero3_size", "8", "got '8'. Write a plain number"),
        ("zero3_size", 8.0, "got 8.0"),
        ("zero3_size", True, "got True"),
        ("zero3_size", None, "got None"),
        ("node_size", 0, "expected an integer >= 1, or null, got 0"),
        ("node_size", "null", "got 'null'"),
        ("min_num_params", 1.5, "got 1.5"),
        ("min_num_params", False, "got False"),
        ("prefetch_depth", -1, "expected an integer >= 0, got -1"),
        ("keep_num_params", "none", "expected an integer >= 0, or all, got 'none'. Write all for every unit"),
        ("keep_num_params", -1, "expected an integer >= 0, or all, got -1"),
        ("keep_num_params", False, "got False"),
        ("forward_prefetch", 1, "expected true or false, got 1"),
        ("forward_prefetch", "true", "got 'true'. Write it without quotes"),
        ("limit_all_gathers", None, "got None"),
        ("offload_grads", "no", "got 'no'"),
        ("autocast_input", 0, "got 0"),
        ("autocast_output", [], "got []"),
        ("sync_module_states", "y", "got 'y'"),
        ("desync_check", 2, "got 2"),
        ("backward_prefetch", "BACKWARD_PR", "one of BACKWARD_PRE, BACKWARD_POST, got 'BACKWARD_PR'"),
        ("backward_prefetch", "backward_post", "Did you mean 'BACKWARD_POST'?"),
        ("backward_reduce_scatter", None, "got None"),
        ("accumulate", "shards", "Did you mean 'shard'?"),
        ("accumulate", True, "one of shard, full, got True"),
        ("param_dtype", "bf61", "expected fp16, bf16 or fp32, or null, got 'bf61'. Did you mean 'bf16'?"),
        ("param_dtype", "bflaot16", "Did you mean 'bfloat16'?"),
        ("reduce_dtype", "fp64", "got 'fp64'. Did you mean 'fp16'?"),
        ("reduce_dtype", 16, "got 16"),
        ("buffer_dtype", torch.float64, "got torch.float64"),
        ("buffer_dtype", "None", "In YAML and JSON, none is written null"),
        ("transformer_layers", "Block", "got 'Block'. Write the module that defines it too"),
        ("transformer_layers", ["a.Block", 3], "got 3"),
        ("transformer_layers", ["a..Block"], "got 'a..Block'"),
        ("transformer_layers", {"a.Block": 1}, "expected a list of module.Class names"),
        ("transformer_layers", b"a.Block", "got b'a.Block'"),
        ("ignored_modules", [""], "expected a list of dotted attribute names"),
        ("ignored_modules", [" vae"], "got ' vae'"),
        ("ignored_modules", [None], "got None"),
        ("ignored_modules", 5, "got 5"),
        ("ckpt_load_path", "", "expected a path, or null, got ''"),
        ("ckpt_load_path", 3, "got 3"),
        ("param_init_fn", "models.init", "Nothing is imported from a configuration"),
        ("sharding", "layerzer", "Did you mean 'layerzero'?"),
        ("sharding", "zero-3", "got 'zero-3'. Did you mean 'zero3'?"),
        ("sharding", None, "expected one of ddp, zero1"),
        ("sharding", 3, "got 3"),
        (
            "sharding",
            {"params": 1, "grad": 1, "optimizer": 1},
            "unknown degree 'grad'. Did you mean 'grads'?",
        ),
        ("sharding", {"params": 1}, "Add grads, optimizer."),
        ("sharding", {"params": 0, "grads": 1, "optimizer": 1}, "expected params to be"),
        ("sharding", {"params": 1, "grads": "every", "optimizer": 1}, "got 'every'"),
        ("sharding", {"params": 1, "grads": 1, "optimizer": True}, "expected optimizer to be"),
    ],
)
def test_wrong_values_name_key_value_and_expectation(key, value, expected):
    message = refusal(**{key: value})
    assert message.startswith(f"LayerZeROConfig: {key}: ")
    assert expected in message
    assert "problems" not in message
    assert message[-1] in ".?"


def test_a_huge_value_is_shortened():
    assert len(refusal(param_dtype="x" * 100_000)) < 400
    assert len(refusal(zero3_size=list(range(100_000)))) < 400


@pytest.mark.parametrize(
    ("short", "dtype", "spellings"),
    [
        ("fp16", torch.float16, ["fp16", "float16", "half", "FP16", "torch.float16", torch.half]),
        ("bf16", torch.bfloat16, ["bf16", "bfloat16", "BFloat16", "torch.bfloat16", torch.bfloat16]),
        ("fp32", torch.float32, ["fp32", "float32", "float", "torch.float", torch.float]),
    ],
)
def test_dtype_spellings(short, dtype, spellings):
    for spelling in spellings:
        config = LayerZeROConfig(param_dtype=spelling, reduce_dtype=spelling, buffer_dtype=spelling)
        assert (config.param_dtype, config.reduce_dtype, config.buffer_dtype) == (short, short, short)
        assert config.param_torch_dtype is dtype
        assert config.reduce_torch_dtype is dtype
        assert config.buffer_torch_dtype is dtype


def test_null_dtypes():
    config = LayerZeROConfig(param_dtype=None)
    assert (config.param_dtype, config.reduce_dtype) == ("fp32", "fp16")
    config = LayerZeROConfig(param_dtype="bf16", reduce_dtype=None)
    assert (config.param_dtype, config.reduce_dtype) == ("bf16", "bf16")
    assert LayerZeROConfig(reduce_dtype=None).reduce_dtype == "fp16"
    assert config.buffer_torch_dtype is None


class Block(torch.nn.Module):
    """Stands for a user's layer."""


def test_names_as_one_name_a_sequence_or_classes():
    assert LayerZeROConfig(transformer_layers="a.b.Block").transformer_layers == ("a.b.Block",)
    assert LayerZeROConfig(transformer_layers=("a.B", "a.C")).transformer_layers == ("a.B", "a.C")
    assert LayerZeROConfig(transformer_layers=[]).transformer_layers is None
    assert LayerZeROConfig(transformer_layers=[Block]).transformer_layers == (f"{Block.__module__}.Block",)
    assert LayerZeROConfig(ignored_modules="vae").ignored_modules == ("vae",)
    assert LayerZeROConfig(ignored_modules=["a.0.b", "c"]).ignored_modules == ("a.0.b", "c")
    assert LayerZeROConfig(ckpt_load_path=Path("runs/a")).ckpt_load_path == "runs/a"


def test_names_are_not_imported(tmp_path, monkeypatch):
    (tmp_path / "explosive.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    config = LayerZeROConfig(transformer_layers=["explosive.Block"])
    assert config.transformer_layers == ("explosive.Block",)


# Sharding


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("accumulate", ["shard", "full"])
def test_strategies_resolve_to_degrees(name, accumulate):
    sharding = LayerZeROConfig(sharding=name.upper(), zero3_size=4, accumulate=accumulate).resolve_sharding()
    params, grads, optimizer = {
        "ddp": (1, 1, 1),
        "zero1": (1, 1, "all"),
        "zero2": (1, "all", "all"),
        "zero3": ("all", "all", "all"),
        "hsdp": (4, 4, 4),
        "mics": (4, 4, 4),
        "layerzero": (4, 4, "all"),
    }[name]
    assert sharding == Sharding(params, 1 if accumulate == "full" else grads, optimizer)


def test_explicit_degrees():
    degrees = {"params": 2, "grads": 4, "optimizer": "all"}
    config = LayerZeROConfig(sharding=degrees, zero3_size=16)
    assert config.resolve_sharding() == Sharding(2, 4, "all")
    assert LayerZeROConfig(sharding=Sharding(2, 4, "all"), zero3_size=16) == config
    assert config.to_dict()["sharding"] == degrees


def test_accumulate_may_not_contradict_explicit_degrees():
    message = refusal(sharding={"params": 2, "grads": 2, "optimizer": 4}, accumulate="full")
    assert message.startswith("LayerZeROConfig: accumulate: expected shard beside three degrees")
    assert LayerZeROConfig(sharding=Sharding(2, 1, 4), accumulate="full").resolve_sharding().grads == 1


# Values as objects


def test_frozen_hashable_picklable():
    config = LayerZeROConfig(zero3_size=2, transformer_layers=["a.B"], sharding=Sharding(1, 1, 2))
    with pytest.raises(ValueError, match="frozen"):
        config.zero3_size = 4
    assert config.zero3_size == 2
    assert hash(config) == hash(config.replace())
    assert pickle.loads(pickle.dumps(config)) == config


def test_replace_validates_and_leaves_the_original():
    config = LayerZeROConfig(zero3_size=2)
    assert config.replace(param_dtype="bfloat16") == LayerZeROConfig(zero3_size=2, param_dtype="bf16")
    assert config.param_dtype == "fp16"
    with pytest.raises(ConfigError, match="Did you mean 'zero3_size'"):
        config.replace(zero3_sizes=4)


def test_config_error_is_a_value_error():
    assert issubclass(ConfigError, ValueError)
    assert issubclass(ConfigError, LayerZeroError)
    error = pickle.loads(pickle.dumps(ConfigError("a: b", problems=["b"])))
    assert (str(error), error.problems) == ("a: b", ("b",))


def test_from_dict_takes_mappings_and_names_its_source():
    assert LayerZeROConfig.from_dict(OrderedDict(zero3_size=2)).zero3_size == 2
    with pytest.raises(ConfigError, match=r"^job 7: zero3_size: expected an integer >= 1, got 0"):
        LayerZeROConfig.from_dict({"zero3_size": 0}, source="job 7")
    with pytest.raises(ConfigError, match=r"^LayerZeROConfig: 8: expected keys to be text, got int"):
        LayerZeROConfig.from_dict({8: 1})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="expected a mapping"):
        LayerZeROConfig.from_dict([("zero3_size", 2)])  # pyright: ignore[reportArgumentType]


# Writing


def initialise(module: torch.nn.Module) -> None:
    module.reset_parameters()


def test_a_callable_is_kept_and_cannot_be_written(tmp_path):
    config = LayerZeROConfig(param_init_fn=initialise)
    assert config.param_init_fn is initialise
    assert config.replace(zero3_size=2).param_init_fn is initialise
    with pytest.raises(ConfigError, match=r"param_init_fn: .*initialise.*cannot be written"):
        config.to_dict()
    with pytest.raises(ConfigError, match="cannot be written"):
        config.to_yaml(tmp_path / "c.yml")
    assert not (tmp_path / "c.yml").exists()


def test_param_init_fn_in_a_file_is_refused(tmp_path):
    path = write(tmp_path, "param_init_fn: torch.nn.init.zeros_")
    with pytest.raises(ConfigError, match=r"config\.yml: param_init_fn: expected null.*got 'torch.nn.init.zeros_'"):
        LayerZeROConfig.from_yaml(path)


WORDS = st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True)
CLASS_NAMES = st.lists(WORDS, min_size=2, max_size=4).map(".".join)
MODULE_NAMES = st.lists(WORDS | st.integers(0, 99).map(str), min_size=1, max_size=4).map(".".join)
DTYPES = st.sampled_from(["fp16", "bf16", "fp32", "float16", "half", "bfloat16", torch.float32, None])
DEGREE = st.integers(1, 512) | st.just("all")
PATHS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
TIMINGS = st.sampled_from(["BACKWARD_PRE", "BACKWARD_POST"])
OPTIONAL_COUNTS = st.none() | st.integers(1, 2**40)
VALUES = {
    "zero3_size": st.integers(1, 4096),
    "transformer_layers": st.none() | CLASS_NAMES | st.lists(CLASS_NAMES, max_size=3),
    "backward_prefetch": TIMINGS,
    "backward_reduce_scatter": TIMINGS,
    "param_dtype": DTYPES,
    "reduce_dtype": DTYPES,
    "buffer_dtype": DTYPES,
    "ignored_modules": st.none() | MODULE_NAMES | st.lists(MODULE_NAMES, max_size=3),
    "param_init_fn": st.none(),
    "forward_prefetch": st.booleans(),
    "limit_all_gathers": st.booleans(),
    "offload_grads": st.booleans(),
    "ckpt_load_path": st.none() | PATHS,
    "autocast_input": st.booleans(),
    "autocast_output": st.booleans(),
    "sharding": st.sampled_from(STRATEGIES)
    | st.fixed_dictionaries({"params": DEGREE, "grads": DEGREE, "optimizer": DEGREE}),
    "accumulate": st.just("shard"),
    "min_num_params": OPTIONAL_COUNTS,
    "node_size": OPTIONAL_COUNTS,
    "prefetch_depth": st.integers(0, 16),
    "keep_num_params": st.integers(0, 10**12) | st.just("all"),
    "sync_module_states": st.booleans(),
    "desync_check": st.booleans(),
}


@settings(deadline=None, max_examples=60)
@given(values=st.fixed_dictionaries({}, optional=VALUES))
def test_round_trips_are_identities(tmp_path_factory, values):
    folder = tmp_path_factory.mktemp("round_trip", numbered=True)
    config = LayerZeROConfig(**values)
    plain = config.to_dict()

    assert LayerZeROConfig.from_dict(plain) == config
    assert LayerZeROConfig.from_dict(plain).to_dict() == plain
    text = config.to_yaml(folder / "config.yml")
    assert LayerZeROConfig.from_file(folder / "config.yml") == config
    assert yaml.safe_load(text) == plain
    (folder / "config.json").write_text(json.dumps(plain))
    assert LayerZeROConfig.from_file(folder / "config.json") == config
    assert list(plain) == list(LayerZeROConfig.model_fields)
    # Not vacuous: a key that differs makes configurations differ.
    assert config.replace(zero3_size=config.zero3_size + 1) != config


def test_round_trip_strategy_covers_every_key():
    assert VALUES.keys() == LayerZeROConfig.model_fields.keys()


@pytest.mark.parametrize("path", ["\x85", "a\u2028b", "\ufeffx", "数据/步", "\xa0", "\U0001f600"])
def test_paths_with_unusual_characters_survive_yaml(tmp_path, path):
    config = LayerZeROConfig(ckpt_load_path=path)
    config.to_yaml(tmp_path / "config.yml")
    assert LayerZeROConfig.from_yaml(tmp_path / "config.yml") == config
