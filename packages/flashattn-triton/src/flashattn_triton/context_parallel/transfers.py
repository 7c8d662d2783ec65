"""How keys travel round a ring, and how their gradients come back: by messages, or by copies.

At step s of a pass, a rank uses the keys and values of the rank s before it, and the rank s behind
it those of this rank. Messages go by NCCL or gloo. NCCL's kernels take multiprocessors that the
attention kernel, which fills the GPU, then waits for. Between GPUs of one host, ranks copy out of
each other's memory instead: copy engines do that beside any kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from flashattn_triton.context_parallel.communication import UnderWay, on_wire
from flashattn_triton.context_parallel.peer_memory import PeerMemory

#: Gradients that can be waiting for the rank that copies them: while one step's are copied, the
#: next one's are summed.
SLOTS = 2
_ALIGNMENT = 256  # bytes
_Moving = UnderWay[Sequence[Tensor]]


class Transfers:
    """One pass over the ring. All ranks make the same calls.

    ``own``: keys and values of this rank.
    """

    def __init__(self, group: dist.ProcessGroup, own: tuple[Tensor, Tensor]) -> None:
        self.own = own
        self._group, self._rank, self._size = group, group.rank(), group.size()

    def fetch(self, step: int, rows: int, *, is_read: bool) -> UnderWay[Sequence[Tensor]]:
        """Keys and values of the rank ``step`` before this one.

        Args:
            step: 1 to the number of ranks - 1.
            rows: that the other rank has; 0 if it sends nothing.
            is_read: whether the rank ``step`` behind this one needs those of this rank.
        """
        received = [x.new_empty(rows, *x.shape[1:]) for x in self.own]
        return self._exchange(self.own if is_read else (), step, received)

    def give_back(
        self, step: int, sums: tuple[Tensor, Tensor], *, is_read: bool
    ) -> UnderWay[Sequence[Tensor]]:
        """Returns gradients of this step to their rank.

        Brings those that the rank ``step`` behind this one has, if it read this rank's keys. What
        was brought in the step before has been waited for.
        """
        rows = len(self.own[0]) if is_read else 0
        received = [x.new_empty(rows, *x.shape[1:], dtype=torch.float32) for x in self.own]
        return self._exchange(sums, -step, received)

    def zeros(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """For the gradients of what was fetched in this step, fp32."""
        k, v = (x.new_zeros(rows, *x.shape[1:], dtype=torch.float32) for x in self.own)
        return k, v

    def _exchange(self, sent: Sequence[Tensor], ahead: int, received: list[Tensor]) -> _Moving:
        """Sends to the rank ``ahead`` of this one, and receives from the rank as far behind.

        Keys and values go ahead; gradients go back, which is a negative number.
        """
        raise NotImplementedError


class Messages(Transfers):
    """Sends and receives."""

    def _exchange(self, sent: Sequence[Tensor], ahead: int, received: list[Tensor]) -> _Moving:
        target, source = ((self._rank + step) % self._size for step in (ahead, -ahead))
        sent = [on_wire(self._group, x) for x in sent]
        arriving = [on_wire(self._group, x) for x in received]
        operations = [
            dist.P2POp(operation, x, dist.get_global_rank(self._group, peer), self._group)
            for operation, tensors, peer in (
                (dist.isend, sent, target), (dist.irecv, arriving, source)
            )
            for x in tensors
            if x.numel()
        ]  # fmt: skip

        def finish() -> Sequence[Tensor]:
            return [x.to(y.device) for x, y in zip(arriving, received, strict=True)]

        return UnderWay(
            self._group,
            f"the exchange of keys, values or gradients with ranks {target} and {source}",
            lambda: dist.batch_isend_irecv(operations) if operations else [],
            finish,
            sent,
        )


class Copies(Transfers):
    """Copies out of the memory of other ranks, on a stream beside the current one.

    Every rank's memory has its keys and values, which no rank writes during a pass, and slots for
    gradients that wait for their rank. Ranks meet before they write what others may still be
    reading, and before they read what others have written. They meet on the current stream: on
    another one, NCCL's kernel would hold a multiprocessor of the attention kernel until the last
    rank has come, which may be when that rank's own attention kernel has left it one.
    """

    def __init__(
        self, memory: PeerMemory, group: dist.ProcessGroup, own: tuple[Tensor, Tensor], rows: int
    ) -> None:
        super().__init__(group, own)
        self._memory, self._rows = memory, rows
        memory.meet(group)  # every rank has waited for the copies of the pass before
        for target, x in zip(self._views(self._rank, len(own[0])), own, strict=True):
            target.copy_(x)
        memory.meet(group)

    @staticmethod
    def nbytes(own: tuple[Tensor, Tensor], rows: int, slots: int) -> int:
        """Memory of a rank, with slots for gradients of up to ``rows`` tokens."""
        keys = sum(_aligned(rows * x[0].numel() * x.element_size()) for x in own)
        return keys + slots * sum(_aligned(rows * x[0].numel() * 4) for x in own)

    def zeros(self, step: int, rows: int) -> tuple[Tensor, Tensor]:
        """In this rank's memory, where their rank reads them."""
        k, v = self._views(self._rank, rows, step)
        return k.zero_(), v.zero_()

    def _exchange(self, sent: Sequence[Tensor], ahead: int, received: list[Tensor]) -> _Moving:
        rank, rows = (self._rank - ahead) % self._size, len(received[0])
        if ahead > 0:
            what, sources = "keys and values", self._views(rank, rows)
        else:
            self._memory.meet(self._group)
            what, sources = "gradients", self._views(rank, rows, -ahead)

        def start() -> Sequence[torch.cuda.Event]:
            with self._memory.beside():
                for target, source in zip(received, sources, strict=True):
                    target.copy_(source)
            return [self._memory.mark()]

        what = f"the copy of {what} of rank {rank}"
        return UnderWay(self._group, what, start, lambda: received, sources)

    def _views(self, rank: int, rows: int, step: int | None = None) -> list[Tensor]:
        """Keys and values in the memory of ``rank``, or the gradients of a step for its reader."""
        at = 0 if step is None else self.nbytes(self.own, self._rows, (step - 1) % SLOTS)
        found = []
        for x in self.own:
            dtype = x.dtype if step is None else torch.float32
            found.append(self._memory.view(rank, at, (rows, *x.shape[1:]), dtype))
            at += _aligned(self._rows * x[0].numel() * dtype.itemsize)
        return found


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
