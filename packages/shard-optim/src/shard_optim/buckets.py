"""Flat buffers: parameters as views into them, gathered in place.

A bucket re-points the data of its parameters (``param.data``) into one flat buffer laid out so
that rank r's elements are the r-th of ``world_size`` equal ranges. The all-gather of updated
parameters then writes straight into them, without a staging copy. Parameters keep identity, shape,
strides, dtype and ``requires_grad``; only their storage is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from shard_optim.collectives import all_gather, guarded
from shard_optim.partition import BucketPlan, Span

# Attribute of a parameter of a FullyShardedDataParallel: the ranks that hold its other shards.
SHARD_GROUP = "_shard_group"


@dataclass(eq=False, kw_only=True)
class Shard:
    """The part of one parameter that this rank updates.

    Attributes:
        param: the whole parameter, as the module knows it.
        index: the parameter's number over all groups in order: its key in a plain state dict.
        name: the parameter's name, for errors.
        span: the owned elements of the flattened parameter.
        begin: their place inside this rank's range of the bucket.
        view: those elements inside the parameter's storage: one-dimensional under "flat", of the
            parameter's own shape under "whole".
        tensor: what the local optimizer updates: ``view`` itself, or a master copy of it.
    """

    param: Tensor
    index: int
    name: str
    span: Span
    begin: int
    view: Tensor
    tensor: Tensor

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a higher-precision copy."""
        return self.tensor is not self.view


class Bucket:
    """One flat buffer holding whole parameters, and this rank's shards of them.

    Attributes:
        flat: the buffer, shape (world_size * chunk,).
        owned: this rank's range of it, shape (chunk,).
        shards: this rank's parts of the members, in the plan's order.

    Args:
        params: the members, in the plan's order; one dtype, one device.
        indices: each member's number over all groups.
        names: each member's name, for errors.
        plan: where the members lie.
        shaped: whether shards keep their parameter's shape ("whole").
        group: the ranks that share the work.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        indices: Sequence[int],
        names: Sequence[str],
        plan: BucketPlan,
        shaped: bool,
        group: dist.ProcessGroup,
    ) -> None:
        self.params = list(params)
        self.indices = list(indices)
        self.names = list(names)
        self.plan = plan
        self.group = group
        self.rank = dist.get_rank(group)
        self.dtype = self.params[0].dtype
        self.device = self.params[0].device
        self.flat = torch.zeros(plan.numel, dtype=self.dtype, device=self.device)
        self.owned = self.flat.narrow(0, self.rank * plan.chunk, plan.chunk)
        self.shards: list[Shard] = []
        self._gather: dist.Work | None = None
        self._gather_words = self.describe("the all-gather of updated parameters")
        for position, param in enumerate(self.params):
            self._adopt(param, plan.offsets[position])
            span = plan.span(position, self.rank)
            if span is not None:
                # A number stays a number, so that its state has the shape a full state dict has.
                keep_shape = shaped or param.ndim == 0
                begin = plan.offsets[position] + span.start
                view = param.detach() if keep_shape else self.flat.narrow(0, begin, span.length)
                self.shards.append(
                    Shard(
                        param=param,
                        index=self.indices[position],
                        name=self.names[position],
                        span=span,
                        begin=begin - self.rank * plan.chunk,
                        view=view,
                        tensor=view,
                    )
                )

        self._addresses = [param.data_ptr() for param in self.params]

    def _adopt(self, param: Tensor, offset: int) -> None:
        """Moves the parameter's values into the flat buffer, keeping its shape and strides."""
        view = self.flat.as_strided(param.size(), param.stride(), offset)
        view.copy_(param.detach())
        param.data = view

    def check_storage(self) -> None:
        """Makes sure that the parameters are still views of the buffer that is updated.

        Raises:
            RuntimeError: naming the first that was moved or converted.
        """
        addresses = [param.data_ptr() for param in self.params]
        if addresses == self._addresses:
            return
        place = next(i for i, a in enumerate(addresses) if a != self._addresses[i])
        param, name = self.params[place], self.names[place]
        raise RuntimeError(
            "parameters must stay in the memory that the sharded optimizer updates, but "
            f"{name} was moved or converted since ({self.dtype} on {self.device} then, "
            f"{param.dtype} on {param.device} now). Convert the model first, with model.to(...), "
            "and construct the optimizer then"
        )

    def describe(self, what: str) -> str:
        """``what`` and this bucket in words, for errors."""
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{what} ({self.names[0]}{more})"

    @property
    def packed(self) -> bool:
        """Whether the members, row-major, follow each other without gaps from the start."""
        ends = accumulate(self.plan.numels)
        return all(
            offset + numel == end and param.is_contiguous()
            for param, offset, numel, end in zip(
                self.params, self.plan.offsets, self.plan.numels, ends, strict=True
            )
        )

    def launch_gather(self) -> None:
        """Starts the all-gather of updated parameters, in place and asynchronously."""
        if self.plan.world_size > 1 and self.plan.chunk > 0:
            self._gather = guarded(
                self._gather_words, self.group, all_gather, self.flat, self.owned, self.group
            )

    @property
    def gathering(self) -> bool:
        """Whether an all-gather was launched and not awaited yet."""
        return self._gather is not None

    def wait_gather(self) -> None:
        """Waits for the all-gather. On CUDA the current stream waits, not the host."""
        if self._gather is not None:
            work, self._gather = self._gather, None
            guarded(self._gather_words, self.group, work.wait)


def check_layout(param: Tensor, name: str) -> None:
    """Refuses parameters whose elements are not one dense block of memory.

    Raises:
        ValueError: for sparse, expanded or strided-with-gaps parameters.
    """
    if param.layout != torch.strided or not _is_dense(param):
        strides = param.stride() if param.layout == torch.strided else "none"
        raise ValueError(
            f"a sharded parameter must occupy one dense block of memory, but {name} has layout "
            f"{param.layout}, shape {tuple(param.shape)}, strides {strides}; "
            "replace it by a contiguous copy first"
        )


def _is_dense(param: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def check_gradient(grad: Tensor | None, name: str) -> None:
    """Refuses gradients that cannot be sliced.

    Raises:
        ValueError: for a sparse gradient.
    """
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(
            f"gradients must be dense, but {name} received one of layout {grad.layout}; "
            "use sparse=False in its embedding"
        )


def flat_gradient(param: Tensor, name: str) -> Tensor | None:
    """The gradient as a vector in its parameter's own memory order, or None.

    No copy, except of a gradient whose strides differ from its parameter's.

    Raises:
        ValueError: for a sparse gradient.
    """
    grad = param.grad
    check_gradient(grad, name)
    return None if grad is None else in_memory_order(grad, param)


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` as a vector in the memory order of ``like``, which has the same shape.

    A view if their strides agree, else a copy.
    """
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.view(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))
