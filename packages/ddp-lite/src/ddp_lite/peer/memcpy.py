"""Many copies in one call of the CUDA driver.

torch starts every copy by itself, which takes the host several microseconds. Drivers have
``cuMemcpyBatchAsync`` since CUDA 12.8: one call starts any number of copies, and asks for copy
engines, which need no SM (CUDA Driver API, "Memory Management").
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch

_ORDER_OF_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in the stream's order
_PREFER_COPY_ENGINES = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


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


def copy_batch(targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int]) -> None:
    """Queues copies on the current stream, in any order among themselves.

    The stream must not be CUDA's default one, nor one that is being recorded in a graph.

    Args:
        targets: addresses of memory that this GPU can reach.
        sources: the same, of memory that nothing in the batch writes.
        sizes: in bytes, none of them 0.

    Raises:
        RuntimeError: if the driver refuses.
    """
    call = driver_call()
    assert call is not None
    addresses, lengths = ctypes.c_uint64 * len(targets), ctypes.c_size_t * len(sizes)
    failed = ctypes.c_size_t(0)
    status = call(
        addresses(*targets),
        addresses(*sources),
        lengths(*sizes),
        ctypes.c_size_t(len(sizes)),
        ctypes.byref(_ATTRIBUTES),
        ctypes.byref(_FIRST_COPY),
        ctypes.c_size_t(1),
        ctypes.byref(failed),
        ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
    )
    if status != 0:
        raise RuntimeError(
            f"the CUDA driver must accept {len(sizes)} copies between GPUs, but cuMemcpyBatchAsync "
            f"returned error {status}. Look for an earlier error on this GPU"
        )
