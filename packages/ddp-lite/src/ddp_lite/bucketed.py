"""Step 4: one asynchronous all-reduce per bucket, during backward.

Buckets of parameters in reverse registration order combine the second step's large messages with
the third step's overlap. The bucket that completes last has nothing to hide under, so it is
small. From the first step on buckets are reduced while backward runs; after it, the buckets are
planned once more in the order in which rank 0's gradients really arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_lite.buckets import bytes_from_mb, plan_buckets
from ddp_lite.collectives import Completed, Waitable
from ddp_lite.overlap import OverlapDDP
from ddp_lite.reduction import FlatReduction, InPlaceReduction, Reduction, WireReduction
from ddp_lite.wire import average_on_wire

CommHook = Callable[[Tensor, "Bucket"], Waitable]


@runtime_checkable
class AllocatingHook(Protocol):
    """A comm hook that needs the flat gradients in memory of its own choice."""

    def __call__(self, flat: Tensor, bucket: Bucket) -> Waitable:
        """Starts reducing ``flat`` in place."""

    def allocate(self, bucket: Bucket) -> Tensor:
        """The flat tensor of a bucket, length ``padded_numel``; called for every reduction."""


@dataclass(kw_only=True, eq=False)
class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        index: place in the order of reduction.
        names: the parameters' names in the module.
        parameters: the parameters.
        slices: where each one's gradient, row-major, lies in the flat tensor.
        numel: elements of all gradients.
        padded_numel: length of the flat tensor, a multiple of the world size; zeros fill it up.
        dtype: of the gradients and the flat tensor.
        device: of the same.
        process_group: the ranks to reduce over.
        flat: this step's flat gradients, from the bucket's completion until the bucket's next
            completion or ``release()``; None before, and always None for buckets reduced in
            place.
    """

    index: int
    names: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    slices: tuple[slice, ...]
    numel: int
    padded_numel: int
    dtype: torch.dtype
    device: torch.device
    process_group: dist.ProcessGroup
    flat: Tensor | None = field(default=None, repr=False)

    @property
    def nbytes(self) -> int:
        """Size of the gradients in bytes, padding left out."""
        return self.numel * self.dtype.itemsize

    def release(self) -> None:
        """Drops the flat tensor; its memory is free once no gradient is a view of it."""
        self.flat = None


class BucketedDDP(OverlapDDP):
    """Averages gradients bucket by bucket while backward runs.

    Args:
        module: see ``DataParallelBase``.
        bucket_size_mb: most MB (1024² bytes) of gradients in a bucket; a larger parameter has
            one of its own. None: one bucket per dtype.
        last_bucket_size_mb: the same for the bucket reduced last, if smaller. None: no extra
            limit.
        copy: False reduces the gradients where autograd put them, coalesced into one collective
            per bucket. True copies each bucket into a flat tensor first; the gradients become
            views of it.
        wire_dtype: send gradients in this dtype, such as ``torch.bfloat16``. They are summed in
            float32 and rounded once, then converted back.
        comm_hook: ``hook(flat, bucket)`` reduces the flat tensor in place (or keeps what it
            needs of it) and returns something with ``wait()``. It is responsible for averaging.
        rebucket: plan again in observed order after the first step; costs one broadcast. None:
            yes, unless there is a ``comm_hook``, whose owner may rely on the buckets.
        kwargs: ``process_group``, ``missing_gradients``, ``auto_finish``: see
            ``DataParallelBase``.

    Raises:
        ValueError: a size that is not positive, a ``wire_dtype`` that is not floating-point or
            meets a complex parameter, or both ``wire_dtype`` and ``comm_hook``.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float | None = 100,
        *,
        last_bucket_size_mb: float | None = 25,
        copy: bool = False,
        wire_dtype: torch.dtype | None = None,
        comm_hook: CommHook | None = None,
        rebucket: bool | None = None,
        **kwargs: Any,
    ) -> None:
        bucket_bytes = bytes_from_mb(bucket_size_mb, "bucket_size_mb")
        last_bucket_bytes = bytes_from_mb(last_bucket_size_mb, "last_bucket_size_mb")
        if wire_dtype is not None and not wire_dtype.is_floating_point:
            raise ValueError(f"wire_dtype must be a floating-point dtype, received {wire_dtype}")
        if wire_dtype is not None and comm_hook is not None:
            raise ValueError(
                "wire_dtype and comm_hook exclude each other, received both; convert inside the "
                "hook (see ddp_lite.hooks)"
            )
        # The base class plans the buckets in its constructor, so the settings come first.
        self._bucket_bytes = bucket_bytes
        self._last_bucket_bytes = last_bucket_bytes
        self._copy = copy
        self._wire_dtype = wire_dtype
        self._comm_hook = comm_hook
        self._rebucket = comm_hook is None if rebucket is None else rebucket
        self._arrival_order: list[int] | None = None
        super().__init__(module, **kwargs)

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets in the order of reduction."""
        return tuple(self._buckets)

    def _plan(self) -> list[tuple[int, ...]]:
        if self._wire_dtype is not None:
            for spec in self._specs:
                if spec.dtype.is_complex:
                    raise ValueError(
                        f"wire_dtype can carry real gradients only, but {spec.name} is "
                        f"{spec.dtype}; leave wire_dtype out or freeze the parameter"
                    )
        self._arrival_order = [] if self._rebucket else None
        return self._plan_in_order(range(len(self._specs) - 1, -1, -1))

    def _plan_in_order(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        specs = [self._specs[index] for index in order]
        return plan_buckets(specs, self._bucket_bytes, self._last_bucket_bytes)

    def _set_groups(self, groups: list[tuple[int, ...]]) -> None:
        super()._set_groups(groups)
        self._buckets = [self._make_bucket(place) for place in range(len(groups))]

    def _make_bucket(self, place: int) -> Bucket:
        indices = self._groups[place]
        slices, used = [], 0
        for index in indices:
            slices.append(slice(used, used + self._specs[index].numel))
            used += self._specs[index].numel
        world_size = self._average.world_size
        return Bucket(
            index=place,
            names=self._group_names[place],
            parameters=tuple(self._parameters_by_index[index] for index in indices),
            slices=tuple(slices),
            numel=used,
            padded_numel=-(-used // world_size) * world_size,
            dtype=self._specs[indices[0]].dtype,
            device=self._specs[indices[0]].device,
            process_group=self.process_group,
        )

    def _gradient_ready(self, index: int) -> None:
        if self._arrival_order is not None:
            self._arrival_order.append(index)
        super()._gradient_ready(index)

    def _reduce(
        self,
        indices: tuple[int, ...],
        gradients: Sequence[Tensor | None],
        extra: Sequence[Tensor],
    ) -> Reduction:
        parameters = self._parameters_of(indices)
        bucket = self._buckets[self._group_of[indices[0]]]

        def run_hook(flat: Tensor) -> Waitable:
            assert self._comm_hook is not None
            bucket.flat = flat
            self._average.collectives += 1
            self._average.bytes += flat.nbytes
            return _Both(self._comm_hook(flat, bucket), self._average_if_any(extra))

        def send_on_wire(flat: Tensor) -> Waitable:
            return _Both(average_on_wire(flat, self._average), self._average_if_any(extra))

        def send_copy(flat: Tensor) -> Waitable:
            bucket.flat = flat
            return self._average([flat, *extra])

        if self._comm_hook is not None:
            flat = self._flat_for_hook(bucket)
            return FlatReduction(indices, parameters, gradients, run_hook, flat)
        if self._wire_dtype is not None:
            flat = parameters[0].new_empty(bucket.padded_numel, dtype=self._wire_dtype)
            return WireReduction(indices, parameters, gradients, send_on_wire, flat)
        if self._copy:
            return FlatReduction(indices, parameters, gradients, send_copy)
        return InPlaceReduction(indices, parameters, gradients, self._average, extra)

    def _average_if_any(self, extra: Sequence[Tensor]) -> Waitable:
        return self._average(extra) if extra else Completed()

    def _flat_for_hook(self, bucket: Bucket) -> Tensor:
        if isinstance(self._comm_hook, AllocatingHook):
            return self._comm_hook.allocate(bucket)
        return bucket.parameters[0].new_empty(bucket.padded_numel)

    def _finish(self) -> None:
        order, self._arrival_order = self._arrival_order, None
        super()._finish()
        if order is not None:
            self._set_groups(self._plan_in_order(self._agree_on_order(order)))
            self._reset()

    def _agree_on_order(self, observed: list[int]) -> list[int]:
        """Rank 0's order of arrival; what did not arrive there comes last, in reverse order."""
        everything = [*observed, *range(len(self._specs) - 1, -1, -1)]
        order = torch.tensor(list(dict.fromkeys(everything)), device=self.device)
        with self._naming_failures_of("the broadcast of the observed order"):
            dist.broadcast(order, group=self.process_group, group_src=0)
        agreed: list[int] = order.tolist()
        return agreed

    def _explain_when(self) -> str:
        limit = "unlimited" if self._bucket_bytes is None else f"{self._bucket_bytes / 2**20:g} MB"
        if self._comm_hook is not None:
            how = "flattened and handed to the comm hook"
        elif self._wire_dtype is not None:
            how = f"flattened and sent as {str(self._wire_dtype).removeprefix('torch.')}"
        else:
            how = "copied into a flat tensor" if self._copy else "coalesced in place"
        return f"buckets of at most {limit}, {how}, each started during backward"


class _Both:
    def __init__(self, first: Waitable, second: Waitable) -> None:
        self._first, self._second = first, second

    def wait(self) -> None:
        self._first.wait()
        self._second.wait()
