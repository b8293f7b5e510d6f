"""Every system of the testbed on ranks of the pool."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.workload import Workload

WORK = Workload(layers=2, width=64, sequence=16, vocabulary=64)


def two_steps() -> dict[str, list[int]]:
    """By system: bytes of parameters and optimizer after steps of one micro-batch and of three."""
    # Not above: torch.distributed.optim warns when it is imported, and pytest takes that for an error.
    from benchmarks.systems import NEEDS_DEEPSPEED, SYSTEMS, Place

    place = Place(dist.get_rank(), dist.get_world_size(), 2, torch.device("cpu"))
    batches = WORK.batches(place.rank, num=3)
    found = {}
    for name, build in SYSTEMS.items():
        if name in NEEDS_DEEPSPEED:
            continue
        system = build(WORK, place)
        system.step(batches[:1])
        system.step(batches)
        state = system.state()
        system.close()
        found[name] = [state.params, state.optimizer]
    return found
