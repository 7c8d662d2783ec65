"""Times a step whose optimizer state rests in host memory, beside the copies that it consists of.

    torchrun --standalone --nproc-per-node 2 scripts/bench_offload.py offload.jsonl

Every rank copies a chunk of the size that ``OffloadedOptimizer`` takes from pinned host memory to
its GPU, back, and both at once, first alone and then together with all ranks. Then all ranks step
the optimizer. A step moves its state once in each direction, so its rate in each direction can be
at most that of both at once. About 20 seconds on two H200s.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench_harness.environment import git_state
from shard_optim import OffloadedOptimizer

CHUNK_BYTES = 2 * 64 * 2**20  # Adam's state of 64 MB of parameters
REPEATS = 5


class Link:
    """Copies between a pinned buffer in host memory and the device, on a stream per direction.

    Args:
        device: of this rank.
        nbytes: copied at once in each direction.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.cuda = device.type == "cuda"
        host = {"dtype": torch.uint8, "pin_memory": self.cuda}
        self._hosts = [torch.zeros(nbytes, **host) for _ in range(2)]  # type: ignore[arg-type]
        self._buffers = [torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._streams = [torch.cuda.Stream() if self.cuda else None for _ in range(2)]

    def to_device(self) -> None:
        """Starts a copy to the device."""
        self._copy(0, self._buffers[0], self._hosts[0])

    def to_host(self) -> None:
        """Starts a copy to host memory."""
        self._copy(1, self._hosts[1], self._buffers[1])

    def both(self) -> None:
        """Starts one of each."""
        self.to_device()
        self.to_host()

    def _copy(self, direction: int, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self._streams[direction]):
            target.copy_(source, non_blocking=True)


def seconds(call: Callable[[], object], repeats: int, cuda: bool) -> float:
    """The mean of calls in a row, until the device has carried them out."""
    call()
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / repeats


def rates(link: Link, nbytes: int) -> dict[str, float]:
    """GB/s in each direction: one direction at a time, and both at once."""
    calls = {"to_device": link.to_device, "to_host": link.to_host, "both": link.both}
    return {
        f"{name}_gb_s": round(nbytes / seconds(call, 4 * REPEATS, link.cuda) / 1e9, 2)
        for name, call in calls.items()
    }


def step_row(device: torch.device, parameters: int, tensors: int) -> dict[str, Any]:
    """A step with state in host memory: time, the host's part, and the rate per direction."""
    cuda = device.type == "cuda"
    params = [
        nn.Parameter(torch.zeros(parameters // tensors, device=device)) for _ in range(tensors)
    ]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer = OffloadedOptimizer(params, torch.optim.AdamW, fused=True)
    optimizer.step()  # makes the state
    whole = seconds(optimizer.step, REPEATS, cuda)
    begin = time.perf_counter()
    optimizer.step()
    host = time.perf_counter() - begin
    moved = sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if value.numel() > 1
    )
    return {
        "ranks_at_once": dist.get_world_size(),
        "step_ms": round(whole * 1e3, 2),
        "host_ms": round(host * 1e3, 2),
        "step_gb": round(moved / 1e9, 3),
        "step_gb_s": round(moved / whole / 1e9, 2),
    }


def main() -> None:
    """Measures on every rank; rank 0 writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", type=Path, help="file to write, in the layout of published rows")
    parser.add_argument("--parameters", type=int, default=250_000_000)
    parser.add_argument("--tensors", type=int, default=48)
    parser.add_argument("--chunk-bytes", type=int, default=CHUNK_BYTES)
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    try:
        link, mine = Link(device, given.chunk_bytes), []
        for turn in range(world_size):
            dist.barrier()
            if turn == rank:
                mine.append({"ranks_at_once": 1, **rates(link, given.chunk_bytes)})
        dist.barrier()
        mine.append({"ranks_at_once": world_size, **rates(link, given.chunk_bytes)})
        dist.barrier()
        mine.append(step_row(device, given.parameters, given.tensors))
        everyone: list[Any] = [None] * world_size
        dist.all_gather_object(everyone, mine)
        if rank == 0:
            rows = [{"rank": number, **row} for number, each in enumerate(everyone) for row in each]
            where = torch.cuda.get_device_name() if cuda else "CPU"
            line = {
                "experiment": "offload",
                "case_key": "offloaded optimizer state",
                "label": "offloaded optimizer state",
                "commit": (git_state(Path(__file__).parent) or {}).get("commit"),
                "measured_on": f"{world_size} × {where}, torch {torch.__version__}",
                "config": {"parameters": given.parameters, "chunk_bytes": given.chunk_bytes},
                "rows": rows,
            }
            given.rows.write_text(json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
            print(json.dumps(rows, indent=1))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
