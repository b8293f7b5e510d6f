"""Two "nodes" on one machine: network namespaces joined by a link of a given rate."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Protocol

from benchmarks.watchdog import Watchdog

LINK = "link0"  # the interface's name inside either namespace


class Nodes(Protocol):
    """Where ranks run.

    Attributes:
        count: nodes.
        interface: network interface that ranks talk over.
    """

    count: int
    interface: str

    def command(self, node: int) -> list[str]:
        """What to put before a command to run it on ``node``."""
        ...

    def address(self, node: int) -> str:
        """IP address of ``node``."""
        ...

    def sent_nbytes(self) -> int | None:
        """Bytes that node 0 has sent over the link so far; None where there is no link."""
        ...

    def close(self) -> None:
        """Undo everything."""
        ...


class OneNode:
    """This machine as it is."""

    count = 1
    interface = "lo"

    def command(self, node: int) -> list[str]:
        """Nothing to put before."""
        return []

    def address(self, node: int) -> str:
        """The loopback address."""
        return "127.0.0.1"

    def sent_nbytes(self) -> int | None:
        """There is no link."""
        return None

    def close(self) -> None:
        """Nothing to undo."""


_UNDO = """
inode=$(stat -L -c %i /run/netns/{name} 2>/dev/null)
ip netns delete {name} 2>/dev/null
sleep 0.2 # a process that was about to enter when the name went away
for process in /proc/[0-9]*; do
    [ "$(readlink $process/ns/net)" = "net:[$inode]" ] && kill -9 "${{process#/proc/}}"
done 2>/dev/null
"""
"""Removes a namespace's name first, so that nothing enters any more, and then ends what is in it."""


class TwoNodes:
    """Two namespaces joined by a veth pair whose ends send at ``rate`` at most.

    They and what runs in them end with `close`, and when this process dies in whatever way.
    """

    count = 2
    interface = LINK

    def __init__(self, rate: str) -> None:
        """``rate`` in tc's units, such as "1gbit"."""
        self._names = [f"layerzero-{os.getpid()}-{i}" for i in range(2)]
        a, b = self._names
        self._watchdog = Watchdog("".join(_UNDO.format(name=name) for name in self._names))
        try:
            for name in self._names:
                _run("ip", "netns", "add", name)
            _run("ip", "-n", a, "link", "add", LINK, "type", "veth", "peer", "name", LINK, "netns", b)
            for i, name in enumerate(self._names):
                _run("ip", "-n", name, "addr", "add", f"{self.address(i)}/30", "dev", LINK)
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", LINK, "up")
                limit = ["rate", rate, "burst", "256kb", "latency", "100ms"]
                _run("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", "tbf", *limit)
        except BaseException:
            self.close()
            raise

    def command(self, node: int) -> list[str]:
        """Runs inside the node's namespace."""
        return ["ip", "netns", "exec", self._names[node]]

    def address(self, node: int) -> str:
        """Of the node's end of the link."""
        return f"10.77.0.{node + 1}"

    def sent_nbytes(self) -> int | None:
        """The kernel's counter of node 0's end: headers included."""
        table = _run(*self.command(0), "cat", "/proc/net/dev")
        line = next(line for line in table.splitlines() if line.strip().startswith(LINK + ":"))
        return int(line.split(":")[1].split()[8])

    def close(self) -> None:
        """Kill what runs in the namespaces and remove them."""
        self._watchdog.close()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def why_not_two_nodes() -> str | None:
    """What is missing to make two nodes on this machine, found by making them; None when nothing is."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "needs root to make network namespaces"
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        return f"needs {' and '.join(missing)} (package iproute2)"
    try:
        nodes = TwoNodes("1gbit")
        try:
            nodes.sent_nbytes()
        finally:
            nodes.close()
    except RuntimeError as error:  # root without capabilities, as in a container; a kernel without veth or tbf
        return f"needs more rights or kernel modules than there are: {error}"
    return None


def bits_per_second(rate: str) -> float:
    """What tc makes of ``rate``, such as "1gbit" or "10mbps" (bytes).

    Raises:
        ValueError: if it isn't a rate in tc's units, or one that its token bucket can't hold a link to.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)([kmgt]?)(i?)(bit|bps)", rate.strip().lower())
    if match is None:
        raise ValueError(f'expected a number and a unit (bit, kbit, mbit, gbit; bps for bytes), got "{rate}"')
    number, prefix, binary, unit = match.groups()
    bits = float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " ") * (8 if unit == "bps" else 1)
    if not 1e3 <= bits <= 1e12:
        raise ValueError(f'expected 1kbit to 1tbit, got "{rate}"')
    return bits
