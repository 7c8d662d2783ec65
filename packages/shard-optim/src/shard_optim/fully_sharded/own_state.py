"""A sharded module's own ``state_dict()`` and ``load_state_dict()``, of any part of it.

They are torch's. Hooks on every module that holds sharded parameters add the origin of this rank's
part to the metadata that torch keeps beside a state dict (``_metadata``), and look at everything
that is loaded: whole parameters, of which this rank takes its shards, or this rank's own part. A
part that has lost its metadata is refused, because nothing else tells it from another rank's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shard_optim.mesh import Mesh
from shard_optim.origin import (
    ORIGIN,
    OwnPart,
    check_loaded,
    describe,
    places_of,
    refuse_part,
    say_once,
    sharded_of,
)
from shard_optim.place import flat_slice


def hook_state_dicts(root: nn.Module, ranks: Mesh, moment: Callable[[], int]) -> None:
    """Hooks the state dicts of a module and of every module in it that holds sharded parameters.

    ``moment`` gives the number of forwards that have begun, the same on every rank.
    """

    def origin(module: nn.Module) -> dict[str, Any]:
        return describe(ranks, moment(), places_of(module.named_parameters(recurse=False)))

    def add_origin(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        metadata[ORIGIN] = origin(module)
        for name in metadata[ORIGIN]["spans"] if ranks.shards.size > 1 else ():
            if type(state.get(prefix + name)) is Tensor:
                state[prefix + name] = state[prefix + name].as_subclass(OwnPart)
        if not prefix:
            say_once(module, "model", ranks)

    def before_load(module: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
        if prefix and module is not root:
            return  # a module around this one has looked already
        taken, problem, part = {}, None, False
        params = module.named_parameters(prefix.removesuffix("."), remove_duplicate=False)
        for name, param in params:
            given, found = state.get(name), sharded_of(param)
            if found is None or found.place.replicated or not isinstance(given, Tensor):
                continue
            place = found.place
            if given.shape == place.size:
                taken[name] = flat_slice(given, place.size, place.stride, *place.span)
            elif given.shape == place.form:
                part = True
            else:
                problem = problem or (
                    f"{name} must have its whole shape {tuple(place.size)}, or "
                    f"{tuple(place.form)} as this rank's shard of {ranks.shards.size}, but got "
                    f"{tuple(given.shape)}"
                )
        origins = [(metadata.get(ORIGIN), origin(module))] if part and not problem else []
        version = None if part or problem else _fingerprint(state)
        check_loaded(ranks, origins, problem=problem, version=version)
        state.update(taken)

    for each in root.modules():
        places = places_of(each.named_parameters()).values()
        if each is root or not all(place.replicated for place in places):
            vars(each)["__reduce_ex__"] = refuse_part  # for deepcopy() and pickle, as of a class
            each.register_state_dict_post_hook(add_origin)
            each.register_load_state_dict_pre_hook(before_load)


def _fingerprint(state_dict: Mapping[str, Any]) -> str:
    """The same for two ranks that load the same whole state, as far as some 256 samples show."""
    samples = [
        (name, value.detach().reshape(-1)[:: max(1, value.numel() // 256)].tolist())
        for name, value in state_dict.items()
        if isinstance(value, Tensor) and not value.is_meta
    ]
    return hashlib.sha256(repr(samples).encode()).hexdigest()[:16]
