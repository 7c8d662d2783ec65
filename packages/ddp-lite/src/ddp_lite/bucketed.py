"""Step 4: one asynchronous all-reduce per bucket, during backward.

Buckets in reverse registration order combine the second step's large messages with the third's
overlap. The bucket that completes last has nothing to hide under, so it is small. After the first
step the buckets are planned once more, in the order in which rank 0's gradients really arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_lite.base import DataParallelBase
from ddp_lite.buckets import Bucket, BucketSizes, ParameterSpec, typical_bytes
from ddp_lite.migration import refuse_arguments
from ddp_lite.observers import Policy
from ddp_lite.ranks import finish
from ddp_lite.reduction import CommHook, Transport


class BucketedDDP(DataParallelBase):
    """Averages gradients bucket by bucket while backward runs.

    Args:
        module: see ``DataParallelBase``.
        bucket_size_mb: most MB (1024² bytes) of gradients in a bucket; a larger parameter has
            one of its own. None: one bucket per dtype. "auto": a sixteenth of the gradients, at
            least 25 MB, and at most half of what is left toward the end.
        last_bucket_size_mb: the same for the bucket reduced last, if smaller. None: no limit.
        copy: False reduces the gradients where autograd put them, coalesced into one collective
            per bucket. True copies each bucket first, into a flat tensor that they become views of.
        wire_dtype: send gradients in this dtype, such as ``torch.bfloat16``. They are summed in
            float32 and rounded once, then converted back.
        comm_hook: ``hook(flat, bucket)`` reduces the flat tensor in place (or keeps what it
            needs of it), averages, and returns something with ``wait()``. Or a ``GradientHook``.
            Ranks compare its attribute ``settings``, a string, if it has one. "collectives" or
            None: the process group's own, such as NCCL's. "auto": copies between GPUs where
            ``ddp_lite.peer.choose_communication`` finds them possible, for large buckets and GPUs
            that do not wait for their hosts, else "collectives"; ``explain()`` says which and why.
        rebucket: plan again in observed order after the first step; costs one broadcast. None:
            yes, unless a hook is the caller's, who may rely on the buckets.
        process_group, missing_gradients, auto_finish: see ``DataParallelBase``.

    Raises:
        ValueError: a size that is not positive, a ``wire_dtype`` that is not floating-point or
            meets a complex parameter, or both ``wire_dtype`` and a hook.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | Literal["auto"] | None = "auto",
        *,
        last_bucket_size_mb: float | None = 25,
        copy: bool = False,
        wire_dtype: torch.dtype | None = None,
        comm_hook: CommHook | Literal["auto", "collectives"] | None = "auto",
        rebucket: bool | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        missing_gradients: Policy = "skip-if-all",
        auto_finish: bool = True,
        **unknown: Never,
    ) -> None:
        refuse_arguments(type(self), unknown)
        # The base class plans the buckets in its constructor, so the settings come first.
        self._sizes = BucketSizes(bucket_size_mb, last_bucket_size_mb)
        self._transport = Transport(copy, wire_dtype, comm_hook)
        self._rebucket = self._transport.name is not None if rebucket is None else rebucket
        self._rebucket_next = False  # after this step, if a plan was made
        super().__init__(
            module,
            process_group=process_group,
            missing_gradients=missing_gradients,
            auto_finish=auto_finish,
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets in the order of reduction."""
        return tuple(self._step.buckets)

    def detach(self) -> nn.Module:
        """As in ``DataParallelBase``. Memory that was shared for automatic copies is let go too."""
        module = super().detach()
        self._transport.release()
        return module

    # -- one step, from a complete bucket to the averages --------------------------------------

    def _bucket_ready(self, bucket: Bucket) -> None:
        self._start(bucket)

    def _start(self, bucket: Bucket, again: bool = False) -> None:
        step = self._step
        with step.taking(bucket, again) as (gradients, messages):
            reduction = self._transport.start(self._average, bucket, gradients, messages)
            step.in_flight[bucket] = reduction

    def _backward_ended(self) -> None:
        step = self._step
        for bucket in step.not_started():
            self._start(bucket)
        for bucket in step.late():
            # The earlier average joins the later gradient; averaging an average changes nothing.
            self._wait(bucket)
            self._start(bucket, again=True)
        for bucket in list(step.in_flight):
            self._wait(bucket)

    def _wait(self, bucket: Bucket) -> None:
        with self._step.waiting(bucket) as reduction:
            averages = reduction.wait()
        self._step.put_back(bucket, averages)

    # -- which parameters share a bucket -----------------------------------------------------

    def _plan(self, specs: Sequence[ParameterSpec]) -> list[tuple[int, ...]]:
        self._transport.check(specs)
        self._rebucket_next = self._rebucket
        plan = self._sizes.plan(specs[::-1])  # backward meets the last registered ones first
        with self._step.naming_failures_of("the choice between copies and collectives"):
            self._transport.choose(self._step, typical_bytes(plan, specs))
        return plan

    def _plan_again(self, arrived: Sequence[int]) -> list[tuple[int, ...]] | None:
        """Once, in rank 0's order of arrival; what did not arrive there comes last, in reverse."""
        if not self._rebucket_next:
            return None
        self._rebucket_next = False
        specs = self._step.specs
        everything = [*arrived, *range(len(specs) - 1, -1, -1)]
        order = torch.tensor(list(dict.fromkeys(everything)), device=self.device)
        with self._step.naming_failures_of("the broadcast of the observed order"):
            finish(dist.broadcast(order, group=self.process_group, group_src=0, async_op=True))
        return self._sizes.plan([specs[index] for index in order.tolist()])

    # -- what it says of itself --------------------------------------------------------------

    def _settings(self) -> dict[str, str]:
        own = self._sizes.settings | self._transport.settings
        return super()._settings() | own | {"rebucket": str(self._rebucket)}

    def _explain_when(self) -> str:
        return f"buckets of {self._sizes}, {self._transport}, each started during backward"
