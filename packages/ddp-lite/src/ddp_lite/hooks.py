"""Comm hooks: other ways to average a bucket, chosen with ``BucketedDDP(..., comm_hook=...)``.

A hook is called as ``hook(flat, bucket)`` when a bucket is complete. It reduces ``flat``, one
dimension, length ``bucket.padded_numel``, in place and returns something with ``wait()``. A
``GradientHook`` takes the gradients where they lie instead. Hooks run in the same order on every
rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Never, Protocol, runtime_checkable

from torch import Tensor

from ddp_lite.buckets import Bucket
from ddp_lite.reduce import Averager, Gradients, Reduction, Waitable, contiguous, pack

_REMOVED = {
    "Communication": "copies are a ddp_lite.peer.PeerCopies",
    "CompressTo": "pass wire_dtype=torch.bfloat16 to BucketedDDP",
    "HierarchicalAverage": "copy examples/hierarchical_average.py of the repository and change it",
    "PowerSGD": "copy examples/power_sgd.py of the repository and change it",
}


@runtime_checkable
class GradientHook(Protocol):
    """A comm hook that takes the gradients where autograd put them, not in a flat tensor."""

    def average_in_place(self, bucket: Bucket, gradients: Sequence[Tensor]) -> Waitable:
        """Starts averaging the gradients of a complete bucket, contiguous ones of any shapes."""


CommHook = Callable[[Tensor, Bucket], Waitable] | GradientHook


class ByHook:
    """Averages as a hook does: a function ``hook(flat, bucket)``, or a ``GradientHook``.

    Raises:
        ValueError: ``hook`` is neither.
    """

    def __init__(self, hook: CommHook | str) -> None:
        if isinstance(hook, str) or not (isinstance(hook, GradientHook) or callable(hook)):
            got = repr(hook) if isinstance(hook, str) else type(hook).__name__
            raise ValueError(
                f'comm_hook must be "auto", "collectives" or a hook, but got {got}. A hook can be '
                "called with (flat, bucket), or has average_in_place(bucket, gradients); see "
                "ddp_lite.hooks and ddp_lite.peer"
            )
        self._hook = hook

    def __call__(
        self, average: Averager, bucket: Bucket, gradients: Gradients, messages: Sequence[Tensor]
    ) -> Reduction:
        """See ``Way``."""
        copy_back: Callable[[], object] | None = None
        if isinstance(self._hook, GradientHook):
            own, values, copy_back = contiguous(bucket, gradients)
            average.count(bucket.nbytes)
            work = self._hook.average_in_place(bucket, values)
        else:
            flat = bucket.parameters[0].new_empty(bucket.padded_numel, dtype=bucket.dtype)
            bucket.flat = flat
            own = pack(bucket, gradients, flat)
            average.count(flat.nbytes)
            work = self._hook(flat, bucket)
        return Reduction((work, average(messages)) if messages else (work,), own, copy_back)

    def __str__(self) -> str:
        return "handed to the comm hook"


def __getattr__(name: str) -> Never:
    """Says what to write for hooks that there were."""
    if name in _REMOVED:
        raise ImportError(f"ddp_lite.hooks has no {name} any more: {_REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
