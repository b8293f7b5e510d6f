"""diffusers' Wan video transformer over context-, tensor- and pipeline-parallel ranks, in one call.

[Note: tensor-parallel Wan]
Attention heads and the feed-forward's inner features are spread over the tensor-parallel ranks (Megatron-LM, Shoeybi
et al., 2019) by torch's ``parallelize_module``. Two things are special. Query and key are normalised over *all* heads,
so these norms sum squares over the ranks (`SplitNorms`), one number per token. And attention's input becomes a DTensor
once, before its projections, so that their gradients are summed once instead of one by one. Everything else is
computed alike on all ranks, hence its parameters are plain.

[Note: Wan stages]
Timestep and caption are embedded on the first stage and travel with the tokens. Other stages would need copies of the
embedders otherwise, which hold 6 D² parameters, more than half of a block of width D without its feed-forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from layerzero.errors import ConfigError
from layerzero.parallel.context import ContextParallel, parallelize
from layerzero.parallel.context.group import NUM_CHECKED_FORWARDS
from layerzero.parallel.mesh import ParallelMesh


def parallelize_wan(model: Any, mesh: ParallelMesh, *, latent_size: Sequence[int] | None = None) -> nn.Module:
    """Split a ``WanTransformer3DModel`` as ``mesh`` says; then shard what it returns, with the same mesh.

    Build the same whole model on every rank, or build it on the meta device. Ranks that differ only in their cp, tp or
    pp coordinate need the same inputs. Checkpoints and ``full_state_dict`` have the whole model's names and shapes.

    Args:
        model: changed in place for cp and tp.
        mesh: cp splits tokens (`layerzero.parallel.context.parallelize`); tp splits heads and the feed-forward.
        latent_size: frames, rows and columns of the latents; needed for pp > 1, as a later stage doesn't see them.

    Returns:
        ``model``, or this rank's `WanStage` of it for pp > 1.

    Raises:
        ConfigError: if heads or the feed-forward's width don't divide by tp, there are fewer blocks than stages, or
            the model is another one, sharded already or was split before. Nothing is changed then.
        DesyncError: in a forward, if ranks that share samples were given different inputs.
    """
    _check(model, mesh, latent_size)
    _done.add(model)
    if mesh.cp is not None:
        parallelize(model, ContextParallel.of(mesh))
    if mesh.tp is not None:
        for block in model.blocks:
            _split_block(block, mesh.tp)
    if latent_size is None or mesh.size("pp") == 1:
        return model
    context = ContextParallel.of(mesh) if mesh.cp is not None else None
    return WanStage(model, mesh.coordinate("pp"), mesh.size("pp"), latent_size, context)


_done: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def _check(model: Any, mesh: ParallelMesh, latent_size: Sequence[int] | None) -> None:
    tp, pp = mesh.size("tp"), mesh.size("pp")
    if "WanTransformer3DModel" not in [cls.__name__ for cls in type(model).__mro__]:
        raise ConfigError(f"parallelize_wan: expected diffusers' WanTransformer3DModel, got {type(model).__name__}")
    if model in _done:
        raise ConfigError("parallelize_wan: this model was split before: call it once, on a model built anew")
    if any(hasattr(parameter, "_layerzero_info") for parameter in model.parameters()):
        raise ConfigError("parallelize_wan: the model is sharded already: split it first, then call lz.shard")
    config, image = model.config, model.condition_embedder.image_embedder
    for what, number in (("num_attention_heads", config.num_attention_heads), ("ffn_dim", config.ffn_dim)):
        if number % tp:
            raise ConfigError(
                f"tensor parallel: {what} = {number} of the Wan transformer must be divisible by tp = {tp}"
            )
    attentions = [attention for block in model.blocks for attention in (block.attn1, block.attn2)]
    if tp > 1 and any(a.add_k_proj is not None or a.fused_projections for a in attentions):
        raise ConfigError("tensor parallel: Wan blocks with image or fused projections are not supported")
    if pp == 1:
        return
    if latent_size is None or len(latent_size) != 3:
        raise ConfigError(
            f"pipeline parallel: expected latent_size=(frames, rows, columns) for pp = {pp}, got {latent_size}"
        )
    if len(model.blocks) < pp:
        raise ConfigError(f"pipeline parallel: {len(model.blocks)} blocks can't be split into {pp} stages")
    if image is not None:
        raise ConfigError("pipeline parallel: Wan transformers that take an image are not supported")


# ---------------------------------------------------------------------------- tensor parallel


def _split_block(block: Any, mesh: DeviceMesh) -> None:
    plan: dict[str, ParallelStyle] = {"ffn.net.0.proj": ColwiseParallel(), "ffn.net.2": RowwiseParallel()}
    for name, states in (("attn1", None), ("attn2", Replicate())):
        attention = getattr(block, name)
        attention.heads //= mesh.size()
        layouts = (Replicate(), states, None, None)  # hidden states, encoder's states, mask, rotary tables
        plan[name] = PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)
        plan |= {f"{name}.{projection}": ColwiseParallel() for projection in ("to_q", "to_k", "to_v")}
        plan[f"{name}.to_out.0"] = RowwiseParallel()
        for norm in ("norm_q", "norm_k"):
            setattr(attention, norm, _SplitNorm(getattr(attention, norm), mesh))
    parallelize_module(block, mesh, plan)


class _SplitNorm(nn.Module):
    """RMS norm over features that are spread over tensor-parallel ranks: [..., D / tp] in and out."""

    def __init__(self, norm: nn.RMSNorm, mesh: DeviceMesh) -> None:
        super().__init__()
        self.eps = norm.eps
        self.ranks = ContextParallel.of(mesh)
        weight = distribute_tensor(norm.weight.detach(), mesh, [Shard(0)])
        self.weight = nn.Parameter(weight, requires_grad=norm.weight.requires_grad)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return SplitNorms.apply(self.ranks, self.eps, x, weight)[0]


class SplitNorms(torch.autograd.Function):
    """RMS norms over all D of tensors [B, n, D / size] with their weights; one small all-reduce for all, each way."""

    @staticmethod
    def forward(
        ctx: Any, ranks: ContextParallel, eps: float, *tensors_and_weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """``tensors_and_weights``: a tensor, its weight [D / size], the next tensor, ..."""
        tensors, weights = tensors_and_weights[::2], tensors_and_weights[1::2]
        ctx.ranks, ctx.width = ranks, tensors[0].size(-1) * ranks.size
        sums = [torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32).square() for x in tensors]
        summed = ranks.comm.all_reduce_sum(torch.cat(sums, 1)).split([x.size(1) for x in tensors], 1)
        inverses = [(total / ctx.width + eps).rsqrt().unsqueeze(-1) for total in summed]
        ctx.save_for_backward(*tensors_and_weights, *inverses)
        return tuple(
            (x * inverse).to(x.dtype) * weight for x, weight, inverse in zip(tensors, weights, inverses, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        num, saved = len(grads), ctx.saved_tensors  # read once: recomputed tensors are given out once
        tensors, weights, inverses = saved[: 2 * num : 2], saved[1 : 2 * num : 2], saved[2 * num :]
        weighted = [grad * weight for grad, weight in zip(grads, weights, strict=True)]
        dots = [(g * x).sum(-1, dtype=torch.float32) for g, x in zip(weighted, tensors, strict=True)]
        summed = ctx.ranks.comm.all_reduce_sum(torch.cat(dots, 1)).split([dot.size(1) for dot in dots], 1)
        out: list[torch.Tensor] = []
        for grad, g, dot, x, inverse in zip(grads, weighted, summed, tensors, inverses, strict=True):
            correction = (dot.unsqueeze(-1) * inverse.pow(3) / ctx.width).to(x.dtype)
            out.append(g * inverse.to(x.dtype) - x * correction)
            out.append((grad * x * inverse.to(x.dtype)).flatten(0, -2).sum(0, dtype=torch.float32).to(x.dtype))
        return None, None, *out


# ---------------------------------------------------------------------------- pipeline parallel


class WanStage(nn.Module):
    """Consecutive blocks of a Wan transformer; the first stage also embeds, the last one projects to latents.

    Parameters keep the whole model's names. Blocks are recomputed in the backward if the model was set to do so.
    """

    def __init__(
        self, model: Any, index: int, num_stages: int, latent_size: Sequence[int], context: ContextParallel | None
    ) -> None:
        """Stage ``index`` of ``num_stages``, which takes its modules from ``model``; see `parallelize_wan`.

        ``context`` are the ranks that share samples with this one, if there are any.
        """
        super().__init__()
        num_blocks = len(model.blocks)
        self._context, self._num_unchecked = context, NUM_CHECKED_FORWARDS
        self.latent_size = tuple(latent_size)
        self.patch_size: tuple[int, ...] = tuple(model.config.patch_size)
        self.is_first, self.is_last = index == 0, index == num_stages - 1
        self._checkpoint = model._gradient_checkpointing_func if model.gradient_checkpointing else None
        self.rope = model.rope
        if self.is_first:
            self.patch_embedding = model.patch_embedding
            self.condition_embedder = model.condition_embedder
        mine = range(index * num_blocks // num_stages, (index + 1) * num_blocks // num_stages)
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in mine})
        if self.is_last:
            self.norm_out, self.proj_out = model.norm_out, model.proj_out
            self.scale_shift_table = model.scale_shift_table

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What the next stage takes, or the last one's latents [B, C, *latent_size].

        Args:
            inputs: latents [B, C, *latent_size], timesteps [B] and text states [B, T, E] on the first stage; on others,
                tokens [B, S, D], text states [B, T, D], and the timesteps' embedding [B, D] and projection [B, 6, D].
        """
        tables = self.rope(torch.empty(1, 1, *self.latent_size, device="meta"))  # reads the shape only
        tokens, text, time, modulation = self._embed(*inputs) if self.is_first else inputs
        for block in self.blocks.values():
            inputs = (tokens, text, modulation, tables)
            recompute = self._checkpoint if torch.is_grad_enabled() else None
            tokens = block(*inputs) if recompute is None else recompute(block, *inputs)
        if self.is_last:
            return self._unpatch(self._head(tokens, time))
        return tokens, *(x.view_as(x) for x in (text, time, modulation))

    def _embed(self, latents: torch.Tensor, timesteps: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if latents.shape[2:] != self.latent_size or timesteps.ndim != 1:
            raise ConfigError(
                f"this pipeline was built for latents of {self.latent_size} and one timestep per sample, got "
                f"latents {list(latents.shape)} and timesteps {list(timesteps.shape)}"
            )
        if self._context is not None and self._num_unchecked:
            self._num_unchecked -= 1
            self._context.check_alike({"latents": latents, "timesteps": timesteps, "text states": text})
        tokens = self.patch_embedding(latents).flatten(2).transpose(1, 2).contiguous()
        time, modulation, text, _ = self.condition_embedder(timesteps, text, None)
        return tokens, text, time, modulation.unflatten(1, (6, -1))

    def _head(self, tokens: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """Tokens [B, S, D] to values of patches [B, S, pixels x C]."""
        shift, scale = (self.scale_shift_table + time.unsqueeze(1)).chunk(2, dim=1)
        return self.proj_out((self.norm_out(tokens.float()) * (1 + scale) + shift).type_as(tokens))

    def _unpatch(self, patches: torch.Tensor) -> torch.Tensor:
        grid = [n // p for n, p in zip(self.latent_size, self.patch_size, strict=True)]
        pixels = patches.unflatten(-1, (*self.patch_size, -1)).unflatten(1, grid)  # [B, f, r, c, pf, pr, pc, C]
        interleaved = pixels.permute(0, 7, 1, 4, 2, 5, 3, 6)
        return interleaved.reshape(len(patches), -1, *(g * p for g, p in zip(grid, self.patch_size, strict=True)))
