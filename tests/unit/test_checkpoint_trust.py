"""A checkpoint may be a stranger's, or damaged: whatever is done to it, it is refused, or read as it says."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import shutil
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

import layerzero as lz
from layerzero.checkpoint import manifest, storage
from layerzero.checkpoint.manifest import seal
from layerzero.checkpoint.source import Source
from tests.unit.handmade import Handmade, documented_reader

BLOCK = 32
Contents = dict[tuple[str, str, str], bytes]


def as_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())


def read(folder: Path) -> Contents:
    """Everything in a checkpoint, through the library."""
    source = Source.open(folder)
    found: Contents = {}
    for name in source.manifest.tensors:
        for state in source.states.get(name, ()):
            found["model", name, state] = as_bytes(source.full(name, state))
    for name in source.manifest.extra_tensors:
        full = source.full(name, of="extra")
        if full.numel():
            found["extra", name, "value"] = as_bytes(full)
    m = source.manifest
    for value in (m.extra, *(m.rank_extra or ())):
        source.decode(value)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small checkpoint of several blocks; reading it may not allocate more than its own bytes at once."""
    monkeypatch.setattr(manifest, "BLOCK_NBYTES", BLOCK)
    monkeypatch.setattr(storage, "BLOCK_NBYTES", BLOCK)
    empty = torch.empty

    def bounded(*size: Any, **kwargs: Any) -> torch.Tensor:
        shape = size[0] if isinstance(size[0], (tuple, list)) else size
        assert prod(shape) <= 10_000, f"a tensor of shape {shape} was allocated"
        return empty(*size, **kwargs)

    made = Handmade().write(tmp_path / "original")
    monkeypatch.setattr(torch, "empty", bounded)
    return made


@pytest.fixture
def truth(folder: Path) -> Contents:
    found = read(folder)
    assert len(found) == 10 and sum(map(len, found.values())) > 400
    return found


class Outcomes:
    """Reads altered copies, and counts how they end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.refused: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self._copy = folder.parent.parent / "altered" / folder.name

    def of(self, kind: str, alter: Callable[[Path], None]) -> Contents | None:
        """What an altered copy holds for the library; None if it was refused."""
        if self._copy.exists():
            shutil.rmtree(self._copy)
        shutil.copytree(self.folder, self._copy)
        alter(self._copy)
        found, text = None, ""
        tracemalloc.start()
        try:
            found = read(self._copy)
        except lz.CheckpointError as error:
            text = str(error)
        finally:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 20 << 20, f"{kind}: {peak} bytes"
        if found is None:
            assert str(self._copy) in text and len(text) < 1500, text
        (self.accepted if found else self.refused)[kind] += 1
        return found


def altered_manifest(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """What an attacker does: change the content, and make its digest match."""

    def alter(folder: Path) -> None:
        path = folder / "manifest.json"
        content = json.loads(path.read_bytes())["content"]
        path.write_bytes(seal(json.dumps(change(content)).encode()))

    return alter


HOSTILE: list[Any] = [
    0, 1, -1, 3, 31, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 10**30, 10**400, 1.5, 1e300, float("nan"), float("inf"),
    True, None, "", "value", "exp_avg", "F64", "U8", "BF16", "emb", "a.weight", "extra", "../x", "/etc/passwd",
    "../original/x.safetensors", "rank-tp0-0.safetensors", "manifest.json", "\x00", "é", "x" * 5000, [], {}, [[]], [0],
    [2**62, 2**62],
    [0, 2**62, 2**62], [1] * 100, {"__tensor__": "extra.0"}, {"__tensor__": "emb"}, {"__number__": ["F64", [0] * 9]},
    {"__bytes__": "zz"}, {"": 1},
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every item in nested lists and dicts."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def mutate(content: Any, dice: random.Random) -> Any:
    """One or two changes at random places, of a kind that keeps it JSON."""
    for _ in range(dice.choice((1, 1, 1, 2))):
        everywhere = list(places(content))
        area = dice.choice(sorted({path[0] for path in everywhere}))  # else long lists get all of it
        path = dice.choice([p for p in everywhere if p[0] == area])
        parent, key = at(content, path[:-1]), path[-1]
        number = type(parent[key]) is int
        match dice.choice(("hostile", "hostile", "other", "near", "near", "near", "drop", "twice", "swap", "rename")):
            case "hostile":
                parent[key] = dice.choice(HOSTILE)
            case "near" if number:
                parent[key] += dice.choice((-8, -4, -2, -1, 1, 2, 4, 8))
            case "other":
                parent[key] = copy.deepcopy(at(content, dice.choice(everywhere)))
            case "drop":
                del parent[key]
            case "twice" if isinstance(parent, list):
                parent.insert(key, copy.deepcopy(parent[key]))
            case "swap":
                alike = [p for p in everywhere if len(p) == len(path) and p[-1] == key and p[:-1] != path[:-1]]
                other = at(content, (dice.choice(alike) if alike else path)[:-1])
                parent[key], other[key] = other[key], parent[key]
            case "rename" if isinstance(parent, dict):
                parent[dice.choice([*parent, "x", "emb", "__tuple__"])] = parent.pop(key)
            case _:
                parent[key] = None
    return content


def test_manifests_of_attackers(folder: Path, truth: Contents) -> None:
    """Random changes with a matching digest: refused, or the format's own reader finds the same in it."""
    outcomes = Outcomes(folder)
    reader = documented_reader(BLOCK)
    changed = 0
    for seed in range(400):
        found = outcomes.of("manifest", altered_manifest(lambda c, seed=seed: mutate(c, random.Random(seed))))
        if found is not None:
            told = reader["read_checkpoint"](outcomes._copy)
            assert found == {key: bytes(data) for key, data in told.items()}, seed
            changed += found != truth
    assert outcomes.refused["manifest"] > 200 and outcomes.accepted["manifest"] > 20
    assert changed < 20  # names that were exchanged, and the like: most of what is accepted alters no tensor


ATTACKS: dict[str, Callable[[Any], Any]] = {}


def attack(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    ATTACKS[change.__name__] = change
    return change


@attack
def a_huge_tensor_without_bytes(c: Any) -> None:
    c["tensors"]["emb"]["shape"] = c["spaces"][2]["entries"][1]["shape"] = [2**20, 2**20]
    c["spaces"][2]["numel"] = 2**45


@attack
def a_huge_tensor_without_elements(c: Any) -> None:
    c["tensors"]["none"]["shape"] = c["spaces"][2]["entries"][0]["shape"] = [0, 2**40, 2**40]


@attack
def a_huge_piece(c: Any) -> None:
    c["pieces"][0]["stop"] = 2**50
    c["spaces"][0]["numel"] = 2**50


@attack
def a_huge_file(c: Any) -> None:
    c["files"]["rank-tp0-0.safetensors"] = 2**62


@attack
def a_huge_shard(c: Any) -> None:
    c["tensors"]["a.weight"]["shape"] = [4, 2**60]
    c["spaces"][1]["entries"][0]["shape"] = [4, 2**60 - 3]


@attack
def no_checksums(c: Any) -> None:
    for piece in c["pieces"]:
        piece["crc32"] = None


@attack
def a_file_twice(c: Any) -> None:
    c["pieces"][1]["file"], c["pieces"][1]["key"] = c["pieces"][0]["file"], c["pieces"][0]["key"]


@attack
def a_file_outside(c: Any) -> None:
    c["files"]["../original/step-00000003/rank-tp0-0.safetensors"] = c["files"]["rank-tp0-0.safetensors"]


@attack
def another_dtype_of_the_same_size(c: Any) -> None:
    for piece in c["pieces"]:
        if piece["dtype"] == "F32":
            piece["dtype"] = "I32"


@attack
def overlapping_entries(c: Any) -> None:
    c["spaces"][2]["entries"][2]["start"] = 17


@attack
def overlapping_pieces(c: Any) -> None:
    c["pieces"][1]["start"] -= 1
    c["pieces"][1]["stop"] -= 1


@attack
def an_alias_that_hides_another(c: Any) -> None:
    c["tensors"]["norm"]["aliases"] = ["emb"]


@attack
def extra_data_that_asks_for_weights(c: Any) -> None:
    c["extra"] = {"__tensor__": "emb"}


@attack
def extra_data_that_is_no_encoding(c: Any) -> None:
    c["extra"] = {"a": [{"__number__": ["F32", [1.0] * 1000]}]}


@attack
def swapped_checksums(c: Any) -> None:
    c["pieces"][0]["crc32"], c["pieces"][2]["crc32"] = c["pieces"][2]["crc32"], c["pieces"][0]["crc32"]


@attack
def swapped_keys(c: Any) -> None:
    first, second = (p for p in c["pieces"] if p["file"] == "rank-tp0-1.safetensors" and p["stop"] == 18)
    first["key"], second["key"] = second["key"], first["key"]


@attack
def another_version(c: Any) -> None:
    c["version"] = 2


@attack
def shards_of_another_dim(c: Any) -> None:
    for space in c["spaces"][:2]:
        space["entries"][0]["dim"] = 0


@attack
def thousands_of_entries_over_all_pieces(c: Any) -> None:
    c["spaces"][2]["entries"] = [dict(c["spaces"][2]["entries"][1], name="emb") for _ in range(5_000)]


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks(folder: Path, name: str) -> None:
    def change(content: Any) -> Any:
        ATTACKS[name](content)
        return content

    assert Outcomes(folder).of(name, altered_manifest(change)) is None


def test_damage(folder: Path, truth: Contents) -> None:
    """Bytes that changed, without anybody making digests match: refused, or the values are those that were saved."""
    outcomes, dice = Outcomes(folder), random.Random(1)
    files = sorted(os.listdir(folder))
    tensors = [name for name in files if name.endswith(".safetensors")]

    def edit(kind: str, names: list[str], change: Callable[[bytearray], bytes | bytearray]) -> None:
        name = dice.choice(names)

        def alter(copy_: Path) -> None:
            data = bytearray((copy_ / name).read_bytes())
            (copy_ / name).write_bytes(change(data))

        found = outcomes.of(kind, alter)
        assert found is None or found == truth, (kind, name)

    def flip(data: bytearray) -> bytearray:
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        return data

    def zeros(data: bytearray) -> bytearray:
        at, numel = dice.randrange(len(data)), dice.randrange(1, 64)
        data[at : at + numel] = bytes(len(data[at : at + numel]))
        return data

    def move(data: bytearray) -> bytearray:
        a, b = sorted(dice.sample(range(len(data) + 1), 2))
        return data[:a] + data[b:] + data[a:b]

    def header(data: bytearray) -> bytearray:
        """As `flip`, where names, dtypes, shapes and offsets are."""
        at = dice.randrange(8 + int.from_bytes(data[:8], "little"))
        data[at] = dice.choice(b'0123456789[]{}",:aF\x00\xff')
        return data

    for _ in range(100):
        edit("flip", files, flip)
    for _ in range(40):
        edit("header", tensors, header)
        edit("move", files, move)
    for _ in range(25):
        edit("cut", files, lambda data: data[: dice.randrange(len(data))])
        edit("longer", files, lambda data: data + dice.randbytes(dice.randrange(1, 20)))
        edit("zeros", files, zeros)
    assert outcomes.refused["cut"] == outcomes.refused["longer"] == 25
    assert sum(outcomes.refused.values()) > 230
    assert sum(outcomes.accepted.values()) < 30  # metadata and the padding of headers, zeros over zeros


def test_files_moved_around(folder: Path, truth: Contents) -> None:
    outcomes = Outcomes(folder)
    names = [name for name in sorted(os.listdir(folder)) if name.endswith(".safetensors")]

    def swap(a: str, b: str) -> Callable[[Path], None]:
        def alter(copy_: Path) -> None:
            os.rename(copy_ / a, copy_ / "aside")
            os.rename(copy_ / b, copy_ / a)
            os.rename(copy_ / "aside", copy_ / b)

        return alter

    def replaced(name: str, put: Callable[[Path], object]) -> Callable[[Path], None]:
        def alter(copy_: Path) -> None:
            os.remove(copy_ / name)
            put(copy_ / name)

        return alter

    for a in names:
        for b in names:
            if a < b:
                assert outcomes.of("swap", swap(a, b)) is None
    for name in [*names, "manifest.json"]:
        original = folder / name
        assert outcomes.of("removed", replaced(name, lambda path: None)) is None
        assert outcomes.of("link", replaced(name, lambda path, o=original: path.symlink_to(o))) is None
        assert outcomes.of("folder", replaced(name, lambda path: path.mkdir())) is None
        assert outcomes.of("pipe", replaced(name, os.mkfifo)) is None
        assert outcomes.of("device", replaced(name, lambda path: path.symlink_to("/dev/zero"))) is None
        assert outcomes.of("hard link", replaced(name, lambda path, o=original: path.hardlink_to(o))) == truth
    assert outcomes.of("unlisted", lambda copy_: (copy_ / "notes.txt").touch()) == truth  # `verify` tells
    sparse = replaced(names[0], lambda path: os.truncate(_touched(path), 2**40))
    assert outcomes.of("sparse", sparse) is None


def _touched(path: Path) -> Path:
    path.touch()
    return path


def test_nothing_is_unpickled(folder: Path, truth: Contents, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    assert read(folder) == truth


def test_plain_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indices and files that no library of ours wrote."""
    from safetensors.torch import save_file

    save_file({"a": torch.arange(6.0).view(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.arange(3)}, tmp_path / "two.safetensors")
    good = {"a": "one.safetensors", "b": "two.safetensors"}
    index = tmp_path / "model.safetensors.index.json"

    def opened(text: Any) -> Source:
        index.write_text(text if isinstance(text, str) else json.dumps(text))
        return Source.open(tmp_path)

    for text in ({"weight_map": good}, {"metadata": {"total_size": 1}, "weight_map": good}):
        source = opened(text)
        assert torch.equal(source.full("a"), torch.arange(6.0).view(2, 3)) and torch.equal(
            source.full("b"), torch.arange(3)
        )
    for text in (
        "", "[]", "{}", "[" * 10**5, {"weight_map": []}, {"weight_map": {"a": 1}},
        {"weight_map": {"a": ["one.safetensors"]}},
        *({"weight_map": {**good, "b": name}} for name in (
            "../two.safetensors", "/two.safetensors", "..", ".", "", "two.bin", "a\\two.safetensors", "x\0.safetensors",
            "x/../two.safetensors", "y" * 300 + ".safetensors",
        )),
    ):  # fmt: skip
        with pytest.raises(lz.CheckpointError, match=r"model\.safetensors\.index\.json: not a usable index"):
            opened(text)
    with pytest.raises(lz.CheckpointError, match=r"three\.safetensors: can't be read"):
        opened({"weight_map": {**good, "b": "three.safetensors"}})
    with pytest.raises(
        lz.CheckpointError, match=r"one\.safetensors: tensor 'c' is not in it, though the index says so"
    ):
        opened({"weight_map": {**good, "c": "one.safetensors"}})
    index.unlink()
    save_file({"x" * 5000: torch.ones(1)}, tmp_path / "three.safetensors")
    with pytest.raises(lz.CheckpointError, match=r"three\.safetensors: tensor 'xx"):
        Source.open(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "three.safetensors")
    with pytest.raises(lz.CheckpointError, match=r"tensor 'a' is in another file too"):
        Source.open(tmp_path)
    (tmp_path / "three.safetensors").write_bytes(b"\x80\x04N.")
    with pytest.raises(lz.CheckpointError, match=r"three\.safetensors: not a usable safetensors file"):
        Source.open(tmp_path / "three.safetensors")
    (tmp_path / "link.safetensors").symlink_to("one.safetensors")  # as in caches of downloads
    assert Source.open(tmp_path / "link.safetensors").full("a").numel() == 6
