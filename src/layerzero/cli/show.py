"""What commands print. Names come from files that may be a stranger's: what is not printable in them is escaped."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from layerzero.checkpoint import Comparison, Exported, Inspection, TensorInfo, Verification
from layerzero.checkpoint.tools import Progress as Told

_MAX_LINES = 200


def _out(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def plain(text: str) -> str:
    """With whatever is not printable escaped."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def size(nbytes: int) -> str:
    """Bytes for people."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 1000 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.3g} {units[0]}"


def error(text: str) -> None:
    """To standard error."""
    _out(stderr=True).print(Text(plain(text), style="red"))


@contextlib.contextmanager
def progress(what: str) -> Iterator[Told]:
    """A bar on standard error, where that is a terminal."""
    columns = TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    console = _out(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def inspection(found: Inspection, *, with_tensors: bool) -> None:
    """See `layerzero.checkpoint.Inspection`."""
    out = _out()
    out.print(Text(plain(found.folder), style="bold"))
    for label, text in _summary(found):
        out.print(Text(f"{label:<12}", style="cyan"), Text(plain(text)), sep="")
    table = _table("file", "size")
    for name, nbytes in found.files.items():
        table.add_row(Text(plain(name)), size(nbytes))
    out.print(table)
    if with_tensors:
        out.print(_tensor_table([*found.tensors, *found.extra_tensors]))


def _summary(found: Inspection) -> Iterator[tuple[str, str]]:
    if found.kind == "safetensors":
        yield "kind", "plain safetensors files, without checksums"
    else:
        yield "step", str(found.step)
        ranks = f"{found.world_size} rank" + ("s" if found.world_size != 1 else "")
        yield "saved by", f"{ranks}, layerzero {found.layerzero}, torch {found.torch}, sharding {found.sharding}"
    kinds = Counter(t.kind for t in found.tensors)
    numel = sum(t.numel for t in found.tensors)
    dtypes = Counter(t.states["value"] for t in found.tensors if t.states)
    yield (
        "tensors",
        f"{', '.join(f'{n} {kind}s' for kind, n in kinds.items()) or 'none'}; {numel:,} elements; "
        f"{', '.join(f'{n} in {dtype}' for dtype, n in dtypes.items())}",
    )
    if found.optimizer is not None:
        o = found.optimizer
        yield "optimizer", ", ".join(o.classes)
        states = [f"{state} {'/'.join(dtypes)}" for state, dtypes in o.elementwise.items()]
        yield "  states", ", ".join([*states, *(f"{state} per parameter" for state in o.scalars)]) or "none"
        for number, group in enumerate(o.groups):
            options = ", ".join(f"{k} {_value(v)}" for k, v in group.items() if k != "num_params")
            yield f"  group {number}", f"{group['num_params']} parameters; {options}"
    if found.left_out:
        yield "left out", ", ".join(found.left_out)
    yield "extra", _value(found.extra)
    if found.num_rank_extra:
        yield "rank_extra", f"of {found.num_rank_extra} ranks"


def _value(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}... (--json shows all)"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _tensor_table(tensors: list[TensorInfo]) -> Table:
    table = _table("tensor", "kind", "shape", "dtype", "also", "optimizer states")
    for t in tensors:
        states = ", ".join(f"{state} {dtype}" for state, dtype in t.states.items() if state != "value")
        kind = t.kind if t.trainable or t.kind != "parameter" else "frozen"
        cells = (t.name, kind, str(list(t.shape)), t.states.get("value", ""), ", ".join(t.aliases), states)
        table.add_row(*(Text(plain(cell)) for cell in cells))
    return table


def verification(found: Verification) -> None:
    """See `layerzero.checkpoint.Verification`."""
    out = _out()
    for problem in found.problems:
        out.print(Text(plain(problem), style="red"))
    checked = f"{found.num_checksums} checksums over {size(found.nbytes)}" if found.num_checksums else "no checksums"
    out.print(Text(f"{'ok' if found.ok else 'DAMAGED'}: {plain(found.folder)}, {checked}"))


def exported(found: Exported) -> None:
    """See `layerzero.checkpoint.Exported`."""
    out = _out()
    for file in found.files:
        out.print(Text(plain(str(found.folder / file))))
    out.print(f"{found.num_tensors} tensors, {size(found.nbytes)}")


def comparison(found: Comparison) -> None:
    """See `layerzero.checkpoint.Comparison`."""
    out = _out()
    table = _table("tensor", "state", "difference", "")
    for d in found.differences[:_MAX_LINES]:
        table.add_row(*(Text(plain(cell)) for cell in (d.name, d.state, d.what, d.detail)))
    if found.differences:
        out.print(table)
    if len(found.differences) > _MAX_LINES:
        out.print(f"and {len(found.differences) - _MAX_LINES} more (--json shows all)")
    if found.dtypes:
        out.print(f"{len(found.dtypes)} of the tensors compared are stored in another dtype")
    verdict = "no difference" if found.same else f"{len(found.differences)} differences"
    out.print(f"{verdict}; {found.num_tensors} pairs of tensors compared")
