"""The choice between a ring and gathering heads, with its reason.

A ring sends only parts that the mask shows, straight to where they are used, and copies between the
GPUs of a host take nothing from the kernels beside them: on four H100s it was faster for every
length (``docs/context-parallel.md``). With a window, sequences of different lengths have different
masks between parts, and a ring has a call for each. Gathering has as few calls as one GPU.
"""

from __future__ import annotations

import functools
from typing import Literal, NamedTuple

from flashattn_triton.context_parallel.zigzag import Band, Zigzag

Way = Literal["auto", "ring", "all-gather"]

#: Pieces into which the heads are divided that are gathered, where their number allows it: one is
#: on its way while another one computes, and the way of the first one is not hidden.
PIECES = 8
_GIB = 2**30
_LITTLE = _GIB  # in bytes
_CALLS_A_PART = 3  # with more, a ring's parts are small


class Choice(NamedTuple):
    """A way, and why."""

    way: str
    reason: str


def heads_of_piece(kv_heads: int) -> int:
    """Key heads that are gathered at a time."""
    return -(-kv_heads // min(kv_heads, PIECES))


@functools.lru_cache(maxsize=256)
def choose(order: Zigzag, band: Band, kv_heads: int, width: int, itemsize: int) -> Choice:
    """The way for such sequences; ``width``: D + E, of key and value together."""
    # All ranks have about as many, and must make one choice.
    calls = sum(len(order.calls(0, source, band)) for source in range(order.world_size))
    if calls <= _CALLS_A_PART * order.world_size:
        return Choice("ring", "keys travel under the calls for other keys")
    # A part in use, one on its way, and fp32 gradients of two parts, and of those that come back.
    ring = order.longest * kv_heads * width * (2 * itemsize + 4 * 4)
    gathered = order.starts[-1] * heads_of_piece(kv_heads) * width * (2 * itemsize + 2 * 4)
    memory = f"{gathered / _GIB:.2f} GiB of keys and gradients, in a ring {ring / _GIB:.2f} GiB"
    if gathered > max(_LITTLE, 2 * ring):
        return Choice("ring", f"less memory: gathered {memory}")
    return Choice("all-gather", f"a ring would have {calls} calls: {memory}")
