"""How the ranks of a job agree on a checkpoint: small messages on a gloo group of their own.

Gloo whatever the training runs on: a background save talks while training does, and accelerator collectives from
two threads may wait for each other.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from layerzero.checkpoint.storage import as_bytes
from layerzero.collectives import Control, Traffic
from layerzero.errors import CheckpointError, DesyncError
from layerzero.mesh import default_timeout

_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Ranks:
    """All processes of the job.

    Attributes:
        rank: this one.
        size: how many.
    """

    rank: int
    size: int
    _control: Control

    @classmethod
    def all(cls) -> Ranks:
        """Collective when called for the first time in a job."""
        cpu, traffic = torch.device("cpu"), Traffic()
        if not (dist.is_available() and dist.is_initialized()):
            return cls(0, 1, Control(None, 1, cpu, traffic))
        world, size = dist.group.WORLD, dist.get_world_size()
        assert world is not None
        if size > 1 and world not in _groups:
            group = dist.new_group(backend="gloo", timeout=default_timeout())
            assert isinstance(group, dist.ProcessGroup)
            _groups[world] = group
        return cls(dist.get_rank(), size, Control(_groups.get(world), size, cpu, traffic))

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of every rank, in rank order, on every rank."""
        return [json.loads(data) for data in self._control.gather_bytes(json.dumps(value).encode())]

    def gather_to_first(self, value: Any) -> list[Any] | None:
        """A JSON value of every rank, in rank order, on rank 0; None elsewhere."""
        data = json.dumps(value).encode()
        if self._control.group is None:
            return [value]
        length = torch.tensor([len(data)])
        self._control.all_reduce(length, dist.ReduceOp.MAX)
        padded = torch.full((int(length),), ord(" "), dtype=torch.uint8)  # JSON ignores spaces around it
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        rows = [torch.empty_like(padded) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(padded, rows, group=self._control.group, group_dst=0)
        return None if rows is None else [json.loads(bytes(as_bytes(row))) for row in rows]

    def from_first(self, value: Any) -> Any:
        """Rank 0's JSON value, on every rank."""
        if self._control.group is None:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        length = self._control.broadcast(torch.tensor([len(data)]))
        payload = torch.empty(int(length), dtype=torch.uint8)
        if self.rank == 0:
            payload.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return json.loads(bytes(as_bytes(self._control.broadcast(payload))))

    def check_same(self, call: str, arguments: Mapping[str, Any]) -> None:
        """Raise on every rank if arguments differ.

        Raises:
            DesyncError: names one that differs, with rank 0's value and another's.
        """
        told = self.gather(dict(arguments))
        for rank, other in enumerate(told):
            for name, value in told[0].items():
                if other[name] != value:
                    raise DesyncError(
                        f"{call}: {name} is {value!r} on rank 0 and {other[name]!r} on rank {rank}: pass the same on "
                        f"every rank" + (" (relative paths count from the working folder)" if name == "path" else "")
                    )

    def agree(self, what: str, error: Exception | None) -> None:
        """Raise on every rank if any rank failed.

        Raises:
            CheckpointError: names the ranks and what happened there; on a rank that failed, its own error is the cause.
        """
        errors = self.gather(None if error is None else _describe(error))
        self._raise(what, errors, error)

    def agree_on_first(self, what: str, error: Exception | None) -> None:
        """Raise on every rank if rank 0 failed."""
        self._raise(what, [self.from_first(None if error is None else _describe(error))], error)

    def _raise(self, what: str, errors: list[str | None], own: Exception | None) -> None:
        failed = {rank: text for rank, text in enumerate(errors) if text is not None}
        if not failed:
            return
        texts = list(dict.fromkeys(failed.values()))
        ranks = ", ".join(map(str, failed)) if len(failed) <= 8 else f"{len(failed)} of {len(errors)}"
        where = f" (on rank {ranks})" if self.size > 1 else ""
        raise CheckpointError(f"{what}: {texts[0]}{where}{_more(texts[1:])}") from own


def _more(texts: list[str]) -> str:
    return "".join(f"; elsewhere: {text}" for text in texts[:2])


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
