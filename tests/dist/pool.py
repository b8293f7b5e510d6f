"""A pool of worker processes for distributed cases: processes start once, each case gets a fresh world."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class CaseError(AssertionError):
    """A case failed on some rank; the text holds the tracebacks of all ranks that reported one."""


class Pool:
    """Runs module-level functions on ``world_size`` ranks at once."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="layerzero-pool-")
        self._parent: _Parent | None = None
        self._ranks: list[_Rank] = []
        self._calls = 0

    def run(
        self, function: Callable[..., Any], world_size: int, *, timeout: float = 90, init: bool = True, **kwargs: Any
    ) -> list[Any]:
        """``function(**kwargs)`` on every rank; what they returned (JSON values), by rank.

        Raises:
            CaseError: if any rank raised, died, or did not answer in ``timeout`` seconds.
        """
        self._start(function.__module__, world_size)
        self._calls += 1
        for number, rank in enumerate(self._ranks[:world_size]):
            request = {
                "module": function.__module__, "function": function.__name__, "kwargs": kwargs, "rank": number,
                "world_size": world_size, "store": f"{self._folder.name}/store-{self._calls}", "timeout": timeout,
                "init": init,
            }  # fmt: skip
            rank.lines.write(json.dumps(request) + "\n")
            rank.lines.flush()
        replies = self._collect(world_size, timeout)
        errors = [f"rank {r}: {reply['error']}" for r, reply in enumerate(replies) if "error" in reply]
        if errors:
            self._kill()
            raise CaseError("\n".join(errors))
        return [reply["value"] for reply in replies]

    def _start(self, module: str, count: int) -> None:
        if self._parent is None:
            self._parent = _Parent()
        if module not in self._parent.modules:
            self._kill()  # new ranks have it from their parent, much sooner than each could import it
            self._parent.load(module)
        while len(self._ranks) < count:
            self._ranks.append(self._parent.fork())

    def _collect(self, count: int, timeout: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < count:
            waiting = {rank.channel: r for r, rank in enumerate(self._ranks[:count]) if r not in replies}
            left = deadline - time.monotonic()
            ready = select.select(list(waiting), [], [], max(0.0, left))[0]
            for channel in ready:
                line = self._ranks[waiting[channel]].read()
                replies[waiting[channel]] = json.loads(line) if line else {"error": "the process died"}
            if any("error" in r for r in replies.values()):
                deadline = min(deadline, time.monotonic() + 3)  # the others may wait for it for ever
            if not ready and time.monotonic() >= deadline:
                for rank in waiting.values():
                    replies.setdefault(rank, {"error": f"no answer in {timeout} s"})
        return [replies[r] for r in range(count)]

    def close(self) -> None:
        """End all processes for good."""
        self._kill()
        if self._parent is not None:
            self._parent.close()
        self._folder.cleanup()

    def _kill(self) -> None:
        for rank in self._ranks:
            rank.kill()
        self._ranks.clear()


class _Parent:
    """The process that ranks are forked from, and what it imported for them."""

    def __init__(self) -> None:
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
            env.pop(name, None)
        self.modules: set[str] = set()
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-W", "ignore", "-m", "tests.dist.worker", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, env=env, pass_fds=[theirs.fileno()])
        self._replies = self._socket.makefile("r")

    def load(self, module: str) -> None:
        """Import a module for the ranks to come."""
        self._socket.sendall(json.dumps({"module": module}).encode())
        self._reply()
        self.modules.add(module)

    def fork(self) -> _Rank:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"fork"], [theirs.fileno()])
            return _Rank(self._reply()["pid"], ours)

    def _reply(self) -> dict[str, Any]:
        line = self._replies.readline()
        reply = json.loads(line) if line else {"error": "the parent of the ranks died"}
        if "error" in reply:
            raise CaseError(reply["error"])
        return reply

    def close(self) -> None:
        self._replies.close()
        self._socket.close()
        self._process.wait()


@dataclass(frozen=True)
class _Rank:
    """A process that runs cases."""

    pid: int
    channel: socket.socket
    lines: Any = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", self.channel.makefile("rw"))

    def read(self) -> str:
        """A reply; empty if the process died."""
        with contextlib.suppress(ConnectionResetError):
            return self.lines.readline()
        return ""

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.lines.close()
        self.channel.close()
