"""Averaging between two GPUs without NCCL: pulls over NVLink, no thread blocks spent on copying.

NCCL's kernels occupy SMs and so compete with the backward pass's matrix products. A copy between
two GPUs of one host needs none: each rank pulls the half it is responsible for from its peer,
adds it to its own, and pulls the other half back when the peer has done the same. What runs on
SMs is one addition over half of the bucket and three barriers of one thread block each.

The flat gradients live in symmetric memory, allocated once, so one copy of the gradients stays
allocated between steps. Multicast is not used.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.bucketed import Bucket
from ddp_lite.collectives import Chain, Waitable, backend_for

_BARRIER_TIMEOUT_MS = 120_000  # a peer that never comes ends in a CUDA error


class PeerCopyAverage:
    """A comm hook for exactly two CUDA ranks with peer access. Keep one instance per wrapper.

    Args:
        group: the wrapper's process group.

    Raises:
        ValueError: the group has not two ranks, or does not serve CUDA.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        if group.size() != 2 or backend_for(group, torch.device("cuda")) is None:
            raise ValueError(
                "copying between peers needs a group of two CUDA ranks, received "
                f"{group.size()} ranks with {dist.get_backend_config(group)!r}"
            )
        self._group = group
        self._peer = 1 - group.rank()
        self._stream: torch.cuda.Stream | None = None
        self._memory: dict[int, tuple[Tensor, Tensor, object]] = {}

    def allocate(self, bucket: Bucket) -> Tensor:
        """The bucket's symmetric memory, made on first use. Collective then."""
        if bucket.index not in self._memory:
            from torch.distributed import _symmetric_memory

            flat = _symmetric_memory.empty(
                bucket.padded_numel, dtype=bucket.dtype, device=bucket.device
            )
            handle = _symmetric_memory.rendezvous(flat, self._group)
            theirs = handle.get_buffer(self._peer, (bucket.padded_numel,), bucket.dtype)
            self._memory[bucket.index] = (flat, theirs, handle)
        return self._memory[bucket.index][0]

    def __call__(self, flat: Tensor, bucket: Bucket) -> Waitable:
        """Starts averaging ``flat`` in place."""
        _, theirs, handle = self._memory[bucket.index]
        if self._stream is None:
            self._stream = torch.cuda.Stream(bucket.device)
        half = flat.numel() // 2
        mine = slice(0, half) if self._peer == 1 else slice(half, None)
        other = slice(half, None) if self._peer == 1 else slice(0, half)

        def barrier() -> None:
            handle.barrier(channel=0, timeout_ms=_BARRIER_TIMEOUT_MS)  # type: ignore[attr-defined]

        def average_my_half() -> None:
            barrier()  # both have packed their gradients
            pulled = torch.empty_like(flat[mine])
            pulled.copy_(theirs[mine])
            flat[mine].add_(pulled).mul_(0.5)

        def fetch_the_other() -> None:
            barrier()  # both halves are averaged
            flat[other].copy_(theirs[other])
            barrier()  # nobody packs the next gradients while the peer still reads

        return Chain([average_my_half, fetch_the_other], bucket.device, self._stream)
