"""Starts a system's ranks on the nodes and talks to them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.links import Nodes
from benchmarks.workload import Workload

_ports = itertools.count(os.getpid())  # nodes are namespaces, where nobody can look whether a port is free
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Shape:
    """Ranks as systems see them, also where both nodes are one machine."""

    num_nodes: int = 2
    ranks_per_node: int = 2

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True)
class Task:
    """What the ranks of every system do.

    Attributes:
        timeout: seconds that a request may take. Collectives get two thirds: a hang ends in the rank's own traceback.
    """

    shape: Shape
    workload: Workload
    timeout: float


class JobError(RuntimeError):
    """A rank died or did not answer."""


class Job:
    """The ranks of one system, alive until closed and idle between requests."""

    def __init__(self, name: str, python: str, nodes: Nodes, task: Task, folder: Path) -> None:
        """Starts the launchers; `wait_until_built` before the first request. Logs and the socket go to ``folder``."""
        self.name = name
        self._timeout = task.timeout
        shape = task.shape
        self._log = folder / f"{name}.log"
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(folder / f"{name}.socket"))
        self._server.listen()
        self._world_size = shape.world_size
        self._connections: dict[int, Any] = {}
        self._launchers = []
        port = free_port()
        env = {
            **os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": nodes.interface, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore",
            "TOKENIZERS_PARALLELISM": "false",
        }  # fmt: skip
        with self._log.open("w") as log:
            for node in range(nodes.count):
                command = [
                    *nodes.command(node), python, "-m", "torch.distributed.run",
                    f"--nnodes={nodes.count}", f"--node-rank={node}",
                    f"--nproc-per-node={shape.world_size // nodes.count}",
                    f"--master-addr={nodes.address(0)}", f"--master-port={port}",
                    f"--log-dir={folder / name}.torchrun",  # torchrun leaves its default, a folder in /tmp, behind
                    "-m", "benchmarks.rank", f"--socket={folder / name}.socket", f"--system={name}",
                    f"--ranks-per-node={shape.ranks_per_node}", f"--timeout={task.timeout * 2 / 3}",
                    f"--workload={json.dumps(asdict(task.workload))}",
                ]  # fmt: skip
                self._launchers.append(
                    subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log, start_new_session=True)
                )

    def wait_until_built(self) -> None:
        """Until every rank has built its system.

        Raises:
            JobError: if a rank died or took too long; the message has the end of its log.
        """
        deadline = time.monotonic() + self._timeout
        while len(self._connections) < self._world_size:
            if not select.select([self._server], [], [], 0.2)[0]:
                self._check_alive(deadline)
                continue
            connection = self._server.accept()[0]
            connection.settimeout(self._timeout)
            lines = connection.makefile("rw")
            rank = self._reply("a starting rank", lines)["rank"]
            self._connections[rank] = lines
        self._replies()

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Every rank's reply to the same request, by rank.

        Raises:
            JobError: if a rank died or took too long; the message has the end of its log.
        """
        for lines in self._connections.values():
            try:
                lines.write(json.dumps({"do": do, **arguments}) + "\n")
                lines.flush()
            except OSError:
                self._fail("a rank closed its connection")
        return self._replies()

    def _replies(self) -> list[dict[str, Any]]:
        return [self._reply(f"rank {rank}", self._connections[rank]) for rank in range(self._world_size)]

    def _reply(self, who: str, lines: Any) -> dict[str, Any]:
        try:
            line = lines.readline()
        except TimeoutError:
            self._fail(f"{who} did not answer within {self._timeout:.0f} s")
        except OSError as error:
            self._fail(f"{who}: {error}")
        if not line.endswith("\n"):
            self._fail(f"{who} ended")
        return json.loads(line)

    def _check_alive(self, deadline: float) -> None:
        ended = [p.poll() for p in self._launchers if p.poll() is not None]
        if ended or time.monotonic() > deadline:
            self._fail(
                f"launcher ended with {ended[0]}" if ended else f"the ranks did not start within {self._timeout:.0f} s"
            )

    def _fail(self, what: str) -> NoReturn:
        time.sleep(1)  # for the traceback to reach the log
        raise JobError(f"{self.name}: {what}\n" + "\n".join(self._log.read_text().splitlines()[-25:]))

    def close(self) -> None:
        """End all ranks."""
        for lines in self._connections.values():
            with contextlib.suppress(OSError):
                lines.close()
        self._server.close()
        for launcher in self._launchers:
            for wait, end in ((5, signal.SIGTERM), (5, signal.SIGKILL)):  # ranks end by themselves, unless one hangs
                try:
                    launcher.wait(wait if self._connections else 0.1)
                    break
                except subprocess.TimeoutExpired:
                    os.killpg(launcher.pid, end)
            launcher.wait()


def free_port() -> int:
    """A port for a launcher's store: outside the range that ranks' own listeners and connections get theirs from."""
    while True:
        port = 20000 + next(_ports) % 10000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
