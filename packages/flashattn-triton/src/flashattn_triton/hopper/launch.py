# mypy: disable-error-code="attr-defined"
"""Starting this tier's kernels: everything but the addresses is fixed beforehand.

A small problem takes a GPU less time than Triton's launcher takes its host: that walks over every
argument in Python and has each descriptor encoded anew. Here arguments are laid out once per kind
of input, descriptors are encoded once per address, and the compiled launcher is called directly.
Its interface is private to Triton 3.6, for which :mod:`eligibility` checks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

_ELEMENTS = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}
# Encoded descriptors that one argument keeps: more than a deep model has layers.
_KEPT = 256


@dataclass(frozen=True)
class TileMap:
    """The tiles that one copy moves of tensors of one shape: a descriptor without its address."""

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
    *,
    swizzled: bool = True,
) -> TileMap:
    """Tiles of ``block`` elements of tensors of up to five dimensions.

    Heads and batch have dimensions of their own, so that a tile that runs past the last row reads
    zeros and writes nothing, instead of touching the next head; likewise past the last column. A
    tile of shape (1, 1, N, D) is copied from and to shared memory of shape (N, D).

    Args:
        shape: of the tensor.
        strides: in elements; the last is 1, the others are multiples of 16 bytes, except that those
            of dimensions of size 1 are never used and may be anything.
        block: powers of two.
        dtype: of the tensor.
        swizzled: whether they lie in shared memory as matrix operands do, or row after row.
    """
    spare = max(16, shape[-1])
    used = [spare if n == 1 else s for n, s in zip(shape[:-1], strides[:-1], strict=True)]
    element = _ELEMENTS[dtype]
    if swizzled:
        layout = gl.NVMMASharedLayout.get_default_for(list(block), element)
    else:
        layout = gl.NVMMASharedLayout(0, element.primitive_bitwidth, len(block))
    return TileMap(list(shape), [*used, 1], list(block), dtype, layout)


# A leading parameter of a kernel: tiles, a pointer to elements of some type, or nothing.
Parameter = TileMap | torch.dtype | None


class DirectLaunch:
    """One kernel on one kind of input, compiled at the first call."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        parameters: Sequence[Parameter],
        numbers: Sequence[float],
        constants: Mapping[str, Any],
    ) -> None:
        """Fixes everything but addresses.

        Args:
            kernel: of 4 warps, besides what it may start itself.
            programs: at least 1.
            parameters: the kernel's first ones; pointers are multiples of 16 bytes.
            numbers: those that follow.
            constants: the compile-time ones, by name.
        """
        self.kernel = kernel
        self.grid = (programs, 1, 1)
        self.parameters = tuple(parameters)
        self.numbers = tuple(numbers)
        # In the order of the kernel's parameters: the compiled launcher takes no names.
        self.constants = {n: constants[n] for n in kernel.arg_names if n in constants}
        self.start: Callable[..., None] | None = None

    def compile(self) -> Any:
        """The compiled kernel for the current device."""
        leading = [x.descriptor() if isinstance(x, TileMap) else x for x in self.parameters]
        arguments = (*leading, *self.numbers)
        return self.kernel.warmup(
            *arguments, **self.constants, grid=self.grid, num_warps=4, num_stages=1
        )

    def __call__(self, *addresses: int | None) -> None:
        """Launches on the current device, which must always be the same, and its current stream.

        ``addresses``: of what the parameters describe.
        """
        if self.start is None:
            self.start = self._starter(self.compile())
        self.start(*addresses)

    def _starter(self, compiled: Any) -> Callable[..., None]:
        launcher = compiled.run
        launch = launcher.launch
        if inspect.isfunction(launch):  # encodes descriptors, and then calls what is wanted here
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]
        device = driver.active.get_current_device()
        current_stream = driver.active.get_current_stream
        grid, runtime = self.grid, knobs.runtime
        # Grid, stream, function, flags, two scratch buffers, metadata, launch metadata, two hooks.
        flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
        template = [*grid, None, compiled.function, *flags, None, None, compiled.packed_metadata]
        template += [None, None, None]
        encodings = iter(compiled.metadata.tensordesc_meta or ())
        places: list[int] = []
        sources: list[_Encoded | None] = []
        for parameter in self.parameters:
            places.append(len(template))
            template.append(None)
            if isinstance(parameter, TileMap):
                sources.append(_Encoded(parameter, next(encodings)))
                template += [*parameter.shape, *parameter.strides]
            else:
                sources.append(None)
        template += [*self.numbers, *self.constants.values()]
        slots = tuple(zip(places, sources, strict=True))

        def start(*addresses: int | None) -> None:
            arguments = template.copy()
            for (place, encoded), address in zip(slots, addresses, strict=True):
                arguments[place] = address if encoded is None else encoded[address]
            arguments[3] = stream = current_stream(device)
            if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
                seen = compiled.launch_metadata(grid, stream)
                arguments[10:13] = seen, runtime.launch_enter_hook, runtime.launch_exit_hook
            launch(*arguments)

        return start


class _Encoded(dict[int | None, Any]):
    """Descriptors of one parameter, as the copy engine reads them, by address."""

    def __init__(self, tiles: TileMap, encoding: Mapping[str, Any]) -> None:
        self.settings = (
            encoding["swizzle"],
            encoding["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[encoding["elem_type"]],
            encoding["block_size"],
            tiles.shape,
            tiles.strides,
            0,  # what lies outside is read as zeros
        )

    def __missing__(self, address: int) -> Any:
        if len(self) >= _KEPT:
            self.clear()
        found = driver.active.utils.fill_tma_descriptor(address, *self.settings)
        self[address] = found
        return found


def current_device() -> int:
    """Of the calling thread."""
    index: int = driver.active.get_current_device()
    return index
