"""Step 4: one asynchronous all-reduce per bucket, during backward.

Buckets of parameters in reverse registration order combine the second step's large messages with
the third step's overlap. The bucket that completes last has nothing to hide under, so it is
small. From the first step on buckets are reduced while backward runs; after it, the buckets are
planned once more in the order in which rank 0's gradients really arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Literal, Never, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_lite import torch_names
from ddp_lite.base import MissingGradients
from ddp_lite.buckets import Bucket, automatic_bucket_bytes, bytes_from_mb, plan_buckets
from ddp_lite.collectives import Both, Completed, SideStream, Waitable
from ddp_lite.overlap import OverlapDDP
from ddp_lite.reduction import FlatReduction, Reduction, WireReduction, WithExtra
from ddp_lite.wire import average_on_wire


@runtime_checkable
class GradientHook(Protocol):
    """A comm hook that takes the gradients where autograd put them, not in a flat tensor."""

    def reduce_gradients(self, bucket: Bucket, gradients: Sequence[Tensor | None]) -> Reduction:
        """Starts averaging the gradients of a complete bucket; None stands for zeros."""


CommHook = Callable[[Tensor, Bucket], Waitable] | GradientHook


class BucketedDDP(OverlapDDP):
    """Averages gradients bucket by bucket while backward runs.

    Args:
        module: see ``DataParallelBase``.
        bucket_size_mb: most MB (1024² bytes) of gradients in a bucket; a larger parameter has
            one of its own. None: one bucket per dtype. "auto": a sixteenth of the gradients, at
            least 25 MB, and at most half of what is left toward the end.
        last_bucket_size_mb: the same for the bucket reduced last, if smaller. None: no extra
            limit.
        copy: False reduces the gradients where autograd put them, coalesced into one collective
            per bucket. True copies each bucket into a flat tensor first; the gradients become
            views of it.
        wire_dtype: send gradients in this dtype, such as ``torch.bfloat16``. They are summed in
            float32 and rounded once, then converted back.
        comm_hook: ``hook(flat, bucket)`` reduces the flat tensor in place (or keeps what it
            needs of it) and returns something with ``wait()``. It is responsible for averaging.
            Or a ``GradientHook``. If it has an attribute ``settings``, a string, ranks compare
            that too.
        rebucket: plan again in observed order after the first step; costs one broadcast. None:
            yes, unless there is a ``comm_hook``, whose owner may rely on the buckets.
        process_group: see ``DataParallelBase``, like the next two.
        missing_gradients: what a parameter without a gradient means.
        auto_finish: whether every backward ends with synchronised gradients.

    Raises:
        ValueError: a size that is not positive, a ``wire_dtype`` that is not floating-point or
            meets a complex parameter, or both ``wire_dtype`` and ``comm_hook``.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | Literal["auto"] | None = "auto",
        *,
        last_bucket_size_mb: float | None = 25,
        copy: bool = False,
        wire_dtype: torch.dtype | None = None,
        comm_hook: CommHook | None = None,
        rebucket: bool | None = None,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        missing_gradients: MissingGradients = "skip-if-all",
        auto_finish: bool = True,
        **unknown: Never,
    ) -> None:
        torch_names.refuse(type(self), unknown)
        automatic = bucket_size_mb == "auto"
        bucket_bytes = None if automatic else bytes_from_mb(bucket_size_mb, "bucket_size_mb")
        last_bucket_bytes = bytes_from_mb(last_bucket_size_mb, "last_bucket_size_mb")
        if wire_dtype is not None and not wire_dtype.is_floating_point:
            raise ValueError(
                f"wire_dtype must be a floating-point dtype, but got {wire_dtype}. Use one such as "
                "torch.bfloat16"
            )
        if wire_dtype is not None and comm_hook is not None:
            raise ValueError(
                "wire_dtype and comm_hook exclude each other, but got both. Convert inside the "
                "hook (see ddp_lite.hooks)"
            )
        # The base class plans the buckets in its constructor, so the settings come first.
        self._automatic_size = automatic
        self._bucket_bytes = bucket_bytes
        self._last_bucket_bytes = last_bucket_bytes
        self._copy = copy
        self._wire_dtype = wire_dtype
        self._side = SideStream()
        self._comm_hook = comm_hook
        self._rebucket = comm_hook is None if rebucket is None else rebucket
        self._rebucket_next = False  # after this step, if a plan was made
        super().__init__(
            module,
            process_group=process_group,
            missing_gradients=missing_gradients,
            auto_finish=auto_finish,
        )

    def _settings(self) -> dict[str, str]:
        hook = self._comm_hook
        kind = hook if isinstance(hook, type | FunctionType) else type(hook)
        return super()._settings() | {
            "bucket_size_mb": "auto" if self._automatic_size else str(self._bucket_bytes),
            "last_bucket_size_mb": str(self._last_bucket_bytes),
            "copy": str(self._copy),
            "wire_dtype": str(self._wire_dtype),
            "comm_hook": f"{kind.__qualname__} {getattr(hook, 'settings', '')}",
            "rebucket": str(self._rebucket),
        }

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets in the order of reduction."""
        return tuple(self._groups)

    def _plan(self) -> list[tuple[int, ...]]:
        if self._wire_dtype is not None:
            for spec in self._specs:
                if spec.dtype.is_complex:
                    raise ValueError(
                        f"wire_dtype can carry real gradients only, but {spec.name} is "
                        f"{spec.dtype}; leave wire_dtype out or freeze the parameter"
                    )
        if self._automatic_size:
            self._bucket_bytes = automatic_bucket_bytes(self._specs)
        self._rebucket_next = self._rebucket
        return self._plan_in_order(range(len(self._specs) - 1, -1, -1))

    def _plan_in_order(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        specs = [self._specs[index] for index in order]
        return plan_buckets(
            specs, self._bucket_bytes, self._last_bucket_bytes, taper=self._automatic_size
        )

    def _reduce(
        self, bucket: Bucket, gradients: Sequence[Tensor | None], extra: Sequence[Tensor]
    ) -> Reduction:
        hook = self._comm_hook
        if isinstance(hook, GradientHook):
            self._average.collectives += 1
            self._average.bytes += bucket.nbytes
            return WithExtra(hook.reduce_gradients(bucket, gradients), self._average_if_any(extra))
        if hook is None and self._wire_dtype is None and not self._copy:
            return super()._reduce(bucket, gradients, extra)

        def send_copy(flat: Tensor) -> Waitable:
            bucket.flat = flat
            if hook is None:
                return self._average([flat, *extra])
            self._average.collectives += 1
            self._average.bytes += flat.nbytes
            return Both(hook(flat, bucket), self._average_if_any(extra))

        def send_on_wire(flat: Tensor) -> Waitable:
            return Both(average_on_wire(flat, self._average), self._average_if_any(extra))

        if self._wire_dtype is not None:
            stream = self._side.on(bucket.device)
            return WireReduction(bucket, gradients, send_on_wire, self._wire_dtype, stream)
        length = bucket.numel if hook is None else bucket.padded_numel
        flat = bucket.parameters[0].new_empty(length)
        return FlatReduction(bucket, gradients, send_copy, flat)

    def _average_if_any(self, extra: Sequence[Tensor]) -> Waitable:
        return self._average(extra) if extra else Completed()

    def _finish(self) -> None:
        observed = self._progress.order
        super()._finish()
        if self._rebucket_next:
            self._rebucket_next = False
            self._set_groups(self._plan_in_order(self._agree_on_order(observed)))

    def _agree_on_order(self, observed: list[int]) -> list[int]:
        """Rank 0's order of arrival; what did not arrive there comes last, in reverse order."""
        everything = [*observed, *range(len(self._specs) - 1, -1, -1)]
        order = torch.tensor(list(dict.fromkeys(everything)), device=self.device)
        with self._naming_failures_of("the broadcast of the observed order"):
            dist.broadcast(order, group=self.process_group, group_src=0)
        agreed: list[int] = order.tolist()
        return agreed

    def _explain_when(self) -> str:
        limit = "any size"
        if self._bucket_bytes is not None:
            limit = f"at most {self._bucket_bytes / 2**20:.4g} MB"
        if self._comm_hook is not None:
            how = "handed to the comm hook"
        elif self._wire_dtype is not None:
            how = f"flattened and sent as {str(self._wire_dtype).removeprefix('torch.')}"
        else:
            how = "copied into a flat tensor" if self._copy else "coalesced in place"
        return f"buckets of {limit}, {how}, each started during backward"
