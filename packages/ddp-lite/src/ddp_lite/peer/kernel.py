"""The kernel that averages one row of an exchange; a module of its own because it needs Triton.

It is given addresses. Of a tensor Triton's launcher asks for its address, and the driver for
what lies there, which takes the host longer than the rest of a launch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import triton
import triton.language as tl

Entry = tuple[int, int, int]

_BLOCK, _NUM_WARPS = 4096, 8  # elements that one program averages, and the warps that do it
# Triton compiles a kernel for each number of tensors and for each pattern of what in them is
# divisible by 16. So only tensors that are divisible throughout share a launch, by powers of two.
_DIVISOR, _MOST_TENSORS = 16, 16


def shares_launch(own: int, start: int, numel: int) -> bool:
    """Whether these values are averaged in one launch with others; see ``average``."""
    return (own | start | numel) % _DIVISOR == 0


def average(
    entries: Sequence[Entry], landed: int, result: int, row_length: int, world_size: int
) -> None:
    """Replaces this rank's values by their means over all ranks, and publishes these.

    All values are float32. It is queued on the current stream.

    Args:
        entries: of each tensor its address, where its values begin in each row, in elements, and
            how many there are.
        landed: address of the other ranks' values, which are ``world_size - 1`` rows.
        result: address of one row, where the other ranks read the means. It may be a row of
            ``landed``, because every element is read before it is written.
        row_length: elements from one row to the next.
        world_size: number of ranks.
    """
    launches = [([entry], False) for entry in entries if not shares_launch(*entry)]
    together = [entry for entry in entries if shares_launch(*entry)]
    launches += [(group, True) for group in _groups(together)]
    for group, aligned in launches:
        average_kernel[(_blocks(group),)](
            *zip(*group, strict=True),
            landed,
            result,
            row_length,
            world_size,
            aligned,
            _BLOCK,
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,  # newer versions warn where this is left out
        )


def _groups(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """What each launch works on, with entries of no elements (the third number) up to 2^n."""
    for i in range(0, len(entries), _MOST_TENSORS):
        group = list(entries[i : i + _MOST_TENSORS])
        first, second, _ = group[0]  # of the types that Triton compiles for
        missing = (1 << (len(group) - 1).bit_length()) - len(group)
        yield group + [(first, second, 0)] * missing


def _blocks(group: Sequence[Entry]) -> int:
    return sum(-(-numel // _BLOCK) for _, _, numel in group)  # triton.cdiv is slow on the host


@triton.jit
def average_kernel(  # type: ignore[no-untyped-def]
    owns,
    starts,
    numels,
    landed,
    result,
    row_length,
    world_size: tl.constexpr,
    aligned: tl.constexpr,
    block: tl.constexpr,
):
    """See ``average``; ``aligned`` is whether everything is divisible by 16."""
    # Which tensor this program works on, and which of its blocks.
    index = tl.program_id(0)
    address, start, numel = owns[0], starts[0], numels[0]
    first = tl.cdiv(numels[0], block)
    first_of_own = 0
    for i in tl.static_range(1, len(owns)):
        if index >= first:
            address, start, numel, first_of_own = owns[i], starts[i], numels[i], first
        first += tl.cdiv(numels[i], block)
    offset = (index - first_of_own).to(tl.int64) * block + tl.arange(0, block)
    own, rows = _pointer(address, aligned), _pointer(landed, aligned)
    published = _pointer(result, aligned)
    inside = offset < numel
    total = tl.load(own + offset, inside)
    for row in tl.static_range(world_size - 1):
        total += tl.load(rows + row * row_length.to(tl.int64) + start + offset, inside)
    mean = total * (1.0 / world_size)
    tl.store(published + start + offset, mean, inside)
    tl.store(own + offset, mean, inside)


@triton.jit
def _pointer(address, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Without the hint Triton loads and stores single elements, whatever the address is."""
    pointer = address.to(tl.pointer_type(tl.float32))
    return tl.multiple_of(pointer, 16) if aligned else pointer
