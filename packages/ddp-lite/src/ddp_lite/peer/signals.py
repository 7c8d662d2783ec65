"""Signals between GPUs whose wait the host can see and end; a module of its own: it needs Triton.

A rank's pad has, for every channel, a word of every rank. A signal sets the word of its sender
when it is 0; the owner of the pad waits until it is 1 and clears it. A kernel of one thread block
does both, and holds the stream until then.

The host must be able to find a kernel that waits for a lost rank, and let it end, without a call
of CUDA: a thread that waits for that kernel may have locked the driver, as a copy to unpinned
memory does, and an abort of NCCL. So both sides share two words of pinned memory: the number of
the wait that is under way (0: none), which kernels write, and whether waits are to end, which the
host writes. A kernel that ends so fills this rank's memory with NaN, because what was exchanged
without a rank must not look like a result.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BARRIER_CHANNEL, _TURN_CHANNEL = 0, 1
_EVERY_RANK = -1
# Counts of the kernels lie in this rank's pad, behind the words of all channels.
_COUNTS_AT_BYTE = 1024
_BLOCK, _NUM_WARPS = 4096, 4  # words that are filled at a time
# Kept for ever, 16 bytes each: a kernel may still write to them when nothing else is left.
_shared_words: list[Tensor] = []


class Signals:
    """Signals of one rank to the others, queued on the current stream.

    Args:
        handle: torch's, of the symmetric memory, which has the pads.
        memory: this rank's, whose values become NaN when waits are released.
    """

    def __init__(self, handle: Any, memory: Tensor) -> None:
        self._handle = handle  # keeps the pads
        self._memory = memory.view(torch.int32)
        self._rank, self._world_size = handle.rank, handle.world_size
        self._pads = tuple(handle.signal_pad_ptrs)
        shared = torch.zeros(2, dtype=torch.int64, device="cpu").pin_memory()
        _shared_words.append(shared)
        self._shared_at = shared.data_ptr()
        self._shared = (ctypes.c_int64 * 2).from_address(self._shared_at)

    @property
    def waiting(self) -> int:
        """The number of the wait that is under way, the same on all ranks; 0 if there is none."""
        return self._shared[0]

    def release(self) -> None:
        """Ends this wait and all later ones."""
        self._shared[1] = 1

    def barrier(self) -> None:
        """Waits for all ranks."""
        self._signal(_EVERY_RANK, _EVERY_RANK, _BARRIER_CHANNEL)

    def stagger(self) -> None:
        """Signals rank - 1 and waits for the signal of rank + 1."""
        before, after = (self._rank - 1) % self._world_size, (self._rank + 1) % self._world_size
        self._signal(before, after, _TURN_CHANNEL)

    def _signal(self, target: int, source: int, channel: int) -> None:
        signal_kernel[(1,)](
            self._pads,
            self._shared_at,
            self._pads[self._rank] + _COUNTS_AT_BYTE,
            self._memory.data_ptr(),
            self._memory.numel(),
            self._rank,
            target,
            source,
            channel,
            _BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # newer versions warn where this is left out
        )


@triton.jit(do_not_specialize=["n_words", "rank", "target", "source"])
def signal_kernel(  # type: ignore[no-untyped-def]
    pads,
    shared,
    counts,
    memory,
    n_words,
    rank,
    target,
    source,
    channel: tl.constexpr,
    block: tl.constexpr,
):
    """Signals ``target`` and waits for ``source``, which are ranks, or -1 for all others.

    ``pads`` are addresses of each rank's; the others are those of the two words shared with the
    host, of two counts (of waits, and whether the memory was filled), and of this rank's memory.
    """
    shared_at = shared.to(tl.pointer_type(tl.int64))
    counts_at = counts.to(tl.pointer_type(tl.int64))
    number = tl.load(counts_at) + 1
    tl.store(counts_at, number)
    tl.store(shared_at, number, cache_modifier=".wt")  # past the GPU's cache, for the host
    own = pads[0]
    for peer in tl.static_range(1, len(pads)):
        if rank == peer:
            own = pads[peer]
    released = tl.full((), 0, tl.int64)
    first = channel * len(pads)
    for peer in tl.static_range(len(pads)):
        if (target == peer) | ((target < 0) & (peer != rank)):
            released |= _replace(pads[peer], first + rank, 0, 1, shared_at)
    for peer in tl.static_range(len(pads)):
        if (source == peer) | ((source < 0) & (peer != rank)):
            released |= _replace(own, first + peer, 1, 0, shared_at)
    if (released != 0) & (tl.load(counts_at + 1) == 0):
        tl.store(counts_at + 1, released)
        words = memory.to(tl.pointer_type(tl.int32))
        for begin in range(0, n_words, block):
            offset = begin + tl.arange(0, block)
            nan = tl.full((block,), -1, tl.int32)  # in every dtype of floating point
            tl.store(words + offset, nan, offset < n_words)
    tl.store(shared_at, tl.full((), 0, tl.int64), cache_modifier=".wt")


@triton.jit
def _replace(pad, word, old, new, shared_at):  # type: ignore[no-untyped-def]
    """Replaces a word of a pad when it is ``old``. Returns 1 if the host ended the wait, else 0."""
    at = pad.to(tl.pointer_type(tl.int32)) + word
    found = tl.atomic_cas(at, old, new, sem="acq_rel", scope="sys")
    released = tl.full((), 0, tl.int64)
    while (found != old) & (released == 0):
        released = tl.load(shared_at + 1, volatile=True)
        found = tl.atomic_cas(at, old, new, sem="acq_rel", scope="sys")
    return released
