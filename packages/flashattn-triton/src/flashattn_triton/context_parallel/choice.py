"""The choice between a ring and gathering heads, with its reason.

Gathering computes faster: a query has all of its keys in one call, whose output is final, and there
are more calls to hide the communication under. A ring sends only parts that the mask shows, and
needs less memory where many ranks share few heads.
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


class Choice(NamedTuple):
    """A way, and why."""

    way: str
    reason: str


def heads_of_piece(kv_heads: int) -> int:
    """Key heads that are gathered at a time."""
    return -(-kv_heads // min(kv_heads, PIECES))


@functools.lru_cache(maxsize=256)
def choose(order: Zigzag, band: Band, kv_heads: int, width: int, itemsize: int) -> Choice:
    """The way for such sequences.

    Args:
        order: of the tokens.
        band: of the mask.
        kv_heads: G.
        width: D + E, of key and value together.
        itemsize: bytes of a number.
    """
    size = order.world_size
    most = max(
        sum(bool(order.calls(rank, source, band)) for source in range(size) if source != rank)
        for rank in range(size)
    )
    if 3 * most <= 2 * (size - 1):  # of the bytes, all of which are gathered
        reason = f"the mask shows a rank the tokens of at most {most} of {size - 1} others"
        return Choice("ring", reason)
    # A part in use, one on its way, and fp32 gradients of two parts, and of those that come back.
    ring = order.longest * kv_heads * width * (2 * itemsize + 4 * 4)
    gathered = order.starts[-1] * heads_of_piece(kv_heads) * width * (2 * itemsize + 2 * 4)
    memory = f"{gathered / _GIB:.2f} GiB of keys and gradients, in a ring {ring / _GIB:.2f} GiB"
    if gathered > max(_LITTLE, 2 * ring):
        return Choice("ring", f"less memory: {memory}")
    return Choice("all-gather", f"one call for all keys of a query: {memory}")
