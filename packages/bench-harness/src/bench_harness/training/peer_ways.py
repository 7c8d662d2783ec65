"""Other ways to carry out an exchange by copies between GPUs, to see what they would save.

Averages are right in all of them, and the same bits as without.

- "keep-by-memcpy": what a rank has averaged for itself is copied to its gradients by the driver's
  copies, not by a kernel of ours beside the matrix products.
- "one-kernel": one kernel averages a rank's row, and writes it both to the shared memory and to the
  gradients: 16 bytes of memory traffic per element in place of 20. For two ranks.
- "high-priority": the copies' stream comes first where kernels wait for SMs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bench_harness.experiments.base import CaseSkipped
from bench_harness.training.settings import PeerWay
from ddp_lite.peer import PeerCopies
from ddp_lite.peer_copies import Program
from ddp_lite.peer_memory import SharedMemory
from ddp_lite.peer_schedule import Kind, Operation

_BLOCK = 4096


class OtherCopies(PeerCopies):
    """Carries out exchanges in another way.

    Args:
        memory: see ``PeerCopies``.
        way: see the module.
        wire_dtype: see ``PeerCopies``.

    Raises:
        CaseSkipped: "one-kernel" among more than two ranks.
    """

    def __init__(
        self, memory: SharedMemory, way: PeerWay, *, wire_dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(memory, wire_dtype=wire_dtype)
        self._way = way
        if way == "one-kernel" and memory.group.size() != 2:
            raise CaseSkipped(f"one-kernel needs 2 ranks, but got {memory.group.size()}")
        if way == "high-priority":
            memory.stream = torch.cuda.Stream(memory.device, priority=-1)

    def operations(self, program: Program) -> list[Operation]:
        """What this rank does in one window."""
        found = super().operations(program)
        if self._way == "one-kernel":
            return [each for each in found if each.kind is not Kind.KEEP]
        if self._way == "keep-by-memcpy":
            own = Operation(Kind.PULL, self.memory.group.rank())
            return [own if each.kind is Kind.KEEP else each for each in found]
        return found

    def _reduce_in_place(self, rows: Tensor, own: Sequence[tuple[int, Tensor]]) -> None:
        if self._way != "one-kernel":
            super()._reduce_in_place(rows, own)
            return
        from bench_harness.training.peer_kernel import average_both

        for at, value in own:
            numel = value.numel()
            grid = (-(-numel // _BLOCK),)
            average_both[grid](rows[0][at : at + numel], value, numel, _BLOCK, num_warps=8)
