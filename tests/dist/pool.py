"""A pool of worker processes for distributed cases: processes start once, each case gets a fresh world."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class CaseError(AssertionError):
    """A case failed on some rank; the text holds the tracebacks of all ranks that reported one."""


class Pool:
    """Runs module-level functions on ``world_size`` ranks at once."""

    def __init__(self) -> None:
        self._workers: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="layerzero-pool-")
        self._calls = 0

    def run(
        self, function: Callable[..., Any], world_size: int, *, timeout: float = 90, init: bool = True, **kwargs: Any
    ) -> list[Any]:
        """``function(**kwargs)`` on every rank; what they returned (JSON values), by rank.

        Raises:
            CaseError: if any rank raised, died, or did not answer in ``timeout`` seconds.
        """
        self._start(world_size)
        self._calls += 1
        for rank in range(world_size):
            request = {
                "module": function.__module__, "function": function.__name__, "kwargs": kwargs, "rank": rank,
                "world_size": world_size, "store": f"{self._folder.name}/store-{self._calls}", "timeout": timeout,
                "init": init,
            }  # fmt: skip
            stdin = self._workers[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
        replies = self._collect(world_size, timeout)
        errors = [f"rank {r}: {reply['error']}" for r, reply in enumerate(replies) if "error" in reply]
        if errors:
            self._kill()
            raise CaseError("\n".join(errors))
        return [reply["value"] for reply in replies]

    def _start(self, count: int) -> None:
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
            env.pop(name, None)
        while len(self._workers) < count:
            self._workers.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "tests.dist.worker"], cwd=ROOT, env=env, text=True,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
            )  # fmt: skip

    def _collect(self, count: int, timeout: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + timeout
        replies: dict[int, dict[str, Any]] = {}
        while len(replies) < count:
            waiting = {w.stdout: r for r, w in enumerate(self._workers[:count]) if r not in replies}
            left = deadline - time.monotonic()
            ready = select.select(list(waiting), [], [], max(0.0, left))[0]
            for pipe in ready:
                assert pipe is not None
                line = pipe.readline()
                replies[waiting[pipe]] = json.loads(line) if line else {"error": "the process died"}
            if any("error" in r for r in replies.values()):
                deadline = min(deadline, time.monotonic() + 3)  # the others may wait for it for ever
            if not ready and time.monotonic() >= deadline:
                for rank in waiting.values():
                    replies.setdefault(rank, {"error": f"no answer in {timeout} s"})
        return [replies[r] for r in range(count)]

    def close(self) -> None:
        """End all workers for good."""
        self._kill()
        self._folder.cleanup()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()
        self._workers.clear()
