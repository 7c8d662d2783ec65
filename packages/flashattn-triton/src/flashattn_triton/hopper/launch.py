# mypy: disable-error-code="attr-defined"
"""How this tier's kernels see tensors, and the band of keys that a query sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from flashattn_triton import triton_versions
from flashattn_triton.hopper.schedule import PACKED_END
from flashattn_triton.launch import Launch, Number, option_numbers
from flashattn_triton.problem import Problem, diagonal_offset
from flashattn_triton.triton_versions import Parameter, TileView

_ANY_TOKEN = 2**31 - 2**16  # a dimension that no index leaves
_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


def tile_map(
    shape: Sequence[int],
    strides: Sequence[int],
    block: Sequence[int],
    dtype: torch.dtype,
    *,
    packed: bool = False,
) -> TileView:
    """Tiles of ``block`` elements of tensors of up to five dimensions, stored as matrix operands.

    Heads and batch have dimensions of their own, so that a tile that runs past the last row reads
    zeros and writes nothing, instead of touching the next head; likewise past the last column. A
    tile of shape (1, 1, N, D) is loaded to, or stored from, shared memory of shape (N, D).

    Args:
        shape: of the tensor; (1, H, T, D) if ``packed``.
        strides: in elements; the last is 1, the others are multiples of 16 bytes, except that those
            of dimensions of size 1 are never used and may be anything.
        block: powers of two.
        dtype: of the tensor.
        packed: tiles end where a sequence ends; see :mod:`schedule`.
    """
    spare = max(16, shape[-1])
    used = [spare if n == 1 else s for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    seen, steps, tile = list(shape), [*used, 1], list(block)
    if packed:
        _, heads, _, width = shape
        _, head, row = used
        seen = [_ANY_TOKEN, _ANY_TOKEN, heads, PACKED_END, width]
        steps, tile = [2**34 - row, row, head, row, 1], [1, *block]
    layout = gl.NVMMASharedLayout.get_default_for(tile, _ELEMENTS[dtype])
    return TileView(seen, steps, tile, dtype, layout)


def hopper_launch(
    kernel: Any,
    programs: int,
    parameters: Mapping[str, Parameter],
    numbers: Mapping[str, Number],
    constants: Mapping[str, Any],
) -> Launch:
    """The launch of one of this tier's kernels, which have 4 warps besides what they start.

    Callers make the device current, always the same.
    """
    return Launch(
        kernel, None, programs, parameters, numbers, constants, by_triton=False,
        **triton_versions.hopper_options(),
    )  # fmt: skip


def edges(n_queries: int, n_keys: int, problem: Problem) -> tuple[int, int]:
    """The band of keys that a query sees, for the kernels: (offset, band).

    Query i sees the keys from ``i + offset - band`` to ``i + offset``, as far as ``problem`` limits
    the side; where only the left one is limited, ``offset`` is the diagonal's.
    """
    numbers = option_numbers(problem)
    left, right = int(numbers["window_left"]), int(numbers["window_right"])
    return diagonal_offset(n_queries, n_keys, problem) + right, left + right
