"""Checks of arguments, before anything is changed or communicated."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ddp_lite.grad_hooks import refuse_averaged_parameters
from shard_optim.fully_sharded.meta import is_on_meta
from shard_optim.fully_sharded.schedule import UnitCall
from shard_optim.mesh import Mesh
from shard_optim.place import check_layout

_REDUCE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float64)


def check_settings(
    compute_dtype: Any,
    reduce_dtype: Any,
    reshard_after_forward: Any,
    prefetch: Any,
    cast_inputs: Any,
) -> None:
    """Raises TypeError or ValueError for arguments of the wrapper that do not work."""
    for name, dtype in (("compute_dtype", compute_dtype), ("reduce_dtype", reduce_dtype)):
        if not isinstance(dtype, (torch.dtype, type(None))):
            raise TypeError(
                f"{name} must be a torch.dtype or None, but got {dtype!r}. Pass torch.bfloat16."
            )
    if compute_dtype is not None and not compute_dtype.is_floating_point:
        raise ValueError(
            f"compute_dtype must be a floating-point dtype, but got {compute_dtype}. Pass "
            "torch.bfloat16."
        )
    if reduce_dtype not in _REDUCE_DTYPES:
        raise ValueError(
            "reduce_dtype must be None, torch.float32, torch.bfloat16 or torch.float64, but "
            f"got {reduce_dtype}. Sums of fp16 gradients overflow. Pass torch.float32."
        )
    flags = (("reshard_after_forward", reshard_after_forward), ("cast_inputs", cast_inputs))
    for name, value in flags:
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, but got {value!r}. Leave it out.")
    if prefetch is True or prefetch not in (1, 2):
        raise ValueError(f"prefetch must be 1 or 2, but got {prefetch!r}. Pass prefetch=1.")


def check_folder(folder: Any) -> None:
    """Raises TypeError for what is not a path."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(
            f"folder must be a path, but got {folder!r}. Pass the same one on every rank."
        )


def check_background_group(group: Any, ranks: Mesh) -> None:
    """Raises TypeError for no process group, ValueError for one that cannot save."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"background_group must be a process group, but got {group!r}. Pass "
            'torch.distributed.new_group(backend="gloo"), called on every rank.'
        )
    if (held := dist.get_process_group_ranks(group)) != ranks.everyone:
        raise ValueError(
            "background_group must hold the ranks of the model's group or mesh, in their order "
            f"({ranks.everyone}), but got {held}. Make a new gloo group of those ranks."
        )
    if any(group is level.group for level in ranks.levels):
        raise ValueError(
            "background_group must be a group that nothing else uses, but got the model's own. "
            'Pass torch.distributed.new_group(backend="gloo").'
        )


def check_module(module: nn.Module, wrapper: type[nn.Module]) -> None:
    """Raises TypeError or ValueError for what cannot be wrapped."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, but got {type(module).__name__}. Pass the model."
        )
    for name, child in module.named_modules():
        known = isinstance(child, (wrapper, DistributedDataParallel))
        if known or isinstance(child._compiled_call_impl, UnitCall):
            raise ValueError(
                f"module must not be wrapped already, but got {name or 'the root'!r} averaged or "
                "sharded. Wrap the outermost module only, and once."
            )
    refuse_averaged_parameters(module)
    for name, param in module.named_parameters():
        if is_lazy(param):
            raise ValueError(
                f"parameters must have their shapes, but {name} has none yet. Call the module once "
                "before it is wrapped."
            )
        if param.is_complex():
            raise ValueError(
                f"parameters must be floating-point, or frozen integers, but got {name} of "
                f"{param.dtype}. Register it as a buffer."
            )
    seen: dict[int, str] = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        check_layout(tensor, name, seen if isinstance(tensor, nn.Parameter) else {})
    owned = {id(param) for param in module.parameters()}
    found = _optimizers_of(owned)
    if found:
        gc.collect()  # an optimizer that was dropped may wait for the garbage collector
        found = _optimizers_of(owned)
    if found:
        raise ValueError(
            "module must be wrapped before an optimizer is made for it, but got parameters that "
            f"{found[0]} holds. Make the optimizer from the wrapper's parameters()."
        )


def device_of(module: nn.Module, device: torch.device | str | None) -> torch.device:
    """Where the module is, or, if it is on the meta device, where it is to be made.

    Raises TypeError or ValueError for several devices, or another ``device`` than the module's.
    """
    if not isinstance(device, (torch.device, str, type(None))):
        raise TypeError(
            f"device must be a torch.device or a string, but got {device!r}. Pass the device that "
            'this rank computes on, such as "cuda:0".'
        )
    wanted = None if device is None else torch.device(device)
    found = {
        tensor.device: name for name, tensor in module.named_parameters() if not tensor.is_meta
    }
    if len(found) > 1:
        (one, first), (other, second), *_ = found.items()
        raise ValueError(
            f"parameters must be on one device, but {first} is on {one} and {second} on {other}. "
            "Call the module's to()."
        )
    if is_on_meta(module):
        if wanted is None:
            raise ValueError(
                "device must be given for a module on the meta device, but got None. Pass the "
                "device that this rank computes on."
            )
        return wanted
    here = next(iter(found), torch.device("cpu") if wanted is None else wanted)
    if wanted is not None and (wanted.type != here.type or wanted.index not in (None, here.index)):
        raise ValueError(
            f"device must be where the module is, which is {here}, but got {wanted}. Move the "
            "module before it is wrapped, and leave device out."
        )
    return here


def _optimizers_of(params: set[int]) -> list[str]:
    """Names of the classes of living optimizers that hold any of these parameters."""
    return [
        type(thing).__name__
        for thing in gc.get_objects()
        if issubclass(type(thing), Optimizer)
        and any(id(param) in params for group in thing.param_groups for param in group["params"])
    ]
