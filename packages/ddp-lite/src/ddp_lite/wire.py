"""Averaging in a dtype that is smaller on the wire than in the sum.

An all-reduce of bfloat16 among N ranks rounds up to N - 1 times. Here every value is rounded
twice whatever N is: once when it is sent, and once when the float32 sum is sent back. Each rank
collects everyone's copy of its own 1/N of the tensor, sums it in float32, and the averages are
gathered. The bytes sent are those of a ring all-reduce, 2·(N-1)/N of the tensor.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.collectives import Averager, Chain, Waitable


def average_on_wire(flat: Tensor, average: Averager) -> Waitable:
    """Starts averaging ``flat`` in place with float32 sums.

    Args:
        flat: one-dimensional, any floating dtype, length a multiple of the world size.
        average: gives the group, and counts.
    """
    world_size, group = average.world_size, average.group
    if world_size <= 2:
        # A sum of two terms is rounded once in either case; one collective is enough.
        return average([flat])
    average.collectives += 2
    average.bytes += 2 * flat.nbytes
    received = torch.empty_like(flat)

    def exchange() -> Waitable:
        work: Waitable | None = dist.all_to_all_single(received, flat, group=group, async_op=True)
        assert work is not None
        return work

    def sum_and_gather() -> Waitable:
        mine = received.view(world_size, -1).float().mean(dim=0).to(flat.dtype)
        work: Waitable | None = dist.all_gather_into_tensor(flat, mine, group=group, async_op=True)
        assert work is not None
        return work

    return Chain([exchange, sum_and_gather], flat.device)
