# mypy: disable-error-code="attr-defined"
"""Starting this tier's kernels: everything but the addresses is fixed beforehand.

A small problem takes a GPU less time than Triton's launcher takes its host; see
:mod:`flashattn_triton.triton_versions`, and :mod:`eligibility`, which asks it for what is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashattn_triton import triton_versions
from flashattn_triton.hopper.schedule import PACKED_END
from flashattn_triton.launch import Number, in_order, option_numbers
from flashattn_triton.problem import Problem, diagonal_offset

_ANY_TOKEN = 2**31 - 2**16  # a dimension that no index leaves
_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


@dataclass(frozen=True)
class TileMap:
    """The tiles of one TMA load, of tensors of one shape: a descriptor without its address."""

    shape: Sequence[int]
    strides: Sequence[int]
    block: Sequence[int]
    dtype: torch.dtype
    layout: Any

    def descriptor(self) -> TensorDescriptor:
        """A descriptor of no tensor in particular, which is all that a compiler looks at."""
        nothing = torch.empty(0, dtype=self.dtype, device="meta")
        return TensorDescriptor(nothing, self.shape, self.strides, self.block, self.layout)


def tile_map(
    shape: Sequence[int],
    strides: Sequence[int],
    block: Sequence[int],
    dtype: torch.dtype,
) -> TileMap:
    """Tiles of ``block`` elements of tensors of up to five dimensions, stored as matrix operands.

    Heads and batch have dimensions of their own, so that a tile that runs past the last row reads
    zeros and writes nothing, instead of touching the next head; likewise past the last column. A
    tile of shape (1, 1, N, D) is loaded to, or stored from, shared memory of shape (N, D).

    Args:
        shape: of the tensor.
        strides: in elements; the last is 1, the others are multiples of 16 bytes, except that those
            of dimensions of size 1 are never used and may be anything.
        block: powers of two.
        dtype: of the tensor.
    """
    spare = max(16, shape[-1])
    used = [spare if n == 1 else s for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    layout = gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENTS[dtype])
    return TileMap(list(shape), [*used, 1], list(block), dtype, layout)


def packed_tile_map(
    shape: Sequence[int],
    strides: Sequence[int],
    block: Sequence[int],
    dtype: torch.dtype,
) -> TileMap:
    """Tiles of a packed batch's tensors, which end where a sequence ends; see :mod:`schedule`.

    Args:
        shape: (1, H, T, D).
        strides: as of :func:`tile_map`.
        block: as of :func:`tile_map`.
        dtype: of the tensors.
    """
    _, heads, _, width = shape
    _, head, row, element = tile_map(shape, strides, block, dtype).strides
    return replace(
        tile_map([1, *shape], [0, *strides], [1, *block], dtype),
        shape=[_ANY_TOKEN, _ANY_TOKEN, heads, PACKED_END, width],
        strides=[2**34 - row, row, head, row, element],
    )


# A leading parameter of a kernel: tiles, a pointer to elements of some type, or nothing.
Parameter = TileMap | torch.dtype | None


class FastLaunch:
    """One kernel on one kind of input, compiled at the first call."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        parameters: Mapping[str, Parameter],
        numbers: Mapping[str, Number],
        constants: Mapping[str, Any],
    ) -> None:
        """Fixes everything but addresses.

        Args:
            kernel: of 4 warps, besides what it may start itself.
            programs: at least 1.
            parameters: the kernel's first ones, by name; pointers are multiples of 16 bytes.
            numbers: those that follow, by name.
            constants: the compile-time ones, by name.

        Raises:
            TypeError: the names are not those of the kernel's parameters.
        """
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        leading, middle, self.constants = in_order(
            kernel, parameters, numbers, constants, whole=True
        )
        self.names = tuple(leading)
        self.parameters: tuple[Parameter, ...] = tuple(leading.values())
        self.numbers: tuple[Number, ...] = tuple(middle.values())
        self.start: Callable[[Mapping[str, int]], None] | None = None

    def compile(self) -> Any:
        """The compiled kernel for the current device."""
        leading = [x.descriptor() if isinstance(x, TileMap) else x for x in self.parameters]
        return triton_versions.compile_version(
            self.kernel,
            self.grid,
            (*leading, *self.numbers),
            self.constants,
            num_warps=4,
            num_stages=1,
            **triton_versions.COMPILE_OPTIONS,
            **triton_versions.hopper_options(),
        )

    def __call__(self, addresses: Mapping[str, int]) -> None:
        """Launches on the current device, which must always be the same, and its current stream.

        ``addresses``: of tensors, by the names of all parameters that are not None.
        """
        start = self.start
        if start is None:
            start = self.start = self._launcher()
        start(addresses)

    def _launcher(self) -> Callable[[Mapping[str, int]], None]:
        rest = (*self.numbers, *self.constants.values())
        parameters: dict[str, triton_versions.Parameter] = {
            name: "pointer" if isinstance(x, torch.dtype) else x
            for name, x in zip(self.names, self.parameters, strict=True)
        }
        start = triton_versions.fast_launcher(self.compile(), self.grid, parameters, rest)
        if start is None:
            raise RuntimeError(
                f"{self.kernel.__name__} must be compiled without scratch memory, but got some, as "
                f"Triton's instrumentation adds. Switch that off, or use implementation='triton'."
            )
        return start


def edges(n_queries: int, n_keys: int, problem: Problem) -> tuple[int, int]:
    """The band of keys that a query sees, for the kernels: (offset, band).

    Query i sees the keys from ``i + offset - band`` to ``i + offset``, as far as ``problem`` limits
    the side; where only the left one is limited, ``offset`` is the diagonal's.
    """
    numbers = option_numbers(problem)
    left, right = int(numbers["window_left"]), int(numbers["window_right"])
    return diagonal_offset(n_queries, n_keys, problem) + right, left + right
