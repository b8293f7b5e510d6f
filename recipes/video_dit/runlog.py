"""Progress bar, TensorBoard scalars and `metrics.jsonl` of a run; one small collective for many steps."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter


class RunLog:
    """Collects steps on every rank and writes them on rank 0 after each `every` steps.

    Losses are averaged over the ranks, gradient norms are global already. Values stay on the device until they
    are written, so that logging does not make the host wait for an accelerator.
    """

    def __init__(
        self, output: Path, *, steps: int, every: int, clips_per_step: int, losses: Sequence[float] = ()
    ) -> None:
        """``losses`` are those of the steps that an interrupted run has behind it."""
        self.losses = list(losses)
        self._steps = steps
        self._every = every
        self._clips_per_step = clips_per_step
        self._pending: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        self._last_flush = time.perf_counter()
        self._writer = _Writer(output, steps, len(self.losses)) if dist.get_rank() == 0 else None

    def step(self, loss: torch.Tensor, grad_norm: torch.Tensor, lr: float) -> None:
        self._pending.append((loss.detach(), grad_norm.detach(), lr))
        if len(self._pending) == self._every or len(self.losses) + len(self._pending) == self._steps:
            self.flush()

    def flush(self) -> None:
        """Write what is pending. Collective."""
        if not self._pending:
            return
        losses = torch.stack([loss for loss, _, _ in self._pending])
        dist.all_reduce(losses)
        losses /= dist.get_world_size()
        now = time.perf_counter()
        rate = self._clips_per_step * len(self._pending) / (now - self._last_flush)
        for loss, (_, grad_norm, lr) in zip(losses.tolist(), self._pending, strict=True):
            self.losses.append(loss)
            if self._writer is not None:
                scalars = {"loss": loss, "grad_norm": float(grad_norm), "lr": lr, "samples_per_second": rate}
                self._writer.write(len(self.losses), scalars)
        self._pending.clear()
        self._last_flush = now

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.close()


class _Writer:
    def __init__(self, output: Path, steps: int, done: int) -> None:
        self._steps = steps
        path = output / "metrics.jsonl"
        kept = path.read_text(encoding="utf-8").splitlines(keepends=True)[:done] if done and path.exists() else []
        self._metrics = path.open("w", encoding="utf-8")
        self._metrics.writelines(kept)
        self._tensorboard = SummaryWriter(str(output / "tensorboard"), purge_step=done + 1)
        self._console = Console()
        columns = (TextColumn("train"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.description}"), console=self._console)
        self._task = self._progress.add_task("", total=steps, completed=done)
        self._progress.start()

    def write(self, step: int, scalars: dict[str, float]) -> None:
        self._metrics.write(json.dumps({"step": step, **scalars}) + "\n")
        self._metrics.flush()
        for name, value in scalars.items():
            self._tensorboard.add_scalar(f"train/{name}", value, step)
        line = "loss {loss:.3f}  {samples_per_second:.1f} samples/s  grad norm {grad_norm:.2f}".format(**scalars)
        self._progress.update(self._task, completed=step, description=line)
        if not self._console.is_terminal and (step % 10 == 0 or step == self._steps):
            self._console.print(f"step {step}/{self._steps}  {line}")  # a log file shows no moving bar

    def close(self) -> None:
        self._progress.stop()
        self._tensorboard.close()
        self._metrics.close()
