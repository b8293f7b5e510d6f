"""Captioned clips of one film: decode once, cut inside shots, split train and held-out by shot."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import av
import numpy as np
import torch

DATA = Path(__file__).parent / "data"
VIDEO = DATA / "big_buck_bunny_128x72_12fps.mp4"
CAPTIONS = DATA / "captions.tsv"
ATTRIBUTION = "(c) copyright Blender Foundation | www.bigbuckbunny.org | CC BY 3.0, cut and resized"

CLIP_FRAMES = 16
NUM_FRAMES = 5850
FILM_FRAMES_PER_FRAME = 2  # the film has 24 frames a second, the file 12

Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Shot:
    """Consecutive frames of one camera take. `start` and `num_frames` count frames of the file."""

    index: int
    start: int
    num_frames: int
    caption: str

    @property
    def split(self) -> Split:
        # Whole shots, because clips of one shot are near copies of each other. Every tenth shot spreads over
        # the film's places; with this offset no caption of a held-out shot occurs in a training shot.
        return "held_out" if self.index % 10 == 4 else "train"


@dataclass(frozen=True)
class Clip:
    """`CLIP_FRAMES` consecutive frames inside one shot; `index` is unique over both splits."""

    index: int
    shot: Shot
    start: int

    @property
    def caption(self) -> str:
        return self.shot.caption


@cache
def load_shots() -> tuple[Shot, ...]:
    with CAPTIONS.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    shots: list[Shot] = []
    for index, (first, last, caption) in enumerate(rows):
        # Frame k is film frame 2k; the last shot goes on after the end of the excerpt.
        start = -(-int(first) // FILM_FRAMES_PER_FRAME)
        end = min(-(-int(last) // FILM_FRAMES_PER_FRAME), NUM_FRAMES)
        shots.append(Shot(index, start, end - start, caption))
    return tuple(shots)


@cache
def load_clips(split: Split) -> tuple[Clip, ...]:
    """Non-overlapping clips of the split, in film order."""
    clips: list[Clip] = []
    for shot in load_shots():
        for piece in range(shot.num_frames // CLIP_FRAMES):
            clips.append(Clip(len(clips), shot, shot.start + piece * CLIP_FRAMES))
    return tuple(clip for clip in clips if clip.shot.split == split)


@cache
def load_frames() -> torch.Tensor:
    """All frames of the file, uint8 of shape [NUM_FRAMES, 3, 72, 128] (162 MB), decoded once per process."""
    with av.open(str(VIDEO)) as container:
        container.streams.video[0].thread_type = "AUTO"
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    return torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)


def clip_frames(clip: Clip) -> torch.Tensor:
    """uint8 of shape [CLIP_FRAMES, 3, 72, 128]."""
    return load_frames()[clip.start : clip.start + CLIP_FRAMES]


def shot_frame_indices(split: Split) -> torch.Tensor:
    """Every frame of the split's shots, also those left over when a shot is cut into clips."""
    shots = [shot for shot in load_shots() if shot.split == split]
    return torch.cat([torch.arange(shot.start, shot.start + shot.num_frames) for shot in shots])
