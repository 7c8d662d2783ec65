"""Flat buffers: parameters as views into them, gathered in place.

A bucket re-points the data of its parameters (``param.data``) into one flat buffer laid out so
that rank r's elements are the r-th of ``world_size`` equal ranges. The all-gather of updated
parameters then writes straight into them, without a staging copy. Parameters keep identity, shape,
strides, dtype and ``requires_grad``; only their storage is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shard_optim.collectives import guarded
from shard_optim.partition import BucketPlan, Span


@dataclass(eq=False, kw_only=True)
class Shard:
    """The part of one parameter that this rank updates.

    Attributes:
        param: the whole parameter, as the module knows it.
        index: the parameter's number over all groups in order: its key in a plain state dict.
        name: the parameter's name, for errors.
        span: the owned elements of the flattened parameter.
        view: those elements inside the parameter's storage: one-dimensional under "flat", of the
            parameter's own shape under "whole".
        tensor: what the local optimizer updates: ``view`` itself, or a master copy of it.
    """

    param: Tensor
    index: int
    name: str
    span: Span
    view: Tensor
    tensor: Tensor

    @property
    def has_master(self) -> bool:
        """Whether the optimizer updates a higher-precision copy."""
        return self.tensor is not self.view


class Bucket:
    """One flat buffer holding whole parameters, and this rank's shards of them.

    Args:
        params: the members, in the plan's order; one dtype, one device.
        indices: each member's number over all groups.
        names: each member's name, for errors.
        plan: where the members lie.
        shaped: whether shards keep their parameter's shape ("whole").
        master_dtype: dtype of the copies that the optimizer updates, or None for none.
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
        master_dtype: torch.dtype | None,
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
        self.shards: list[Shard] = []
        self._gather: dist.Work | None = None
        for position, param in enumerate(self.params):
            self._adopt(param, plan.offsets[position])
            span = plan.span(position, self.rank)
            if span is not None:
                # A number stays a number, so that its state has the shape a full state dict has.
                keep_shape = shaped or param.ndim == 0
                begin = plan.offsets[position] + span.start
                view = param.detach() if keep_shape else self.flat.narrow(0, begin, span.length)
                wants_master = master_dtype is not None and master_dtype != self.dtype
                self.shards.append(
                    Shard(
                        param=param,
                        index=self.indices[position],
                        name=self.names[position],
                        span=span,
                        view=view,
                        tensor=view.to(master_dtype) if wants_master else view,
                    )
                )

    def _adopt(self, param: Tensor, offset: int) -> None:
        """Moves the parameter's values into the flat buffer, keeping its shape and strides."""
        view = self.flat.as_strided(param.size(), param.stride(), offset)
        view.copy_(param.detach())
        param.data = view

    @property
    def owned(self) -> Tensor:
        """This rank's range of the flat buffer, shape (chunk,)."""
        return self.flat.narrow(0, self.rank * self.plan.chunk, self.plan.chunk)

    def describe(self, what: str) -> str:
        """``what`` and this bucket in words, for errors."""
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{what} ({self.names[0]}{more})"

    def write_back_masters(self) -> None:
        """Rounds updated master copies into the parameters."""
        mastered = [shard for shard in self.shards if shard.has_master]
        if mastered:
            torch._foreach_copy_(
                [shard.view for shard in mastered], [shard.tensor for shard in mastered]
            )

    def launch_gather(self) -> None:
        """Starts the all-gather of updated parameters, in place and asynchronously."""
        if self.plan.world_size > 1 and self.plan.chunk > 0:
            self._gather = guarded(
                self.describe("the all-gather of updated parameters"),
                self.group,
                lambda: dist.all_gather_into_tensor(
                    self.flat, self.owned, group=self.group, async_op=True
                ),
            )

    @property
    def gathering(self) -> bool:
        """Whether an all-gather was launched and not awaited yet."""
        return self._gather is not None

    def wait_gather(self) -> None:
        """Waits for the all-gather. On CUDA the current stream waits, not the host."""
        if self._gather is not None:
            work, self._gather = self._gather, None
            guarded(self.describe("the all-gather of updated parameters"), self.group, work.wait)


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


def check_gradient(param: Tensor, name: str) -> None:
    """Refuses gradients that cannot be sliced.

    Raises:
        ValueError: for a sparse gradient.
    """
    if param.grad is not None and param.grad.layout != torch.strided:
        raise ValueError(
            f"gradients must be dense, but {name} received one of layout {param.grad.layout}; "
            "use sparse=False in its embedding"
        )


def flat_gradient(param: Tensor, name: str) -> Tensor | None:
    """The gradient as a vector in its parameter's own memory order, or None.

    No copy, except of a gradient whose strides differ from its parameter's.

    Raises:
        ValueError: for a sparse gradient.
    """
    check_gradient(param, name)
    return None if param.grad is None else in_memory_order(param.grad, param)


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
