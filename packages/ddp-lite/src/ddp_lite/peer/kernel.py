"""The kernel that averages one row of an exchange; a module of its own because it needs Triton.

It is given addresses. Of a tensor Triton's launcher asks for its address, and the driver for
what lies there, which takes the host longer than the rest of a launch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

Entry = tuple[int, int, int, int]
"""One tensor: the address of this rank's values, that of their mean, where they begin in each row
(elements), and how many there are."""

DTYPES = {
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}
_BLOCK, _NUM_WARPS = 4096, 8  # elements that one program averages, and the warps that do it
# Triton compiles a kernel for each number of tensors and for each pattern of what in them is
# divisible by 16. So only tensors that are divisible throughout share a launch, by powers of two.
_DIVISOR, _MOST_TENSORS = 16, 16


def shares_launch(*entry: int) -> bool:
    """Whether a tensor with these numbers is worked on in one launch with others."""
    return math.gcd(_DIVISOR, *entry) == _DIVISOR


def average(
    entries: Sequence[Entry],
    slot: Tensor,
    world_size: int,
    given: torch.dtype,
    into: torch.dtype,
    result: int | None,
) -> None:
    """Writes the means of this rank's and all other ranks' values, rounded once.

    It is queued on the current stream. Sums are in float32, or float64 for values in float64.

    Args:
        entries: the tensors.
        slot: shape (rows, elements), of which the first ``world_size - 1`` rows hold the other
            ranks' values.
        world_size: number of ranks; 1 casts this rank's values and publishes them.
        given: the dtype of this rank's values.
        into: the dtype of the means.
        result: number of the row where the other ranks read the means, in the dtype of ``slot``;
            None if they do not. It may be one of their values, because every element is read before
            it is written.
    """
    for group, aligned in launches(entries):
        average_kernel[(blocks(group, _BLOCK),)](
            *zip(*group, strict=True),
            slot.data_ptr(),
            slot.stride(0),
            world_size,
            result,
            DTYPES[slot.dtype],
            DTYPES[given],
            DTYPES[into],
            aligned,
            _BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # newer versions warn where this is left out
        )


def launches(entries: Iterable[tuple[int, ...]]) -> Iterator[tuple[list[tuple[int, ...]], bool]]:
    """What each launch works on, and whether all of it is divisible by 16.

    Args:
        entries: numbers of each tensor, the last of which is how many elements it has. Entries of
            no elements are added, up to 2^n.
    """
    together: list[tuple[int, ...]] = []
    for entry in entries:
        if shares_launch(*entry):
            together.append(entry)
        else:
            yield [entry], False
    for i in range(0, len(together), _MOST_TENSORS):
        group = together[i : i + _MOST_TENSORS]
        missing = (1 << (len(group) - 1).bit_length()) - len(group)
        yield group + [(*group[0][:-1], 0)] * missing, True  # of the types compiled for


def blocks(group: Iterable[tuple[int, ...]], size: int) -> int:
    """Number of programs, each of which works on ``size`` elements of one tensor."""
    return sum(-(-numel // size) for *_, numel in group)  # triton.cdiv is slow on the host


@triton.jit
def average_kernel(  # type: ignore[no-untyped-def]
    owns,
    targets,
    starts,
    numels,
    rows,
    row_length,
    world_size: tl.constexpr,
    result: tl.constexpr,
    dtype: tl.constexpr,
    given: tl.constexpr,
    into: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
):
    """See ``average``; ``aligned`` is whether everything is divisible by 16."""
    # Which tensor this program works on, and which of its blocks.
    index = tl.program_id(0)
    address, target, start, numel = owns[0], targets[0], starts[0], numels[0]
    first = tl.cdiv(numels[0], block)
    first_of_own = 0
    for i in tl.static_range(1, len(owns)):
        if index >= first:
            address, target, start, numel = owns[i], targets[i], starts[i], numels[i]
            first_of_own = first
        first += tl.cdiv(numels[i], block)
    offset = (index - first_of_own).to(tl.int64) * block + tl.arange(0, block)
    inside = offset < numel
    # Those of other ranks begin here.
    landed = pointer(rows, dtype, aligned) + start + offset
    length = row_length.to(tl.int64)
    exact: tl.constexpr = tl.float64 if given == tl.float64 else tl.float32
    total = tl.load(pointer(address, given, aligned) + offset, inside).to(exact)
    for row in tl.static_range(world_size - 1):
        total += tl.load(landed + row * length, inside).to(exact)
    mean = total * (1.0 / world_size)
    if result is not None:
        tl.store(landed + result * length, mean, inside)
    tl.store(pointer(target, into, aligned) + offset, mean, inside)


@triton.jit
def pointer(address, dtype: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Without the hint Triton loads and stores single elements, whatever the address is."""
    typed = address.to(tl.pointer_type(dtype))
    return tl.multiple_of(typed, 16) if aligned else typed
