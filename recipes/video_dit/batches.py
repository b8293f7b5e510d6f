"""Which clips a rank trains on, as a pure function of the seed and the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recipes.video_dit.clips import Clip


@dataclass(frozen=True)
class DataOrder:
    """Deals shuffled epochs to ranks like cards, so that no two ranks train on the same clip at a time.

    There is no state: a run that continues at step s, or that looks back at one, gets the same clips.
    """

    clips: Sequence[Clip]
    seed: int
    rank: int
    num_ranks: int
    batch_size: int
    micro_batches: int

    def micro_batch(self, step: int, index: int) -> list[Clip]:
        first = self._first_position(step, index)
        return [self._at(position) for position in range(first, first + self.batch_size)]

    def noise_seed(self, step: int, index: int) -> int:
        """Seed for the noise of a micro-batch, different on every rank."""
        return self.seed * 1_000_003 + self._first_position(step, index)

    def _first_position(self, step: int, index: int) -> int:
        return ((step * self.micro_batches + index) * self.num_ranks + self.rank) * self.batch_size

    def _at(self, position: int) -> Clip:
        epoch, offset = divmod(position, len(self.clips))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return self.clips[int(torch.randperm(len(self.clips), generator=generator)[offset])]
