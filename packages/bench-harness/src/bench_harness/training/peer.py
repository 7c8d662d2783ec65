"""Copies between GPUs in place of NCCL's kernels, for the variants that ask for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from bench_harness.core import CaseSkipped
from bench_harness.training import settings as of


def peer_hook(wrapper: of.Bucketed, group: Any) -> Any:
    """The comm hook of a wrapper with ``comm_hook="peer-copy"``; collective.

    Raises:
        CaseSkipped: these GPUs cannot copy to each other, or a part of the exchange is to be left
            out, which only earlier rows have.
    """
    from ddp_lite.peer import PeerCopyAverage

    for name in ("peer_parts", "peer_way"):
        if getattr(wrapper, name) is not None:
            raise CaseSkipped(
                f"{name} must be left out, but got {getattr(wrapper, name)!r}, which only earlier "
                "rows have. Measure the whole exchange."
            )

    memory = peer_memory(group)
    hook = PeerCopyAverage(memory)
    if wrapper.copy:
        return lambda flat, bucket: hook.copies.average([flat])
    return hook


def peer_memory(group: Any) -> Any:
    """Memory that the GPUs of a group share; collective.

    Raises:
        CaseSkipped: these GPUs cannot copy to each other.
    """
    from ddp_lite.peer import PeerMemory, choose_communication

    choice = choose_communication(group, 2**30)
    if choice.name != "peer-copy":
        raise CaseSkipped(
            f"peer-copy must have GPUs of one host with peer access, but {choice.reason}. "
            f"Leave peer-copy out."
        )
    return PeerMemory(group)


def peer_copies(group: Any = None) -> Any:
    """Collectives by copies, for shard-optim's ``communication=``; collective.

    Args:
        group: the ranks; None for all.

    Raises:
        CaseSkipped: these GPUs cannot copy to each other.
    """
    from ddp_lite.peer import PeerCopies

    return PeerCopies(peer_memory(group or dist.group.WORLD))
