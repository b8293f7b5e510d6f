"""Folders of a run's checkpoints: names, the ``latest`` pointer, and how a step becomes visible.

[Note: commit]
A step is written into a hidden folder beside the others. When every rank's file and the manifest are on disk, one
rename gives the folder its name. ``latest`` holds names of steps, one a line, and means the first that exists: just
before the rename it becomes the new step and the one that was latest, so the rename makes the step visible and the
latest at once. A step is removed by renaming it away first. So whatever is killed whenever, a folder with a step's
name is complete, and ``latest`` means the one that was saved last.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path

from layerzero.checkpoint.manifest import Manifest, dumps, loads
from layerzero.checkpoint.storage import check_regular
from layerzero.errors import CheckpointError
from layerzero.warnings_ import warn

MANIFEST = "manifest.json"
LATEST = "latest"
_STEP = re.compile(r"step-(\d{8,18})\Z")
_HIDDEN = ".layerzero-tmp-"
_REMOVED, _REPLACED = f"{_HIDDEN}removed-", f"{_HIDDEN}replaced-"
_MAX_MANIFEST_NBYTES = 2 << 30
_RESERVE_NBYTES = 1 << 20  # for manifest or index, and the file system's own


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step:08d}"


def steps(root: Path) -> list[int]:
    """Numbers of the steps in ``root``, ascending; empty where there is no such folder."""
    try:
        names = os.listdir(root)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return []
    except OSError as error:
        raise CheckpointError(f"{root}: can't be read ({error.strerror})") from None
    found = (_STEP.match(name) for name in names)
    return sorted(int(m[1]) for m in found if m and m[0] == step_name(int(m[1])) and _is_step(root / m[0]))


def _is_step(path: Path) -> bool:
    """A link in a run's folder is not a step; one that the user gives the path of may be."""
    return is_step_folder(path) and not os.path.islink(path)


def is_step_folder(path: Path) -> bool:
    """Whether ``path`` holds a checkpoint, if perhaps a damaged one."""
    return os.path.lexists(path / MANIFEST)


def has_step_name(path: Path) -> bool:
    """Whether ``path`` is or was a checkpoint: without its manifest its files are not taken for plain ones."""
    return is_step_folder(path) or _STEP.match(path.name) is not None


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """Number of the checkpoint that was saved last in folder ``path``; None if there is none."""
    root = Path(path)
    available = steps(root)
    if not available:
        return None
    with contextlib.suppress(OSError, ValueError, CheckpointError):
        if check_regular(root / LATEST) <= 128:
            for line in (root / LATEST).read_text(encoding="ascii").split():
                pointed = _STEP.match(line)
                if pointed and int(pointed[1]) in available:
                    return int(pointed[1])
    return available[-1]  # the pointer is missing or names what someone removed


def resolve(path: str | os.PathLike[str], step: int | None) -> Path:
    """The folder of one checkpoint: ``path`` itself if it is one, else the latest, or ``step``, inside it.

    Raises:
        CheckpointError: there is none.
    """
    root = Path(path)
    if is_step_folder(root) and step is None:
        return root
    if not root.is_dir():
        raise CheckpointError(f"{root}: no such folder, seen from {Path.cwd()}. Give a path that every rank can read.")
    chosen = latest_step(root) if step is None else step
    if chosen is None:
        raise CheckpointError(f"{root}: holds no checkpoint: expected {MANIFEST}, or folders such as {step_name(100)}")
    folder = root / step_name(chosen)
    if not _is_step(folder):
        there = ", ".join(map(str, steps(root))) or "none"
        raise CheckpointError(f"{root}: holds no step {chosen}; there: {there}")
    return folder


def read_manifest(folder: Path) -> Manifest:
    """The validated manifest of a checkpoint folder.

    Raises:
        CheckpointError: absent, damaged, or inconsistent.
    """
    path = folder / MANIFEST
    nbytes = check_regular(path)
    if nbytes > _MAX_MANIFEST_NBYTES:
        raise CheckpointError(f"{path}: {nbytes} bytes is no manifest")
    try:
        return loads(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read: {error}") from None


# ---------------------------------------------------------------------------- writing, on one rank


def open_draft(root: Path, step: int, overwrite: bool) -> Path:
    """A fresh hidden folder to write a step into; remains of killed saves are removed.

    Raises:
        CheckpointError: the step exists already, and ``overwrite`` is false.
    """
    root.mkdir(parents=True, exist_ok=True)
    recover(root)
    if (root / step_name(step)).exists() and not overwrite:
        raise CheckpointError(
            f"{root / step_name(step)} exists already: choose another step, or pass overwrite=True to replace it"
        )
    for name in os.listdir(root):
        if name.startswith(_HIDDEN):
            _delete(root / name)
    draft = root / f"{_HIDDEN}{step_name(step)}"
    draft.mkdir()
    return draft


def commit(draft: Path, manifest: Manifest, keep: int | None) -> Path:
    """Make a draft visible; see [Note: commit]. Returns the step's folder.

    Raises:
        CheckpointError: a file is not there in full.
        OSError: as from the system.
    """
    root = draft.parent
    for name, nbytes in manifest.files.items():
        found = check_regular(draft / name)
        if found != nbytes:
            raise CheckpointError(f"{draft / name}: {found} bytes, expected {nbytes}")
    write_synced(draft / MANIFEST, dumps(manifest))
    sync_folder(draft)
    folder = root / step_name(manifest.step)
    before = latest_step(root)
    _point(root, [manifest.step] if before is None else [manifest.step, before])
    replaced = _set_aside(folder, _REPLACED) if os.path.lexists(folder) else None
    try:
        os.rename(draft, folder)
    except OSError:
        if replaced is not None:
            os.rename(replaced, folder)
        raise
    sync_folder(root)
    _point(root, [manifest.step])
    if replaced is not None:
        _delete(replaced)  # after the new one has its name: removing may take long
    if keep is not None:
        try:
            _retain(root, manifest.step, keep)
        except OSError as error:
            warn(f"checkpoint {manifest.step} was saved, but older ones could not be removed: {error}")
    return folder


def discard(draft: Path) -> None:
    """Remove a draft that can't be completed."""
    shutil.rmtree(draft, ignore_errors=True)


def _point(root: Path, targets: list[int]) -> None:
    """Replace ``latest``."""
    pointer = root / f"{_HIDDEN}{LATEST}"
    _delete(pointer)
    write_synced(pointer, "".join(f"{step_name(step)}\n" for step in targets).encode("ascii"))
    os.replace(pointer, root / LATEST)
    sync_folder(root)


def _retain(root: Path, newest: int, keep: int) -> None:
    """Remove all but the ``keep`` steps saved last, by the time of their manifests."""
    others = [root / step_name(step) for step in steps(root) if step != newest]
    others.sort(key=lambda folder: ((folder / MANIFEST).stat().st_mtime_ns, folder.name), reverse=True)
    for folder in others[keep - 1 :]:
        _delete(_set_aside(folder, _REMOVED))


def recover(root: Path) -> None:
    """Give a step its name back that was being replaced when the process was killed."""
    for name in os.listdir(root) if root.is_dir() else ():
        if name.startswith(_REPLACED) and not os.path.lexists(root / name.removeprefix(_REPLACED)):
            os.rename(root / name, root / name.removeprefix(_REPLACED))


def _set_aside(folder: Path, prefix: str) -> Path:
    away = folder.parent / f"{prefix}{folder.name}"
    _delete(away)
    os.rename(folder, away)
    return away


def _delete(path: Path) -> None:
    """A folder, a file or a link itself; what can't be deleted stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def check_space(folder: Path, nbytes: int, advice: str) -> None:
    """Raise where ``nbytes`` of tensors don't fit.

    Raises:
        CheckpointError: says how much is needed and free, and ends with ``advice``.
    """
    free, needed = shutil.disk_usage(folder).free, nbytes + _RESERVE_NBYTES
    if needed > free:
        raise CheckpointError(
            f"{folder}: {needed / 2**20:.1f} MiB are needed and {free / 2**20:.1f} MiB are free. {advice}"
        )


def write_synced(path: Path, data: bytes) -> None:
    """A new file: one that is there may be a link to elsewhere."""
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Names in a folder on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
