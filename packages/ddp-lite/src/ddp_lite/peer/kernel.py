"""The kernel that averages one row of an exchange; a module of its own because it needs Triton."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _NUM_WARPS = 4096, 8  # elements that one program averages, and the warps that do it


def average(own: Tensor, landed: Tensor, result: Tensor, at: int, world_size: int) -> None:
    """Replaces this rank's values by their means over all ranks, and publishes these.

    Args:
        own: this rank's values, float32, one-dimensional and contiguous.
        landed: the other ranks' values in its first ``world_size - 1`` rows, contiguous.
        result: one row, where the other ranks read the means. It may be a row of ``landed``,
            because every element is read before it is written.
        at: where the values begin in each row.
        world_size: number of ranks.
    """
    grid = (triton.cdiv(own.numel(), _BLOCK),)
    average_kernel[grid](
        own,
        landed,
        result,
        at,
        own.numel(),
        landed.shape[1],
        world_size,
        _BLOCK,
        num_warps=_NUM_WARPS,
        enable_fp_fusion=False,  # newer versions warn where this is left out
    )


@triton.jit
def average_kernel(  # type: ignore[no-untyped-def]
    own, landed, result, at, numel, row_length, world_size: tl.constexpr, block: tl.constexpr
):
    """See ``average``; ``row_length`` is the number of elements from one row to the next."""
    offset = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = offset < numel
    total = tl.load(own + offset, inside)
    for row in tl.static_range(world_size - 1):
        total += tl.load(landed + row * row_length.to(tl.int64) + at + offset, inside)
    mean = total * (1.0 / world_size)
    tl.store(result + at + offset, mean, inside)
    tl.store(own + offset, mean, inside)
