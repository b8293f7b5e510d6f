"""Cleaning up that happens however a benchmark ends."""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "layerzero-bench-"

_REMOVE = """
for attempt in 1 2 3 4 5 6 7 8 9 10; do # a launcher may start a rank while it is being ended
    found=
    for process in /proc/[0-9]*; do
        if grep -aqsF -e --socket={folder}/ $process/cmdline && [ "${{process#/proc/}}" != $$ ]; then
            kill -9 "${{process#/proc/}}" && found=yes
        fi
    done
    [ $found ] || break
    sleep 0.1
done 2>/dev/null
rm -rf {folder}
"""


class Watchdog:
    """A shell that runs ``script`` when its standard input ends.

    Which is what `close` does, and what happens when this process dies in whatever way.
    """

    def __init__(self, script: str) -> None:
        self._shell = subprocess.Popen(
            ["sh", "-c", f"cat >/dev/null; {script}"], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        """Run the script, once, and wait for it."""
        if self._shell.stdin is not None and not self._shell.stdin.closed:
            self._shell.stdin.close()
            self._shell.wait()


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A folder that goes away at the end, after the processes that were started with ``--socket=`` a file in it."""
    with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder:
        watchdog = Watchdog(_REMOVE.format(folder=shlex.quote(folder)))
        try:
            yield Path(folder)
        finally:
            watchdog.close()


def exit_on_signals() -> None:
    """SIGTERM and a closed terminal's SIGHUP end the program as Ctrl-C does: with `finally` and ``with`` blocks run."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, lambda received, _: sys.exit(128 + received))
