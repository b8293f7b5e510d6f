"""Both systems of the headline comparison against plain training of the same model."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from benchmarks.headline_rank import SYSTEMS, Workload

WORK = Workload(dim=48, heads=4, ffn_dim=96, layers=2, text_tokens=5, dtype="fp32")
LENGTH = 256


def losses_of_both() -> dict[str, list[float]]:
    """Losses of four steps of each system, and of one process."""
    plain = WORK.model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    batches = [WORK.batch(LENGTH, step) for step in range(4)]
    losses: dict[str, list[float]] = {"plain": []}
    for batch in batches:
        loss = F.mse_loss(plain(**batch, return_dict=False)[0], batch["hidden_states"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses["plain"].append(loss.item())
    for name, build in SYSTEMS.items():
        system = build(WORK)
        losses[name] = [system.step(batch) for batch in batches]
    return losses
