# mypy: disable-error-code="attr-defined"
"""How tensors, bands of keys and packed batches become arguments of this tier's kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from flashattn_triton import triton_versions
from flashattn_triton.hopper.schedule import (
    FIELDS,
    PACKED_END,
    SEQUENCES,
    most_tiles,
    packed_tiles_kernel,
)
from flashattn_triton.launch import Launch, Number, option_numbers
from flashattn_triton.mask_and_bias import Given
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
    *,
    few_registers: bool = False,
    early: bool = False,
) -> Launch:
    """The launch of one of this tier's kernels, which have 4 warps besides what they start.

    Callers make the device current, always the same. ``few_registers``: as
    :func:`~flashattn_triton.triton_versions.hopper_options` says. ``early``: the kernel begins when
    the one before allows it, and waits for it itself.
    """
    options = triton_versions.hopper_options(few_registers)
    if early:
        options["launch_pdl"] = True
    return Launch(
        kernel, None, programs, parameters, numbers, constants, by_triton=False, **options
    )


def edges(n_queries: int, n_keys: int, problem: Problem) -> tuple[int, int]:
    """The band of keys that a query sees, for the kernels: (offset, band).

    Query i sees the keys from ``i + offset - band`` to ``i + offset``, as far as ``problem`` limits
    the side; where only the left one is limited, ``offset`` is the diagonal's.
    """
    numbers = option_numbers(problem)
    left, right = int(numbers["window_left"]), int(numbers["window_right"])
    return diagonal_offset(n_queries, n_keys, problem) + right, left + right


# ---- packed sequences ----------------------------------------------------------------------------


def without_offset(problem: Problem, given: Given) -> Problem:
    """The same problem where packed sequences have as many keys as queries.

    Their last query meets the last key on the diagonal that starts at the first of both.
    """
    if not given.has_equal_lengths or not problem.bottom_right:
        return problem
    return replace(problem, causal="top-left" if problem.causal == "bottom-right" else "none")


class PackedTiles:
    """The kernel that writes the tables of tiles of one kind of packed batch.

    ``most``: how many tiles of queries there can be, and how many of keys, if ``of_keys``.
    ``key_table``: the bytes before the table of keys.
    """

    def __init__(
        self,
        given: Given,
        tokens: tuple[int, int],
        rows: tuple[int, int],
        *,
        heads: int,
        group: int = 1,
        of_keys: bool = False,
    ) -> None:
        """Plans the launch.

        ``tokens``: queries and keys of all sequences. ``rows``: queries and keys of a tile.
        ``heads``: of queries. ``group``: how many tiles of one sequence are computed at the same
        time, see :func:`~flashattn_triton.hopper.schedule.packed_tiles_kernel`.
        """
        n, (n_queries, n_keys) = given.sequences, tokens
        of_key_side = most_tiles(n_keys, n, rows[1]) if of_keys else 0
        self.most = most_tiles(n_queries, n, rows[0]), of_key_side
        first_of_keys = (1 + self.most[0]) * FIELDS.value
        self.key_table = first_of_keys * 4
        self.launch = hopper_launch(
            packed_tiles_kernel,
            -(-(n + 1) // SEQUENCES) * (1 + of_keys),
            {"starts_q_ptr": torch.int32, "starts_k_ptr": torch.int32, "tiles_ptr": torch.int32},
            {
                "N_SEQUENCES": n,
                "N_QUERIES": n_queries,
                "N_KEYS": n_keys,
                "N_HEADS": heads,
                "GROUP": group,
                "KEY_TABLE": first_of_keys,
            },
            {"ROWS": rows[0], "KEY_ROWS": rows[1], "FIELDS": FIELDS.value, "SEQUENCES": SEQUENCES},
        )

    def __call__(self, given: Given) -> Tensor:
        """The table of queries, (1 + most, FIELDS) int32, and then that of keys.

        The first element of each says how many tiles follow.
        """
        starts_q, starts_k = given.cu_seqlens_q, given.cu_seqlens_k
        assert starts_q is not None
        assert starts_k is not None
        table = starts_q.new_empty((2 + sum(self.most)) * FIELDS.value)
        self.launch(
            {
                "starts_q_ptr": starts_q.data_ptr(),
                "starts_k_ptr": starts_k.data_ptr(),
                "tiles_ptr": table.data_ptr(),
            }
        )
        return table
