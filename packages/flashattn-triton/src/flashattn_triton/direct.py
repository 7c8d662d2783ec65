# mypy: disable-error-code="attr-defined"
"""Starting compiled kernels without what Triton does in Python at every launch.

That walks over all arguments, expands each tensor descriptor to an encoded one with its shape and
strides, and describes the launch to profilers' hooks, which takes the host longer than a small
kernel takes the GPU. Here arguments are laid out once, descriptors are encoded once per address,
and the compiled launcher below is called. What is used of it is private to Triton 3.6, so under
any other version, or on another vendor's GPUs, :func:`starter` finds no way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

VERSION = "3.6."
# Encoded descriptors that one argument keeps: more than a deep model has layers.
_KEPT = 256


class Tiles(Protocol):
    """A descriptor without its address."""

    @property
    def shape(self) -> Sequence[int]:
        """Of the tensor."""

    @property
    def strides(self) -> Sequence[int]:
        """Of the tensor, in elements."""


# What takes a tensor: a descriptor, a pointer, or nothing (the tensor is None at every launch).
Parameter = Tiles | Literal["pointer"] | None


def starter(
    compiled: Any, grid: tuple[int, int, int], parameters: Sequence[Parameter], rest: Sequence[Any]
) -> Callable[[Sequence[int]], None] | None:
    """Starts a compiled kernel on the current stream, given addresses; None if it cannot be done.

    Args:
        compiled: what launching a ``triton.jit`` function returned, on the current device.
        grid: how many programs there are.
        parameters: the kernel's first ones; one address is given for each that is not None.
        rest: all arguments after those, compile-time ones included.
    """
    import triton

    if not triton.__version__.startswith(VERSION):
        return None
    from triton import knobs
    from triton.runtime.driver import driver

    launcher = compiled.run
    # Scratch memory is allocated for each launch; none of these kernels wants any.
    if getattr(launcher, "global_scratch_size", 1) or getattr(launcher, "profile_scratch_size", 1):
        return None
    launch = launcher.launch
    encodings: Sequence[Mapping[str, Any] | None] = ()
    if any(x not in ("pointer", None) for x in parameters):
        # This function expands descriptors, and then calls what is wanted here.
        expanding = inspect.getclosurevars(launch).nonlocals
        launch, encodings = expanding["launcher"], expanding["tensordesc_meta"]
        if None in encodings:  # not for the copy engine
            return None
    device = driver.active.get_current_device()
    current_stream = driver.active.get_current_stream
    runtime = knobs.runtime
    # Grid, stream, function, flags, two scratch buffers, metadata, launch metadata, two hooks.
    flags = (launcher.launch_cooperative_grid, launcher.launch_pdl)
    template = [*grid, None, compiled.function, *flags, None, None, compiled.packed_metadata]
    template += [None, None, None]
    remaining = iter(encodings)
    slots: list[tuple[int, _Encoded | None]] = []
    for parameter in parameters:
        place = len(template)
        template.append(None)
        if parameter == "pointer":
            slots.append((place, None))
        elif parameter is not None:
            slots.append((place, _Encoded(parameter, next(remaining))))
            template += [*parameter.shape, *parameter.strides]
    template += rest

    def start(addresses: Sequence[int]) -> None:
        arguments = template.copy()
        for (place, encoded), address in zip(slots, addresses, strict=True):
            arguments[place] = address if encoded is None else encoded[address]
        arguments[3] = stream = current_stream(device)
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            seen = compiled.launch_metadata(grid, stream)
            arguments[10:13] = seen, runtime.launch_enter_hook, runtime.launch_exit_hook
        launch(*arguments)

    return start


class _Encoded(dict[int, Any]):
    """Descriptors of one parameter as the copy engine reads them, by address."""

    def __init__(self, tiles: Tiles, encoding: Mapping[str, Any] | None) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        assert encoding is not None
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
        found = driver.active.utils.fill_tma_descriptor(address, *self.settings)
        self[address] = found
        return found
