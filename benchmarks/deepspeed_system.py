"""DeepSpeed ZeRO-3, with and without its hierarchical partitioning (hpZ), on any accelerator or on CPUs with gloo."""

from __future__ import annotations

import logging

import deepspeed
import torch
from deepspeed.utils import logger

from benchmarks.systems import Place, StateNbytes, System, optimizer_nbytes, storage_nbytes
from benchmarks.workload import Workload


class DeepSpeedZero3(System):
    """ZeRO stage 3 with communication overlapped and DeepSpeed's default bucket sizes.

    At those defaults a model under a billion parameters stays gathered between forward and backward, which
    is fastest and what ZeRO-3 users get; the peak memory shows it.
    """

    def __init__(self, workload: Workload, place: Place, hpz: bool) -> None:
        logger.setLevel(logging.ERROR)
        model = workload.model(place.device)
        self.micro_batch_size, self.world_size = workload.batch, place.world_size
        config = {
            "train_micro_batch_size_per_gpu": workload.batch,
            "gradient_accumulation_steps": 1,
            "bf16": {"enabled": workload.dtype == "bf16"},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {
                "stage": 3,
                "overlap_comm": True,
                "contiguous_gradients": True,
                **({"zero_hpz_partition_size": place.ranks_per_node} if hpz else {}),
            },
        }
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=workload.optimizer(model.parameters()), config=config, dist_init_required=False
        )

    def step(self, batches: list[torch.Tensor]) -> None:
        self.engine.set_train_batch_size(len(batches) * self.micro_batch_size * self.world_size)
        for ids in batches:
            self.engine.backward(self.engine(ids))  # divides by the number of micro-batches
            self.engine.step()  # takes effect at the last one

    def state(self) -> StateNbytes:
        zero = self.engine.optimizer
        compute = [p.ds_tensor for p in self.engine.module.parameters()]
        secondary = [getattr(p, "ds_secondary_tensor", None) for p in self.engine.module.parameters()]
        params = [*compute, *secondary, *zero.fp32_partitioned_groups_flat]
        return StateNbytes(storage_nbytes(params), optimizer_nbytes(zero.optimizer))
