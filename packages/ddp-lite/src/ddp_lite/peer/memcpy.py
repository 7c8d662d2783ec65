"""Many copies in one call of the CUDA driver.

torch starts every copy by itself, and each costs the host time. Drivers have
``cuMemcpyBatchAsync`` since CUDA 12.8: one call starts any number of copies, and asks for copy
engines, which need no SM (CUDA Driver API, "Memory Management").
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

_ORDER_OF_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the stream's order
_PREFER_COPY_ENGINES = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
_NOT_SUPPORTED = 801  # CUDA_ERROR_NOT_SUPPORTED: a driver may have the function for other GPUs


class _Location(ctypes.Structure):
    """``CUmemLocation``; only managed memory needs it."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """``CUmemcpyAttributes``."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source", _Location),
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


_ATTRIBUTES = _Attributes(source_access_order=_ORDER_OF_STREAM, flags=_PREFER_COPY_ENGINES)
_FIRST_COPY = ctypes.c_size_t(0)  # from which the attributes hold


@cache
def driver_call() -> Callable[..., int] | None:
    """The driver's function; None without a driver that has it."""
    try:
        return getattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync", None)
    except OSError:
        return None


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Queues one copy after the other on the current stream."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def copy_batch(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Queues copies on the current stream by one call, in any order among themselves.

    One by one instead, where the driver says that it cannot.

    The stream must not be CUDA's default one, nor one that is being recorded in a graph.

    Args:
        targets: contiguous, with elements, in memory that this GPU can reach.
        sources: of the same sizes and dtype, which nothing in the batch writes.

    Raises:
        RuntimeError: if the driver refuses.
    """
    count = len(targets)
    if count == 0:
        return
    call = driver_call()
    assert call is not None
    addresses = ctypes.c_uint64 * count
    failed = ctypes.c_size_t(0)
    status = call(
        addresses(*[target.data_ptr() for target in targets]),
        addresses(*[source.data_ptr() for source in sources]),
        (ctypes.c_size_t * count)(*[source.nbytes for source in sources]),
        ctypes.c_size_t(count),
        ctypes.byref(_ATTRIBUTES),
        ctypes.byref(_FIRST_COPY),
        ctypes.c_size_t(1),
        ctypes.byref(failed),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if status == _NOT_SUPPORTED:
        copy_each(targets, sources)
    elif status != 0:
        raise RuntimeError(
            f"the CUDA driver must accept {count} copies between GPUs, but cuMemcpyBatchAsync "
            f"returned error {status}. Look for an earlier error on this GPU"
        )
