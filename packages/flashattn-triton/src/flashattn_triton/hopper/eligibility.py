"""Which kinds of input the Hopper tier takes, and in words why not the others.

Whether the TMA can read them is said by ``tma_refusal`` of :mod:`flashattn_triton.launch`.
Imports no kernels.
"""

from __future__ import annotations

import torch

from flashattn_triton import triton_versions
from flashattn_triton.problem import Problem

CAPABILITY = (9, 0)
# Tiles are 64 or 128 columns wide, and the TMA fills them up with zeros. It wants rows to
# start at multiples of 16 bytes. Up to 32, the portable tier's tiles are narrower.
HEAD_DIMS = range(40, 129, 8)
# Of query and key, and of value, where one is above 128.
WIDE_HEAD_DIMS = range(40, 257, 8)
DTYPES = (torch.float16, torch.bfloat16)
# With tiles of so many columns the portable tier is faster on soft-caps, and on windows of fewer
# keys; see LOG.md.
NARROW = 64
SHORTEST_NARROW_WINDOW = 1024
# Smaller factors on scores are zero or denormal in fp32, and masked scores are infinite.
_SMALLEST_SCALE = 1e-30


def refusal(
    capability: tuple[int, int],
    dtype: torch.dtype,
    head_dims: tuple[int, int],
    problem: Problem,
    tensors: tuple[str, ...] = (),
    by_name: bool = False,
) -> str | None:
    """Why not this kind of problem; None if it can be computed.

    ``head_dims``: D of query and key, E of value. ``tensors``: names of those that change the
    softmax. ``by_name``: whether the caller insists on this tier.
    """
    if capability != CAPABILITY:
        return f"it needs compute capability 9.0, and this is {capability[0]}.{capability[1]}"
    if dtype not in DTYPES:
        return f"it takes float16 and bfloat16, and this is {str(dtype).removeprefix('torch.')}"
    if problem.softcap is not None and max(head_dims) <= NARROW and not by_name:
        return f"up to head_dim {NARROW} it takes no soft-cap, unless asked for by name"
    if not is_wide(head_dims):
        if head_dims[0] != head_dims[1]:
            return (
                f"it takes two head_dims where one of them is above 128 and both are multiples of "
                f"8 from 40 to 256, and this is {head_dims}"
            )
        if head_dims[0] not in HEAD_DIMS:
            return f"it takes multiples of 8 from 40 to 256 as head_dim, and this is {head_dims[0]}"
        left, right = problem.band
        if head_dims[0] <= NARROW and left is not None and right is not None:
            keys = left + right + 1
            if keys < SHORTEST_NARROW_WINDOW:
                return (
                    f"up to head_dim {NARROW} it takes windows of at least "
                    f"{SHORTEST_NARROW_WINDOW} keys, and this is {keys}"
                )
    if problem.largest_only:
        return "it does not return the largest scores"
    others = [name for name in tensors if name != "sinks"]
    if others:
        return f"it takes no {' or '.join(others)}"
    if abs(problem.scale) < _SMALLEST_SCALE:
        return "it needs a scale other than 0"
    return triton_versions.refusal()


def is_wide(head_dims: tuple[int, int]) -> bool:
    """Whether there are head_dims above 128, and the tier has tiles for them."""
    return max(head_dims) > 128 and all(x in WIDE_HEAD_DIMS for x in head_dims)


def takes_gradients(head_dims: tuple[int, int], problem: Problem, by_name: bool = False) -> bool:
    """Whether gradients of what is not refused are this tier's too; else the portable kernels run.

    For soft-caps on narrow heads there is no kernel here. Deterministic gradients are taken where
    they are faster than by the portable tier's separate pass, or asked for ``by_name``. Under a
    mask with a right edge each program begins at its own diagonal, so few programs wait for others,
    and without a mask they form rings. A left edge alone leaves all programs to begin at the same
    queries. Of wide heads the portable tier takes twice as long anyway.
    """
    if problem.softcap is not None and max(head_dims) <= NARROW:
        return False
    left, right = problem.band
    is_faster = is_wide(head_dims) or right is not None or left is None
    return is_faster or by_name or not problem.deterministic
