"""Shared by all launchers: how tensors, problems and packed batches become arguments.

Launchers are planned with (B, H, N, D) views of any strides. A packed batch comes as (1, H, T, D),
a view of its (T, H, D), and its sequences start where ``given`` says. What is launched reads
addresses alone, and allocates results in the layout of the problem (:func:`in_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashattn_triton import triton_versions
from flashattn_triton.mask_and_bias import NOTHING, Given
from flashattn_triton.problem import Problem, as_given, heads_first
from flashattn_triton.triton_versions import Parameter, Pointer, TileView

# Windows wider than any sequence mean the same as this one; sums with it stay within 32 bits.
_WIDEST_WINDOW = 2**29
# A TMA descriptor holds strides below 2^40 bytes.
_LONGEST_STRIDE = 2**40


# The kernels' parameters for the tensors of Given.
POINTERS = (
    *("slopes_ptr", "bias_ptr", "prefix_ptr", "mask_ptr", "sinks_ptr"),
    *("cu_seqlens_q_ptr", "cu_seqlens_k_ptr"),
)
# Query, key, value, output, logsumexp, and the gradients of the last two, the last None for zero.
BackwardTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]
Strides = tuple[int, ...]
# Shape, strides and dtype of a tensor.
Layout = tuple[tuple[int, ...], Strides, torch.dtype]


def given_addresses(given: Given) -> dict[str, int]:
    """The addresses of :data:`POINTERS` that are not None."""
    if given is NOTHING:
        return {}
    pairs = zip(POINTERS, given, strict=True)
    return {name: x.data_ptr() for name, x in pairs if x is not None}


def padded(width: int, dtype: torch.dtype) -> int:
    """The power of two that a head_dim is computed at.

    Matrix units need 16. Kernels for fp32 read outside shared memory at 16 on sm_90 (Triton 3.6).
    """
    return max(32 if dtype == torch.float32 else 16, 1 << (width - 1).bit_length())


def unit_last_stride(x: Tensor) -> Tensor:
    """``x``, copied if elements of one row are not neighbours: rows are read 16 bytes at a time."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def tiles_of_head(shape: Sequence[int], tile: int, given: Given) -> int:
    """How many programs take the rows of one head of (B, H, N, D) tensors, or of a packed batch.

    Those of a packed batch are enough whatever its lengths are: see
    :func:`flashattn_triton.primitives.tile_of_program`.
    """
    batch, _, rows, _ = shape
    return rows // tile + given.sequences + 1 if given.packed else batch * -(-rows // tile)


def empty_result(like: Tensor, width: int, layout: str, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of ``width``, in layout and order of memory of an input; dtype None: in its dtype.

    An input whose rows are not contiguous is read from a copy, whose order of dimensions counts.
    """
    like = heads_first(unit_last_stride(like), layout)
    batch, heads, rows, _ = like.shape
    if like.stride(1) < like.stride(2):
        result = like.new_empty(batch, rows, heads, width, dtype=dtype).transpose(1, 2)
    else:
        result = like.new_empty(batch, heads, rows, width, dtype=dtype)
    return as_given(result, layout)


def planned_output(like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
    """:func:`empty_result` for a (B, H, N, D) view, without memory."""
    on_meta = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return empty_result(on_meta, width, "bhsd", dtype)


def empty_row_statistic(like: Tensor) -> Tensor:
    """(B, H, N) fp32 (fp64 of fp64 inputs), contiguous: the logsumexp, or delta."""
    return like.new_empty(like.shape[:3], dtype=torch.promote_types(like.dtype, torch.float32))


def in_layout(x: Tensor, layout: str) -> Layout:
    """Of (B, H, N, D) or (B, H, N) results as a caller has them whose tensors are in ``layout``."""
    x = as_given(x, layout)
    return tuple(x.shape), x.stride(), x.dtype


def allocator(device: torch.device) -> Callable[[tuple[int, ...], Strides, torch.dtype], Tensor]:
    """What allocates an uninitialised tensor of a :data:`Layout` on ``device``, a current one.

    PyTorch's compiler calls these functions in the code that it generates. They skip the
    dispatcher, and take the host half as long as ``Tensor.new_empty_strided``.
    """
    if device.type in ("cpu", "cuda"):
        return getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")  # type: ignore[no-any-return]

    def allocate(shape: tuple[int, ...], strides: Strides, dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)

    return allocate  # on "meta", where launchers are tested


def stride_numbers(**strides: Sequence[int]) -> dict[str, int]:
    """The kernels' arguments for the strides of batch, head and row of tensors.

    ``q=(1, 2, 3)`` gives stride_qb, stride_qh and stride_qq; rows of K and V, and of their
    gradients, are keys, hence stride_kk and stride_vk.
    """
    return {
        f"stride_{tensor}{dimension}": stride
        for tensor, outer_strides in strides.items()
        for dimension, stride in zip(
            ("b", "h", "k" if tensor[-1] in "kv" else "q"), outer_strides, strict=False
        )
    }


def option_numbers(problem: Problem) -> dict[str, float]:
    """The kernels' arguments that are numbers of the problem."""
    left, right = problem.band
    return {
        "scale": problem.scale,
        "softcap": 1.0 if problem.softcap is None else problem.softcap,
        "window_left": 0 if left is None else min(left, _WIDEST_WINDOW),
        "window_right": 0 if right is None else min(right, _WIDEST_WINDOW),
    }


def tma_refusal(
    name: str, shape: torch.Size, strides: Strides, address: int, itemsize: int
) -> str | None:
    """Why the TMA (tensor memory accelerator) cannot read tiles of a (B, H, N, D) tensor, or None.

    ``strides`` are in elements; those of dimensions of size 1 are never used. Of ``address``, in
    bytes, the remainder by 16 counts.
    """
    if strides[3] != 1 or address % 16:
        return f"{name}'s rows must be contiguous and aligned to 16 bytes"
    unit = 16 // itemsize
    for n, stride in zip(shape[:3], strides[:3], strict=True):
        if n > 1 and (stride % unit or not 0 < stride < _LONGEST_STRIDE // itemsize):
            multiples = f"positive multiples of {unit} elements"
            return f"{name}'s strides must be {multiples}, and are {strides}"
    return None


def can_use_tma(x: Tensor) -> bool:
    """Whether the TMA can read tiles of a (B, H, N, D) tensor; see :func:`tma_refusal`."""
    return tma_refusal("", x.shape, x.stride(), x.data_ptr() % 16, x.element_size()) is None


def tile_view(
    shape: Sequence[int], strides: Sequence[int], block: Sequence[int], dtype: torch.dtype
) -> TileView:
    """The view of a tensor whose last stride is 1."""
    # The stride of a dimension of size 1 is arbitrary; a descriptor needs a valid one.
    valid = [s if n > 1 else 256 for n, s in zip(shape, strides, strict=True)]
    return TileView(list(shape), [*valid[:-1], 1], list(block), dtype)


def current_device() -> int:
    """Of the calling thread, as an index. CUDA must have been used, as where tensors are on it."""
    index: int = torch._C._cuda_getDevice()
    return index


Number = float | None


def in_order(kernel: Any, *groups: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Arguments by name in the order of the kernel's parameters: a compiled kernel takes no names.

    Each of ``groups`` are the arguments of neighbouring parameters, or a ``TypeError`` says so.
    """
    names, first, ordered = list(kernel.arg_names), 0, []
    for group in groups:
        end = len(names) if group is groups[-1] else first + len(group)
        expected, first = names[first:end], end
        if set(expected) != set(group):
            raise TypeError(
                f"arguments of {kernel.__name__} must be {expected} in this place, but got "
                f"{list(group)}. Name each parameter of {names} once."
            )
        ordered.append({name: group[name] for name in expected})
    return tuple(ordered)


class Launch:
    """One kernel on one kind of input, compiled at the first call: all arguments but addresses.

    Triton's own launcher binds, classifies and hashes every argument at each call, which takes the
    host longer than a small kernel takes the GPU.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device | None,
        programs: int,
        parameters: Mapping[str, Parameter],
        numbers: Mapping[str, Number],
        constants: Mapping[str, Any],
        *,
        warps: int = 4,
        stages: int = 1,
        registers: int | None = None,
        by_triton: bool = True,
        **options: Any,
    ) -> None:
        """Fixes everything but addresses.

        Args:
            kernel: its parameters are ``parameters``, ``numbers`` and ``constants``, by name.
            device: where the tensors are; None if callers make it the current one.
            programs: the grid.
            parameters: tensors.
            numbers: None for those of options that are absent.
            constants: the compile-time arguments.
            warps: of a program, as ``stages`` of a pipelined loop, ``registers``, the most that a
                thread may have, and other ``options`` of the compilation.
            by_triton: whether Triton's launcher takes the place of a fast one that cannot be made.
        """
        self.kernel = kernel
        self.device = device.index if device is not None and device.type == "cuda" else None
        self.grid = (programs, 1, 1)
        ordered = in_order(kernel, parameters, numbers, constants)
        self.parameters, self.numbers, self.constants = ordered
        self.options = {"num_warps": warps, "num_stages": stages, **options}
        self.options |= triton_versions.COMPILE_OPTIONS
        if registers is not None:
            self.options["maxnreg"] = registers
        self.by_triton = by_triton
        self.start: Callable[[Mapping[str, int]], None] | None = None

    def __call__(self, addresses: Mapping[str, int]) -> None:
        """Launches on the device's current stream; nothing if there is no program to run.

        Args:
            addresses: of tensors, by the names of all parameters that are not None; others, which
                kernels beside this one read, are passed over. At every call they have the same
                remainders by 16.
        """
        if self.grid[0] == 0:
            return
        # Triton launches on the device that is current.
        if self.device is not None and self.device != current_device():
            with torch.cuda.device(self.device):
                self(addresses)
            return
        start = self.start
        if start is None:
            start = self.start = self._launcher(addresses)
        start(addresses)

    def compile(self, addresses: Mapping[str, int] | None = None) -> Any:
        """The kernel compiled for the current device, and for addresses with these remainders.

        Without addresses, for multiples of 16. Triton's interpreter returns None.
        """
        remainders = {name: address % 16 for name, address in (addresses or {}).items()}
        leading = self._leading(lambda name, dtype: Pointer(dtype, remainders.get(name, 0)))
        rest = {**self.constants, **self.options}
        return self.kernel.warmup(*leading, *self.numbers.values(), grid=self.grid, **rest)

    def _leading(self, base: Callable[[str, torch.dtype], Any]) -> list[Any]:
        """Arguments for ``parameters``; ``base`` makes those of a name and a dtype."""
        return [
            x.of(base(name, x.dtype)) if isinstance(x, TileView) else x and base(name, x)
            for name, x in self.parameters.items()
        ]

    def _launcher(self, addresses: Mapping[str, int]) -> Callable[[Mapping[str, int]], None]:
        rest = (*self.numbers.values(), *self.constants.values())
        compiled = self.compile(addresses)
        start = None
        if compiled is not None:
            start = triton_versions.fast_launcher(compiled, self.grid, self.parameters, rest)
        if start is None and self.by_triton:
            return self._launch_by_triton
        if start is None:
            raise RuntimeError(
                f"{self.kernel.__name__} must be compiled without scratch memory, but got some, as "
                f"Triton's instrumentation adds. Switch that off, or use implementation='triton'."
            )
        return start

    def _launch_by_triton(self, addresses: Mapping[str, int]) -> None:
        """Launches by Triton's own launcher, or in its interpreter."""
        leading = self._leading(
            lambda name, dtype: triton_versions.tensor_at(self.kernel, addresses[name], dtype)
        )
        rest = (*self.numbers.values(), *self.constants.values())
        self.kernel[self.grid](*leading, *rest, **self.options)


def dot_precision(dtype: torch.dtype) -> str:
    """How fp32 products are computed: TF32 only if PyTorch's own matrix products may use it.

    Otherwise each operand is the sum of three bf16 numbers, which hold all its 24 bits, and the six
    products that matter are added: as many matrix operations as three TF32 products, which lose two
    bits or three.
    """
    if dtype != torch.float32:
        return "ieee"  # half operands have exact products
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "bf16x6"
