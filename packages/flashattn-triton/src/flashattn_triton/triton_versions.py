# mypy: disable-error-code="attr-defined"
"""The only file that knows private interfaces of Triton, and in which version each has which form.

Launching. Triton walks over all arguments of every launch in Python, expands each tensor descriptor
to an encoded one with its shape and strides, and describes the launch to profilers' hooks, which
takes the host longer than a small kernel takes the GPU. :func:`fast_launcher` lays arguments out
once, encodes descriptors once per address, and calls the compiled launcher below all that.

- Triton 3.6 compiles one launcher for each kernel, which takes the kernel's arguments in one row
  behind scratch buffers, metadata and hooks. It is found in the function that expands descriptors.
- Triton 3.7 to 3.9 have one launcher for all kernels. It takes metadata and hooks before the
  scratch buffers, and then two descriptions of the arguments and the arguments as a sequence.
- What encodes a descriptor is called ``fill_tma_descriptor``, from 3.7 on
  ``fill_tma_descriptor_tiled``.

The Hopper tier. Gluon, its language, renamed copies by the TMA (tensor memory accelerator) in 3.8:
:func:`tma_copies`. Compilers differ in where they need help: :func:`rounds_in_pairs`,
:func:`hopper_options`.

Under a version that is not in :data:`TESTED`, or on another vendor's GPUs, the portable tier is
launched by Triton itself, and the Hopper tier is not used: :func:`refusal` says why.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Private interfaces are known, and the Hopper kernels compiled without spills in their main loops.
TESTED = ((3, 6), (3, 7), (3, 8), (3, 9))
KNOWN = "Triton " + ", ".join(f"{major}.{minor}" for major, minor in TESTED)
# Options of every compilation. Products and sums of the kernels are meant to be fused: Triton 3.9
# warns where nobody says so, and later versions will not fuse them by themselves.
COMPILE_OPTIONS = {"enable_fp_fusion": True}
# Encoded descriptors that one argument keeps: more than a deep model has layers.
_KEPT = 256


def installed() -> tuple[int, int] | None:
    """Major and minor version of Triton; None where there is none."""
    try:
        version: str = importlib.import_module("triton").__version__
    except ImportError:
        return None
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


@functools.cache
def refusal() -> str | None:
    """Why private interfaces of the installed Triton are not used; None if they are known."""
    version = installed()
    if version is None:
        return "Triton is not installed"
    if version not in TESTED:
        there = importlib.import_module("triton").__version__
        return f"it needs {KNOWN}, and Triton {there} is installed"
    return None


# ---- launching -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileView:
    """How the TMA sees tensors of one shape: all of a descriptor but the address.

    Heads and batch keep dimensions of their own, so that a tile past the last row reads zeros, and
    not the next head. ``layout``: that of tiles in shared memory, which Gluon's kernels want.
    """

    shape: Sequence[int]
    strides: Sequence[int]
    block: Sequence[int]
    dtype: torch.dtype
    layout: Any = None

    def of(self, base: Any) -> Any:
        """The descriptor of ``base``, which has a dtype, and an address if something is launched.

        A tensor must have this shape and these strides (:func:`~.launch.can_use_tma`).
        """
        shape, strides, block = list(self.shape), list(self.strides), list(self.block)
        if self.layout is None:
            from triton.tools.tensor_descriptor import TensorDescriptor

            return TensorDescriptor(base, shape, strides, block)
        from triton.experimental.gluon.nvidia import hopper

        return hopper.TensorDescriptor(base, shape, strides, block, self.layout)


# What a kernel takes in place of a tensor: tiles, a pointer to elements of a dtype, or nothing.
Parameter = TileView | torch.dtype | None
# Starts a compiled kernel: stream; launch metadata and two hooks; the kernel's arguments.
_Launch = Callable[[int, Any, Any, Any, list[Any]], None]


@dataclass(frozen=True)
class Pointer:
    """What Triton looks at of a tensor that a kernel takes as a pointer: dtype and address."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """The address, in bytes."""
        return self.address


def fast_launcher(
    compiled: Any,
    grid: tuple[int, int, int],
    parameters: Mapping[str, Parameter],
    rest: Sequence[Any],
) -> Callable[[Mapping[str, int]], None] | None:
    """Starts a compiled kernel on the current stream, given addresses; None if it cannot be done.

    Args:
        compiled: what launching a ``triton.jit`` function returned, on the current device.
        grid: how many programs there are.
        parameters: the kernel's first ones, by name, in its order. By the same names, addresses
            are given for those that are not None.
        rest: all arguments after those, compile-time ones included.
    """
    if refusal() is not None:
        return None
    from triton import knobs
    from triton.runtime.driver import driver

    launcher = compiled.run
    if compiled.function is None:
        # Loading it failed before, for lack of memory, say. Triton would not try again by itself.
        compiled._init_handles()
    # Scratch memory is allocated for each launch; none of these kernels wants any by itself.
    if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1):
        return None
    described = [x for x in parameters.values() if isinstance(x, TileView)]
    encodings = list(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    if len(encodings) != len(described) or None in encodings:  # not for the TMA
        return None
    device = driver.active.get_current_device()
    current_stream = driver.active.get_current_stream
    runtime = knobs.runtime
    template: list[Any] = []
    remaining = iter(encodings)
    pointers: list[tuple[str, int]] = []
    descriptors: list[tuple[str, int, _Encoded]] = []
    for name, parameter in parameters.items():
        position = len(template)
        template.append(None)
        if isinstance(parameter, torch.dtype):
            pointers.append((name, position))
        elif parameter is not None:
            descriptors.append((name, position, _Encoded(parameter, next(remaining))))
            template += [*parameter.shape, *parameter.strides]
    template += rest
    launch = _launch(compiled, grid)

    def start(addresses: Mapping[str, int]) -> None:
        arguments = template.copy()
        for name, position in pointers:
            arguments[position] = addresses[name]
        for name, position, encoded in descriptors:
            arguments[position] = encoded[addresses[name]]
        stream = current_stream(device)
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if enter.calls or leave.calls:
            launch(stream, compiled.launch_metadata(grid, stream), enter, leave, arguments)
        else:
            launch(stream, None, None, None, arguments)

    return start


def _launch(compiled: Any, grid: tuple[int, int, int]) -> _Launch:
    """The launcher of one kernel, or from Triton 3.7 on of all kernels."""
    from triton.runtime.driver import driver

    launcher = compiled.run
    x, y, z = grid
    handle, metadata = compiled.function, compiled.packed_metadata
    cooperative, dependent = launcher.launch_cooperative_grid, launcher.launch_pdl
    if installed() == (3, 6):
        own = launcher.launch
        if inspect.isfunction(own):  # it expands descriptors, and then calls what is wanted here
            own = inspect.getclosurevars(own).nonlocals["launcher"]

        return lambda stream, seen, enter, leave, args: own(
            x, y, z, stream, handle, cooperative, dependent,
            None, None, metadata, seen, enter, leave, *args,
        )  # fmt: skip
    function = driver.active.utils.launch
    annotations, signature = launcher.arg_annotations, launcher.kernel_signature
    return lambda stream, seen, enter, leave, args: function(
        x, y, z, stream, handle, cooperative, dependent,
        metadata, seen, enter, leave, None, None, annotations, signature, args,
    )  # fmt: skip


class _Encoded(dict[int, Any]):
    """Descriptors of one parameter as the TMA reads them, by address."""

    def __init__(self, tiles: TileView, encoding: Mapping[str, Any]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        self.settings = (
            encoding["swizzle"],
            encoding["elem_size"],
            TMA_DTYPE_DEVICE_TO_HOST[encoding["elem_type"]],
            encoding["block_size"],
            list(tiles.shape),
            list(tiles.strides),
            0,  # what lies outside is read as zeros
        )

    def __missing__(self, address: int) -> Any:
        from triton.runtime.driver import driver

        if len(self) >= _KEPT:
            self.clear()
        utils = driver.active.utils
        encode = (
            utils.fill_tma_descriptor if installed() == (3, 6) else utils.fill_tma_descriptor_tiled
        )
        found = self[address] = encode(address, *self.settings)
        return found


# ---- the interpreter -----------------------------------------------------------------------------


def tensor_at(kernel: Any, address: int, dtype: torch.dtype) -> Any:
    """What Triton's launcher, or its interpreter, takes for the tensor at an address.

    The interpreter reads memory by address, but asks a tensor for its address, and copies what it
    believes to be the tensor: here one element onto itself.
    """
    from triton import JITFunction

    if isinstance(kernel, JITFunction):
        return Pointer(dtype, address)
    if address == 0:  # as of tensors without elements
        return torch.empty(0, dtype=dtype)
    element = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(element, dtype=dtype)


def integer_of_interpreter() -> Any:
    """A function for kernels: the integer in one of the interpreter's scalars, which are arrays."""
    from triton import constexpr_function  # because kernels may not name other Python functions

    @constexpr_function
    def integer_of(x: Any) -> int:
        value: int = x.handle.data.item()
        return value

    return integer_of


# ---- Gluon ---------------------------------------------------------------------------------------


def tma_copies() -> tuple[Any, Any]:
    """Gluon's operations that copy a tile: from global to shared memory, and back."""
    from triton.experimental.gluon.language.nvidia.hopper import tma

    if (installed() or (0, 0)) < (3, 8):
        return tma.async_copy_global_to_shared, tma.async_copy_shared_to_global
    return tma.async_load, tma.async_store


def views_are_public() -> bool:
    """Whether shared memory's view as another shape has a public name, as from Triton 3.9 on."""
    from triton.experimental.gluon.language import _core

    return hasattr(_core.shared_memory_descriptor, "reinterpret")


def rounds_in_pairs() -> bool:
    """Whether numbers rounded to a half type stay in pairs, two in a register, by themselves.

    Triton 3.8 rounds them one by one, and what ptxas then combines in the forward loop of the
    Hopper tier costs 32 more instructions a step and registers that are not there.
    """
    return installed() != (3, 8)


def hopper_options(few_registers: bool = False) -> dict[str, Any]:
    """Options of compiling the Hopper tier's kernels, besides :data:`COMPILE_OPTIONS`.

    Triton 3.9 assembles for sm_90 with ptxas 13.4, the versions before with 12.8 and 12.9. At its
    usual level of register usage the newer one believes that the backward kernels' products in
    flight need more registers than there are, and runs them one by one (its warning C7512). Triton
    also lowers the level of register allocation for all kernels, because of an error in ptxas that
    it does not name; at the level that ptxas takes by itself the forward kernels spill nothing in
    their loops and much less around them, and the tests on a GPU pass.

    ``few_registers``: for the backward kernels. Triton 3.9 computes the addresses of all operands
    of several products before the first product. That is more than a warp's uniform registers
    hold, so ptxas keeps addresses in registers of each thread, and spills others. With Triton's
    option ``sched4reg`` an address is computed where it is needed. Forward kernels have fewer
    operands, and get longer with that option.
    """
    if installed() != (3, 9):
        return {}
    options: dict[str, Any] = {"ptx_options": "--register-usage-level=3 --regAllocOptLevel=5"}
    if few_registers:
        options["sched4reg"] = True
    return options
