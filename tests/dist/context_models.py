"""Models of diffusers and transformers with their tokens split: outputs and gradients, without the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import MistralConfig, MistralForCausalLM, Qwen3Config, Qwen3ForCausalLM

import layerzero as lz
from layerzero.parallel.context import ContextParallel, parallelize
from tests.dist.context_cases import context_of_all, random
from tests.dist.test_real_models import latte, llama, wan

VOCAB = 67


def compare(model: nn.Module, loss_of: Callable[[nn.Module], torch.Tensor], prepare: Any = None) -> Any:
    """The loss of the split model is the plain one's, and so is the mean of its ranks' gradients."""
    context = context_of_all()
    model.zero_grad()
    split = parallelize(copy.deepcopy(model), context)
    for m in (model, split):
        if prepare is not None:
            prepare(m)
    want, got = loss_of(model), loss_of(split)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-6)
    want.backward()
    got.backward()
    compared = 0
    for (name, p), q in zip(model.named_parameters(), split.parameters(), strict=True):
        mean = torch.zeros_like(p) if q.grad is None else q.grad.clone()
        dist.all_reduce(mean)
        mean /= context.size
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        scale = max(1e-3, grad.abs().max().item())
        torch.testing.assert_close(mean / scale, grad / scale, rtol=0, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
        compared += int((grad != 0).sum())
    assert compared > 1000
    return split


# ---------------------------------------------------------------------------- video


def video_loss_of(shape: tuple[int, ...], timesteps: torch.Tensor, **extra: Any) -> Callable[[nn.Module], torch.Tensor]:
    video, text, weights = random(1, 2, 3, *shape), random(2, 2, 5, 10), random(3, 2, 3, *shape)

    def loss(model: nn.Module) -> torch.Tensor:
        return (model(video, timestep=timesteps, encoder_hidden_states=text, **extra)[0] * weights).mean()

    return loss


def wan_shapes() -> None:
    """15 tokens, 2 heads; one noise level per sample, then one per token; with recomputation."""
    torch.manual_seed(1)
    compare(wan(), video_loss_of((5, 6, 2), torch.tensor([3, 700]), return_dict=False))
    per_token = torch.arange(30).view(2, 15) * 30
    compare(wan(), video_loss_of((5, 6, 2), per_token), lambda m: m.enable_gradient_checkpointing())
    with pytest.raises(lz.ShardingError, match="1 tokens can't be split"):
        parallelize(wan(), context_of_all())(
            random(0, 1, 3, 1, 2, 2), timestep=torch.tensor([1]), encoder_hidden_states=random(0, 1, 5, 10)
        )


def different_samples_refused() -> None:
    """A data loader that goes by rank instead of by data-parallel rank is found in the first forward."""
    rank, context = dist.get_rank(), context_of_all()
    text, time = random(0, 1, 5, 10), torch.tensor([1])
    for make in (wan, latte):
        model = parallelize(make(), context)
        with pytest.raises(lz.DesyncError, match=r"different hidden_states \(here \(1, 3, 3, 4, 4\)"):
            model(random(rank, 1, 3, 3, 4, 4), timestep=time, encoder_hidden_states=text)
        with pytest.raises(lz.DesyncError, match="different timestep"):
            model(random(0, 1, 3, 3, 4, 4), timestep=time + rank, encoder_hidden_states=text)
    model = parallelize(llama(), context)
    with pytest.raises(lz.DesyncError, match="different input_ids"):
        model(input_ids=torch.arange(7 + rank)[None])
    with pytest.raises(lz.DesyncError, match="different labels"):
        model(input_ids=torch.arange(7)[None], labels=torch.arange(7)[None] + rank)
    with pytest.raises(lz.ShardingError, match="parallelized before"):
        parallelize(model, context)


def latte_shapes() -> None:
    """5 frames of 4 patches, without and with temporal blocks, recomputation; as many frames as ranks."""
    context = context_of_all()
    torch.manual_seed(1)

    def longer(frames: int) -> nn.Module:
        model = latte()
        return type(model).from_config({**model.config, "video_length": frames}).train()

    timesteps = torch.tensor([3, 700])
    compare(longer(5), video_loss_of((5, 4, 4), timesteps, return_dict=False))
    compare(longer(5), video_loss_of((5, 4, 4), timesteps, enable_temporal_attentions=True), lambda m: m.enable_gradient_checkpointing())
    only_space = video_loss_of((5, 4, 4), timesteps, enable_temporal_attentions=False)
    compare(longer(5), only_space)
    split = compare(longer(context.size), video_loss_of((context.size, 4, 4), timesteps))
    with pytest.raises(lz.ShardingError, match="1 frames can't be split"):
        video_loss_of((1, 4, 4), timesteps)(split)


# ---------------------------------------------------------------------------- language


def language_loss(padded: bool, **extra: Any) -> Callable[[Any], torch.Tensor]:
    tokens = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(5))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[0, :4] = -100  # a prompt without loss
    if padded:
        mask[0, 10:], labels[0, 10:] = 0, -100

    def loss(model: Any) -> torch.Tensor:
        return model(input_ids=tokens, labels=labels, attention_mask=mask if padded else None, **extra).loss

    return loss


def llama_sequences() -> None:
    """13 tokens, 4 query and 2 key heads: plain, padded, packed by a mask, positions and counts given, recomputed."""
    torch.manual_seed(1)
    compare(llama(), language_loss(padded=False))
    compare(llama(), language_loss(padded=True), lambda m: m.gradient_checkpointing_enable())
    compare(llama(), language_loss(padded=False, num_items_in_batch=torch.tensor(40)))
    positions = torch.arange(13).unsqueeze(0) + 7
    compare(llama(), language_loss(padded=True, position_ids=positions))
    apart = torch.arange(13) // 6
    packed = (apart[:, None] == apart) & torch.ones(13, 13).tril().bool()
    restart = torch.cat([torch.arange(6), torch.arange(6), torch.arange(1)]).unsqueeze(0)
    split = parallelize(llama(), context_of_all())
    with pytest.raises(lz.ShardingError, match="several are packed into one"):
        language_loss(padded=False, position_ids=restart)(split)

    def of_packed(model: Any) -> torch.Tensor:
        tokens = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(5))
        mask = packed.expand(2, 1, 13, 13)
        return model(input_ids=tokens, labels=tokens, attention_mask=mask, position_ids=restart.expand(2, 13)).loss

    compare(llama(), of_packed)
    for bad, words in (({"use_cache": True}, "cache"), ({"logits_to_keep": 3}, "logits_to_keep")):
        with pytest.raises(lz.ShardingError, match=words):
            language_loss(padded=False, **bad)(split)


def other_language_models() -> None:
    """Sliding windows with 5 heads; embeddings given instead of tokens; a base model without a head; a tuple output."""
    torch.manual_seed(1)
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8, "use_cache": False,
    }  # fmt: skip
    window = MistralForCausalLM(MistralConfig(**sizes, sliding_window=4)).train()
    reached = window(torch.arange(13)[None]).logits - window((torch.arange(13) + (torch.arange(13) == 0))[None]).logits
    assert reached[0, 3].abs().max() > 0 and reached[0, 12].abs().max() == 0  # the window is in effect
    compare(window, language_loss(padded=False))
    compare(window, language_loss(padded=True))

    def of_tuple(model: Any) -> torch.Tensor:
        tokens = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(5))
        return model(tokens, labels=tokens, return_dict=False)[0]

    compare(Qwen3ForCausalLM(Qwen3Config(**sizes)).train(), of_tuple)

    def of_embeddings(model: Any) -> torch.Tensor:
        context = context_of_all() if model.config._attn_implementation == "layerzero_ulysses" else ContextParallel.of(None)
        hidden = model(inputs_embeds=random(3, 2, 13, 24)).last_hidden_state
        weights = random(4, 2, 13, 24)
        return context.gather((hidden * context.split(weights, 1)).mean(-1), 1, 13).mean()

    compare(llama().model, of_embeddings)
