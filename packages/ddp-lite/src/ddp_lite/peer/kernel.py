"""The kernels of an exchange: averages of a row, and copies; a module of its own for Triton's sake.

They are given addresses. Of a tensor Triton's launcher asks for its address, and the driver for
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
_WORD_BYTES = 8  # which copies are made in


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


def can_copy(target: int, source: int, size: int) -> bool:
    """Whether ``copy`` takes this."""
    return (target | source) % _DIVISOR == 0 and size % (_DIVISOR * _WORD_BYTES) == 0


def copy(entries: Sequence[Entry]) -> None:
    """Copies between addresses, queued on the current stream, in any order among themselves.

    Args:
        entries: target, source and size in bytes of each copy, as ``can_copy`` wants them. This
            GPU can reach the addresses.
    """
    words = [(target, source, size // _WORD_BYTES) for target, source, size in entries]
    for group in _groups(words):
        copy_kernel[(_blocks(group),)](
            *zip(*group, strict=True), _BLOCK, num_warps=_NUM_WARPS, enable_fp_fusion=False
        )


def _groups(entries: Sequence[Entry]) -> Iterator[list[Entry]]:
    """What each launch works on, with entries of no elements up to a power of two.

    The third of an entry's numbers is that of its elements.
    """
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
    address, start, numel, offset = _locate(owns, starts, numels, block)
    own = _pointer(address, tl.float32, aligned)
    rows, published = _pointer(landed, tl.float32, aligned), _pointer(result, tl.float32, aligned)
    inside = offset < numel
    total = tl.load(own + offset, inside)
    for row in tl.static_range(world_size - 1):
        total += tl.load(rows + row * row_length.to(tl.int64) + start + offset, inside)
    mean = total * (1.0 / world_size)
    tl.store(published + start + offset, mean, inside)
    tl.store(own + offset, mean, inside)


@triton.jit
def copy_kernel(targets, sources, words, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """See ``copy``."""
    target, source, count, offset = _locate(targets, sources, words, block)
    inside = offset < count
    values = tl.load(_pointer(source, tl.int64, True) + offset, inside)
    tl.store(_pointer(target, tl.int64, True) + offset, values, inside)


@triton.jit
def _pointer(address, dtype: tl.constexpr, aligned: tl.constexpr):  # type: ignore[no-untyped-def]
    """Without the hint Triton loads and stores single elements, whatever the address is."""
    pointer = address.to(tl.pointer_type(dtype))
    return tl.multiple_of(pointer, 16) if aligned else pointer


@triton.jit
def _locate(firsts, seconds, numels, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The entry of the three tuples that this program works on, and its elements there."""
    index = tl.program_id(0)
    first, second, numel = firsts[0], seconds[0], numels[0]
    end = tl.cdiv(numels[0], block)  # of the blocks of all entries so far
    begin = 0
    for i in tl.static_range(1, len(firsts)):
        if index >= end:
            first, second, numel, begin = firsts[i], seconds[i], numels[i], end
        end += tl.cdiv(numels[i], block)
    offset = (index - begin).to(tl.int64) * block + tl.arange(0, block)
    return first, second, numel, offset
