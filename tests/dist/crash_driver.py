"""Kills a rank at a seeded moment of a save, again and again; prints what is left after each as a JSON line.

Run as a process of its own: it forks ranks after torch is imported, which a process with threads must not.
``python -m tests.dist.crash_driver FOLDER SEED COUNT``
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it, which takes a second in every fork
import torch.distributed as dist
from torch import nn

import layerzero as lz
from layerzero.checkpoint.source import Source

WORLD = 2
CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "listdir", "close", "rmdir", "unlink")


class Countdown:
    """Counts the calls by which a save touches the disk; kills the process before or after one of them."""

    def __init__(self, victim: bool, at: int, after: bool) -> None:
        self.victim, self.at, self.after, self.count = victim, at, after, 0
        for name in CALLS:
            setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            due = self.victim and self.count == self.at
            if due and not self.after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*args, **kwargs)
            if due:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted


def model_of(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 9))
    for p in model.parameters():
        nn.init.constant_(p, value)
    lz.shard(model, sharding="zero3", units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.full_like(p.detach(), value)
    return model, optimizer


def save_on(rank: int, folder: str, store: str, step: int, victim: bool, at: int, after: bool) -> int:
    """One rank; returns how many calls a whole save makes."""
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    model, optimizer = model_of(float(step))
    dist.barrier()
    countdown = Countdown(victim, at, after)
    lz.save(folder, model, optimizer, step=step, keep=3)
    return countdown.count


def attempt(folder: str, step: int, victim: int | None, at: int, after: bool) -> list[int]:
    """Saves ``step`` with ``victim`` dying; by rank, how many calls were made, or -1."""
    with tempfile.TemporaryDirectory() as scratch:
        pids, counts = [], []
        for rank in range(WORLD):
            pid = os.fork()
            if pid == 0:
                signal.alarm(60)
                count = -1
                try:
                    count = save_on(rank, folder, f"{scratch}/store", step, rank == victim, at, after)
                finally:
                    with open(f"{scratch}/{rank}", "w") as file:
                        file.write(str(count))
                    os.kill(os.getpid(), signal.SIGKILL)  # no clean-up of half a process group
            pids.append(pid)
        if victim is not None:
            os.waitpid(pids[victim], 0)
            os.kill(pids[1 - victim], signal.SIGKILL) if not _ended(pids[1 - victim]) else None
        for rank, pid in enumerate(pids):
            if rank != victim and not _reaped(pid):
                os.waitpid(pid, 0)
        for rank in range(WORLD):
            path = Path(scratch, str(rank))
            text = path.read_text() if path.exists() else ""
            counts.append(int(text) if text else -1)
        return counts


_done: set[int] = set()


def _ended(pid: int) -> bool:
    """Whether a child ends within the time a healthy save takes; its peer may have died after its own part."""
    for _ in range(30):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            _done.add(pid)
            return True
        signal.sigtimedwait([], 0.01)
    return False


def _reaped(pid: int) -> bool:
    return pid in _done


def whole(folder: str) -> dict[str, Any]:
    """What a reader finds: the latest step, whether every visible step verifies, and the values of the latest."""
    latest = lz.latest_step(folder)
    names = sorted(name for name in os.listdir(folder) if name.startswith("step-"))
    for name in names:
        source = Source.open(Path(folder, name))
        values = {
            float(x)
            for tensor, states in source.states.items()
            for state in states
            for x in source.full(tensor, state).unique()
        }
        assert values == {float(name[5:])}, (name, values)
    return {"latest": latest, "steps": [int(name[5:]) for name in names]}


def main(folder: str, seed: int, count: int) -> None:
    rng = random.Random(seed)
    step = 1
    totals = attempt(folder, step, None, 0, False)
    print(json.dumps({"totals": totals, **whole(folder)}), flush=True)
    for _ in range(count):
        step += 1
        victim = rng.choice([0, 0, 1])  # the first rank also commits
        at, after = rng.randint(1, totals[victim]), rng.random() < 0.5
        attempt(folder, step, victim, at, after)
        print(json.dumps({"step": step, "victim": victim, "at": at, "after": after, **whole(folder)}), flush=True)
    step += 1
    attempt(folder, step, None, 0, False)
    print(json.dumps({"step": step, "left": sorted(os.listdir(folder)), **whole(folder)}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
