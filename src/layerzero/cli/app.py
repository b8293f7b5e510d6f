"""Commands and their options."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from layerzero import checkpoint
from layerzero.cli import show
from layerzero.errors import CheckpointError

app = typer.Typer(
    help="Tools of layerzero.", no_args_is_help=True, add_completion=False, rich_markup_mode=None,
    pretty_exceptions_enable=False,
)  # fmt: skip
ckpt = typer.Typer(help="Look into checkpoints, verify, export and compare them.", no_args_is_help=True)
app.add_typer(ckpt, name="ckpt")

_UNITS = {"": 1, "B": 1} | {
    unit: base**power
    for base, suffix in ((1000, "B"), (1024, "iB"))
    for power, letter in enumerate("KMGT", 1)
    for unit in [f"{letter}{suffix}"]
}


class DType(str, Enum):
    """What floating-point tensors are exported as."""

    saved = "saved"
    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"


_DTYPES = {
    DType.saved: None,
    DType.bf16: torch.bfloat16,
    DType.fp16: torch.float16,
    DType.fp32: torch.float32,
}

Source = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run's folder, a checkpoint's folder, or plain safetensors.")
]
Step = Annotated[int | None, typer.Option(help="A certain checkpoint of a run's folder, instead of the latest.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _app() -> None:
    pass  # without it typer leaves out the name of an only group


@contextlib.contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        show.error(str(error))
        raise typer.Exit(2) from None


@ckpt.command()
def inspect(
    path: Source,
    step: Step = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List all tensors.")] = False,
    as_json: Json = False,
) -> None:
    """What is inside: step, ranks, tensors, optimizer states, extra data, files. Reads no tensor."""
    with _errors():
        found = checkpoint.inspect(path, step)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=1))
    else:
        show.inspection(found, with_tensors=tensors)


@ckpt.command()
def verify(path: Source, step: Step = None, as_json: Json = False) -> None:
    """Read everything and compare it with its checksums. Exit code 1 if something is wrong, which is then named."""
    with _errors(), show.progress("verifying") as progress:
        found = checkpoint.verify(path, step, progress=progress)
    if as_json:
        typer.echo(json.dumps({**vars(found), "ok": found.ok}, indent=1))
    else:
        show.verification(found)
    raise typer.Exit(0 if found.ok else 1)


@ckpt.command()
def export(
    path: Source,
    out: Annotated[Path, typer.Argument(help="Folder for the files.")],
    step: Step = None,
    dtype: Annotated[DType, typer.Option(help="Of floating-point tensors.")] = DType.saved,
    max_shard_size: Annotated[str, typer.Option(help="Of one file, such as 500MB or 2GiB.")] = "5GB",
    prefix: Annotated[str, typer.Option(help="Only what is below this module, named from there.")] = "",
    aliases: Annotated[bool, typer.Option(help="Write tied tensors under all of their names.")] = True,
    name: Annotated[str, typer.Option(help="Of the files; diffusers expects diffusion_pytorch_model.")] = "model",
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
) -> None:
    """Write the weights as plain safetensors files that from_pretrained reads."""
    nbytes = _parse_size(max_shard_size)
    with _errors(), show.progress("exporting") as progress:
        found = checkpoint.export(
            path, out, step=step, dtype=_DTYPES[dtype], max_shard_nbytes=nbytes, prefix=prefix, aliases=aliases,
            name=name, overwrite=force, progress=progress,
        )  # fmt: skip
    show.exported(found)


@ckpt.command()
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, as above.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Compare optimizer states and options too.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two checkpoints of any layouts. Exit code 1 if they differ."""
    with _errors(), show.progress("comparing") as progress:
        found = checkpoint.diff(a, b, optimizer=optimizer, progress=progress)
    if as_json:
        content: dict[str, Any] = {**vars(found), "differences": [vars(d) for d in found.differences]}
        typer.echo(json.dumps({**content, "same": found.same}, indent=1))
    else:
        show.comparison(found)
    raise typer.Exit(0 if found.same else 1)


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise typer.BadParameter(
            f"expected a size such as 500MB, 5GB or 2GiB, got {text!r}", param_hint="--max-shard-size"
        )
    return int(float(match[1]) * _UNITS[match[2]])
