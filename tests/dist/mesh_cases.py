"""`ParallelMesh`, and `lz.shard` on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import layerzero as lz
from layerzero import lanes
from layerzero.module import engine_of
from tests.dist.parity import rank_and_size


def ranks_of(submesh: Any) -> list[int] | None:
    return None if submesh is None else submesh.mesh.tolist()


def layout(options: dict[str, Any]) -> dict[str, Any]:
    """Where this rank is, and who is with it along every dimension."""
    mesh = lz.ParallelMesh(**options)
    probe = torch.tensor([dist.get_rank()])
    dist.all_reduce(probe, group=mesh.zero1.get_group())
    assert probe.item() == sum(mesh.zero1.mesh.tolist())
    return {
        "coordinates": [mesh.coordinate(d) for d in ("pp", "dp", "cp", "tp")],
        "sizes": [mesh.size(d) for d in ("pp", "dp", "cp", "tp")],
        "zero1": ranks_of(mesh.zero1),
        **{d: ranks_of(getattr(mesh, d)) for d in ("pp", "dp", "cp", "tp")},
    }


def refused() -> None:
    for options, error, words in [
        ({"dp": 3}, lz.ConfigError, ["dp=3", "world size of 4"]),
        ({"cp": 3}, lz.ConfigError, ["cp=3", "3 does not divide the world size of 4"]),
        ({"dp": 2, "cp": 2, "tp": 2}, lz.ConfigError, ["8 is not the world size of 4"]),
        ({"cp": 0}, lz.ConfigError, ["positive"]),
        ({"dp": 2, "cp": 2, "zero3_size": 3}, lz.ConfigError, ["zero3_size = 3", "dp x cp = 2 x 2 = 4"]),
        ({"cp": 2, "tp": 2, "zero3_size": 4}, lz.ConfigError, ["zero3_size = 4", "1 x 2 = 2"]),
        ({"order": ("dp", "cp")}, lz.ConfigError, ["order"]),
    ]:
        with pytest.raises(error) as caught:
            lz.ParallelMesh(**options)
        assert all(word in str(caught.value) for word in words), str(caught.value)


def refused_without_distributed() -> None:
    with pytest.raises(lz.ShardingError, match="init_process_group"):
        lz.ParallelMesh(dp=1)


def shards_over_dp_and_cp(options: dict[str, Any], patch_local_world_size: int) -> dict[str, Any]:
    """How a model is sharded, and the gradient that comes of a rank-dependent loss."""
    rank, _ = rank_and_size()
    patch = pytest.MonkeyPatch()
    patch.setenv("LOCAL_WORLD_SIZE", str(patch_local_world_size))
    mesh = lz.ParallelMesh(**options)
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    try:
        lz.shard(model, mesh=mesh, units=[nn.Linear])
    finally:
        patch.undo()
    model(torch.full((1, 3), float(1 + rank))).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    ranks = mesh.zero1.mesh.tolist()
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False))
    plain.load_state_dict(lz.full_state_dict(model))
    plain(torch.full((1, 3), sum(1 + r for r in ranks) / len(ranks))).sum().backward()
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 1e9))
    return {"axes": list(engine_of(model).axes.sizes), "zero3_size": engine_of(model).config.zero3_size}


def two_sizes_refused() -> None:
    mesh = lz.ParallelMesh(dp=2, cp=2, zero3_size=2)
    with pytest.raises(lz.ConfigError, match="4 in the configuration and 2 in the mesh"):
        lz.shard(nn.Linear(2, 2), mesh=mesh, zero3_size=4)


def end_of_program() -> list[int]:
    """Process groups before `lz.shard`, after a step, and at the end of a program that does not end them."""
    groups = dist.distributed_c10d._world.pg_map
    found = [len(groups)]
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    lz.shard(model, units=[model[0]], sharding="layerzero", zero3_size=2)
    model(torch.ones(1, 3)).sum().backward()
    found.append(len(groups))
    lanes._end()
    dist.barrier()  # the user's group is as it was
    return [*found, len(groups)]
