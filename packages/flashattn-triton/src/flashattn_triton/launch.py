"""What all launchers share: how tensors, options and packed batches become arguments.

Launchers take (B, H, N, D) views with any strides. A packed batch comes as (1, H, T, D), a view of
its (T, H, D), together with a :class:`Packing`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.options import AttentionOptions

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

# Windows wider than any sequence mean the same as this one; sums with it stay within 32 bits.
_WIDEST_WINDOW = 2**29
_LARGEST_TILE = 256


# Sequences of a packed batch, its longest query sequence and its longest key sequence.
Sizes = tuple[int, int, int]
Strides = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the sequences of a packed batch start, and the longest of them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def sizes(self) -> Sizes:
        """B, and the longest query and key sequence."""
        return self.cu_seqlens_q.shape[0] - 1, self.max_seqlen_q, self.max_seqlen_k


def padded(width: int, dtype: torch.dtype) -> int:
    """The power of two that a head_dim is computed at.

    Matrix units need 16. Kernels for fp32 read outside shared memory at 16 on sm_90 (Triton 3.6).
    """
    return max(32 if dtype == torch.float32 else 16, 1 << (width - 1).bit_length())


def unit_last_stride(x: Tensor) -> Tensor:
    """``x``, copied if elements of one row are not neighbours: rows are read 16 bytes at a time."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def is_wide(*strides: Strides) -> bool:
    """Whether the rows of one tile can be more than 2^31 elements apart."""
    return any(abs(stride[2]) * _LARGEST_TILE >= 2**31 for stride in strides)


def outer(stride: Strides, sizes: Sizes | None) -> Strides:
    """Batch, head and row stride; the sequences of a packed batch start where it says."""
    return (stride[0] if sizes is None else 0, stride[1], stride[2])


def empty_output(like: Tensor, width: int) -> Tensor:
    """(B, H, N, width) in ``like``'s dtype, its memory in ``like``'s order of heads and rows."""
    batch, heads, rows, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty(batch, rows, heads, width).transpose(1, 2)
    return like.new_empty(batch, heads, rows, width)


def empty_row_statistic(like: Tensor) -> Tensor:
    """(B, H, N) fp32, contiguous: the logsumexp, or delta."""
    return like.new_empty(like.shape[:3], dtype=torch.float32)


def option_numbers(options: AttentionOptions) -> tuple[float, float, int, int]:
    """The kernels' arguments scale, softcap, window_left, window_right."""
    left, right = options.band
    return (
        options.scale,
        1.0 if options.softcap is None else options.softcap,
        0 if left is None else min(left, _WIDEST_WINDOW),
        0 if right is None else min(right, _WIDEST_WINDOW),
    )


def option_constants(options: AttentionOptions) -> dict[str, bool]:
    """The kernels' compile-time arguments that say which options there are."""
    left, right = options.band
    return {
        "BOTTOM_RIGHT": options.causal == "bottom-right",
        "HAS_LEFT": left is not None,
        "HAS_SOFTCAP": options.softcap is not None,
        "is_causal": right is not None,
    }


def alignment(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The addresses' remainders by 16; nothing if all are multiples."""
    addresses = [x.data_ptr() % 16 for x in tensors]
    return tuple(addresses) if any(addresses) else ()


def can_be_copied(x: Tensor) -> bool:
    """Whether the copy engine can read tiles of a (B, H, N, D) tensor: its base and its strides.

    Strides of dimensions of size 1 are never used.
    """
    if x.data_ptr() % 16 or x.stride(3) != 1:
        return False
    unit = 16 // x.element_size()
    used = [stride for n, stride in zip(x.shape[:3], x.stride()[:3], strict=True) if n > 1]
    longest = 2**40 // x.element_size()
    return all(0 < stride < longest and stride % unit == 0 for stride in used)


class TileView:
    """How the copy engine sees tensors of one shape: all of a descriptor but the address.

    Heads and batch keep dimensions of their own, so that a tile past the last row reads zeros, and
    not the next head.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> None:
        self.shape = list(shape)
        # Those of dimensions of size 1 may be anything, which a descriptor may not be.
        self.strides = [s if n > 1 else 256 for n, s in zip(shape, strides, strict=True)]
        self.strides[-1] = 1
        self.block = list(block)

    def of(self, x: Tensor) -> TensorDescriptor:
        """The descriptor of ``x``, which must have this shape and these strides."""
        return _descriptor_type()(x, self.shape, self.strides, self.block)


@functools.cache
def _descriptor_type() -> type[TensorDescriptor]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    class Descriptor(TensorDescriptor):
        """Triton's own checks cost the host more than the encoding of a descriptor does."""

        def __post_init__(self) -> None:
            """Checks nothing; :func:`can_be_copied` did."""

    return Descriptor


class Launch:
    """One kernel with all arguments but the tensors, compiled once and then launched directly.

    Triton's own launcher binds, classifies and hashes every argument at each call, which takes the
    host longer than a small kernel takes the GPU. Everything but the tensors' alignment is fixed
    here, so that is all that must be looked at before the compiled kernel is found again.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: Sequence[float],
        constants: Mapping[str, Any],
        tiles: Tiles,
    ) -> None:
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        # In the order of the kernel's parameters: the compiled kernel takes no names.
        self.constants = {n: constants[n] for n in kernel.arg_names if n in constants}
        self.numbers = tuple(numbers)
        self.rest = (*self.numbers, *self.constants.values())
        self.tiles = tiles
        self.started: dict[tuple[bool, ...], Callable[..., None]] = {}

    def __call__(self, *tensors: Tensor | TensorDescriptor | None) -> None:
        """Launches on the current device and stream; nothing if there is no program to run."""
        if self.grid[0] == 0:
            return
        # Addresses as numbers: the compiled launcher would ask the driver about each tensor.
        pointers = [x.data_ptr() if isinstance(x, Tensor) else x for x in tensors]
        aligned = tuple([type(p) is int and p % 16 == 0 for p in pointers])
        start = self.started.get(aligned)
        if start is not None:
            start(*pointers, *self.rest)
            return
        compiled = self.kernel[self.grid](
            *tensors,
            *self.numbers,
            **self.constants,
            num_warps=self.tiles.warps,
            num_stages=self.tiles.stages,
        )
        if compiled is not None:  # as in Triton's interpreter
            self.started[aligned] = _starter(compiled, self.grid)


def _starter(compiled: Any, grid: tuple[int, int, int]) -> Callable[..., None]:
    """Starts a compiled kernel on the current stream, given all of its arguments.

    ``compiled[grid]`` describes every launch to profilers' hooks, in Python, even where there are
    none. Without hooks the launcher below it is called, whose interface is Triton 3.6's own.
    """
    import triton

    described: Callable[..., None] = compiled[grid]
    if not triton.__version__.startswith("3.6."):
        return described
    from triton import knobs
    from triton.runtime.driver import driver

    device = driver.active.get_current_device()
    current_stream = driver.active.get_current_stream
    runtime = knobs.runtime
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata

    def start(*arguments: Any) -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            described(*arguments)
        else:
            stream = current_stream(device)
            run(*grid, stream, function, metadata, None, None, None, *arguments)

    return start


def on_device_of(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Makes ``x``'s GPU current: Triton launches on the current device and its current stream."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def dot_precision(dtype: torch.dtype) -> str:
    """How fp32 products are computed: TF32 only if PyTorch's own matrix products may use it.

    Otherwise each operand is the sum of three bf16 numbers, which hold all its 24 bits, and the six
    products that matter are added: as many matrix operations as three TF32 products, which lose two
    bits or three.
    """
    if dtype != torch.float32:
        return "ieee"  # half operands have exact products
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "bf16x6"
