"""Tensors on their way between ranks, for which the caller waits when it has computed meanwhile.

On a GPU no host waits: NCCL moves tensors on a stream of its own, and ``wait`` makes the current
stream wait for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from flashattn_triton.context_parallel.agreement import lost_ranks_named, on_wire
from flashattn_triton.context_parallel.zigzag import Zigzag

Result = TypeVar("Result")


class UnderWay(Generic[Result]):
    """A result that communication is still to bring.

    Args:
        group: the ranks.
        what: moves, in words.
        start: starts the communication; returns what is to be waited for.
        finish: makes the result afterwards.
        sent: tensors that must live until then.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        what: str,
        start: Callable[[], Sequence[Any]],
        finish: Callable[[], Result],
        sent: object,
    ) -> None:
        self._group, self._what, self._finish, self._sent = group, what, finish, sent
        with lost_ranks_named(group, what):
            self._works = start()

    def wait(self) -> Result:
        """The result, once it is there.

        Raises:
            RankLostError: a rank is lost.
        """
        with lost_ranks_named(self._group, self._what):
            for work in self._works:
                work.wait()
        return self._finish()


def gather(group: dist.ProcessGroup, order: Zigzag, own: Tensor) -> UnderWay[Tensor]:
    """Tokens of all ranks: (n, ...) of each to (tokens, ...), as the sequences are packed."""
    sent = on_wire(group, padded(own, order.longest))
    found = sent.new_empty(group.size() * order.longest, *own.shape[1:])
    rows = gathered_rows(order, own.device)

    def start() -> Sequence[Any]:
        return [dist.all_gather_into_tensor(found, sent, group=group, async_op=True)]

    def finish() -> Tensor:
        return found.to(own.device).index_select(0, rows)

    return UnderWay(group, "the gathering of tokens", start, finish, sent)


def sum_of_own(group: dist.ProcessGroup, order: Zigzag, x: Tensor) -> UnderWay[Tensor]:
    """Sums of the ranks' (tokens, ...), of which each rank gets (n, ...), its own tokens."""
    sent = on_wire(group, x.index_select(0, scattered_rows(order, x.device)))
    found = sent.new_empty(order.longest, *x.shape[1:])
    n = order.length(group.rank())

    def start() -> Sequence[Any]:
        return [dist.reduce_scatter_tensor(found, sent, group=group, async_op=True)]

    def finish() -> Tensor:
        return found[:n].to(x.device)

    return UnderWay(group, "the sum of the gradients of keys", start, finish, sent)


def padded(x: Tensor, rows: int) -> Tensor:
    """A contiguous tensor with at least some rows, zeros behind those of ``x``."""
    missing = rows - len(x)
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x.contiguous()


@functools.lru_cache(maxsize=16)
def own_rows(order: Zigzag, rank: int, device: torch.device) -> Tensor:
    """For each token of a rank, its row in the packed sequences."""
    return _rows(order, rank).to(device)


@functools.lru_cache(maxsize=16)
def gathered_rows(order: Zigzag, device: torch.device) -> Tensor:
    """For each token of the packed sequences, its row among those gathered from all ranks."""
    found = torch.empty(order.starts[-1], dtype=torch.int64)
    for rank in range(order.world_size):
        first = rank * order.longest
        found[_rows(order, rank)] = torch.arange(first, first + order.length(rank))
    return found.to(device)


@functools.lru_cache(maxsize=16)
def scattered_rows(order: Zigzag, device: torch.device) -> Tensor:
    """For each row that is scattered to the ranks, its row in the packed sequences.

    Every rank has as many rows as the one with most tokens; the first row stands for those missing.
    """
    found = torch.zeros(order.world_size, order.longest, dtype=torch.int64)
    for rank in range(order.world_size):
        found[rank, : order.length(rank)] = _rows(order, rank)
    return found.flatten().to(device)


def _rows(order: Zigzag, rank: int) -> Tensor:
    spans = torch.tensor(order.spans(rank))
    lengths = spans[:, 1] - spans[:, 0]
    ends = lengths.cumsum(0)
    shifts = torch.repeat_interleave(spans[:, 0] - ends + lengths, lengths)
    return torch.arange(int(ends[-1])) + shifts
