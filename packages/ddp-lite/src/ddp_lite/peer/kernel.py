"""The kernel that averages one row of an exchange; a module of its own because it needs Triton."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _NUM_WARPS = 4096, 8  # elements that one program averages, and the warps that do it
# Triton compiles a kernel for each number of tensors and for each pattern of what in them is
# divisible by 16. So only tensors that are divisible throughout share a launch, by powers of two.
_DIVISOR, _MOST_TENSORS = 16, 16


def shares_launch(own: Tensor, start: int) -> bool:
    """Whether these values are averaged in one launch with others; see ``average``."""
    return (own.numel() | start | own.data_ptr()) % _DIVISOR == 0


def average(
    owns: Sequence[Tensor], starts: Sequence[int], landed: Tensor, result: Tensor, world_size: int
) -> None:
    """Replaces this rank's values by their means over all ranks, and publishes these.

    Args:
        owns: this rank's values, float32, one-dimensional and contiguous.
        starts: where each of them begins in each row.
        landed: the other ranks' values in its first ``world_size - 1`` rows, contiguous.
        result: one row, where the other ranks read the means. It may be a row of ``landed``,
            because every element is read before it is written.
        world_size: number of ranks.
    """
    together: list[tuple[Tensor, int]] = []
    groups: list[list[tuple[Tensor, int]]] = []
    for own, start in zip(owns, starts, strict=True):
        if shares_launch(own, start):
            together.append((own, start))
        else:
            groups.append([(own, start)])
    groups += [together[i : i + _MOST_TENSORS] for i in range(0, len(together), _MOST_TENSORS)]
    for group in groups:
        missing = (1 << (len(group) - 1).bit_length()) - len(group)
        numels = [own.numel() for own, _ in group]
        blocks = sum(-(-numel // _BLOCK) for numel in numels)  # triton.cdiv is slow on the host
        average_kernel[(blocks,)](
            (*(own for own, _ in group), *[group[0][0]] * missing),
            (*(start for _, start in group), *[0] * missing),
            (*numels, *[0] * missing),
            landed,
            result,
            landed.shape[1],
            world_size,
            _BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # newer versions warn where this is left out
        )


@triton.jit
def average_kernel(  # type: ignore[no-untyped-def]
    owns,
    starts,
    numels,
    landed,
    result,
    row_length,
    world_size: tl.constexpr,
    block: tl.constexpr,
):
    """See ``average``; ``row_length`` is the number of elements from one row to the next."""
    # Which tensor this program works on, and which of its blocks.
    index = tl.program_id(0)
    own, start, numel = owns[0], starts[0], numels[0]
    first = tl.cdiv(numels[0], block)
    first_of_own = 0
    for i in tl.static_range(1, len(owns)):
        if index >= first:
            own, start, numel, first_of_own = owns[i], starts[i], numels[i], first
        first += tl.cdiv(numels[i], block)
    offset = (index - first_of_own).to(tl.int64) * block + tl.arange(0, block)
    inside = offset < numel
    total = tl.load(own + offset, inside)
    for row in tl.static_range(world_size - 1):
        total += tl.load(landed + row * row_length.to(tl.int64) + start + offset, inside)
    mean = total * (1.0 / world_size)
    tl.store(result + start + offset, mean, inside)
    tl.store(own + offset, mean, inside)
