"""The sharded module with its optimizer, and one step of it, however the transformer is split over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import layerzero as lz
from layerzero.parallel.wan import parallelize_wan
from recipes.video_dit.batches import DataOrder
from recipes.video_dit.clips import clip_frames, load_clips
from recipes.video_dit.model import LATENT_SHAPE, FlowBatch, VideoDiffusion, flow_loss
from recipes.video_dit.settings import OptimizerSettings, Settings


@dataclass(frozen=True)
class Trainer:
    """A sharded module, or one stage of it, with its optimizer and schedule."""

    module: VideoDiffusion  # and an lz.ShardedModule, since lz.shard
    mesh: lz.ParallelMesh
    pipeline: lz.Pipeline | None
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    order: DataOrder
    max_grad_norm: float
    device: torch.device
    num_params: int

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step; returns this rank's loss, whose mean over ranks counts, and the global gradient norm.

        The norm is that before clipping.
        """
        loss = self._accumulate(step) if self.pipeline is None else self._run_pipeline(self.pipeline, step)
        grad_norm = (self.pipeline or self.module).clip_grad_norm_(self.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss, grad_norm

    def _accumulate(self, step: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        *first, last = range(self.order.micro_batches)
        with self.module.no_sync():
            for index in first:
                losses.append(self._forward_backward(step, index))
        losses.append(self._forward_backward(step, last))
        return torch.stack(losses).mean()

    def _forward_backward(self, step: int, index: int) -> torch.Tensor:
        batch = self._micro_batch(step, index)
        loss = flow_loss(self.module(*batch.inputs), batch.target)
        (loss / self.order.micro_batches).backward()
        return loss.detach()

    def _run_pipeline(self, pipeline: lz.Pipeline, step: int) -> torch.Tensor:
        stage, num_stages = self.mesh.coordinate("pp"), self.mesh.size("pp")
        is_first, is_last = stage == 0, stage == num_stages - 1
        losses: list[torch.Tensor] = []
        if is_first or is_last:
            batch = FlowBatch.join([self._micro_batch(step, index) for index in range(self.order.micro_batches)])
            pipeline.step(
                *(batch.inputs if is_first else ()), target=batch.target if is_last else None, losses=losses
            )  # the schedule cuts it into the micro-batches again
        else:
            pipeline.step()
        # Only last stages have losses; the mean is over the ranks of all stages.
        return torch.stack(losses).mean().detach() * num_stages if is_last else torch.zeros((), device=self.device)

    def _micro_batch(self, step: int, index: int) -> FlowBatch:
        clips = self.order.micro_batch(step, index)
        frames = torch.stack([clip_frames(clip) for clip in clips]).to(self.device)
        generator = torch.Generator(self.device).manual_seed(self.order.noise_seed(step, index))
        with torch.no_grad():
            return self.module.prepare(
                frames, [clip.caption for clip in clips], [clip.index for clip in clips], generator
            )


def build_trainer(settings: Settings, engine: lz.LayerZeROConfig, device: torch.device) -> Trainer:
    """Collective over all ranks.

    Raises:
        lz.ConfigError: the ranks, the transformer or the micro-batches can't be split as `settings` say.
    """
    mesh = lz.ParallelMesh(cp=settings.cp, tp=settings.tp, pp=settings.pp)
    if settings.micro_batches < settings.pp:
        raise lz.ConfigError(
            f"pipeline parallel: {settings.micro_batches} micro-batches for pp = {settings.pp} stages, expected at "
            f"least as many: some stages would never have any work"
        )
    module, num_params = build_module(settings, engine, mesh, device)
    pipeline = build_pipeline(module, mesh, settings.micro_batches, device) if mesh.pp is not None else None
    options = settings.optimizer
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trainable, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay, fused=True
    )
    order = DataOrder(
        load_clips("train"),
        settings.seed,
        mesh.coordinate("dp"),  # ranks that share clips draw the same clips and the same noise
        mesh.size("dp"),
        settings.batch_size,
        settings.micro_batches,
    )
    schedule = warmup_cosine(optimizer, options, settings.steps)
    return Trainer(module, mesh, pipeline, optimizer, schedule, order, options.max_grad_norm, device, num_params)


def build_module(
    settings: Settings, engine: lz.LayerZeROConfig, mesh: lz.ParallelMesh, device: torch.device
) -> tuple[VideoDiffusion, int]:
    """The sharded module, of a pipeline this rank's stage, and the whole module's number of trained parameters."""
    torch.manual_seed(settings.seed)
    module = VideoDiffusion(settings.transformer, settings.flow).to(device)
    num_params = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    module.transformer = parallelize_wan(module.transformer, mesh, latent_size=LATENT_SHAPE[1:])
    if mesh.coordinate("pp") < mesh.size("pp") - 1:
        engine = engine.replace(autocast_output=False)  # the next stage takes activations in the compute dtype
    lz.shard(module, fitting(engine, mesh), mesh=mesh)
    return module, num_params


def fitting(engine: lz.LayerZeROConfig, mesh: lz.ParallelMesh) -> lz.LayerZeROConfig:
    """With `zero3_size` and `node_size` no larger than what cp, tp and pp leave of the ranks."""
    num_ranks = mesh.size("dp") * mesh.size("cp")
    node_size = None if engine.node_size is None else math.gcd(engine.node_size, num_ranks)
    return engine.replace(zero3_size=math.gcd(engine.zero3_size, num_ranks), node_size=node_size)


def build_pipeline(
    module: VideoDiffusion, mesh: lz.ParallelMesh, micro_batches: int, device: torch.device
) -> lz.Pipeline:
    """One forward, one backward: a stage keeps the activations of at most as many micro-batches as there are stages."""
    assert mesh.pp is not None
    stage = PipelineStage(module, mesh.coordinate("pp"), mesh.size("pp"), device, group=mesh.pp.get_group())
    return lz.Pipeline(Schedule1F1B(stage, n_microbatches=micro_batches, loss_fn=flow_loss), mesh)


def warmup_cosine(
    optimizer: torch.optim.Optimizer, options: OptimizerSettings, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then a cosine down to `final_lr_ratio`."""

    def ratio(step: int) -> float:
        if step < options.warmup_steps:
            return (step + 1) / options.warmup_steps
        progress = (step - options.warmup_steps) / max(1, steps - options.warmup_steps)
        return options.final_lr_ratio + (1 - options.final_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, ratio)
