"""The comm hook that averages gradients by copies between GPUs, and when it is worth choosing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Never

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.buckets import Bucket
from ddp_lite.peer.copies import PeerCopies, refuse_removed
from ddp_lite.peer.memory import NEEDS, PeerMemory, SharedMemory, obstacle
from ddp_lite.peer.schedule import SLOTS, rows_in_slot
from ddp_lite.ranks import MEBIBYTE
from ddp_lite.reduce import Waitable

#: Smaller messages are faster over NCCL: bus bandwidth on 4 H200s crosses at about this size.
SMALLEST_MESSAGE_BYTES = 100 * MEBIBYTE


class PeerCopyAverage:
    """A gradient hook for ``BucketedDDP``: copies between the GPUs instead of NCCL's kernels.

    Collective to build. Keep one per wrapper.

    Args:
        group: the wrapper's process group, or the memory that its ranks share.

    Attributes:
        settings: what ranks must agree on, in words.
        copies: what does the work.

    Raises:
        ValueError: on every rank, if the group's GPUs cannot reach each other.
        RuntimeError: on every rank, if memory cannot be shared. A ``torch.OutOfMemoryError``, if
            a GPU has not enough.
    """

    def __init__(self, group: dist.ProcessGroup | SharedMemory, **removed: Never) -> None:
        refuse_removed(type(self), removed)
        if group is None or isinstance(group, dist.ProcessGroup):
            memory: SharedMemory = PeerMemory(group)  # explains why a group may be None
        else:
            memory = group
        self.copies = PeerCopies(memory)
        self.settings = f"rows of {memory.row_bytes} bytes"

    def average_in_place(self, bucket: Bucket, gradients: Sequence[Tensor]) -> Waitable:
        """Starts averaging the gradients where they lie."""
        group = self.copies.memory.group
        if bucket.process_group.group_name != group.group_name:
            raise ValueError(
                "the comm hook must be built for the wrapper's process group, but it is for "
                f"{group.group_name} ({group.size()} ranks) and the wrapper's is "
                f"{bucket.process_group.group_name} ({bucket.process_group.size()} ranks). Build "
                "PeerCopyAverage from the group that the wrapper is given"
            )
        return self.copies.average(gradients)


@dataclass(frozen=True, kw_only=True)
class Communication:
    """How the ranks of a group should move messages of some size, and why.

    Attributes:
        name: "peer-copy" or "collectives": those of the process group's backend, such as NCCL.
        reason: in words.
    """

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def choose_communication(
    group: dist.ProcessGroup, message_bytes: int, device: torch.device | None = None
) -> Communication:
    """Whether copies between GPUs are possible, and worth choosing over the group's collectives.

    ``BucketedDDP`` asks this, unless it is given a ``comm_hook``. ``print`` shows the reason.
    Collective, if the messages are large enough and the group is one for GPUs.

    Args:
        group: the ranks.
        message_bytes: size of a typical message, such as a bucket of gradients; the same on every
            rank.
        device: where the messages are, of the same type on every rank; None for the current GPU.

    Returns:
        The same on every rank.
    """
    if device is not None and device.type != "cuda":
        reason = f"copies are between GPUs, and the messages are on {device.type}"
    elif message_bytes < SMALLEST_MESSAGE_BYTES:
        reason = (
            f"messages of {message_bytes / MEBIBYTE:.4g} MB are below "
            f"{SMALLEST_MESSAGE_BYTES // MEBIBYTE} MB, from which copies are faster"
        )
    elif (found := obstacle(group, device)) is not None:
        reason = f"{NEEDS}, but got {found}"
    else:
        reason = (
            f"{group.size()} GPUs of one host reach each other's memory, and messages of "
            f"{message_bytes / MEBIBYTE:.4g} MB are large enough"
        )
        return Communication(name="peer-copy", reason=reason)
    return Communication(name="collectives", reason=reason)


def chosen_hook(
    group: dist.ProcessGroup, bucket_bytes: Iterable[int], device: torch.device
) -> tuple[PeerCopyAverage | None, Communication]:
    """The hook that ``choose_communication`` leads to, None for the group's collectives, and why.

    A GPU without enough free memory, or whose memory cannot be shared, leads to collectives too.
    ``bucket_bytes``: sizes of all buckets.
    """
    choice = choose_communication(group, typical_bytes(bucket_bytes), device)
    if choice.name != "peer-copy":
        return None, choice
    try:
        memory = PeerMemory.without_asking(group)
    except RuntimeError as error:  # torch.OutOfMemoryError among them
        return None, Communication(name="collectives", reason=str(error))
    shared = SLOTS * rows_in_slot(group.size()) * memory.row_bytes / MEBIBYTE
    reason = (
        f"{choice.reason}; each GPU has {shared:.4g} MB of memory that they share, which "
        "torch.cuda.memory_allocated does not count"
    )
    return PeerCopyAverage(memory), replace(choice, reason=reason)


def typical_bytes(sizes: Iterable[int]) -> int:
    """The size in bytes of the buckets that most of the gradients travel in.

    Args:
        sizes: of all buckets, in bytes.

    Returns:
        Half of all bytes are in buckets of at least this size; 0 if there are none.
    """
    largest_first = sorted(sizes, reverse=True)
    half, so_far = sum(largest_first) / 2, 0
    for size in largest_first:
        so_far += size
        if so_far >= half:
            return size
    return 0
