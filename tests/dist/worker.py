"""Processes of the pool: a parent that imports what cases need, and the ranks forked from it.

The parent reads requests from a socket: to import a module, or to fork a rank, with the rank's own socket. A rank runs
functions it is told by name, in a process group made for the call. Barriers follow its start and precede its end: a
rank that ended early would close connections that others still make. Importing once in the parent takes seconds off
every rank, also off those that replace killed ones. Messages are JSON lines; whatever a case prints goes to stderr.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import threading
import traceback
from datetime import timedelta
from typing import Any

import torch
import torch._dynamo  # an optimizer imports it
import torch.distributed as dist
import torch.distributed.tensor.debug


def run(request: dict[str, Any]) -> object:
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
        dist.barrier()
        value = function(**request["kwargs"])
        if dist.is_initialized():
            dist.barrier()
        return value
    finally:
        # DTensor's caches hold meshes that equal the next world's but name process groups of this one.
        torch.distributed.tensor.debug._clear_sharding_prop_cache()
        gc.collect()
        gc.freeze()  # what is left are modules: walking them again after every case takes most of its time
        groups = list(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()
        # Gloo ends a connection by waiting 10 ms for its thread to look up: not while the pool waits.
        threading.Thread(target=groups.clear).start()
        del groups


def serve(channel: socket.socket) -> None:
    """One rank, until the pool closes its end."""
    with channel, channel.makefile("rw") as lines:
        for line in lines:
            try:
                reply = {"value": run(json.loads(line))}
            except BaseException:
                reply = {"error": traceback.format_exc()}
            lines.write(json.dumps(reply) + "\n")
            lines.flush()
            if "error" in reply:
                return  # collectives may be left half-way: the pool starts a new process


def main(control: socket.socket) -> None:
    os.dup2(2, 1)
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1 << 16, 1)
        if not message:
            return
        reply: dict[str, Any] = {}
        if descriptors:
            # No rank that died is waited for: its number stays its own for as long as the pool may want to kill it.
            reply["pid"] = os.fork()
            if reply["pid"] == 0:
                control.close()
                try:
                    serve(socket.socket(fileno=descriptors[0]))
                finally:
                    os._exit(0)
            os.close(descriptors[0])
        else:
            try:
                importlib.import_module(json.loads(message)["module"])
            except BaseException:
                reply["error"] = traceback.format_exc()
            gc.collect()
            gc.freeze()
        control.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
