"""One rank of the shortened main job; torchrun starts it. Arguments: settings, engine file, output folder."""

import hashlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch.distributed as dist
from torch import nn

from recipes.video_dit import train

config, engine, output = (Path(argument) for argument in sys.argv[1:4])
build_trainer = train.build_trainer
sample_held_out = train.sample_held_out
before: dict[str, str] = {}


def fingerprint(module: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, parameter in module.named_parameters():
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def fingerprints(trainer: train.Trainer) -> dict[str, str]:
    return {name: fingerprint(getattr(trainer.module, name)) for name in ("vae", "text_encoder", "transformer")}


def build_and_remember(*args):
    trainer = build_trainer(*args)
    before.update(fingerprints(trainer))
    return trainer


def check_and_sample(trainer, settings, *args):
    changed = {name for name, value in fingerprints(trainer).items() if value != before[name]}
    assert changed == {"transformer"}, f"changed by training: {changed}"
    clips = [[clip.index for clip in trainer.order.micro_batch(0, index)] for index in range(settings.micro_batches)]
    facts = {"changed": sorted(changed), "clips": clips}
    (output / f"rank{dist.get_rank()}.json").write_text(json.dumps(facts), encoding="utf-8")
    return sample_held_out(trainer, settings, *args)


train.build_trainer = build_and_remember
train.sample_held_out = check_and_sample
train.main(config=config, engine=engine, output=output)
