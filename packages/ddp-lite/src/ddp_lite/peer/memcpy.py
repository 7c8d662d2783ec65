"""Copies between addresses, without tensors: a view of a tensor costs the host more than a copy.

``copy_batch`` starts many by one call of the CUDA driver, which has ``cuMemcpyBatchAsync`` since
CUDA 12.8 and asks for copy engines, which need no SM (CUDA Driver API, "Memory Management").

Every function takes the addresses of targets and sources, sizes in bytes, and the handle of a CUDA
stream. Nothing may write a source, or use a target, before the stream has come to the copies' end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

Transfer = Callable[[Sequence[int], Sequence[int], Sequence[int], int], None]

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
def driver_call(name: str = "cuMemcpyBatchAsync") -> Callable[..., int] | None:
    """A function of the CUDA driver; None without a driver that has it."""
    try:
        found = getattr(ctypes.CDLL("libcuda.so.1"), name, None)
    except OSError:
        return None
    if found is not None:
        stream, size = ctypes.c_void_p, ctypes.c_size_t
        array = structure = ctypes.c_void_p
        found.argtypes = {
            "cuMemcpyBatchAsync": (
                *(array, array, array, size),
                *(structure, structure, size, structure, stream),
            ),
            "cuMemcpyAsync": (ctypes.c_uint64, ctypes.c_uint64, size, stream),
        }[name]
    return found


def copy_on_host(
    targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
) -> None:
    """Copies memory of the host, at once."""
    for target, source, size in zip(targets, sources, sizes, strict=True):
        ctypes.memmove(target, source, size)


def copy_each(
    targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
) -> None:
    """Queues one copy after the other, which a recording of the stream in a graph can hold.

    Raises:
        RuntimeError: if the driver refuses.
    """
    call = driver_call("cuMemcpyAsync")
    assert call is not None
    for target, source, size in zip(targets, sources, sizes, strict=True):
        if (status := call(target, source, size, stream)) != 0:
            raise _refused(1, "cuMemcpyAsync", status)


def copy_batch(
    targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
) -> None:
    """Queues copies by one call, in any order among themselves; single ones if it is not supported.

    The stream must not be CUDA's default one, nor one that is being recorded in a graph. No size
    may be 0.

    Raises:
        RuntimeError: if the driver refuses.
    """
    count = len(targets)
    if count == 0:
        return
    call = driver_call()
    assert call is not None
    array = ctypes.c_uint64 * count
    failed = ctypes.c_size_t(0)
    status = call(
        array(*targets),
        array(*sources),
        array(*sizes),
        count,
        ctypes.byref(_ATTRIBUTES),
        ctypes.byref(_FIRST_COPY),
        1,
        ctypes.byref(failed),
        stream,
    )
    if status == _NOT_SUPPORTED:
        copy_each(targets, sources, sizes, stream)
    elif status != 0:
        raise _refused(count, "cuMemcpyBatchAsync", status)


def _refused(count: int, name: str, status: int) -> RuntimeError:
    return RuntimeError(
        f"the CUDA driver must accept {count} copies between GPUs, but {name} returned error "
        f"{status}. Look for an earlier error on this GPU"
    )
