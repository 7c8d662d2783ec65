"""Times averages by copies between the GPUs of this host: whole exchanges, and the host's part.

::

    torchrun --nproc-per-node 2 packages/ddp-lite/tools/time_exchanges.py

Another version takes its turn with ``PYTHONPATH`` set to its ``src``. Each message is eight float32
tensors; a time is the mean over the messages of a block, in milliseconds, and the smallest of five
blocks is printed: of the whole exchange, and of the host until it has been queued.
"""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from ddp_lite.peer import PeerCopies, PeerMemory

MESSAGES = ((16, 40), (256, 40), (2048, 8))  # MB (1024² bytes), and how many in a block
BLOCKS, TENSORS, WARMUP = 5, 8, 3


def main() -> None:
    """Prints a line for each size, on rank 0."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    group = dist.group.WORLD
    assert group is not None
    copies = PeerCopies(PeerMemory(group))
    for megabytes, count in MESSAGES:
        tensors = [torch.randn(megabytes * 2**18 // TENSORS, device="cuda") for _ in range(TENSORS)]
        for _ in range(WARMUP):
            copies.average(tensors).wait()
        blocks = []
        for _ in range(BLOCKS):
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                copies.average(tensors).wait()
            queued = time.perf_counter()
            torch.cuda.synchronize()
            blocks.append((time.perf_counter() - begin, queued - begin))
        whole, host = (1e3 * min(times) / count for times in zip(*blocks, strict=True))
        if dist.get_rank() == 0:
            print(f"{megabytes} MB: {whole:.3f} ms, of which the host {host:.3f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
