"""Gradients reduced straight into shards during backward: ZeRO stage 2.

Each bucket's gradients are packed into one flat buffer as soon as the last of them is accumulated,
and reduce-scattered asynchronously; the parameters' own gradients are freed at once. A rank thus
holds its slice of the averaged gradients and the buffers of a few buckets in flight, never all
gradients.

Every rank launches the same sequence: passes over all buckets, last bucket first. A pass ends when
a parameter's gradient arrives a second time (another backward) or at the optimizer's step; buckets
still incomplete are then launched with zeros for what is missing. A parameter is updated if any
rank had a gradient for it, as under torch's DistributedDataParallel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from shard_optim.buckets import Bucket, check_gradient
from shard_optim.collectives import guarded

# Buckets whose packed gradients may wait for the network before backward waits for them: enough to
# ride out jitter, few enough that gradients in flight stay a small part of the memory.
MAX_IN_FLIGHT = 4


@dataclass(eq=False)
class Reduction:
    """What has happened to one bucket's gradients since the last step.

    Attributes:
        bucket: the bucket.
        arrived: positions whose gradients were accumulated in this pass.
        present: positions for which this rank had a gradient since the last step.
        shard: this rank's slice of the averaged gradients, shape (chunk,); None before a launch.
    """

    bucket: Bucket
    arrived: set[int] = field(default_factory=set)
    present: set[int] = field(default_factory=set)
    shard: Tensor | None = None


@dataclass(eq=False)
class _Flight:
    """A launched reduce-scatter; ``packed`` must live until it has been awaited."""

    reduction: Reduction
    packed: Tensor
    output: Tensor
    work: dist.Work | None


class GradientReducer:
    """Hooks parameters and reduces their gradients bucket by bucket.

    Args:
        group: the ranks to average over.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._reductions: list[Reduction] = []
        self._next = 0  # launched reductions of this pass, in launch order
        self._in_flight: deque[_Flight] = deque()
        self._paused = False
        self._flags: tuple[Tensor, dist.Work | None] | None = None

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Hooks the parameters of new buckets; their place is at the end of the launch order."""
        for bucket in reversed(buckets):
            reduction = Reduction(bucket)
            self._reductions.append(reduction)
            for position, param in enumerate(bucket.params):
                param.register_post_accumulate_grad_hook(self._hook(reduction, position))

    def _hook(self, reduction: Reduction, position: int) -> Callable[[Tensor], None]:
        def on_gradient(param: Tensor) -> None:
            if self._paused:
                return
            if position in reduction.arrived:
                self._finish_pass()
            reduction.arrived.add(position)
            if len(reduction.arrived) == len(reduction.bucket.params):
                self._launch_ready()

        return on_gradient

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, gradients accumulate in the parameters and nothing is communicated."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _launch_ready(self) -> None:
        """Launches complete buckets, but only in the order that all ranks share."""
        while self._next < len(self._reductions):
            reduction = self._reductions[self._next]
            if len(reduction.arrived) < len(reduction.bucket.params):
                return
            self._launch(reduction)
            self._next += 1

    def _finish_pass(self) -> None:
        for reduction in self._reductions[self._next :]:
            self._launch(reduction)
        for reduction in self._reductions:
            reduction.arrived.clear()
        self._next = 0

    @torch.no_grad()
    def _launch(self, reduction: Reduction) -> None:
        bucket = reduction.bucket
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._land()
        packed = torch.empty(bucket.plan.numel, dtype=bucket.dtype, device=bucket.device)
        targets, grads = [], []
        for position, (param, offset) in enumerate(
            zip(bucket.params, bucket.plan.offsets, strict=True)
        ):
            target = packed.as_strided(param.size(), param.stride(), offset)
            if param.grad is None:
                target.zero_()
                continue
            check_gradient(param, bucket.names[position])
            reduction.present.add(position)
            targets.append(target)
            grads.append(param.grad)
            param.grad = None
        if grads:
            torch._foreach_copy_(targets, grads)
        if self._group.size() == 1 or bucket.plan.chunk == 0:
            self._in_flight.append(_Flight(reduction, packed, packed, None))
            return
        output = torch.empty(bucket.plan.chunk, dtype=bucket.dtype, device=bucket.device)
        work = guarded(
            bucket.describe("the reduce-scatter of gradients"),
            self._group,
            lambda: dist.reduce_scatter_tensor(
                output, packed, op=dist.ReduceOp.AVG, group=self._group, async_op=True
            ),
        )
        self._in_flight.append(_Flight(reduction, packed, output, work))

    def _land(self) -> None:
        """Awaits the oldest reduce-scatter (on CUDA the stream does) and lets its buffer go."""
        flight = self._in_flight.popleft()
        if flight.work is not None:
            guarded(
                flight.reduction.bucket.describe("the reduce-scatter of gradients"),
                self._group,
                flight.work.wait,
            )
        if flight.reduction.shard is None:
            flight.reduction.shard = flight.output
        else:
            flight.reduction.shard.add_(flight.output)

    def finish(self) -> None:
        """Completes the reduction of all gradients since the last step; every rank calls it.

        Raises:
            RuntimeError: if gradients are left that no pass covered.
            CollectiveError: if a peer died or timed out.
        """
        if self.active or any(r.shard is None for r in self._reductions):
            self._finish_pass()
            self._exchange_flags()
        while self._in_flight:
            self._land()
        for reduction in self._reductions:
            for param, name in zip(reduction.bucket.params, reduction.bucket.names, strict=True):
                if param.grad is not None:
                    raise RuntimeError(
                        f"all gradients must be reduced before a step, but {name} has one that "
                        "was accumulated after the last reduction; leave the last backward before "
                        "a step out of no_sync()"
                    )

    @property
    def active(self) -> bool:
        """Whether gradients have arrived that no pass has covered yet."""
        return any(reduction.arrived for reduction in self._reductions)

    def _exchange_flags(self) -> None:
        """Shares which parameters had a gradient; read only by who lacked one."""
        present = [
            position in reduction.present
            for reduction in self._reductions
            for position in range(len(reduction.bucket.params))
        ]
        device = self._reductions[0].bucket.device
        flags = torch.ones(len(present), dtype=torch.uint8, device=device)
        if not all(present):
            flags.copy_(torch.tensor(present, dtype=torch.uint8))
        work = None
        if self._group.size() > 1:
            work = guarded(
                "the exchange of which parameters have gradients",
                self._group,
                lambda: dist.all_reduce(
                    flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True
                ),
            )
        self._flags = (flags, work)

    def gradients(self) -> dict[int, Tensor]:
        """After ``finish``: the averaged gradient of each shard of this rank that has one.

        Returns:
            By parameter number; vectors, views of the bucket's slice.
        """
        used = self._used()
        found: dict[int, Tensor] = {}
        first = 0
        for reduction in self._reductions:
            bucket = reduction.bucket
            assert reduction.shard is not None
            positions = {index: position for position, index in enumerate(bucket.indices)}
            for shard in bucket.shards:
                position = positions[shard.index]
                if position in reduction.present or (used is not None and used[first + position]):
                    begin = bucket.plan.offsets[position] + shard.span.start
                    begin -= bucket.rank * bucket.plan.chunk
                    found[shard.index] = reduction.shard.narrow(0, begin, shard.span.length)
            first += len(bucket.params)
        return found

    def _used(self) -> list[int] | None:
        """Which parameters had a gradient on any rank; None if this rank need not ask.

        Asking waits for the device, so only a rank that lacked a gradient does.
        """
        if all(len(r.present) == len(r.bucket.params) for r in self._reductions):
            return None
        assert self._flags is not None
        flags, work = self._flags
        if work is not None:
            guarded("the exchange of which parameters have gradients", self._group, work.wait)
        return [int(flag) for flag in flags.tolist()]

    def discard(self) -> None:
        """Forgets all gradients reduced since the last step."""
        while self._in_flight:
            self._land()
        for reduction in self._reductions:
            reduction.arrived.clear()
            reduction.present.clear()
            reduction.shard = None
        self._next = 0
