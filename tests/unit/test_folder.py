"""Names of steps, the latest one, what is taken for a checkpoint, and how a step becomes visible and goes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import layerzero as lz
from layerzero.checkpoint import folder as folders
from layerzero.checkpoint.folder import commit, latest_step, open_draft, read_manifest, resolve, step_name, steps
from layerzero.checkpoint.manifest import Manifest, SavedBy


def manifest(step: int, **files: int) -> Manifest:
    saved_by = SavedBy(layerzero="", torch="", world_size=1, sharding="")
    named = {f"{name}.safetensors": nbytes for name, nbytes in files.items()}
    return Manifest(step=step, saved_by=saved_by, files=named, tensors={}, spaces=(), pieces=())


def save(root: Path, step: int, keep: int | None = None, overwrite: bool = False, content: bytes = b"12345") -> Path:
    draft = open_draft(root, step, overwrite)
    (draft / "a.safetensors").write_bytes(content)
    folder = commit(draft, manifest(step, a=len(content)), keep)
    os.utime(folder / "manifest.json", ns=(1, 10**9 * len(os.listdir(root)) + step))  # saved in the order of the calls
    return folder


class TestSteps:
    def test_ascending_and_nothing_else(self, tmp_path: Path) -> None:
        assert steps(tmp_path) == steps(tmp_path / "absent") == [] and latest_step(tmp_path) is None
        for step in (100, 7, 123456789):
            save(tmp_path, step)
        for name in ("step-7", "step-0000000008", "step-x0000009", "step-00000010", "step-٠٠٠٠٠٠١١", "other"):
            (tmp_path / name).mkdir()
            if name != "step-00000010":  # that one has no manifest
                (tmp_path / name / "manifest.json").write_text("{}")
        (tmp_path / "step-00000012").write_text("a file")
        (tmp_path / "step-00000013").symlink_to(step_name(7))
        assert steps(tmp_path) == [7, 100, 123456789]
        (tmp_path / "step-00000014" / "manifest.json").mkdir(parents=True)  # damaged: not to be passed over
        assert steps(tmp_path) == [7, 14, 100, 123456789]
        assert steps(tmp_path / "step-00000012") == []

    @pytest.mark.parametrize(
        "content",
        [
            "step-00000100\n",
            "step-00000100",
            "step-00000099\n",
            "../step-00000100",
            "step-100",
            "",
            "\x00",
            "x" * 70,
            "é",
        ],
    )
    def test_latest(self, tmp_path: Path, content: str) -> None:
        for step in (100, 300):
            save(tmp_path, step)
        (tmp_path / "latest").write_text(content)
        assert latest_step(tmp_path) == (100 if content.strip() == "step-00000100" else 300)

    def test_latest_that_is_no_file(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        save(tmp_path, 2)
        (tmp_path / "elsewhere").write_text("step-00000001")
        os.remove(tmp_path / "latest")
        (tmp_path / "latest").symlink_to("elsewhere")
        assert latest_step(tmp_path) == 2
        os.remove(tmp_path / "latest")
        (tmp_path / "latest").mkdir()
        assert latest_step(tmp_path) == 2

    def test_latest_is_the_one_saved_last(self, tmp_path: Path) -> None:
        save(tmp_path, 9)
        save(tmp_path, 3)
        assert latest_step(tmp_path) == 3 and resolve(tmp_path, None) == tmp_path / step_name(3)
        assert (tmp_path / "latest").read_text() == "step-00000003\n"


class TestResolve:
    def test_what_is_found(self, tmp_path: Path) -> None:
        folder = save(tmp_path, 4)
        save(tmp_path, 5)
        assert resolve(tmp_path, None) == tmp_path / step_name(5) and resolve(tmp_path, 4) == folder
        assert resolve(folder, None) == folder
        (tmp_path / "best").symlink_to(folder)  # the user's own link
        assert resolve(tmp_path / "best", None) == tmp_path / "best"
        assert read_manifest(resolve(tmp_path / "best", None)).step == 4

    def test_what_is_not(self, tmp_path: Path) -> None:
        save(tmp_path, 4)
        for path, step, problem in (
            (tmp_path, 5, "holds no step 5; there: 4"), (tmp_path / "x", None, "no such folder"),
            (tmp_path / step_name(4), 4, "holds no step 4; there: none"), (tmp_path / "a\0b", None, "no such folder"),
            (tmp_path / "latest", None, "no such folder"),
        ):  # fmt: skip
            with pytest.raises(lz.CheckpointError, match=re.escape(problem)):
                resolve(path, step)
        (tmp_path / "empty").mkdir()
        with pytest.raises(lz.CheckpointError, match="holds no checkpoint"):
            resolve(tmp_path / "empty", None)

    def test_manifest_that_is_a_link_or_too_large(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = save(tmp_path, 4)
        os.rename(folder / "manifest.json", tmp_path / "moved")
        (folder / "manifest.json").symlink_to(tmp_path / "moved")
        with pytest.raises(lz.CheckpointError, match=r"step-00000004/manifest\.json: not a plain file"):
            read_manifest(resolve(tmp_path, 4))
        os.remove(folder / "manifest.json")
        os.rename(tmp_path / "moved", folder / "manifest.json")
        monkeypatch.setattr(folders, "_MAX_MANIFEST_NBYTES", 10)
        with pytest.raises(lz.CheckpointError, match=r"bytes is no manifest"):
            read_manifest(folder)


class TestCommit:
    def test_visible_at_once_and_nothing_is_left(self, tmp_path: Path) -> None:
        draft = open_draft(tmp_path / "run", 3, overwrite=False)
        (draft / "a.safetensors").write_bytes(b"12")
        assert steps(tmp_path / "run") == []
        folder = commit(draft, manifest(3, a=2), None)
        assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step-00000003"]
        assert sorted(os.listdir(folder)) == ["a.safetensors", "manifest.json"]
        assert read_manifest(folder) == manifest(3, a=2)

    @pytest.mark.parametrize("content", [None, b"1"])
    def test_not_without_every_file_in_full(self, tmp_path: Path, content: bytes | None) -> None:
        draft = open_draft(tmp_path, 3, overwrite=False)
        if content is not None:
            (draft / "a.safetensors").write_bytes(content)
        with pytest.raises(lz.CheckpointError, match=r"a\.safetensors: (can't be read|1 bytes, expected 2)"):
            commit(draft, manifest(3, a=2), None)
        folders.discard(draft)
        assert os.listdir(tmp_path) == []

    def test_a_step_that_exists(self, tmp_path: Path) -> None:
        save(tmp_path, 3)
        with pytest.raises(lz.CheckpointError, match=r"exists already.*overwrite=True"):
            open_draft(tmp_path, 3, overwrite=False)
        save(tmp_path, 3, overwrite=True, content=b"new")
        assert (tmp_path / step_name(3) / "a.safetensors").read_bytes() == b"new"
        assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000003"]

    @pytest.mark.parametrize("killed", [False, True])
    def test_the_old_one_comes_back_if_it_could_not_be_replaced(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
    ) -> None:
        save(tmp_path, 3)
        original, step = os.rename, tmp_path / step_name(3)

        def rename(source: Path, target: Path) -> None:
            if target == step and "replaced" not in source.name:
                raise KeyboardInterrupt if killed else OSError(5, "Input/output error")
            original(source, target)

        monkeypatch.setattr(os, "rename", rename)
        with pytest.raises(KeyboardInterrupt if killed else OSError):
            save(tmp_path, 3, overwrite=True, content=b"new")
        assert step.exists() is not killed  # a killed process puts nothing back
        monkeypatch.undo()
        folders.recover(tmp_path)
        assert (step / "a.safetensors").read_bytes() != b"new" and latest_step(tmp_path) == 3

    def test_the_old_one_goes_after_the_new_one_is_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(tmp_path, 3)
        seen = []
        original = folders._delete

        def delete(path: Path) -> None:
            if os.path.lexists(path):
                seen.append((path.name, (tmp_path / step_name(3) / "a.safetensors").read_bytes()))
            original(path)

        monkeypatch.setattr(folders, "_delete", delete)
        save(tmp_path, 3, overwrite=True, content=b"new")
        assert seen == [(".layerzero-tmp-replaced-step-00000003", b"new")]

    @pytest.mark.parametrize(
        ("keep", "left"), [(1, [4]), (2, [4, 20]), (3, [4, 7, 20]), (9, [4, 7, 9, 20]), (None, [4, 7, 9, 20])]
    )
    def test_retention_counts_by_time(self, tmp_path: Path, keep: int | None, left: list[int]) -> None:
        for step in (9, 7, 20):
            save(tmp_path, step)
        (tmp_path / "notes").mkdir()
        save(tmp_path, 4, keep=keep)
        assert steps(tmp_path) == left and latest_step(tmp_path) == 4
        assert {"notes", "latest"} == {n for n in os.listdir(tmp_path) if not n.startswith("step-")}


class TestRemains:
    def test_of_killed_saves_are_removed(self, tmp_path: Path) -> None:
        save(tmp_path, 1)
        left = open_draft(tmp_path, 2, overwrite=False)
        (left / "rank-00000.safetensors").write_text("half")
        (tmp_path / ".layerzero-tmp-removed-step-00000000" / "x").mkdir(parents=True)
        (tmp_path / ".layerzero-tmp-latest").write_text("step-")
        assert steps(tmp_path) == [1] and latest_step(tmp_path) == 1
        draft = open_draft(tmp_path, 2, overwrite=False)
        assert os.listdir(draft) == []
        assert sorted(os.listdir(tmp_path)) == [draft.name, "latest", "step-00000001"]

    def test_links_among_them_are_not_followed(self, tmp_path: Path) -> None:
        """A folder may be a stranger's: saving into it must not write or delete elsewhere."""
        root, victim = tmp_path / "run", tmp_path / "victim"
        victim.mkdir()
        (victim / "file").write_text("keep")
        root.mkdir()
        for name in ("latest", "step-00000002", "removed-step-00000001"):
            (root / f".layerzero-tmp-{name}").symlink_to(victim if name != "latest" else victim / "file")
        (root / "step-00000001").symlink_to(victim)
        (root / "latest").symlink_to(victim / "file")
        save(root, 2)
        save(root, 1, overwrite=True)
        assert sorted(os.listdir(root)) == ["latest", "step-00000001", "step-00000002"]
        assert not (root / "latest").is_symlink() and not (root / "step-00000001").is_symlink()
        assert os.listdir(victim) == ["file"] and (victim / "file").read_text() == "keep"
