"""A Wan transformer over tensor- and pipeline-parallel ranks with recomputed blocks, against one process."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel, WanTransformerBlock
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

import layerzero as lz
from layerzero.parallel.wan import parallelize_wan

SIZE = (4, 4, 6)
MICRO = 3


def make_wan(num_layers: int = 3) -> Any:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=num_layers, rope_max_seq_len=16,
    ).train()  # fmt: skip


def batch_of() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(1)
    videos, text = (torch.randn(MICRO, *shape, generator=generator) for shape in ((4, *SIZE), (5, 16)))
    return videos, torch.randint(1000, (MICRO,), generator=generator), text


def recomputing_case() -> list[int]:
    """Gradients of two stages of two tensor-parallel ranks; (elements compared, forwards of this stage's first block)."""
    whole = make_wan()
    mesh = lz.ParallelMesh(pp=2, tp=2)
    videos, times, text = batch_of()
    plain = copy.deepcopy(whole)
    F.mse_loss(plain(videos, times, text, return_dict=False)[0], videos).backward()

    whole.enable_gradient_checkpointing()
    stage: Any = parallelize_wan(whole, mesh, latent_size=SIZE)
    lz.shard(stage, mesh=mesh, units=[WanTransformerBlock], sharding="zero3")
    place = mesh.coordinate("pp")
    assert mesh.pp is not None
    made = PipelineStage(stage, place, 2, torch.device("cpu"), group=mesh.pp.get_group())
    pipeline = lz.Pipeline(Schedule1F1B(made, n_microbatches=MICRO, loss_fn=F.mse_loss), mesh)
    pipeline.step(*(() if place else (videos, times, text)), target=videos if place else None)  # finds out shapes
    stage.zero_grad()
    num_forwards = 0

    def count(*_: Any) -> None:
        nonlocal num_forwards
        num_forwards += 1

    next(iter(stage.blocks.values())).register_forward_pre_hook(count)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1.0)
    before = lz.full_state_dict(stage)
    pipeline.step(*(() if place else (videos, times, text)), target=videos if place else None)
    optimizer.step()
    after, compared = lz.full_state_dict(stage), 0
    for name, parameter in plain.named_parameters():
        if name in after:
            assert parameter.grad is not None
            torch.testing.assert_close(before[name] - after[name], parameter.grad, rtol=1e-3, atol=2e-6, msg=name)
            compared += int(parameter.grad.count_nonzero())
    assert len(after) == sum(1 for _ in stage.parameters())
    return [compared, num_forwards]


def refusals_case() -> list[str]:
    """What doesn't fit is refused: heads, blocks, a pipeline without a size."""
    messages = []

    def refused(model: Any, mesh: lz.ParallelMesh, latent_size: tuple[int, ...] | None = SIZE) -> None:
        try:
            parallelize_wan(model, mesh, latent_size=latent_size)
        except lz.ConfigError as error:
            messages.append(str(error))

    refused(make_wan(), lz.ParallelMesh(tp=4))
    refused(make_wan(), lz.ParallelMesh(pp=4))
    both, model = lz.ParallelMesh(pp=2, tp=2), make_wan()
    refused(model, both, None)
    refused(model, both, (4, 4))
    stage = parallelize_wan(model, both, latent_size=SIZE)  # what was refused was not changed
    refused(model, both)
    refused(stage, both)
    refused(lz.shard(make_wan(), units=[]), both)
    return messages


def frozen_case() -> list[str]:
    """Names of what is trainable after a split of a model of which the feed-forward alone is."""
    model = make_wan()
    model.requires_grad_(False)
    for block in model.blocks:
        block.ffn.requires_grad_(True)
    parallelize_wan(model, lz.ParallelMesh(tp=2))
    return [name for name, p in model.named_parameters() if p.requires_grad]


def unlike_inputs_case() -> str:
    """Context-parallel ranks of a pipeline's first stage that were given different samples."""
    mesh = lz.ParallelMesh(pp=2, cp=2)
    stage = parallelize_wan(make_wan(), mesh, latent_size=SIZE)
    lz.shard(stage, mesh=mesh, units=[WanTransformerBlock])
    if mesh.coordinate("pp"):
        return ""
    videos, times, text = batch_of()
    try:
        stage(videos + mesh.coordinate("cp"), times, text)
    except lz.DesyncError as error:
        return str(error)
    return "nothing was noticed"
