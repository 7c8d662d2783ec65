"""Collectives whose failures name what was moved, and comparisons of settings over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, ReduceScatterOptions

from ddp_lite.errors import PeerFailureError
from ddp_lite.ranks import Ranks, all_reduce, asynchronous, backend_for
from ddp_lite.reduce import Reduction, Waitable

_NO_RANGE = nullcontext()

PeerCopy = Literal["peer-copy"]


class CollectiveError(PeerFailureError):
    """A peer died, timed out, or left the group while this rank was communicating."""


def traced(what: str, unit: str) -> AbstractContextManager[object]:
    """A named range in the trace of a running profiler; without a profiler, nothing.

    Tools know ``what``: ``all_gather``, ``wait_for_all_gather`` or ``reduce_scatter``.
    """
    if not torch._C._autograd._profiler_enabled():  # a range costs microseconds even then
        return _NO_RANGE
    return torch.profiler.record_function(f"shard_optim::{what} ({unit})")


def reduce_scatter(output: Tensor, flat: Tensor, communicator: Any) -> dist.Work:
    """Starts averaging ``flat``, shape (world_size * n,), of which each rank gets n elements."""
    options = asynchronous(ReduceScatterOptions(), dist.ReduceOp.AVG)
    work: dist.Work = communicator._reduce_scatter_base(output, flat, options)
    return work


def all_gather(flat: Tensor, owned: Tensor, communicator: Any) -> dist.Work:
    """Starts filling ``flat``, shape (world_size * n,), with each rank's n elements."""
    work: dist.Work = communicator._allgather_base(flat, owned, asynchronous(AllgatherOptions()))
    return work


def all_to_all(
    received: Tensor,
    sent: Tensor,
    received_sizes: Sequence[int],
    sent_sizes: Sequence[int],
    communicator: Any,
) -> dist.Work:
    """Starts sending each rank its part of ``sent``; ``received`` gets one part of every rank's."""
    work: dist.Work = communicator.alltoall_base(
        received, sent, received_sizes, sent_sizes, asynchronous(AllToAllOptions())
    )
    return work


def as_sent(values: Tensor) -> Tensor:
    """The vector, or its bytes unless all back ends know its dtype, such as float8 and int16."""
    known = values.is_floating_point() and values.dtype.itemsize > 1
    return values if known else values.view(torch.uint8)


def check_gradient(grad: Tensor | None, name: str) -> None:
    """Raises ValueError for a sparse gradient, which cannot be sliced."""
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(
            f"gradients must be dense, but got one of layout {grad.layout} for {name}. "
            "Use sparse=False in its embedding."
        )


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, at twice its speed on CUDA by the kernel for several tensors."""
    if tensor.dtype == dtype:
        return tensor
    result = torch.empty_like(tensor, dtype=dtype)
    torch._foreach_copy_([result], [tensor])
    return result


class Communication(Protocol):
    """What moves gradients and parameters between the ranks of a group; each call is collective.

    ``communication=`` takes one in place of the process group's own collectives. The name
    ``"peer-copy"`` stands for ``ddp_lite.peer.PeerCopies`` over memory of its own. One with a true
    attribute ``casts`` casts for a ``FullyShardedDataParallel``: it gathers float32 parts into
    16-bit wholes, and averages 16-bit gradients into float32 outputs.

    Attributes:
        group: the ranks.
    """

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the ranks that exchange."""

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], /) -> Waitable:
        """Starts averaging each input, shape (world_size * n,); its output gets this rank's n."""

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], /) -> Waitable:
        """Starts filling each whole, shape (world_size * n,), with every rank's n elements."""


class GroupCollectives:
    """The collectives of a process group's back end, as a ``Communication``.

    Several tensors travel in one call and, over NCCL, in one kernel.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.group = ranks.group
        self._ranks = ranks  # whose connections end with it, while a peer may still be making them
        # gloo has no coalesced reduce-scatter, and its coalesced gather is not safe: its worker
        # threads store the name of what they completed last in one string without a lock. Names of
        # up to 15 characters lie inside the string, but "ALLGATHER_COALESCED" is allocated, and two
        # threads that assign it at once free it twice (seen with torch 2.15).
        self._one_by_one = backend_for(ranks.group, ranks.device) == "gloo"

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], /) -> Waitable:
        """Starts averaging each input, of which each rank gets its range."""
        if self._one_by_one or len(inputs) == 1:
            return self._each(reduce_scatter, outputs, inputs)
        options = asynchronous(ReduceScatterOptions(), dist.ReduceOp.AVG)
        work: Waitable = self._ranks.communicator.reduce_scatter_tensor_coalesced(
            list(outputs), list(inputs), options
        )
        return work

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], /) -> Waitable:
        """Starts filling each whole with every rank's part of it."""
        if self._one_by_one or len(wholes) == 1:
            return self._each(all_gather, wholes, parts)
        work: Waitable = self._ranks.communicator.allgather_into_tensor_coalesced(
            list(wholes), list(parts), asynchronous(AllgatherOptions())
        )
        return work

    def _each(
        self, start: Callable[..., dist.Work], targets: Sequence[Tensor], sources: Sequence[Tensor]
    ) -> Waitable:
        over, pairs = self._ranks.communicator, zip(targets, sources, strict=True)
        works = [start(*pair, over) for pair in pairs]
        return works[0] if len(works) == 1 else Reduction(works, ())


def resolve_communication(
    communication: Communication | PeerCopy | None, ranks: Ranks
) -> Communication:
    """The named or given communication, or the collectives of the group. Collective if named.

    TypeError if it has no group; ValueError for other ranks, or if these cannot copy.
    """
    if communication is None:
        return GroupCollectives(ranks)
    if communication == "peer-copy":
        from ddp_lite.peer import PeerCopies, PeerMemory  # loads drivers

        return PeerCopies(PeerMemory(ranks.group))
    if not isinstance(getattr(communication, "group", None), dist.ProcessGroup):
        raise TypeError(
            "communication must have the methods of a Communication and the group that they serve, "
            f'but got {type(communication).__name__}. Pass "peer-copy", or leave it out.'
        )
    group = ranks.group
    if communication.group.group_name != group.group_name:
        raise ValueError(
            f"communication must be for the group of {group.size()} ranks that hold the shards "
            f"({group.group_name}), but got one for {communication.group.size()} ranks "
            f"({communication.group.group_name}). Build it from the same process group."
        )
    return communication


# Relative, of the norms of weights and of gradients. Norms of equal tensors differ only where ranks
# run different hardware; those of gradients of different batches differ in the first digits.
_TOLERANCES = (1e-5, 1e-3)


def check_first_step(
    params: Sequence[Tensor], *, gradients: bool, name_of: Callable[[int], str], ranks: Ranks
) -> None:
    """Compares the norms of weights and gradients over the ranks, by one all-reduce. Collective.

    Otherwise ranks would update shards of different models, or each its shard with its own
    gradients. RuntimeError on every rank, naming the first parameter that differs.

    Args:
        gradients: whether their dense gradients must have been averaged already.
    """
    numbers = [index for index, param in enumerate(params) if param.numel()]
    if ranks.size == 1 or not numbers:
        return
    device = params[0].device
    own = [_norms([params[index].detach() for index in numbers], device)]
    if gradients:
        own.append(_norms([params[index].grad for index in numbers], device))
    norms = torch.stack(own)
    bounds = torch.stack([norms, -norms])  # the largest of -x is minus the smallest of x
    words = "the comparison of the first step"
    ranks.together(words, all_reduce, ranks.communicator, bounds, dist.ReduceOp.MAX)
    largest, smallest = bounds[0], -bounds[1]
    tolerance = torch.tensor(_TOLERANCES[: len(own)], dtype=norms.dtype, device=device)
    differing = (largest - smallest > tolerance.unsqueeze(1) * largest.abs()).nonzero()
    if not differing.numel():
        return
    row, column = differing[0].tolist()
    name, low, high = name_of(numbers[column]), smallest[row, column], largest[row, column]
    span = f"between {low:.6g} and {high:.6g} over the ranks"
    if row == 0:
        raise RuntimeError(
            "every rank must start from the same weights, but at the first step the norm of "
            f"{name} is {span}. Initialise with the same seed on every rank, or broadcast rank 0's "
            "weights before the optimizer is constructed"
        )
    difference = "it has none on some ranks" if low == -1 else f"its norm is {span}"
    raise RuntimeError(
        "gradients must have been averaged over the ranks before the step, but at the first step "
        f"that of {name} differs: {difference}. Put the model into a data-parallel wrapper that "
        "averages gradients, or let this optimizer average them with reduce_gradients=True"
    )


def _norms(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Shape (tensors,), fp64: -1 for None, -2 where the norm is not finite."""

    def norm(tensor: Tensor | None) -> Tensor:
        if tensor is None:
            return torch.tensor(-1.0, dtype=torch.float64, device=device)
        wide = torch.complex64 if tensor.is_complex() else torch.float32
        dtype = torch.promote_types(tensor.dtype, wide)
        found: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
        return found.to(device).double()

    return torch.stack([*map(norm, tensors)]).nan_to_num(-2, -2, -2)
