"""One process of the pool: runs functions it is told by name, in a process group made for the call.

Requests and replies are JSON lines. The reply channel is the original stdout; whatever a case prints goes
to stderr.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from datetime import timedelta


def run(request: dict) -> object:
    import torch
    import torch.distributed as dist
    import torch.distributed.tensor.debug

    torch.manual_seed(0)
    torch.set_num_threads(1)
    function = getattr(importlib.import_module(request["module"]), request["function"])
    if request["world_size"] == 1 and not request["init"]:
        return function(**request["kwargs"])
    store = dist.FileStore(request["store"], request["world_size"])
    dist.init_process_group(
        "gloo", store=store, rank=request["rank"], world_size=request["world_size"],
        timeout=timedelta(seconds=request["timeout"]),
    )  # fmt: skip
    try:
        return function(**request["kwargs"])
    finally:
        gc.collect()
        # DTensor's caches hold meshes that equal the next world's but name process groups of this one.
        torch.distributed.tensor.debug._clear_sharding_prop_cache()
        dist.destroy_process_group()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = {"value": run(json.loads(line))}
        except BaseException:
            reply = {"error": traceback.format_exc()}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
        if "error" in reply:
            os._exit(1)  # collectives may be left half-way: the pool starts a new process


if __name__ == "__main__":
    main()
