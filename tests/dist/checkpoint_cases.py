"""Saving, loading and resuming through real processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero as lz
from layerzero.checkpoint.source import Source
from tests.dist.models import Block, OddModel, token_loss, tokens_for

ROWS, VOCAB = 24, 17


def sharding_of(name: str) -> lz.Sharding | str:
    kind, _, size = name.partition(":")
    if kind == "full":
        return lz.Sharding.layerzero(int(size), accumulate="full")
    return lz.Sharding.named(kind, int(size)) if size else kind


class Run:
    """A model with its optimizer and schedule; ``seed`` makes the weights."""

    def __init__(self, sharding: str, seed: int = 0, optimizer: str = "AdamW", model: nn.Module | None = None, **kw: Any):
        torch.manual_seed(seed)
        if kw.get("param_dtype") == "bf16":
            kw["buffer_dtype"] = "bf16"
        self.model = OddModel() if model is None else model
        lz.shard(self.model, sharding=sharding_of(sharding), units=[Block], **kw)
        trainable = [p for p in self.model.parameters() if p.requires_grad]
        decayed = [p for p in trainable if p.ndim > 1]
        others = [p for p in trainable if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        self.optimizer = getattr(torch.optim, optimizer)(groups, lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)

    def step(self, step: int) -> float:
        """One step on the global batch of that number; returns the loss over it."""
        rows = tokens_for(step, VOCAB, ROWS).chunk(dist.get_world_size())[dist.get_rank()]
        loss = token_loss(self.model(rows), rows)
        loss.backward()
        self.model.clip_grad_norm_(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def slices(self) -> list[tuple[str, int, dict[str, list[float]]]]:
        """Name, first element and values by state, of everything this rank holds. Independent of checkpoints."""
        held = []
        for p in self.model.parameters():
            info = lz.param_info(p)
            state = {"value": p, **{k: v for k, v in self.optimizer.state.get(p, {}).items() if v.shape == p.shape}}
            if p.ndim == 0:
                state.pop("step", None)
            values = {k: v.detach().reshape(-1).tolist() for k, v in state.items()}
            held.append((info.fqn, info.global_range.start, values))
        return held

    def steps_of_adam(self) -> list[float]:
        return sorted({float(s["step"]) for s in self.optimizer.state.values() if "step" in s})


def train_and_save(folder: str, sharding: str, steps: int, optimizer: str = "AdamW", **save: Any) -> dict[str, Any]:
    run = Run(sharding, optimizer=optimizer)
    for step in range(steps):
        run.step(step)
    saved = lz.save(folder, run.model, run.optimizer, step=steps, extra={"schedule": run.schedule.state_dict()}, **save)
    saved.wait()
    held = run.slices()
    return {"slices": held, "next": run.step(steps), "folder": saved.folder.name}


def load_and_step(folder: str, sharding: str, steps: int, optimizer: str = "AdamW") -> dict[str, Any]:
    run = Run(sharding, seed=99, optimizer=optimizer)
    before = run.slices()
    loaded = lz.load(folder, run.model, run.optimizer)
    run.schedule.load_state_dict(loaded.extra["schedule"])
    assert (loaded.step, loaded.missing, loaded.unexpected, loaded.mismatched) == (steps, (), (), ())
    return {
        "before": before, "slices": run.slices(), "adam_steps": run.steps_of_adam(), "next": run.step(steps),
        "lr": [group["lr"] for group in run.optimizer.param_groups],
    }  # fmt: skip


def resume_equals_no_interruption(folder: str, sharding: str, dtype: str) -> None:
    whole = Run(sharding, param_dtype=dtype)
    losses = [whole.step(step) for step in range(6)]
    first = Run(sharding, param_dtype=dtype)
    assert [first.step(step) for step in range(3)] == losses[:3]
    extra = {"schedule": first.schedule.state_dict(), "position": (3, [1.5])}
    lz.save(folder, first.model, first.optimizer, extra=extra, rank_extra=lz.rng_state())
    drawn = torch.rand(3).tolist()
    second = Run(sharding, seed=99, param_dtype=dtype)
    assert second.slices() != first.slices()
    loaded = lz.load(folder, second.model, second.optimizer)
    second.schedule.load_state_dict(loaded.extra["schedule"])
    lz.set_rng_state(loaded.rank_extra)
    assert torch.rand(3).tolist() == drawn
    assert loaded.extra["position"] == (3, [1.5])
    assert second.slices() == first.slices()
    assert [second.step(step) for step in range(3, 6)] == losses[3:]
    assert second.slices() == whole.slices() and losses[0] != losses[5]


def first_forward_after_load_uses_new_weights(folder: str, sharding: str) -> None:
    run = Run(sharding, param_dtype="bf16")
    tokens = tokens_for(7, VOCAB, ROWS)
    with torch.no_grad():
        early = run.model(tokens)
    lz.save(folder, run.model, run.optimizer)
    run.step(0)
    run.step(1)
    with torch.no_grad():
        assert not torch.equal(run.model(tokens), early)  # and `model` is now made from later weights
    lz.load(folder, run.model)
    with torch.no_grad():
        assert torch.equal(run.model(tokens), early)


def background_save(folder: str, sharding: str) -> dict[str, Any]:
    run = Run(sharding)
    run.step(0)
    held = run.slices()
    saved = lz.save(folder, run.model, run.optimizer, background=True)
    for step in range(1, 5):
        run.step(step)  # changes every weight while they are being written
    assert saved.wait().name == "step-00000000" and saved.done()
    assert held != run.slices()
    again = lz.save(folder, run.model, run.optimizer, background=True)
    third = lz.save(folder, run.model, run.optimizer)  # waits for the one before
    assert (again.done(), again.step, third.step) == (True, 1, 2)
    other = Run(sharding, seed=99)
    assert lz.load(folder, other.model, other.optimizer, step=0).step == 0
    assert other.slices() == held
    return {"latest": lz.latest_step(folder)}


@contextlib.contextmanager
def failing_write(rank: int):
    """Writing fails on one rank, as it does when its disk is full."""
    save_module = importlib.import_module("layerzero.checkpoint.save")  # the package's attribute is the function
    original = save_module.write_file

    def fail(path: Path, blobs: Any) -> Any:
        if dist.get_rank() == rank:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return original(path, blobs)

    save_module.write_file = fail
    try:
        yield
    finally:
        save_module.write_file = original


def message_of(function: Any, *args: Any, error: type[Exception] = lz.CheckpointError, **kwargs: Any) -> str:
    try:
        function(*args, **kwargs)
    except error as e:
        return str(e)
    raise AssertionError(f"{function} did not raise")


def failed_saves_leave_the_others(folder: str) -> list[str]:
    run = Run("layerzero:2")
    run.step(0)
    lz.save(folder, run.model, run.optimizer)
    messages = []
    with failing_write(rank=1):
        messages.append(message_of(lz.save, folder, run.model, run.optimizer))
        background = lz.save(folder, run.model, run.optimizer, background=True)
    messages.append(message_of(lz.save, folder, run.model, run.optimizer))  # surfaces here, and nothing is saved
    assert background.done() and background.wait().name == "step-00000001"  # raised once
    for extra in (object(), {"a": [1, {2: lambda: 0}]}, torch.zeros(2).to_sparse()):
        messages.append(message_of(lz.save, folder, run.model, run.optimizer, extra=extra))
    messages.append(message_of(lz.save, folder, run.model, run.optimizer, keep=0))
    messages.append(message_of(lz.save, folder, run.model, run.optimizer, step=0))
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=1.0)
    messages.append(message_of(lz.save, folder, run.model, stranger))
    own = dist.get_rank()
    messages.append(message_of(lz.save, folder, run.model, step=own, error=lz.DesyncError))
    messages.append(message_of(lz.save, f"{folder}/file/below", run.model))
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["file", "latest", "step-00000000"]
    assert lz.load(folder, run.model, run.optimizer).step == 0
    return messages


class Smaller(OddModel):
    """Without two parameters of the other, one of another shape, and one more."""

    def __init__(self) -> None:
        super().__init__()
        del self.pair, self.blocks[2]
        self.blocks[0].up.bias = nn.Parameter(torch.zeros(31))
        self.added = nn.Parameter(torch.full((3,), 7.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def differences(folder: str) -> dict[str, Any]:
    run = Run("zero3")
    run.step(0)
    lz.save(folder, run.model, run.optimizer)
    other = Run("layerzero:2", model=Smaller())
    before = other.slices()
    text = message_of(lz.load, folder, other.model, other.optimizer)
    assert other.slices() == before
    loaded = lz.load(folder, other.model, other.optimizer, strict=False)
    values = {name: values["value"] for name, _, values in other.slices()}
    assert set(values["added"]) <= {7.0} and set(values["blocks.0.up.bias"]) <= {0.0}
    same = lz.full_state_dict(run.model)["blocks.1.down.weight"]
    assert torch.equal(lz.full_state_dict(other.model)["blocks.1.down.weight"], same)
    sgd = Run("zero3", optimizer="SGD")
    return {
        "text": text, "missing": loaded.missing, "unexpected": loaded.unexpected, "mismatched": loaded.mismatched,
        "class": message_of(lz.load, folder, sgd.model, sgd.optimizer),
        "step": message_of(lz.load, folder, run.model, step=5), "none": message_of(lz.load, f"{folder}/no", run.model),
    }  # fmt: skip


def weights_only(folder: str) -> str:
    run = Run("zero3")
    run.step(0)
    lz.save(folder, run.model)
    other = Run("zero3", seed=99)
    assert lz.load(folder, other.model).has_optimizer is False
    assert other.slices() == [(n, s, {"value": v["value"]}) for n, s, v in run.slices()]
    return message_of(lz.load, folder, other.model, other.optimizer)


def param_groups(folder: str) -> None:
    run = Run("layerzero:2")
    run.step(0)
    lz.save(folder, run.model, run.optimizer)
    other = Run("zero1", seed=99)
    named = {lz.param_info(p).fqn: p for p in other.model.parameters() if p.requires_grad}
    one_by_one = [{"params": [p]} for p in reversed(list(named.values()))]
    optimizer = torch.optim.AdamW(one_by_one, lr=5.0, betas=(0.5, 0.5), fused=True)
    lz.load(folder, other.model, optimizer)
    for group in optimizer.param_groups:
        decays = len(lz.param_info(group["params"][0]).global_shape) > 1
        assert group["weight_decay"] == (0.1 if decays else 0.0) and group["betas"] == (0.9, 0.999)
        assert group["fused"] is True and group["initial_lr"] == (1e-2 if decays else 3e-3)
    joined = torch.optim.AdamW(list(named.values()), lr=5.0, weight_decay=0.7)
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lz.load(folder, other.model, joined)
    assert any("weight_decay" in str(w.message) and "lr" in str(w.message) for w in caught)
    assert joined.param_groups[0]["weight_decay"] == 0.7 and joined.param_groups[0]["betas"] == (0.9, 0.999)
    other.optimizer = joined
    assert other.slices()[0][2].keys() == {"value", "exp_avg", "exp_avg_sq"}


def resume_from_configuration(folder: str) -> list[str]:
    run = Run("layerzero:2")
    for step in range(2):
        run.step(step)
    lz.save(folder, run.model, run.optimizer, step=2, extra={"schedule": run.schedule.state_dict()})
    loss = run.step(2)
    other = Run("zero3", seed=99, ckpt_load_path=folder)
    texts = [message_of(other.step, 2, error=lz.ShardingError)]
    other.optimizer.zero_grad()
    loaded = lz.resume(other.model, other.optimizer)
    assert loaded is not None and loaded.step == 2
    other.schedule.load_state_dict(loaded.extra["schedule"])
    assert abs(other.step(2) - loss) < 1e-6
    weights = Run("zero3", seed=99, ckpt_load_path=folder)
    lz.resume(weights.model)
    weights.step(2)
    assert lz.resume(run.model) is None
    texts.append(message_of(Run, "zero3", ckpt_load_path=f"{folder}/absent"))
    return texts


class WithIgnored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(13, 29)
        self.frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.norm = nn.BatchNorm1d(13)


def ignored_modules(folder: str) -> None:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = WithIgnored()
        model.norm.running_mean.fill_(seed)
        model.adapter[1].running_mean.fill_(seed)
        import warnings

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", lz.LayerZeROWarning)  # a trained module that is ignored
            lz.shard(model, sharding="zero3", units=[Block], ignored_modules=["frozen", "adapter"])
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    model, optimizer = build(1)
    for p in model.adapter.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    lz.save(folder, model, optimizer)
    saved = Source.open(Path(folder)).manifest
    assert not any(name.startswith("frozen") for name in saved.tensors) and saved.left_out == ("frozen",)
    other, other_optimizer = build(2)
    frozen = [t.clone() for t in other.frozen.state_dict().values()]
    lz.load(folder, other, other_optimizer)
    assert all(torch.equal(a, b) for a, b in zip(frozen, other.frozen.state_dict().values(), strict=True))
    assert torch.equal(other.adapter[0].weight, model.adapter[0].weight)
    state = other_optimizer.state[other.adapter[0].weight]
    assert torch.equal(state["exp_avg"], optimizer.state[model.adapter[0].weight]["exp_avg"])
    assert other.norm.running_mean.eq(1).all() and other.adapter[1].running_mean.eq(1).all()
    lz.save(folder, model, optimizer, include_ignored=True)
    lz.load(folder, other, other_optimizer)
    assert torch.equal(other.frozen[0].weight, model.frozen[0].weight)


def retention(folder: str) -> list[list[int]]:
    run = Run("zero3")
    seen = []
    for step in (5, 10, 15, 20):
        lz.save(folder, run.model, step=step, keep=2)
        seen.append([int(name[5:]) for name in sorted(os.listdir(folder)) if name.startswith("step-")])
        assert lz.latest_step(folder) == step
        dist.barrier()
    lz.load(folder, run.model, step=15)
    lz.save(folder, run.model, step=16, keep=2)  # another continuation: the pointer follows what was saved last
    assert lz.latest_step(folder) == 16
    lz.save(folder, run.model, step=16, keep=2, overwrite=True, extra="again")
    assert lz.load(folder, run.model).extra == "again"
    seen.append([int(name[5:]) for name in sorted(os.listdir(folder)) if name.startswith("step-")])
    return seen


def full_disk(folder: str, foreseen: bool) -> tuple[str, int]:
    """The first save fits, the second does not; after making room it does."""
    with pytest.MonkeyPatch.context() as patch:
        if not foreseen:  # what else writes to the disk may take the room in between
            patch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1 << 40))
        return _full_disk(folder)


def _full_disk(folder: str) -> tuple[str, int]:
    model = nn.Sequential(nn.Linear(128, 1024), nn.Linear(1024, 17))
    lz.shard(model, sharding="zero3", units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    lz.save(folder, model, optimizer, step=0)
    filler = Path(folder, "filler")
    if dist.get_rank() == 0:
        filler.write_bytes(b"x" * (2 << 20))
    dist.barrier()
    text = message_of(lz.save, folder, model, optimizer, step=1)
    dist.barrier()
    assert sorted(os.listdir(folder)) == ["filler", "latest", "step-00000000"]
    assert lz.load(folder, model, optimizer).step == 0
    if dist.get_rank() == 0:
        filler.unlink()
    dist.barrier()
    return text, lz.save(folder, model, optimizer, step=1, keep=1).step


def ranks_that_disagree(folder: str) -> dict[str, str]:
    """Whatever one rank gets wrong is an error on all, at once, and leaves everything as it was."""
    rank = dist.get_rank()
    run = Run("zero3")
    run.step(0)
    lz.save(folder, run.model, run.optimizer)
    optimizer: Any = run.optimizer
    told = {
        "path": message_of(lz.save, None if rank else folder, run.model),
        "step": message_of(lz.save, folder, run.model, step=2.5 if rank else 2),
        "optimizer": message_of(
            lz.save, folder, run.model, *([optimizer] if rank == 0 else []), error=lz.DesyncError
        ),
        "list": message_of(lz.load, folder, run.model, 3 if rank else optimizer),
    }  # fmt: skip
    home = os.getcwd()
    own = Path(folder, f"home{rank}")
    try:
        own.mkdir(exist_ok=True)
        os.chdir(own)
        told["cwd"] = message_of(lz.load, "x", run.model, error=lz.DesyncError)
    finally:
        os.chdir(home)
    with torch.inference_mode():
        told["inference"] = message_of(lz.load, folder, run.model)
    saved = lz.save(folder, run.model, step=torch.tensor(7))
    assert saved.step == 7 and lz.load(folder, run.model).step == 7
    return told


def copies_that_differ(folder: str) -> str:
    """Nodes whose folders of the same name are not the same folder."""
    source_module = importlib.import_module("layerzero.checkpoint.source")
    run = Run("zero3")
    lz.save(folder, run.model)
    original = source_module.Source.fingerprint
    source_module.Source.fingerprint = lambda source: str(dist.get_rank())
    try:
        return message_of(lz.load, folder, run.model, error=lz.DesyncError)
    finally:
        source_module.Source.fingerprint = original


def one_rank_waits(folder: str) -> None:
    """The error of a background save that rank 0 has seen, and the others have not, is raised on all."""
    run = Run("zero3")
    lz.save(folder, run.model)
    with failing_write(rank=1):
        saved = lz.save(folder, run.model, background=True)
        if dist.get_rank() == 0:
            assert "No space left" in message_of(saved.wait)
        assert "No space left" in message_of(lz.save, folder, run.model)
    assert lz.save(folder, run.model).step == 1


def no_room_for_a_copy(folder: str) -> str:
    """A rank without host memory for a background save tells the others, which would wait for it otherwise."""
    capture = importlib.import_module("layerzero.checkpoint.capture")
    original = capture.LocalPiece.in_host_memory

    def fail(piece: Any) -> Any:
        if dist.get_rank() == 1:
            raise MemoryError("no room for a copy")
        return original(piece)

    run = Run("zero3")
    capture.LocalPiece.in_host_memory = fail
    try:
        text = message_of(lz.save, folder, run.model, background=True)
    finally:
        capture.LocalPiece.in_host_memory = original
    assert lz.save(folder, run.model, background=True).wait().name == "step-00000000"
    return text


class Untied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        if tied:
            self.b.weight = self.a.weight


def untied_into_tied(folder: str) -> str:
    different = lz.shard(Untied(tied=False), sharding="zero3", units=[nn.Linear])
    lz.save(folder, different, step=0)
    tied = lz.shard(Untied(tied=True), sharding="zero3", units=[nn.Linear])
    text = message_of(lz.load, folder, tied)
    with torch.no_grad():
        for p, q in zip(different.a.parameters(), different.b.parameters(), strict=True):
            q.copy_(p)
    lz.save(folder, different, step=1)
    lz.load(folder, tied)
    assert torch.equal(lz.full_state_dict(tied)["b.weight"], lz.full_state_dict(different)["a.weight"])
    return text
