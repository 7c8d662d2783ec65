"""Exchanges by copies between GPUs without one of their improvements, to see what it saves.

Averages are right in all of them.

- "torch-sums": torch's operations average, and copy each average to the gradients: 20 bytes of
  memory traffic per element in place of the 16 of ddp-lite's kernel.
- "default-priority": the copies' stream does not come first where kernels wait for SMs.
- "single-copies": the driver is called for every copy, in place of once for all copies to or from
  a peer.
"""

from __future__ import annotations

import torch

from bench_harness.training.settings import PeerWay
from ddp_lite.peer import PeerCopies, PeerMemory


def copies_without(memory: PeerMemory, way: PeerWay) -> PeerCopies:
    """Carries out exchanges in another way.

    Args:
        memory: see ``PeerCopies``.
        way: see the module.
    """
    copies = PeerCopies(memory)
    if way == "torch-sums":
        copies.fused = False
    if way == "single-copies":
        copies.batched = False
    if way == "default-priority":
        memory.stream = torch.cuda.Stream(memory.device)
    return copies
