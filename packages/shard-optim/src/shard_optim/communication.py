"""Collectives whose failures name what was moved, and comparisons of settings over the ranks."""

from __future__ import annotations

import atexit
import functools
import hashlib
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions

from shard_optim.changes import pending_change
from shard_optim.exchange import all_gather_values, finish

Result = TypeVar("Result")

_PAUSE_BEFORE_EXIT_SECONDS = 0.1
_NAME_BITS = 22  # of a random name; the rest of 62 bits are a digest
_NO_RANGE = nullcontext()


class CollectiveError(RuntimeError):
    """A peer died, timed out, or left the group while this rank was communicating."""


def traced(what: str, unit: str) -> AbstractContextManager[object]:
    """A named range in the trace of a running profiler; without a profiler, nothing.

    Args:
        what: ``all_gather``, ``wait_for_all_gather`` or ``reduce_scatter``. Tools that look for
            late gathers know these names.
        unit: name of the parameters that are moved.
    """
    if not torch._C._autograd._profiler_enabled():  # a range costs microseconds even then
        return _NO_RANGE
    return torch.profiler.record_function(f"shard_optim::{what} ({unit})")


def guarded(
    what: str, group: dist.ProcessGroup, call: Callable[..., Result], *arguments: Any
) -> Result:
    """Calls ``call(*arguments)`` and names what failed if the process group reports an error.

    Raises:
        CollectiveError: from the back end's own error.
    """
    try:
        return call(*arguments)
    except RuntimeError as error:  # torch reports every back end's failures as RuntimeError
        cause = pending_change(group) or (
            "A peer has probably died or left; look at the first error in the other ranks' logs "
            "and restart from the last checkpoint."
        )
        raise CollectiveError(
            f"every rank of the group must take part in {what}, but it failed on rank "
            f"{dist.get_rank(group)} of {group.size()}: {error}. {cause}"
        ) from error


def reduce_scatter(output: Tensor, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts averaging ``flat``, shape (world_size * n,), of which each rank gets its n elements.

    The group's own method, here and below: the functions of ``torch.distributed`` check their
    arguments again at every call.
    """
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    options.asyncOp = True
    return group._reduce_scatter_base(output, flat, options)


def all_gather(flat: Tensor, owned: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts filling ``flat``, shape (world_size * n,), with each rank's n elements."""
    options = AllgatherOptions()
    options.asyncOp = True
    return group._allgather_base(flat, owned, options)


class Waitable(Protocol):
    """A collective under way, or several."""

    def wait(self) -> Any:
        """Returns when the result may be used; on CUDA the current stream waits, not the host."""


class _All:
    """Several collectives as one."""

    def __init__(self, works: Sequence[Waitable]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def all_gather_several(
    wholes: Sequence[Tensor], parts: Sequence[Tensor], group: dist.ProcessGroup
) -> Waitable:
    """Starts filling each of ``wholes``, shape (world_size * n,), with every rank's part of it.

    One call and, over NCCL, one kernel for all of them; each may have another n, shape (n,).
    """
    # Gloo's worker threads store the name of what they completed last in one string without a lock.
    # Names of up to 15 characters lie inside the string, but "ALLGATHER_COALESCED" is allocated,
    # and two threads that assign it at once free it twice (seen with torch 2.15).
    if group._get_backend(wholes[0].device).name() == "gloo":
        pairs = zip(wholes, parts, strict=True)
        return _All([all_gather(whole, part, group) for whole, part in pairs])
    options = AllgatherOptions()
    options.asyncOp = True
    return group.allgather_into_tensor_coalesced(list(wholes), list(parts), options)


def reduce_scatter_several(
    parts: Sequence[Tensor], wholes: Sequence[Tensor], group: dist.ProcessGroup
) -> dist.Work:
    """Starts averaging each of ``wholes``, shape (world_size * n,), of which ``parts`` get n each.

    One call and, over NCCL, one kernel for all of them.
    """
    options = ReduceScatterOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    options.asyncOp = True
    return group.reduce_scatter_tensor_coalesced(list(parts), list(wholes), options)


class Communication(Protocol):
    """What moves gradients and parameters between the ranks of a group; each call is collective.

    ``communication=`` takes one in place of the process group's own collectives, such as
    ``ddp_lite.peer.PeerCopies``.

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

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], /) -> Waitable:
        """Starts averaging each input, of which each rank gets its range."""
        if len(inputs) == 1:
            return reduce_scatter(outputs[0], inputs[0], self.group)
        return reduce_scatter_several(outputs, inputs, self.group)

    def all_gather(self, wholes: Sequence[Tensor], parts: Sequence[Tensor], /) -> Waitable:
        """Starts filling each whole with every rank's part of it."""
        if len(wholes) == 1:
            return all_gather(wholes[0], parts[0], self.group)
        return all_gather_several(wholes, parts, self.group)


def resolve_communication(
    communication: Communication | None, group: dist.ProcessGroup
) -> Communication:
    """The given communication, or the collectives of the group.

    Raises:
        TypeError: if it has no group.
        ValueError: if it is for other ranks.
    """
    if communication is None:
        return GroupCollectives(group)
    if not isinstance(getattr(communication, "group", None), dist.ProcessGroup):
        raise TypeError(
            "communication must have the methods of a Communication and the group that they serve, "
            f"but got {type(communication).__name__}. Pass ddp_lite.peer.PeerCopies(...), or leave "
            "it out."
        )
    if communication.group.group_name != group.group_name:
        raise ValueError(
            f"communication must be for the group of {group.size()} ranks that hold the shards "
            f"({group.group_name}), but got one for {communication.group.size()} ranks "
            f"({communication.group.group_name}). Build it from the same process group."
        )
    return communication


def average(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts replacing each element of ``values`` by its mean over all ranks."""
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)
    options.asyncOp = True
    return group.allreduce([values], options)


def maximum(values: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts replacing each element of ``values`` by the largest that any rank has there."""
    options = AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    options.asyncOp = True
    return group.allreduce([values], options)


def point_to_point_device(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Where a tensor of ``device`` must lie to be sent or received: gloo takes host memory only."""
    backends = dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))
    return torch.device("cpu") if backends.get(device.type) == "gloo" else device


def resolve_group(
    process_group: dist.ProcessGroup | dist.device_mesh.DeviceMesh | None,
) -> dist.ProcessGroup:
    """The given group, that of the given one-dimensional device mesh, or the default one.

    Raises:
        RuntimeError: if there is neither. World size 1 is never assumed: a launcher that forgot
            to initialise would otherwise train unsynchronised replicas.
    """
    if isinstance(process_group, dist.device_mesh.DeviceMesh):
        process_group = process_group.get_group()
    if process_group is not None:
        _pause_before_exit()
        return process_group
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "a sharded optimizer needs a process group, but none was given and the default one is "
            "not initialised. Call torch.distributed.init_process_group() first (a single process "
            "can use world_size=1) or pass process_group=."
        )
    group = dist.group.WORLD
    assert group is not None
    _pause_before_exit()
    return group


@functools.cache
def _pause_before_exit() -> None:
    """Gives gloo's threads a moment before the interpreter finalises; works once per process.

    The thread that carried out a collective releases what it kept of the Python context in which
    the collective was started, which takes Python's global lock. If the program has begun to exit
    by then, torch aborts the process with "terminate called without an active exception" although
    all its work is done. A sleeping main thread hands over the lock.
    """
    atexit.register(time.sleep, _PAUSE_BEFORE_EXIT_SECONDS)


def check_agreement(
    lines: Sequence[str],
    *,
    group: dist.ProcessGroup,
    across: dist.ProcessGroup | None = None,
    device: torch.device,
    must: str = "construct the sharded optimizer from the same class, groups and parameters",
    remedy: str = "build the same optimizer on every rank",
) -> str:
    """Compares a description over all ranks: one 16-byte all-reduce if they agree.

    Args:
        lines: the description, one fact per line, most general first.
        group: the ranks to compare.
        across: if given, the ranks that are at this rank's place in other such groups, which are
            compared too.
        device: where the group's back end can reduce tensors.
        must: what every rank must do, for the error.
        remedy: what to do otherwise.

    Returns:
        A name for what is described, random and the same on every rank.

    Raises:
        RuntimeError: on every rank if any two differ, naming the first difference.
    """
    name = secrets.randbits(_NAME_BITS)
    groups = [each for each in (group, across) if each is not None and each.size() > 1]
    if not groups:
        return f"{name:x}"
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    number = int.from_bytes(digest[:5], "big")
    # max(x) == -max(-x) exactly when every rank sent the same x; the name is in the lower bits.
    own = [number << _NAME_BITS | name, -number]
    bounds = torch.tensor(own, dtype=torch.int64, device=device)
    for each in groups:
        guarded(
            "the comparison of what the ranks construct",
            each,
            lambda each=each: finish(
                dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=each, async_op=True)
            ),
        )
    largest, negated_smallest = bounds.tolist()
    if largest >> _NAME_BITS == -negated_smallest:
        return f"{largest & (1 << _NAME_BITS) - 1:x}"
    everyone = [list(lines)]
    for each in groups:
        gathered = all_gather_values(everyone, each)
        everyone = [described for ranks in gathered for described in ranks]
    raise RuntimeError(f"every rank must {must}, but {first_difference(everyone)}; {remedy}")


def first_difference(everyone: Sequence[Sequence[str]]) -> str:
    """Names the first line in which a rank differs from rank 0; some line must."""
    rows = zip_longest(*everyone, fillvalue="nothing")
    facts = next(row for row in rows if any(fact != row[0] for fact in row))
    rank = next(rank for rank, fact in enumerate(facts) if fact != facts[0])
    return f"rank 0 has [{facts[0]}] where rank {rank} has [{facts[rank]}]"


# Norms of equal tensors differ only where ranks run different hardware; those of gradients of
# different batches differ in the first digits.
_WEIGHTS_TOLERANCE, _GRADIENTS_TOLERANCE = 1e-5, 1e-3


def check_first_step(
    params: Sequence[Tensor],
    *,
    gradients: bool,
    name_of: Callable[[int], str],
    group: dist.ProcessGroup,
) -> None:
    """Compares the norms of weights and gradients over the ranks, by one all-reduce. Collective.

    Otherwise ranks would update shards of different models, or each its shard with its own
    gradients.

    Args:
        params: all parameters, the same on every rank.
        gradients: whether their dense gradients must have been averaged already.
        name_of: a parameter's name by its number.
        group: the ranks to compare.

    Raises:
        RuntimeError: on every rank, naming the first parameter that differs.
    """
    if group.size() == 1:
        return
    numbers = [index for index, param in enumerate(params) if param.numel()]
    if not numbers:
        return
    device = params[0].device
    weights = [params[index].detach() for index in numbers]
    found = [_norms(weights, device)]
    if gradients:
        found.append(_norms([params[index].grad for index in numbers], device))
    own = torch.stack(found)
    bounds = torch.stack([own, -own])  # the largest of -x is minus the smallest of x
    work = guarded("the comparison of the first step", group, maximum, bounds, group)
    guarded("the comparison of the first step", group, work.wait)
    largest, smallest = bounds[0], -bounds[1]
    spread, scale = largest - smallest, largest.abs()
    for row, (tolerance, describe) in enumerate(
        [(_WEIGHTS_TOLERANCE, _weights), (_GRADIENTS_TOLERANCE, _gradients)][: len(own)]
    ):
        differs = (spread[row] > tolerance * scale[row]).nonzero()
        if differs.numel():
            column = int(differs[0])
            low, high = float(smallest[row, column]), float(largest[row, column])
            raise RuntimeError(describe(name_of(numbers[column]), low, high))


def _norms(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Shape (tensors,), fp64: -1 for None, -2 where the norm is not finite."""
    norms = [
        torch.tensor(-1.0, device=device)
        if tensor is None
        else torch.linalg.vector_norm(tensor, dtype=_wide(tensor)).to(device)
        for tensor in tensors
    ]
    return torch.stack([norm.double() for norm in norms]).nan_to_num(-2, -2, -2)


def _wide(tensor: Tensor) -> torch.dtype:
    narrow = torch.complex64 if tensor.is_complex() else torch.float32
    return torch.promote_types(tensor.dtype, narrow)


def _weights(name: str, low: float, high: float) -> str:
    return (
        "every rank must start from the same weights, but at the first step the norm of "
        f"{name} is between {low:.6g} and {high:.6g} over the ranks. Initialise with the same seed "
        "on every rank, or broadcast rank 0's weights before the optimizer is constructed"
    )


def _gradients(name: str, low: float, high: float) -> str:
    span = f"its norm is between {low:.6g} and {high:.6g} over the ranks"
    if low == -1:
        span = "it has none on some ranks"
    return (
        "gradients must have been averaged over the ranks before the step, but at the first step "
        f"that of {name} differs: {span}. Put the model into a data-parallel wrapper that averages "
        "gradients, or let this optimizer average them with reduce_gradients=True"
    )
