"""The manifest: bytes and back, and every inconsistency it names."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest

import layerzero as lz
from layerzero.checkpoint.manifest import Entry, Manifest, Piece, SortedPieces, dumps, loads, seal
from layerzero.layout import Range


def entry(name: str, start: int, shape: list[int], dim: int | None = None, offset: int = 0) -> dict[str, Any]:
    return {"name": name, "start": start, "shape": shape, "dim": dim, "offset": offset}


def piece(key: str, space: str, state: str, start: int, stop: int, file: str = "a.safetensors") -> dict[str, Any]:
    return {
        "file": file, "key": key, "space": space, "state": state, "dtype": "F32", "start": start, "stop": stop,
        "crc32": [7],
    }  # fmt: skip


def record(kind: str, shape: list[int], *aliases: str) -> dict[str, Any]:
    return {"kind": kind, "shape": shape, "trainable": kind == "parameter", "aliases": list(aliases)}


CONTENT: dict[str, Any] = {
    "format": "layerzero-checkpoint", "version": 1, "step": 5,
    "saved_by": {"layerzero": "0", "torch": "2", "world_size": 2, "sharding": "zero3"},
    "files": {"a.safetensors": 1000, "b.safetensors": 500},
    "tensors": {
        "w": record("parameter", [4, 3]), "b": record("parameter", [3], "b2"), "none": record("parameter", [0, 3]),
        "cut": record("parameter", [2, 5]), "buffer": record("buffer", []),
    },
    "extra_tensors": {"extra.0": record("extra", [2])},
    "spaces": [
        {"name": "s", "of": "model", "numel": 15,
         "entries": [entry("none", 0, [0, 3]), entry("w", 0, [4, 3]), entry("b", 12, [3])]},
        {"name": "cut@0", "of": "model", "numel": 6, "entries": [entry("cut", 0, [2, 3], 1, 0)]},
        {"name": "cut@1", "of": "model", "numel": 4, "entries": [entry("cut", 0, [2, 2], 1, 3)]},
        {"name": "buffer", "of": "model", "numel": 1, "entries": [entry("buffer", 0, [])]},
        {"name": "extra:", "of": "extra", "numel": 2, "entries": [entry("extra.0", 0, [2])]},
    ],
    "pieces": [
        piece("s", "s", "value", 0, 7), piece("s", "s", "value", 7, 15, "b.safetensors"),
        piece("m", "s", "exp_avg", 0, 15), piece("c0", "cut@0", "value", 0, 6), piece("c1", "cut@1", "value", 0, 4),
        piece("buffer", "buffer", "value", 0, 1), piece("extra", "extra:", "value", 0, 2),
    ],
    "optimizer": {"classes": ["Adam"], "groups": [{"params": ["w", "b"], "options": {"lr": 0.1}}],
                  "scalars": {"w": {"step": 1}}},
    "left_out": ["vae"], "extra": {"a": [1, None]}, "rank_extra": [None, 2],
}  # fmt: skip


def sealed(content: Any) -> bytes:
    return seal(json.dumps(content).encode())


def changed(path: str, value: Any = ...) -> bytes:
    """The content with one place replaced; without ``value`` removed; a function maps what is there."""
    content = copy.deepcopy(CONTENT)
    *parents, last = [int(p) if p.isdigit() else p for p in path.split("/")]
    place: Any = content
    for parent in parents:
        place = place[parent]
    if value is ...:
        del place[last]
    else:
        place[last] = value(place[last]) if callable(value) else value
    return sealed(content)


def refusal(data: bytes) -> str:
    with pytest.raises(lz.CheckpointError) as error:
        loads(data, "the/manifest.json")
    assert str(error.value).startswith("the/manifest.json: ")
    return str(error.value).removeprefix("the/manifest.json: ")


def append(item: Any) -> Any:
    return lambda items: [*items, item]


class TestBytes:
    def test_round_trip(self) -> None:
        manifest = loads(sealed(CONTENT), "x")
        assert loads(dumps(manifest), "x") == manifest
        assert json.loads(dumps(manifest))["content"] == json.loads(json.dumps(manifest.model_dump()))
        assert manifest.states() == {
            "w": {"value", "exp_avg"}, "b": {"value", "exp_avg"}, "cut": {"value"}, "buffer": {"value"},
        }  # fmt: skip

    def test_every_changed_byte_is_noticed(self) -> None:
        data = sealed(CONTENT)
        for at in range(0, len(data), 7):
            for bit in (1, 0x20, 0x80):
                altered = bytearray(data)
                altered[at] ^= bit
                assert re.match("its digest does not match|not a layerzero manifest", refusal(bytes(altered))), at
        for cut in (0, 1, 70, 90, len(data) // 2, len(data) - 1):
            refusal(data[:cut])
        refusal(data + b" ")
        refusal(b" " + data)

    @pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"null", b"\x80\x04N.", b'{"sha256": "", "content": {}}'])
    def test_something_else(self, data: bytes) -> None:
        assert refusal(data).startswith("not a layerzero manifest")

    def test_another_version(self) -> None:
        assert "format version '2', but this layerzero reads version 1" in refusal(changed("version", 2))
        assert "format version '[2]'" in refusal(sealed({"format": "layerzero-checkpoint", "version": [2]}))
        assert len(refusal(changed("version", "9" * 10**6))) < 300

    def test_another_format(self) -> None:
        assert "format" in refusal(changed("format", "other"))
        assert "version" in refusal(sealed({"format": "layerzero-checkpoint"}))


class TestTypes:
    @pytest.mark.parametrize(
        ("path", "value"),
        [
            ("step", -1), ("step", 2**63), ("step", 1.0), ("step", "1"), ("step", True), ("step", None), ("step", ...),
            ("files/a.safetensors", -1), ("files/a.safetensors", 10**400), ("files", []), ("files", None),
            ("tensors/w/shape", [-4, -3]), ("tensors/w/shape", "12"), ("tensors/w/shape", [1] * 65),
            ("tensors/w/trainable", 1),
            ("tensors/w/kind", "module"), ("tensors/w/aliases", "w2"), ("tensors/w/aliases", [""]),
            ("tensors/w/more", 1),
            ("spaces/0/numel", 2**70), ("spaces/0/of", "optimizer"), ("spaces/0/name", ""),
            ("spaces/0/name", "x" * 5000),
            ("spaces/0/entries/0/dim", -1), ("spaces/0/entries/0/start", float("nan")), ("spaces", {}), ("pieces", ...),
            ("pieces/0/dtype", "F99"), ("pieces/0/dtype", "f32"), ("pieces/0/crc32", [2**32]), ("pieces/0/crc32", [-1]),
            ("pieces/0/crc32", 7), ("pieces/0/start", 1e300), ("saved_by/world_size", "2"),
            ("optimizer/groups/0/options", []),
            ("optimizer/scalars", [[]]), ("more", 1), ("pieces/0/more", 1), ("left_out", "vae"),
        ],
    )  # fmt: skip
    def test_named(self, path: str, value: Any) -> None:
        assert path.split("/")[0] in refusal(changed(path, value))

    @pytest.mark.parametrize(
        "name",
        ["../a.safetensors", "/a.safetensors", "a/b.safetensors", ".a.safetensors", "a.bin", "a\\b.safetensors", "",
         "a.safetensors\n", "a\0.safetensors", "é.safetensors", f"{'a' * 300}.safetensors", "..safetensors"],
    )  # fmt: skip
    def test_files_elsewhere(self, name: str) -> None:
        assert "files" in refusal(changed("files", lambda files: {**files, name: 5}))
        assert "pieces.0.file" in refusal(changed("pieces/0/file", name))

    def test_errors_are_short(self) -> None:
        many = [{"file": "x" * 200} for _ in range(1000)]
        assert len(refusal(changed("pieces", many))) < 500
        assert len(refusal(changed("files", {"x" * 10**6: 5}))) < 700

    def test_deep_nesting(self) -> None:
        deep = b'{"format": "layerzero-checkpoint", "version": 1, "extra": ' + b"[" * 10**5 + b"]" * 10**5 + b"}"
        assert "recursion" in refusal(seal(deep))

    def test_huge_numbers(self) -> None:
        content = json.dumps(CONTENT).encode().replace(b'"step": 5', b'"step": ' + b"9" * 10**5)
        assert "number" in refusal(seal(content)).lower()

    @pytest.mark.parametrize(
        "path",
        ["extra", "optimizer", "version", "spaces/0/of", "spaces/0/entries/0/dim", "tensors/b/aliases",
         "saved_by/torch", "pieces/0/crc32", "optimizer/scalars"],
    )  # fmt: skip
    def test_fields_that_lack(self, path: str) -> None:
        field = path.split("/")[-1]
        assert re.search(f"lacks {field}|{field}': Field required", refusal(changed(path)))


class TestConsistency:
    @pytest.mark.parametrize(
        ("path", "value", "problem"),
        [
            ("spaces", append(CONTENT["spaces"][0]), "two spaces have the same name"),
            ("spaces/0/entries", append(entry("stranger", 15, [0])), "entry 'stranger' is no tensor"),
            ("spaces/4/of", "model", "entry 'extra.0' is no tensor"),
            ("spaces/0/entries/2/start", 11, "entry 'b' overlaps another or leaves the space"),
            ("spaces/0/entries/2/start", 13, "entry 'b' overlaps another or leaves the space"),
            ("spaces/0/entries/2/start", 2**62, "entry 'b' overlaps another or leaves the space"),
            ("spaces/0/entries/1/shape", [2**40, 2**40], "entry 'w' overlaps another or leaves the space"),
            ("spaces/0/numel", 14, "entry 'b' overlaps another or leaves the space"),
            ("tensors/none/shape", [0, 2**40, 2**40], "tensor 'none': no tensor can have shape"),
            ("tensors", lambda t: {**t, "lost": record("parameter", [1])}, "tensor 'lost' has no entry"),
            ("spaces/0/entries/1", entry("w", 0, [3, 4]), r"tensor 'w': entry of shape \(3, 4\), expected \(4, 3\)"),
            ("spaces/0/entries/1/offset", 1, "tensor 'w': entry of shape"),
            ("spaces/1/entries/0/dim", None, "tensor 'cut': its entries contradict"),
            ("spaces/1/entries/0/dim", 0, "tensor 'cut': its entries contradict"),
            ("spaces/0/entries/2/dim", 1, "tensor 'b': sharded along dim 1, but it has 1"),
            ("spaces/2/entries/0/offset", 2, "tensor 'cut': its shards along dim 1 leave a gap or overlap at 3"),
            ("spaces/2/entries/0/offset", 4, "tensor 'cut': its shards along dim 1 leave a gap or overlap at 3"),
            ("spaces/1/entries/0/shape", [3, 2], r"tensor 'cut': shard of shape \(3, 2\) along dim 1"),
            ("spaces/1/entries/0/shape", [6], r"tensor 'cut': shard of shape \(6,\) along dim 1"),
            ("tensors/cut/shape", [2, 6], "tensor 'cut': its shards cover 5 of 6 along dim 1"),
            ("tensors/b/aliases", ["w"], "tensor 'b': its alias 'w' is another tensor's name"),
            ("tensors/b/aliases", ["x", "x"], "tensor 'b': its alias 'x' is another tensor's name"),
            ("tensors/w/aliases", ["b2"], "its alias 'b2' is another tensor's name"),
            ("tensors/w/kind", "extra", "tensor 'w': of the model, but said to be extra"),
            ("extra_tensors/extra.0/kind", "buffer", "extra tensor 'extra.0': described as one of the model"),
            ("extra_tensors/extra.0/aliases", ["w"], "extra tensor 'extra.0': described as one of the model"),
            ("optimizer/groups/0/params", ["w", "x"], "a parameter 'x' that is no tensor"),
            ("optimizer/scalars", {"x": {}}, "a parameter 'x' that is no tensor"),
            ("pieces/0/space", "x", "piece 's' of a.safetensors: space 'x' does not exist"),
            ("pieces/0/file", "c.safetensors", "piece 's' of c.safetensors: the file is not listed"),
            ("files", {"a.safetensors": 1000}, "piece 's' of b.safetensors: the file is not listed"),
            ("pieces/2/key", "s", "piece 's' of a.safetensors is listed twice"),
            ("pieces/0/stop", 0, r"piece 's' of a.safetensors: range 0..0 is empty"),
            ("pieces/1/stop", 6, r"piece 's' of b.safetensors: range 7..6 is empty"),
            ("pieces/1/stop", 16, r"piece 's' of b.safetensors: range 7..16 is empty or leaves space 's'"),
            ("pieces/0/crc32", [], "piece 's' of a.safetensors: 0 checksums for 28 bytes"),
            ("pieces/0/crc32", [1, 2], "piece 's' of a.safetensors: 2 checksums for 28 bytes"),
            ("pieces/0/crc32", None, "piece 's' of a.safetensors has no checksums"),
            ("files/b.safetensors", 31, "b.safetensors: pieces of 32 bytes in a file of 31"),
            ("pieces/1/start", 6, "space 's': pieces of state 'value' overlap"),
            ("pieces/0/stop", 6, "tensor 'w': 11 of 12 elements of state 'value' are there"),
            ("pieces/2/stop", 13, "tensor 'b': 1 of 3 elements of state 'exp_avg' are there"),
            ("pieces/6/state", "exp_avg", "space 'extra:': extra data with a state 'exp_avg'"),
            ("pieces/0/state", "exp_avg", "space 's': pieces of state 'exp_avg' overlap"),
            ("pieces/0/dtype", "F16", "tensor 'w': state 'value' is stored in several dtypes"),
        ],
    )  # fmt: skip
    def test_named(self, path: str, value: Any, problem: str) -> None:
        assert re.search(problem, refusal(changed(path, value)))

    def test_states_may_be_absent(self) -> None:
        """Frozen parameters have no states; those of a neighbour may end where they begin."""
        assert loads(changed("pieces/2/stop", 12), "x").states()["b"] == {"value"}
        assert loads(changed("pieces/2"), "x").states()["w"] == {"value"}

    def test_checks_are_not_quadratic(self) -> None:
        """As many pieces as entries: comparing all with all would be 4e6 steps."""
        num = 2_000
        content: dict[str, Any] = {
            **CONTENT, "files": {"a.safetensors": num * 8}, "extra_tensors": {}, "optimizer": None,
            "tensors": {f"t{i}": record("parameter", [2]) for i in range(num)},
            "spaces": [{"name": "s", "of": "model", "numel": 2 * num,
                        "entries": [entry(f"t{i}", 2 * i, [2]) for i in range(num)]}],
            "pieces": [piece(f"p{i}", "s", "value", 2 * i, 2 * i + 2) for i in range(num)],
        }  # fmt: skip
        calls = 0
        original = Range.intersect

        def counted(self: Range, other: Range) -> Range:
            nonlocal calls
            calls += 1
            return original(self, other)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Range, "intersect", counted)
            manifest = loads(sealed(content), "x")
            assert len(manifest.states()) == num
        assert calls <= 2 * num


class TestSortedPieces:
    def test_overlapping(self) -> None:
        bounds = [(0, 3), (3, 4), (6, 9), (9, 12)]
        pieces = SortedPieces([Piece.model_validate(piece(str(a), "s", "value", a, b)) for a, b in reversed(bounds)])
        for start in range(14):
            for stop in range(start, 14):
                found = [(p.start, p.stop) for p in pieces.overlapping(Range(start, stop))]
                assert found == [(a, b) for a, b in bounds if max(a, start) < min(b, stop)]


def test_validated_on_construction_too() -> None:
    manifest = loads(sealed(CONTENT), "x")
    small = manifest.spaces[0].model_copy(update={"numel": 3})
    with pytest.raises(ValueError, match="overlaps another"):
        Manifest(**{**dict(manifest), "spaces": (small, *manifest.spaces[1:])})
    assert manifest.placement(manifest.spaces[1], manifest.spaces[1].entries[0]).offset == 0
    assert Entry(name="a", start=3, shape=(2, 2)).range == Range(3, 7)
