"""A module whose parameters live in shards: ZeRO stage 3 of Rajbhandari et al. 2020.

https://arxiv.org/abs/1910.02054
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ddp_lite.transparent import TransparentWrapper, temporarily
from shard_optim.communication import Communication, PeerCopy, resolve_communication
from shard_optim.fully_sharded.checks import check_module, check_settings, device_of
from shard_optim.fully_sharded.meta import is_on_meta, materialize
from shard_optim.fully_sharded.own_state import hook_state_dicts
from shard_optim.fully_sharded.replicated import ReplicatedParameters
from shard_optim.fully_sharded.schedule import Schedule, UnitCall
from shard_optim.fully_sharded.structure import StructureWatch
from shard_optim.fully_sharded.unit import Slot, Unit
from shard_optim.fully_sharded.unit_plan import UnitPlan, Units, plan_units
from shard_optim.fully_sharded.update_in_backward import UpdateInBackward
from shard_optim.gradient_norm import check_clipping, clip_sharded_
from shard_optim.mesh import resolve_mesh
from shard_optim.origin import Sharded, refuse_part, watch_optimizers
from shard_optim.place import SHARDED, replicated_place
from shard_optim.refused_gradient import USED

_COMPILE_UNITS = (
    "units must be compiled, and before the model is wrapped, but got {} "
    "FullyShardedDataParallel. Call compile() of each block, then wrap the model."
)


class FullyShardedDataParallel(TransparentWrapper):
    """Wraps a module so that each rank holds 1/world_size of its large parameters.

    ``parameters()`` are the shards: one-dimensional, with gradients of the same shape and dtype,
    so any optimizer that treats every element alike works on them unchanged::

        model = FullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(x).backward()
        optimizer.step()

    The parameters of one *unit*, such as a Transformer block, are gathered just before they are
    needed, in forward and again in backward, while the unit before computes. Their gradients are
    averaged by one reduce-scatter per unit during backward, which ends with the shards' gradients
    in ``.grad``. Small parameters (norms, biases) stay whole on every rank; one all-reduce averages
    their gradients.

    The constructor is collective: the first rank's parameters and buffers are taken. All ranks must
    call the same units in the same order, and freeze and unfreeze the same parameters before the
    same forward. Compile units, not the model around them, and do so before.

    Args:
        module: on its device, in the dtype to update the parameters in.
        process_group: the ranks that hold a shard each: a group or a one-dimensional device mesh;
            None means the default group. A two-dimensional mesh shards over its second dimension,
            such as the GPUs of one node, and replicates over its first.
        units: the modules to gather as one each, as a list or a predicate; None finds the repeated
            blocks: children of one container that have the same type. What these do not hold, such
            as an embedding and a head, forms units of its own, one for each child of the root,
            which are gathered throughout forward, and throughout backward.
        compute_dtype: dtype that parameters are cast to before they are gathered; None for the
            parameters' own.
        cast_inputs: whether the model's floating-point inputs are cast to ``compute_dtype`` too.
            Pass False for inputs that bf16 would round, such as times and positions, and cast the
            others inside the model.
        reduce_dtype: dtype in which gradients are averaged: fp32, bf16, or None for the gradients'
            own (fp32 for fp16 gradients, which would overflow).
        reshard_after_forward: whether repeated units take turns in ``prefetch + 1`` buffers, and no
            unit is held between forward and backward. With False, every unit has a buffer, and is
            gathered once per step.
        prefetch: how many units are gathered ahead, 1 or 2.
        device: where to make parameters that are on the meta device, one unit at a time, by each
            module's ``reset_parameters()``; such a model is never whole on any rank. If the first
            rank's model has values, the others may be on the meta device: they get these.
        communication: what gathers parameters and reduce-scatters gradients of units, in place of
            the process group's own collectives: "peer-copy" for copies between the GPUs of one
            host, or an object for the group of the ranks that hold a shard each.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the module cannot be wrapped: it is already, an optimizer holds its
            parameters, ``units`` are not in it, or a parameter has no dense memory; or for other
            values that do not work.
        RuntimeError: without a process group; on every rank, if the ranks' models differ.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | dist.device_mesh.DeviceMesh | None = None,
        units: Units = None,
        compute_dtype: torch.dtype | None = None,
        cast_inputs: bool = True,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        device: torch.device | str | None = None,
        communication: Communication | PeerCopy | None = None,
    ) -> None:
        settings = {
            "compute_dtype": compute_dtype,
            "cast_inputs": cast_inputs,
            "reduce_dtype": reduce_dtype,
            "reshard_after_forward": reshard_after_forward,
            "prefetch": prefetch,
        }
        check_settings(**settings)
        check_module(module, FullyShardedDataParallel)
        super().__init__(module)
        self.compute_dtype = compute_dtype
        self._cast_inputs = cast_inputs and compute_dtype is not None
        named = dict(module.named_parameters())
        plans = plan_units(module, units)
        self.device = device_of(module, device)
        self.ranks = resolve_mesh(process_group, device=self.device, owner=type(self).__name__)
        self.process_group = self.ranks.shards.group
        communication = resolve_communication(communication, self.ranks.shards)
        self._agree(plans, settings | {"communication": type(communication).__qualname__})
        # Whoever is on the meta device gets the first rank's values, if that one has any.
        reset = bool(self.ranks.broadcast_json("the start of a model", is_on_meta(module)))
        owners: defaultdict[nn.Parameter, list[nn.Module]] = defaultdict(list)
        for each in module.modules():
            for param in each.parameters(recurse=False):
                owners[param].append(each)
        self.units = []
        for plan in plans:  # one after the other: the whole model never has memory
            readers = (m for param in plan.params for m in owners[param])
            materialize(readers, self.device, reset=reset)
            self._broadcast(zip(plan.names, plan.params, strict=True))
            self.units.append(
                Unit(
                    plan,
                    ranks=self.ranks,
                    communication=communication,
                    compute_dtype=compute_dtype,
                    reduce_dtype=reduce_dtype,
                )
            )
        materialize(module.modules(), self.device, reset=reset)
        self.slots = _assign_slots(self.units, prefetch=prefetch, reshard=reshard_after_forward)
        sharded = {id(param) for unit in self.units for param in unit.params}
        small = {name: param for name, param in named.items() if id(param) not in sharded}
        self._broadcast((*small.items(), *module.named_buffers()))
        self.replicated = ReplicatedParameters(
            list(small),
            list(small.values()),
            ranks=self.ranks,
            compute_dtype=compute_dtype,
            device=self.device,
        )
        self.schedule = Schedule(
            self.units,
            self.replicated,
            ranks=self.ranks,
            device=self.device,
            prefetch=prefetch,
            reshard=reshard_after_forward,
        )
        self._calls = self._replace_calls(plans)
        self._structure = StructureWatch(module, self.schedule.history, self.ranks.shards)
        self._say_where_parameters_lie(small)
        schedule = self.schedule  # which does not hold this wrapper
        hook_state_dicts(module, self.ranks, lambda: schedule.generation)
        self.pass_on()

    # --- training ----------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module; gathers its units in turn.

        Raises:
            RuntimeError: if a unit was compiled after wrapping, a parameter was moved, or the last
                backward was not finished.
            ModelMismatchError: if a parameter was added to the module or replaced in it.
            StepMismatchError: on gloo on every rank, if another rank does something else.
            CollectiveError: if a peer died or timed out.
        """
        return self._run(self.module, inputs, kwargs)

    def _run(self, call: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
        callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
        if torch.compiler.is_compiling() or callback() not in (None, False):
            raise RuntimeError(_COMPILE_UNITS.format("torch.compile() around the"))
        for unit_module, unit_call in self._calls.items():
            if unit_module._compiled_call_impl is not unit_call:
                raise RuntimeError(
                    "units must be compiled before the model is wrapped, but a "
                    f"{type(unit_module).__name__} was compiled afterwards. Call compile() first, "
                    "then FullyShardedDataParallel."
                )
        self._structure.check(self.schedule.generation + 1)
        if self._cast_inputs:
            inputs, kwargs = self._cast(inputs), self._cast(kwargs)
        return self.schedule.call_outermost(call, inputs, kwargs)

    def _cast(self, inputs: Any) -> Any:
        """The floating-point tensors in nested containers and data classes in ``compute_dtype``."""

        def cast(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return leaf.to(self.compute_dtype) if leaf.is_floating_point() else leaf
            if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
                result = copy.copy(leaf)
                for field in dataclasses.fields(leaf):
                    value = self._cast(getattr(leaf, field.name))
                    object.__setattr__(result, field.name, value)  # also of frozen ones
                return result
            return leaf

        return pytree.tree_map(cast, inputs)

    def register_forward_method(self, name: str) -> None:
        """Makes a method of the module train as ``forward`` does, called through this wrapper.

        Without it a method that reads parameters of the module itself finds shards.

        Args:
            name: of the method, such as ``"training_loss"``. Every rank calls it alike.

        Raises:
            ValueError: if the module has no such method.
        """
        method = getattr(self.module, name, None)
        if not callable(method):
            raise ValueError(
                f"name must be a method of the wrapped {type(self.module).__name__}, but got "
                f"{name!r}. Pass the name of a method beside forward."
            )
        root = self._calls.get(self.module)
        call: Callable[..., Any] = method
        if root is not None:
            call = UnitCall(schedule=self.schedule, call=method, units=root.units)
        self.__dict__[name] = lambda *inputs, **kwargs: self._run(call, inputs, kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Ends the last backward, after which every ``.grad`` is this rank's averaged shard.

        Backward does this itself at its end, and then this call changes nothing. It is needed
        only if the model's outputs hide their tensors from torch's pytree utilities.

        Raises:
            CollectiveError: if a peer died or timed out.
        """
        self.schedule.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it, backward keeps whole gradients on this rank and communicates none.

        For gradient accumulation at the price of memory: the first backward outside it reduces
        the sum. Until then ``.grad`` refuses to be used; ``zero_grad()`` drops what was kept.
        Without it, every backward adds to the shards in ``.grad``.
        """
        return temporarily(self.schedule, "paused", True)

    def update_in_backward(self, optimizer: Optimizer) -> None:
        """From now on, ``optimizer`` updates each unit as soon as its gradients are averaged.

        On CUDA it does so beside the rest of backward, and the gradient shards of all units never
        live at once. Weights are bit for bit those without it, and the loop stays as it is::

            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            model.update_in_backward(optimizer)  # once, on every rank
            for tokens in batches:
                optimizer.zero_grad()
                model(tokens).mean().backward()  # updates units
                optimizer.step()  # updates small parameters, and those without a gradient here

        Set hyperparameters before backward; save, evaluate and step schedulers after ``step()``. To
        accumulate gradients, run all backward passes but the last under :meth:`no_sync`. Hooks on
        gradients run before their unit is updated, and step hooks of the optimizer once a unit.

        Args:
            optimizer: holds every trainable parameter of the units, and treats elements alike.

        Raises:
            TypeError: if it is no ``torch.optim.Optimizer``, or a ``ShardedOptimizer``.
            ValueError: if it lacks a parameter, or looks beyond one element, as LBFGS does.
            RuntimeError: at the second call. Later: in clipping and scaling; in a backward without
                ``step()`` and ``zero_grad()`` after the one before, or with ``create_graph=True``;
                for a gradient that arrives after its parameter's update.
        """
        if self.schedule.updates is not None:
            raise RuntimeError(
                "update_in_backward() must be called once, with one optimizer for all units, but "
                "was called before. Wrap the model anew."
            )
        self.schedule.updates = UpdateInBackward(optimizer, self.units, self.device)
        self.schedule.history.note(f"called update_in_backward({type(optimizer).__name__})")

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` over the whole gradients. Every rank calls it.

        Arguments, result and errors are those of ``ShardedOptimizer.clip_grad_norm_``; after
        ``update_in_backward`` it raises a RuntimeError.
        """
        if self.schedule.updates is not None:
            raise RuntimeError(USED.format("clip_grad_norm_"))
        check_clipping(max_norm, norm_type)
        self.schedule.finish()
        return clip_sharded_(
            [p.grad for unit in self.units for p in unit.params if p.grad is not None],
            max_norm,
            norm_type=norm_type,
            ranks=self.ranks.shards,
            device=self.device,
            replicated=[p.grad for p in self.replicated.params if p.grad is not None],
        )

    # --- names and values --------------------------------------------------------------------

    @torch.no_grad()
    def full_parameters(self) -> dict[str, Tensor]:
        """All parameters, whole, as new tensors under the module's own names.

        A collective call: every rank makes it and receives them. A parameter that has several names
        is listed under the first, as by ``named_parameters()``.

        Raises:
            CollectiveError: if a peer died or timed out.
        """
        location_of = {id(p): (u, at) for u in self.units for at, p in enumerate(u.params)}
        found = {}
        for name, param in self.module.named_parameters():
            unit, position = location_of.get(id(param), (None, 0))
            found[name] = param.clone() if unit is None else unit.whole_parameter(position)
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads whole parameters, of which this rank takes its shards, or this rank's own part.

        A collective call, in which the ranks compare what each of them loads. Only slices are
        copied to the device, so a file opened with ``torch.load(path, mmap=True)`` is read one
        tensor at a time.

        Args:
            state_dict: the same whole one on every rank, or what ``state_dict()`` returned on
                this rank of as many.
            strict: as for ``torch.nn.Module``.
            assign: must be False.

        Raises:
            ValueError: on every rank, if one of them was given another rank's part, parts of
                different moments, or other shapes; also for ``assign=True``. Nothing has changed.
            CollectiveError: if a peer died or timed out.
        """
        if assign:
            raise ValueError(
                "assign must be False, because parameters must stay in the memory that is "
                "gathered, but got True. Leave it out: values are copied."
            )
        return super().load_state_dict(state_dict, strict)

    # --- construction ------------------------------------------------------------------------

    def _agree(self, plans: list[UnitPlan], settings: Mapping[str, Any]) -> None:
        """Compares all that decides which collectives are made, in which order and size."""
        unit_of = {id(param): plan.name for plan in plans for param in plan.params}
        lines = [f"{name} {value}" for name, value in settings.items()]
        lines += [
            f"unit {plan.name!r}, {'one of several alike' if plan.repeated else 'alone'}"
            for plan in plans
        ]
        lines += [
            f"parameter {name} {tuple(param.shape)} {param.dtype} {self.device.type} "
            f"strides {param.stride()} {'trainable' if param.requires_grad else 'frozen'}, "
            + (f"in unit {unit_of[id(param)]!r}" if id(param) in unit_of else "replicated")
            for name, param in self.module.named_parameters()
        ]
        buffers = self.module.named_buffers()
        lines += [f"buffer {name} {tuple(each.shape)} {each.dtype}" for name, each in buffers]
        self.ranks.agree(
            lines,
            must="wrap the same model with the same settings",
            remedy="Build the model from the same configuration on every rank.",
        )

    def _say_where_parameters_lie(self, small: Mapping[str, nn.Parameter]) -> None:
        places = [(param, replicated_place(name, param)) for name, param in small.items()]
        for unit in self.units:
            places += zip(unit.params, unit.places, strict=True)
        for param, place in places:
            where = Sharded(place=place, ranks=self.ranks, history=self.schedule.history)
            vars(param).update({SHARDED: where, "averaged_by": type(self).__name__})
            if not place.replicated and self.ranks.shards.size > 1:
                names = ("__create_write_items__", "__create_chunk_list__")  # which OwnPart has
                vars(param).update(dict.fromkeys(names, refuse_part))
        watch_optimizers()

    @torch.no_grad()
    def _broadcast(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Makes all ranks' tensors equal to the first rank's."""
        for name, tensor in tensors:
            self.ranks.broadcast(f"the broadcast of {name}", tensor.detach())

    def _replace_calls(self, plans: list[UnitPlan]) -> dict[nn.Module, UnitCall]:
        """Replaces the units' calls, as ``module.compile()`` does, instead of using hooks.

        A hook would become part of a compiled module's graph.
        """
        calls: dict[nn.Module, UnitCall] = {}
        for unit, plan in zip(self.units, plans, strict=True):
            for reader in plan.readers:
                if reader not in calls:
                    own = reader._compiled_call_impl or reader._call_impl
                    calls[reader] = UnitCall(schedule=self.schedule, call=own, units=[])
                    # Left out of copies and pickles by torch.
                    reader.__dict__["_compiled_call_impl"] = calls[reader]
                calls[reader].units.append(unit)
        return calls

    def compile(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError: units are compiled, before they are wrapped."""
        raise RuntimeError(_COMPILE_UNITS.format("compile() of the"))

    __reduce_ex__ = refuse_part  # type: ignore[assignment]

    def _apply(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            "a model must be moved or cast before it is wrapped, but got to(), half() or the like "
            "afterwards. Call it on the module, then wrap."
        )


def _assign_slots(units: list[Unit], *, prefetch: int, reshard: bool) -> list[Slot]:
    """Gives every unit its buffer: repeated ones take turns, the others have their own."""
    rings: dict[Any, list[Unit]] = {}
    for unit in units:
        rings.setdefault(unit.gather_dtype if unit.repeated else unit, []).append(unit)
    slots = []
    for ring in rings.values():
        count = min(prefetch + 1, len(ring)) if reshard else len(ring)
        for first in range(count):
            takers = ring[first::count]
            largest = max(unit.whole_numel for unit in takers)
            slots.append(Slot(largest, ring[0].gather_dtype, ring[0].device))
            for unit in takers:
                unit.use(slots[-1])
            if reshard:
                slots[-1].free()
    return slots
