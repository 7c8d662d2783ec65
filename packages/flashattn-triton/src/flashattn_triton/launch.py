"""What all launchers share: how tensors, problems and packed batches become arguments.

Launchers are planned with (B, H, N, D) views of any strides. A packed batch comes as (1, H, T, D),
a view of its (T, H, D), together with a :class:`Packing`. What is launched reads addresses alone,
and allocates results in the layout of the problem (:func:`in_layout`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashattn_triton import triton_versions
from flashattn_triton.configs import Tiles
from flashattn_triton.mask_and_bias import NO_MASK_OR_BIAS, MaskAndBias, MaskAndBiasSpecialization
from flashattn_triton.problem import Problem, as_given, heads_first

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

# Windows wider than any sequence mean the same as this one; sums with it stay within 32 bits.
_WIDEST_WINDOW = 2**29
_LARGEST_TILE = 256
# A TMA descriptor holds strides below 2^40 bytes.
_LONGEST_STRIDE = 2**40


# Sequences of a packed batch, its longest query sequence and its longest key sequence.
Sizes = tuple[int, int, int]
Strides = tuple[int, ...]
# Shape, strides and dtype of a tensor.
Layout = tuple[tuple[int, ...], Strides, torch.dtype]


class Packing(NamedTuple):
    """Where the sequences of a packed batch start, and the longest of them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def sizes(self) -> Sizes:
        """B, and the longest query and key sequence."""
        return self.cu_seqlens_q.shape[0] - 1, self.max_seqlen_q, self.max_seqlen_k

    @property
    def has_equal_lengths(self) -> bool:
        """Whether both start at the same places, because ``cu_seqlens`` is one tensor: then each
        sequence has as many keys as queries."""
        return self.cu_seqlens_q.data_ptr() == self.cu_seqlens_k.data_ptr()


def problem_tensors(
    packing: Packing | None, mask_and_bias: MaskAndBias
) -> dict[str, Tensor | None]:
    """The kernels' arguments for the starts of sequences, slopes, bias and prefixes, if any."""
    tensors: dict[str, Tensor | None] = {}
    if packing is not None:
        tensors["cu_seqlens_q_ptr"] = packing.cu_seqlens_q
        tensors["cu_seqlens_k_ptr"] = packing.cu_seqlens_k
    if mask_and_bias is not NO_MASK_OR_BIAS:
        tensors["slopes_ptr"] = mask_and_bias.alibi_slopes
        tensors["bias_ptr"] = mask_and_bias.bias
        tensors["prefix_ptr"] = mask_and_bias.prefix_lengths
    return tensors


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


def empty_result(like: Tensor, width: int, layout: str) -> Tensor:
    """:func:`empty_output` for an input in ``layout``, in the same layout.

    An input whose rows are not contiguous is read from a copy, whose order of dimensions counts.
    """
    return as_given(empty_output(heads_first(unit_last_stride(like), layout), width), layout)


def empty_row_statistic(like: Tensor) -> Tensor:
    """(B, H, N) fp32, contiguous: the logsumexp, or delta."""
    return like.new_empty(like.shape[:3], dtype=torch.float32)


def in_layout(x: Tensor, layout: str) -> Layout:
    """Of (B, H, N, D) or (B, H, N) results as a caller has them whose tensors are in ``layout``."""
    if x.dim() == 4:
        x = as_given(x, layout)
    elif layout == "thd":
        x = x.squeeze(0)
    return tuple(x.shape), x.stride(), x.dtype


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """The strides of a contiguous tensor without empty dimensions."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides))


def allocator(device: torch.device) -> Callable[[tuple[int, ...], Strides, torch.dtype], Tensor]:
    """What allocates an uninitialised tensor of a :data:`Layout` on ``device``, a current one.

    PyTorch's compiler calls these functions in the code that it generates. They skip the
    dispatcher, and take the host half as long as ``Tensor.new_empty_strided``.
    """
    functions: Any = torch._C._dynamo.guards
    if device.type == "cuda":
        return functions._empty_strided_cuda  # type: ignore[no-any-return]
    if device.type == "cpu":
        return functions._empty_strided_cpu  # type: ignore[no-any-return]

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


def option_constants(problem: Problem) -> dict[str, bool]:
    """The kernels' compile-time arguments that say which options there are."""
    left, right = problem.band
    return {
        "BOTTOM_RIGHT": problem.bottom_right,
        "HAS_LEFT": left is not None,
        "HAS_SOFTCAP": problem.softcap is not None,
        "is_causal": right is not None,
    }


def alibi_constant(problem: Problem, specialization: MaskAndBiasSpecialization) -> dict[str, int]:
    """The kernels' compile-time argument HAS_ALIBI: 2 where no key behind the diagonal is seen."""
    right = problem.band[1]
    one_sided = right is not None and right <= 0 and not specialization.prefix
    return {"HAS_ALIBI": specialization.alibi and 1 + one_sided}


def register_limit(
    specialization: MaskAndBiasSpecialization, tiles: Tiles, dtype: torch.dtype, width: int
) -> int | None:
    """How many registers a thread may have, so that as many programs fit as without ALiBi.

    For narrow heads, the programs that own queries take 140 to 158 registers without it, and three
    of 4 warps share a multiprocessor of sm_90. With it the compiler takes up to 217.
    """
    narrow = dtype.itemsize == 2 and width <= 64
    return 168 if specialization.alibi and narrow and tiles.use_tma and tiles.warps == 4 else None


def tma_refusal(
    name: str, shape: torch.Size, strides: Strides, address: int, itemsize: int
) -> str | None:
    """Why the TMA (tensor memory accelerator) cannot read tiles of a tensor; None if it can.

    The tensor is (B, H, N, D).

    Args:
        name: of the tensor, for the answer.
        shape: of the tensor.
        strides: in elements; those of dimensions of size 1 are never used.
        address: in bytes, or as much of it as is known: its remainder by 16 is what counts.
        itemsize: bytes of an element.
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


class TileView:
    """How the TMA sees tensors of one shape: all of a descriptor but the address.

    Heads and batch keep dimensions of their own, so that a tile past the last row reads zeros, and
    not the next head.
    """

    def __init__(self, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> None:
        self.shape = list(shape)
        # The stride of a dimension of size 1 is arbitrary; a descriptor needs a valid one.
        self.strides = [s if n > 1 else 256 for n, s in zip(shape, strides, strict=True)]
        self.strides[-1] = 1
        self.block = list(block)

    def of(self, x: Tensor) -> TensorDescriptor:
        """The descriptor of ``x``, which has this shape and these strides: :func:`can_use_tma`."""
        descriptor: TensorDescriptor = triton_versions.unchecked_descriptor()(
            x, self.shape, self.strides, self.block
        )
        return descriptor


def current_device() -> int:
    """Of the calling thread, as an index. CUDA must have been used, as where tensors are on it."""
    index: int = torch._C._cuda_getDevice()
    return index


Number = float | None


def in_order(
    kernel: Any, *groups: Mapping[str, Any], whole: bool = False
) -> tuple[dict[str, Any], ...]:
    """Arguments by name in the order of the kernel's parameters: a compiled kernel takes no names.

    Args:
        kernel: its parameters end with those of ``groups``.
        groups: the arguments of some neighbouring parameters each, by name.
        whole: whether the kernel has no other parameters.

    Returns:
        The same groups, each in the kernel's order.

    Raises:
        TypeError: a group's names are not those of the parameters in its place.
    """
    names = list(triton_versions.parameter_names(kernel))
    first = len(names) - sum(map(len, groups))
    fits = first == 0 if whole else first >= 0
    ordered = []
    for group in groups:
        expected = names[max(first, 0) : first + len(group)]
        if not fits or set(expected) != set(group):
            raise TypeError(
                f"arguments of {kernel.__name__} must be {expected} in this place, but got "
                f"{list(group)}. Name each parameter of {names} once."
            )
        ordered.append({name: group[name] for name in expected})
        first += len(group)
    return tuple(ordered)


class Launch:
    """One kernel with all arguments but the tensors, compiled once and then launched directly.

    Triton's own launcher binds, classifies and hashes every argument at each call, which takes the
    host longer than a small kernel takes the GPU. Here everything but the addresses is fixed.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        programs: int,
        numbers: Mapping[str, Number],
        constants: Mapping[str, Any],
        tiles: Tiles,
        views: Mapping[str, TileView] | None = None,
        registers: int | None = None,
    ) -> None:
        """Fixes everything but tensors.

        Args:
            kernel: its parameters are tensors, then ``numbers``, then ``constants``.
            device: where the tensors are.
            programs: the grid.
            numbers: what follows the tensors, by name.
            constants: the compile-time arguments, by name.
            tiles: warps and stages.
            views: how the TMA sees tensors, by name; the other tensors are passed as pointers.
            registers: the most that a thread may have; None leaves it to the compiler.

        Raises:
            TypeError: the names are not those of the kernel's parameters.
        """
        self.kernel = kernel
        self.device = device.index if device.type == "cuda" else None
        self.grid = (programs, 1, 1)
        self.numbers, self.constants = in_order(kernel, numbers, constants)
        self.tiles = tiles
        self.limits = {} if registers is None else {"maxnreg": registers}
        self.views = views or {}
        n_tensors = -len(numbers) - len(constants)
        self.names = tuple(triton_versions.parameter_names(kernel)[:n_tensors])
        # What launches the compiled kernel: given tensors by name, or, by Triton, all arguments.
        self.start: Callable[[Mapping[str, Tensor | None]], None] | None = None
        self.run: Callable[..., None] | None = None

    def __call__(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Launches on the device's current stream; nothing if there is no program to run.

        Args:
            tensors: by the names of the kernel's parameters; those left out are None. The same are
                None at every call, and their addresses have the same remainders by 16.

        Raises:
            TypeError: at the first call, if the names are not those of the kernel's parameters.
        """
        if self.grid[0] == 0:
            return
        # Triton launches on the device that is current.
        if self.device is not None and self.device != current_device():
            with torch.cuda.device(self.device):
                self(tensors)
            return
        if self.start is not None:
            self.start(tensors)
            return
        tensors = {**dict.fromkeys(self.names), **tensors}
        if self.run is not None:
            self.run(*self._described(tensors).values(), *self._rest())
            return
        in_order(self.kernel, tensors, self.numbers, self.constants, whole=True)
        compiled = self.kernel[self.grid](
            **self._described(tensors),
            **self.numbers,
            **self.constants,
            num_warps=self.tiles.warps,
            num_stages=self.tiles.stages,
            **self.limits,
            **triton_versions.COMPILE_OPTIONS,
        )
        if compiled is None:  # as in Triton's interpreter
            return
        parameters: dict[str, triton_versions.Parameter] = {
            name: None if x is None else self.views.get(name, "pointer")
            for name, x in tensors.items()
        }
        self.start = triton_versions.fast_launcher(
            compiled, self.grid, parameters, self._rest(), of_tensors=True
        )
        if self.start is None:
            self.run = compiled[self.grid]

    def _described(
        self, tensors: Mapping[str, Tensor | None]
    ) -> dict[str, Tensor | TensorDescriptor | None]:
        """The tensors as the kernel takes them."""
        return {
            name: self.views[name].of(x) if x is not None and name in self.views else x
            for name, x in tensors.items()
        }

    def _rest(self) -> tuple[Any, ...]:
        """The arguments behind the tensors, in the order of the kernel's parameters."""
        return (*self.numbers.values(), *self.constants.values())


def dot_precision(dtype: torch.dtype) -> str:
    """How fp32 products are computed: TF32 only if PyTorch's own matrix products may use it.

    Otherwise each operand is the sum of three bf16 numbers, which hold all its 24 bits, and the six
    products that matter are added: as many matrix operations as three TF32 products, which lose two
    bits or three.
    """
    if dtype != torch.float32:
        return "ieee"  # half operands have exact products
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "bf16x6"
