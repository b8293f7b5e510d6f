"""One rank of one system, started by a launcher and told what to do by the testbed over a local socket.

Requests and replies are JSON lines. The socket's end, which is also what the testbed's death looks like, ends
the process.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import resident_nbytes, trim
from benchmarks.systems import SYSTEMS, LayerZeRO, Place, System
from benchmarks.workload import Workload


class Rank:
    """Carries out requests on one system."""

    def __init__(self, name: str, workload: Workload, place: Place) -> None:
        self._place = place
        trim()
        self._resident_before = resident_nbytes("VmRSS")
        started = time.perf_counter()
        self.system: System = SYSTEMS[name](workload, place)
        self.construction_seconds = time.perf_counter() - started
        self._batches = workload.batches(place.rank, place.device, num=8)

    def steps(self, micro_batches: int, count: int) -> dict[str, Any]:
        """Seconds per step over ``count`` consecutive ones, started together on all ranks."""
        batches = [self._batches[i % len(self._batches)] for i in range(micro_batches)]
        gc.collect()  # here rather than by chance inside one system's step
        gc.disable()
        try:
            dist.barrier()
            started = time.perf_counter()
            for _ in range(count):
                self.system.step(batches)
            return {"seconds": (time.perf_counter() - started) / count}
        finally:
            gc.enable()

    def memory(self, micro_batches: int) -> dict[str, Any]:
        """Bytes of state, and the peak of resident memory over two steps, above that before construction."""
        trim()
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        self.steps(micro_batches, 2)
        peak = resident_nbytes("VmHWM") - self._resident_before
        return {"peak": peak, **vars(self.system.state())}

    def traffic(self) -> dict[str, Any]:
        """LayerZeRO's own report."""
        import layerzero as lz

        if not isinstance(self.system, LayerZeRO):
            return {"report": ""}
        return {"report": str(lz.traffic_report(self.system.model))}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--system", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--timeout", type=float, required=True, help="seconds for a collective")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout))
    place = Place(dist.get_rank(), dist.get_world_size(), args.ranks_per_node, torch.device("cpu"))
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(args.socket)
    with connection, connection.makefile("rw") as lines:

        def reply(value: dict[str, Any]) -> None:
            lines.write(json.dumps(value) + "\n")
            lines.flush()

        reply({"system": args.system, "rank": place.rank})
        rank = Rank(args.system, Workload(**json.loads(args.workload)), place)
        reply({"construction_seconds": rank.construction_seconds})
        for line in lines:
            request = json.loads(line)
            reply(getattr(rank, request.pop("do"))(**request))
    os._exit(0)  # process groups of ranks that may be gone already: nothing to end in order


if __name__ == "__main__":
    main()
