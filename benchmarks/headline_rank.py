"""One rank of the headline comparison: a Wan transformer, split by tensor parallelism or by context parallelism.

Started by `benchmarks.headline` through torchrun. Writes what it measured as JSON.
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from torch.nn import functional as F

import layerzero as lz
from benchmarks import wan_tensor_parallel
from benchmarks.memory import resident_nbytes, trim
from layerzero.module import engine_of
from layerzero.parallel.context import ContextParallel, parallelize

TOKENS_PER_FRAME = 256  # 32 x 32 latents in patches of 2 x 2


@dataclass(frozen=True)
class Workload:
    """The model, and how it is trained.

    Attributes:
        text_tokens: of the caption that tokens attend to.
        recompute: keep only the inputs of blocks for the backward.
        zero3_size: ranks in LayerZeRO's ZeRO-3 group.
    """

    dim: int = 256
    heads: int = 4
    ffn_dim: int = 1024
    layers: int = 4
    text_tokens: int = 64
    dtype: str = "bf16"
    recompute: bool = False
    zero3_size: int = 2

    def model(self) -> Any:
        """The same weights on every rank."""
        torch.manual_seed(0)
        model = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=self.heads, attention_head_dim=self.dim // self.heads,
            in_channels=8, out_channels=8, text_dim=128, freq_dim=64, ffn_dim=self.ffn_dim, num_layers=self.layers,
            cross_attn_norm=True, rope_max_seq_len=1024,
        )  # fmt: skip
        if self.recompute:
            model.enable_gradient_checkpointing()
        return model.train()

    def batch(self, length: int, step: int) -> dict[str, torch.Tensor]:
        """One video of ``length`` tokens, the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        side = 2 * int(TOKENS_PER_FRAME**0.5)
        return {
            "hidden_states": torch.randn(1, 8, length // TOKENS_PER_FRAME, side, side, generator=generator),
            "timestep": torch.randint(1000, (1,), generator=generator),
            "encoder_hidden_states": torch.randn(1, self.text_tokens, 128, generator=generator),
        }


class System:
    """A way of training the model on all ranks."""

    model: Any

    def __init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Gradients of the mean square of what the output differs from the input; returns it."""
        output = self.model(**batch, return_dict=False)[0]
        loss = F.mse_loss(output.float(), batch["hidden_states"])
        (loss * self.loss_share).backward()
        return loss.detach()

    loss_share = 1.0

    def step(self, batch: dict[str, torch.Tensor]) -> float:
        """One optimizer step."""
        loss = self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class ContextLayerZeRO(System):
    """Ulysses context parallelism over all ranks, model states sharded by LayerZeRO."""

    def __init__(self, work: Workload) -> None:
        self.mesh = lz.ParallelMesh(cp=dist.get_world_size(), zero3_size=work.zero3_size)
        self.ranks = ContextParallel.of(self.mesh)
        self.model = parallelize(work.model(), self.ranks)
        wan_tensor_parallel.use_lean_norms(self.model)
        lz.shard(self.model, mesh=self.mesh, units=[WanTransformerBlock], param_dtype=work.dtype)
        super().__init__()


class TensorZeRO1(System):
    """Tensor and sequence parallelism over all ranks; ZeRO-1 over the one rank that holds each part."""

    def __init__(self, work: Workload) -> None:
        self.mesh = lz.ParallelMesh(tp=dist.get_world_size())
        self.ranks = ContextParallel.of(self.mesh.tp)
        self.model = work.model()
        self._shared = {id(p) for p in wan_tensor_parallel.parallelize_wan(self.model, self.ranks)}
        names = [name for name, p in self.model.named_parameters() if id(p) in self._shared]
        self.loss_share = 1 / self.ranks.size
        lz.shard(self.model, mesh=self.mesh, sharding="zero1", param_dtype=work.dtype, units=[WanTransformerBlock])
        parameters = dict(self.model.named_parameters())
        self._shared_parameters = [parameters[name] for name in names]
        super().__init__()

    def backward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().backward(batch)
        wan_tensor_parallel.sum_gradients([p.grad.local for p in self._shared_parameters], self.ranks)
        return loss


SYSTEMS: dict[str, Callable[[Workload], System]] = {"cp+layerzero": ContextLayerZeRO, "tp+zero1": TensorZeRO1}


# ---------------------------------------------------------------------------- measuring


def measure_time(work: Workload, lengths: Sequence[int], rounds: int) -> dict[str, Any]:
    """Seconds per step on the slowest rank, by length and system; systems take turns in every round."""
    systems = {name: build(work) for name, build in SYSTEMS.items()}
    seconds: dict[int, dict[str, list[float]]] = {n: {name: [] for name in systems} for n in lengths}
    losses: dict[int, dict[str, list[float]]] = {n: {name: [] for name in systems} for n in lengths}
    sent: dict[int, dict[str, int]] = {n: {} for n in lengths}
    for length in lengths:
        for number in range(rounds + 1):
            batch = work.batch(length, number)
            order = list(systems) if number % 2 else list(reversed(systems))
            for name in order:
                system = systems[name]
                system.ranks.comm.traffic.reset()
                gc.collect()
                gc.disable()
                dist.barrier()
                started = time.perf_counter()
                loss = system.step(batch)
                mine = torch.tensor([time.perf_counter() - started, loss], dtype=torch.float64)
                gc.enable()
                dist.all_reduce(mine, op=dist.ReduceOp.MAX)
                if number:  # the first is for warming up
                    seconds[length][name].append(mine[0].item())
                losses[length][name].append(mine[1].item())
                sent[length][name] = sum(count.nbytes for _, _, count in system.ranks.comm.traffic)
    state = {name: sum(row.nbytes for row in lz.traffic_report(system.model).rows) for name, system in systems.items()}
    return {"seconds": seconds, "losses": losses, "sent_activations": sent, "sent_model_states": state}


def measure_memory(work: Workload, lengths: Sequence[int], name: str) -> dict[str, Any]:
    """Bytes on the rank that needs most, by length: a step's peak of resident memory, and what of it is what."""
    SYSTEMS[name](replace(work, layers=1)).step(work.batch(min(lengths), 0))  # loads what code is loaded on first use
    trim()
    before = resident_nbytes("VmRSS")
    system = SYSTEMS[name](work)
    for step in range(2):
        system.step(work.batch(min(lengths), step))
    trim()
    at_rest = resident_nbytes("VmRSS") - before
    report = lz.memory_report(system.model)
    adam = sum(t.nbytes for s in system.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    peaks: dict[int, list[int]] = {}
    for length in lengths:
        batch = work.batch(length, 0)
        dist.barrier()
        trim()
        start = resident_nbytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts anew
        system.step(batch)
        peak = resident_nbytes("VmHWM")
        peaks[length] = [peak - start, saved_for_backward(system, batch)]
    flat = [nbytes for pair in peaks.values() for nbytes in pair]
    mine = torch.tensor([report.main + report.model, report.main_grad, adam, at_rest, *flat])
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    parameters, gradients, optimizer, at_rest, *rest = mine.tolist()
    return {
        "parameters": parameters, "gradients": gradients, "optimizer": optimizer, "at_rest": at_rest,
        "in_step": dict(zip(lengths, rest[::2], strict=True)), "saved": dict(zip(lengths, rest[1::2], strict=True)),
    }  # fmt: skip


def saved_for_backward(system: System, batch: dict[str, torch.Tensor]) -> int:
    """Bytes of tensors that autograd holds at the end of a forward, each storage once, without parameters."""
    held: dict[int, int] = {}
    groups = [group for unit in engine_of(system.model).units for group in unit.groups]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if all(storage._cdata != group.unsharded.untyped_storage()._cdata for group in groups):
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = system.model(**batch, return_dict=False)[0]
    (output.sum() * 0).backward()
    system.optimizer.zero_grad()
    return sum(held.values())


def main(job: dict[str, Any]) -> None:
    """``job``: what to measure, and the file for the result."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work = Workload(**job["workload"])
    if job["measure"] == "time":
        result = measure_time(work, job["lengths"], job["rounds"])
    else:
        result = measure_memory(work, job["lengths"], job["measure"])
    if dist.get_rank() == 0:
        Path(job["result"]).write_text(json.dumps({"workload": asdict(work), **result}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import sys

    main(json.loads(sys.argv[1]))
