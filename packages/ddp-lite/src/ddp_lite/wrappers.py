"""Data-parallel training in four steps: naive, flat, overlapped, bucketed.

A wrapper is three answers; ``engine.py`` does the rest, and ``base.py`` tells of the arguments.

===============  =============================  ==========================  ======================
wrapper          which travel together          when                        in which way
===============  =============================  ==========================  ======================
``NaiveDDP``     each parameter alone           after backward, one by one  where they lie
``FlatDDP``      all of one dtype               after backward              in a flat copy
``OverlapDDP``   each parameter alone           in backward                 where they lie
``BucketedDDP``  some megabytes of parameters   in backward                 as its arguments say
===============  =============================  ==========================  ======================

Ranks may produce gradients in different orders, but collectives must be started in the same order
everywhere. So reductions start strictly in the plan's order: a gradient that arrives early waits
until those before it have been started.
"""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Literal, Never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_lite.base import DataParallelBase
from ddp_lite.buckets import Bucket, one_per_kind, one_per_parameter
from ddp_lite.missing import Policy
from ddp_lite.ranks import MEBIBYTE
from ddp_lite.reduce import FlatCopy, InPlace, Way

if TYPE_CHECKING:
    from ddp_lite.hooks import CommHook


class NaiveDDP(DataParallelBase):
    """Step 1: averages gradients one parameter at a time, after backward.

    Nothing is hidden: each all-reduce waits for the one before, and all of them for the backward
    pass. It pays the fixed cost of a collective once per parameter. It is the oracle of the others.
    """

    _plan = staticmethod(one_per_parameter)
    _when = "one by one after backward"
    _way = InPlace()
    _words = "one after another after backward"


class FlatDDP(DataParallelBase):
    """Step 2: averages all gradients of one dtype with a single all-reduce, after backward.

    The fixed cost of a collective is paid once (once per dtype), and large messages use the whole
    bandwidth. The price is a copy, and still nothing overlaps with the backward pass. The gradients
    become views of the flat tensor, which is allocated anew each step; while it is filled,
    gradients exist twice.
    """

    _plan = staticmethod(one_per_kind)
    _when = "after backward"
    _way = FlatCopy()
    _words = "flattened, all at once after backward"


class OverlapDDP(DataParallelBase):
    """Step 3: averages each gradient as soon as backward has produced it.

    The backward pass of earlier layers runs meanwhile. The exposed time is that of the last
    reductions, plus the fixed cost of as many collectives as there are parameters. This is
    ``BucketedDDP`` with one parameter in each bucket.
    """

    _plan = staticmethod(one_per_parameter)
    _when = "in backward"
    _way = InPlace()
    _words = "each started during backward, in reverse registration order"


class BucketedDDP(DataParallelBase):
    """Step 4: averages gradients bucket by bucket while backward runs.

    Buckets in reverse registration order combine the second step's large messages with the third's
    overlap. The bucket that completes last has nothing to hide under, so it is small. After the
    first step the buckets are planned once more, in the order in which rank 0's gradients really
    arrived.

    Args:
        module: see ``DataParallelBase``.
        bucket_size_mb: most MB (1024² bytes) of gradients in a bucket; a larger parameter has
            one of its own. None: one bucket per dtype. "auto": a sixteenth of the gradients, at
            least 25 MB, and at most half of the bytes that are left toward the end.
        last_bucket_size_mb: the same for the bucket reduced last, if smaller. None: no limit.
        copy: False reduces the gradients where autograd put them, coalesced into one collective
            per bucket. True copies each bucket first, into a flat tensor that they become views of.
        wire_dtype: send gradients in this dtype, such as ``torch.bfloat16``, over the process
            group's collectives. They are summed in float32 and rounded once, then converted back.
        comm_hook: ``hook(flat, bucket)`` reduces the flat tensor in place (or keeps the part of it
            that it needs), averages, and returns something with ``wait()``. Or a ``GradientHook``.
            Ranks compare its attribute ``settings``, a string, if it has one. "collectives" or
            None: the process group's own, such as NCCL's. "auto": copies between GPUs where
            ``ddp_lite.peer.choose_communication`` finds them possible, for large buckets, else
            "collectives"; ``explain()`` tells the choice and the reason.
        rebucket: plan again in observed order after the first step; costs one broadcast. None:
            yes, unless a hook is the caller's, who may rely on the buckets.
        process_group, missing_gradients, auto_finish: see ``DataParallelBase``.

    Raises:
        ValueError: a size that is not positive, a ``wire_dtype`` that is not floating-point or
            meets a complex parameter, or both ``wire_dtype`` and a hook.
    """

    _when = "in backward"

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
        from ddp_lite.bucket_sizes import bytes_from_mb, plan_buckets

        # The base class makes the plan in its constructor, so the settings come first.
        most: int | Literal["auto"] | None = "auto"
        if bucket_size_mb != "auto":
            most = bytes_from_mb(bucket_size_mb, "bucket_size_mb")
        last = bytes_from_mb(last_bucket_size_mb, "last_bucket_size_mb")
        self._most = most
        self._plan = partial(plan_buckets, bucket_bytes=most, last_bucket_bytes=last)
        self._wire_dtype = wire_dtype
        self._hook = comm_hook if comm_hook is not None else "collectives"
        self._way, self._choice = _chosen_way(copy, wire_dtype, self._hook)
        self._rebucket = isinstance(self._hook, str) if rebucket is None else rebucket
        self._settings = {
            "bucket_size_mb": str(most),
            "last_bucket_size_mb": str(last),
            "copy": str(copy),
            "wire_dtype": str(wire_dtype),
            "comm_hook": self._hook if isinstance(self._hook, str) else _named(self._hook),
            "rebucket": str(self._rebucket),
        }
        super().__init__(
            module,
            process_group=process_group,
            missing_gradients=missing_gradients,
            auto_finish=auto_finish,
            **unknown,
        )

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets in the order of reduction."""
        return tuple(self._engine.buckets)

    def detach(self) -> nn.Module:
        """As in ``DataParallelBase``. Memory that was shared for automatic copies is let go too."""
        module = super().detach()
        self._engine.way = self._way
        return module

    def _adopt(self) -> None:
        super()._adopt()
        if self._wire_dtype is not None:
            for spec in self._engine.specs:
                if spec.dtype.is_complex:
                    raise ValueError(
                        f"wire_dtype can carry real gradients only, but {spec.name} is "
                        f"{spec.dtype}. Leave wire_dtype out or freeze the parameter."
                    )
        undecided = self._hook == "auto" and isinstance(self._way, InPlace)
        if undecided and self._engine.way is self._way and self._engine.buckets:
            what = "the choice between copies and collectives"
            self._choice = self._ranks.call(what, self._choose_copies)

    def _choose_copies(self) -> str:
        """Averages by copies between GPUs if that is possible; the choice, and why. Collective."""
        if not _is_gpu(self.device):
            return f"collectives: copies are between GPUs, and the messages are on {self.device}"
        from ddp_lite.hooks import ByHook
        from ddp_lite.peer.hook import chosen_hook

        sizes = [bucket.nbytes for bucket in self._engine.buckets]
        hook, choice = chosen_hook(self.process_group, sizes, self.device)
        if hook is not None:
            self._engine.way = ByHook(hook)
        return str(choice)

    @property
    def _words(self) -> str:  # type: ignore[override]
        how = "copied between GPUs" if self._engine.way is not self._way else str(self._way)
        if isinstance(self._hook, str):
            how += f" ({self._choice})"
        most = self._most
        if most == "auto":
            from ddp_lite.bucket_sizes import automatic_bucket_bytes

            most = automatic_bucket_bytes(self._engine.specs)
        size = "any size" if most is None else f"at most {most / MEBIBYTE:.4g} MB"
        return f"buckets of {size}, {how}, each started during backward"


def _chosen_way(
    copy: bool, wire_dtype: torch.dtype | None, comm_hook: CommHook | str
) -> tuple[Way, str]:
    """The way that a user's arguments ask for, and why it is no copy between GPUs."""
    if comm_hook not in ("auto", "collectives"):
        from ddp_lite.hooks import ByHook

        way = ByHook(comm_hook)
        if wire_dtype is not None:
            raise ValueError(
                "wire_dtype and a comm hook exclude each other, but got both. Convert inside the "
                "hook (see ddp_lite.hooks)"
            )
        return way, ""
    asked = "" if comm_hook == "auto" else "collectives: as comm_hook asks"
    if wire_dtype is not None:
        from ddp_lite.wire import OnWire

        why = "collectives: wire_dtype is sent by them, and copies send gradients as they are"
        return OnWire(wire_dtype), asked or why
    if copy:
        why = "copy=True asks for one flat tensor, and copies leave gradients where they are"
        return FlatCopy(keep=True), asked or f"collectives: {why}"
    return InPlace(), asked or "collectives: there is nothing to average"


def _named(hook: object) -> str:
    """A hook and its settings, on which ranks must agree, in words."""
    kind = hook if isinstance(hook, type | FunctionType) else type(hook)
    return f"{kind.__qualname__} {getattr(hook, 'settings', '')}"


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"
