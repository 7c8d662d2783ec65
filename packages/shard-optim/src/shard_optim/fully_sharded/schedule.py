"""When each unit is gathered, computed with, freed and reduced: the order of one training step.

    forward     each unit: its gather has been launched before -> wait -> launch the next unit's
                gather -> compute -> its buffer may be overwritten
    the turn    if units are resharded, all buffers are freed: activations and the loss need most
                memory now
    backward    the same in reverse order; as soon as the last gradient of a unit has been
                accumulated, launch its reduce-scatter
    the end     reduce what is left, average the small parameters' gradients, wait, and put the
                shards and their gradients back into the parameters; free the buffers again

A collective waits for all kernels that were enqueued before it. So a gather launched just before
unit i's kernels may overwrite what unit i-1 read, and needs no further synchronisation. The host
never waits for the device.

All ranks launch the same collectives in the same order: gathers in the order of the calls, which
must be equal on all ranks, and reductions in the reverse order of the units' first calls, with
zeros for what a rank has no gradient for.
"""

from __future__ import annotations

import dataclasses
import numbers
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack
from torch.utils import _pytree as pytree

from ddp_lite.grad_hooks import tensors_in
from shard_optim.communication import CollectiveError
from shard_optim.fully_sharded.deferred_hooks import defer, run_deferred
from shard_optim.fully_sharded.replicated import ReplicatedParameters
from shard_optim.fully_sharded.structure import agree_on_trainable
from shard_optim.fully_sharded.unit import Unit, UnitReduction
from shard_optim.fully_sharded.update_in_backward import UpdateInBackward
from shard_optim.history import History
from shard_optim.mesh import Mesh

_requires_grad = attrgetter("requires_grad")

# Reductions under way, each of which holds the whole gradients of one unit.
MAX_REDUCTIONS = 2

_SHARDS_OUTSIDE = (
    "Note: a sharded parameter is whole only while its unit's module is called, and otherwise this "
    "rank's one-dimensional shard. If the error comes from another module that reads such a "
    "parameter, pass units= such that the module that reads it, or one around both, is the unit."
)


@dataclasses.dataclass(eq=False, kw_only=True)
class UnitCall:
    """Takes the place of a module's call: has its units gathered, then calls the module."""

    schedule: Schedule  # what decides
    call: Callable[..., Any]  # the module's own call, compiled or not
    units: list[Unit]  # whose parameters it reads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module with whole parameters."""
        return self.schedule.call_unit(self, args, kwargs)

    def on_output_gradient(self, _grad: Tensor) -> None:
        """Backward is about to need the parameters again."""
        self.schedule.before_backward_of(self.units)


class Schedule:
    """The state of one training step of one model, whose units know their slots."""

    def __init__(
        self,
        units: Sequence[Unit],
        replicated: ReplicatedParameters,
        *,
        ranks: Mesh,
        device: torch.device,
        prefetch: int,
        reshard: bool,
    ) -> None:
        self.units, self.replicated = list(units), replicated
        self.paused = False  # whether backward passes keep whole gradients instead of reducing them
        self.updates: UpdateInBackward | None = None  # what updates units during backward
        self._prefetch, self._reshard = prefetch, reshard
        self._slots = list(dict.fromkeys(unit.slot for unit in units))
        self.generation = 0  # number of forwards that have begun
        self._number = {unit: number for number, unit in enumerate(units)}
        self._ranks, self._device = ranks, device
        self._holders: tuple[Unit | ReplicatedParameters, ...] = (*units, replicated)
        self._params = [param for holder in self._holders for param in holder.params]
        self._names = [name for holder in self._holders for name in holder.names]
        self._trainable = list(map(_requires_grad, self._params))  # the same on all ranks
        self._order_digest = 0  # of all gathers and reductions since the last exchange
        self.history = History()  # of what this rank does to the model
        self._in_forward = False
        self._expect_order(units)
        self._called: dict[Unit, None] = {}  # in this forward, in order of first calls
        self._backward = False  # has begun and not ended
        self._end_is_queued = False
        self._queue: list[Unit] = []  # units to reduce, in order
        self._next = 0
        self._reductions: deque[UnitReduction] = deque()
        self._present: dict[Unit, set[int]] = {}

    # --- forward -----------------------------------------------------------------------------

    def call_outermost(
        self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """A whole forward. Afterwards all parameters are at rest, whatever happened."""
        if self._in_forward:
            return call(*args, **kwargs)
        if _in_backward():  # recomputation of a checkpoint around the whole model
            outputs = call(*args, **kwargs)
            _hook(outputs, self._on_output_gradient)
            return outputs
        if any(level.key() != TransformType.Vmap for level in get_interpreter_stack() or ()):
            raise RuntimeError(
                "derivatives must be autograd's, which gathers parameters again, but got a call in "
                "a derivative of torch.func. Call backward() or torch.autograd.grad(), or "
                "differentiate a module that is not sharded."
            )
        self._recover()
        self.generation += 1
        for ranks in self._ranks.levels:
            ranks.step = self.generation
        self._called.clear()
        self._in_forward = True
        self.replicated.refresh()
        self.replicated.materialize()
        try:
            outputs = call(*args, **kwargs)
        except CollectiveError:
            raise
        except Exception as error:
            if self.units:
                error.add_note(_SHARDS_OUTSIDE)
            raise
        finally:
            self._in_forward = False
            for unit in self.units:
                unit.uses = 0
            self._rest()
            if self._called:
                self._expect_order(
                    [*self._called, *(u for u in self.units if u not in self._called)]
                )
        _hook(outputs, self._on_output_gradient)
        self._free_buffers()
        return outputs

    def call_unit(self, call: UnitCall, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """One call of a module that reads units."""
        if _in_backward():  # recomputation of a checkpoint: backward's own order of gathers holds
            for unit in call.units:
                self._prepare_backward(unit)
            outputs = call.call(*args, **kwargs)
        elif not self._in_forward:
            return self.call_outermost(call, args, kwargs)
        else:
            for unit in call.units:
                self._called[unit] = None
                unit.expected = len(unit.trainable_positions())
                unit.arrived.clear()
                if unit.expected != len(unit.hooked):
                    self._hook_gradients(unit)
                self._gather(unit)
                unit.uses += 1
            for unit in call.units:
                unit.slot.wait()
                unit.materialize()
            self._gather_ahead(self._index_of[call.units[-1]], 1)
            try:
                outputs = call.call(*args, **kwargs)
            finally:
                for unit in call.units:
                    unit.uses -= 1
                    if unit.uses <= 0:
                        unit.rest()
        if not _hook(outputs, call.on_output_gradient) and torch.is_grad_enabled():
            _check_visible(outputs, call, (args, kwargs))
        return outputs

    def _expect_order(self, units: Sequence[Unit]) -> None:
        """Units are gathered ahead in this order: that of the last forward."""
        self._order = list(units)
        self._index_of = {unit: index for index, unit in enumerate(units)}

    def _gather(self, unit: Unit) -> None:
        """Launches the gather of the unit's present values, unless it has been launched."""
        if not unit.gathered(self.generation):
            owner = unit.slot.owner
            if owner is not None and owner is not unit and owner.uses > 0:
                raise RuntimeError(
                    "units that share buffers must not run inside each other, but "
                    f"{unit.name!r} was called by {owner.name!r}. Pass "
                    "reshard_after_forward=False, or units without the inner one."
                )
            self._launch_gather(unit)

    def _launch_gather(self, unit: Unit) -> None:
        self._order_digest = hash((self._order_digest, self._number[unit]))
        phase = "for a backward"
        if not self._backward:
            phase = "for a forward" + ("" if torch.is_grad_enabled() else " without gradients")
        unit.launch_gather(self.generation, phase)

    def _gather_ahead(self, index: int, direction: int) -> None:
        """Launches the gathers of the units after a place, but never over one that is used."""
        present = self._order[index] if index < len(self._order) else None
        for distance in range(1, self._prefetch + 1):
            ahead = index + direction * distance
            if not 0 <= ahead < len(self._order):
                return
            following = self._order[ahead]
            owner = following.slot.owner
            free = owner is None or (owner is not present and owner.uses == 0)
            if free and not following.gathered(self.generation):
                self._launch_gather(following)

    # --- backward ----------------------------------------------------------------------------

    def _hook_gradients(self, unit: Unit) -> None:
        """Hooks the unit's trainable parameters that were not hooked before."""
        # A parameter keeps its hooks alive where the garbage collector cannot follow, so a hook
        # that held a unit would keep the whole model for ever.
        schedule_if_alive, unit_if_alive = weakref.ref(self), weakref.ref(unit)
        for position, param in enumerate(unit.params):
            if not param.requires_grad or position in unit.hooked:
                continue
            unit.hooked.add(position)

            def on_gradient(_param: Tensor, position: int = position) -> None:
                unit, schedule = unit_if_alive(), schedule_if_alive()
                if unit is not None and schedule is not None and not schedule.paused:
                    if schedule.updates is not None:
                        schedule.updates.check_arrival(unit, position)
                    unit.arrived.add(position)
                    if len(unit.arrived) == unit.expected:
                        schedule._launch_complete(unit)

            on_gradient.runs_in_backward = True  # type: ignore[attr-defined] # see ``defer``
            param.register_post_accumulate_grad_hook(on_gradient)

    def before_backward_of(self, units: Sequence[Unit]) -> None:
        """Gathers the units of one call, and those that backward needs next."""
        self._check_first_order()
        for unit in units:
            self._prepare_backward(unit)
        self._gather_ahead(self._index_of[units[0]], -1)

    def _on_output_gradient(self, _grad: Tensor) -> None:
        """The gradient of the model's output is made in the outermost backward, and first."""
        self._check_first_order()
        self._begin_backward()
        if not self._end_is_queued:
            self._gather_ahead(len(self._called), -1)
            self._end_is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _check_first_order(self) -> None:
        """In a hook, autograd records what it does if its graph is to be differentiated again.

        That second backward would read weights through buffers that other units have then.
        """
        if torch.is_grad_enabled() and (self._reshard or self.updates is not None):
            raise RuntimeError(
                "gradients of gradients need all weights at once, but got create_graph=True where "
                "units take turns in a few buffers, or are updated in backward. Pass "
                "reshard_after_forward=False, and leave update_in_backward() out."
            )

    def _begin_backward(self) -> None:
        if self._backward:
            return
        if self.updates is not None:
            self.updates.begin(self._params)
        self._agree_on_trainable()
        self._backward = self.history.in_backward = True
        defer(self._params, self)
        kept = self.replicated.gradients.begin()
        self.replicated.materialize()
        self._queue = [unit for unit in self._reduction_order() if unit.trainable_positions()]
        self._next = 0
        for unit in self._queue:
            kept += unit.gradients.begin()
        self.history.note(f"run backward with {kept} gradients kept from before")

    def _agree_on_trainable(self) -> None:
        """Compares ``requires_grad`` over the ranks if it has changed on this one.

        It decides which gradients a rank reduces, so ranks that differ would average the gradients
        of different parameters, or make collectives of different sizes.
        """
        trainable = list(map(_requires_grad, self._params))
        if trainable != self._trainable:
            changed = [
                (name, now)
                for name, now, before in zip(self._names, trainable, self._trainable, strict=True)
                if now != before
            ]
            for ranks in reversed(self._ranks.levels):
                agree_on_trainable(changed, ranks)
            self._trainable = trainable

    def _reduction_order(self) -> list[Unit]:
        """The reverse of registration, with repeated units in the reverse order of their calls.

        Units that were not called come last: they must not hold up the others.
        """
        calls = iter([unit for unit in self._called if unit.repeated])
        called = [
            next(calls) if unit.repeated else unit for unit in self.units if unit in self._called
        ]
        return [*called[::-1], *(unit for unit in self.units if unit not in self._called)]

    def _prepare_backward(self, unit: Unit) -> None:
        self._begin_backward()
        self._gather(unit)
        unit.slot.wait()
        unit.materialize()

    def _launch_complete(self, unit: Unit) -> None:
        """Launches reductions of complete units, but only in the order that all ranks share."""
        if not unit.resting and unit.slot.owner is not unit:
            raise RuntimeError(
                "a unit's parameters must stay gathered until its gradients have been computed, "
                f"but those of {unit.name!r} were replaced by {unit.slot.owner.name!r}'s. Pass "  # type: ignore[union-attr]
                "reshard_after_forward=False."
            )
        while self._next < len(self._queue):
            following = self._queue[self._next]
            if len(following.arrived) < following.expected:
                return
            self._next += 1
            self._reduce(following)

    def _reduce(self, unit: Unit) -> None:
        while len(self._reductions) >= MAX_REDUCTIONS:
            self._finish_oldest()
        for earlier in self._reductions:
            earlier.start_all_reduce()
        reduction, present = unit.launch_reduction()
        reduced = tuple(reduction.plan.positions)
        self._order_digest = hash((self._order_digest, -1 - self._number[unit], reduced))
        self._reductions.append(reduction)
        self._present.setdefault(unit, set()).update(present)
        if self.updates is not None:
            self.updates.claim(unit, present)

    def _finish_oldest(self) -> None:
        finish = UnitReduction.finish if self.updates is None else self.updates.finish
        finish(self._reductions.popleft())

    def finish(self) -> None:
        """Ends the backward pass: afterwards gradients are averaged, and all is at rest."""
        if not self._backward:
            return
        trainable = [unit for unit in self.units if unit.gradients.begun]
        if self.paused:
            for unit in trainable:
                unit.gradients.keep()
            self.replicated.gradients.keep()
        else:
            self._reduce_the_rest(trainable)
        self._end(trainable)
        if not self.paused:
            if self.updates is not None:
                self.updates.end()
            run_deferred(self._params)

    def _reduce_the_rest(self, trainable: Sequence[Unit]) -> None:
        late = self._queue[: self._next]  # gradients that came after their unit's reduction
        for unit in (*self._queue[self._next :], *(unit for unit in late if unit.arrived)):
            self._reduce(unit)
        while self._reductions:
            self._finish_oldest()
        parameters = [
            (unit, position) for unit in trainable for position in unit.reduce_plan.positions
        ]
        present = [position in self._present[unit] for unit, position in parameters]
        digest, self._order_digest = self._order_digest, 0
        anywhere = self.replicated.reduce(present, digest, self.history.take())
        if not all(anywhere):
            for (unit, position), used in zip(parameters, anywhere, strict=True):
                if not used:
                    unit.gradients.drop(position)

    def _end(self, trainable: Sequence[Unit]) -> None:
        self._backward = self.history.in_backward = self._end_is_queued = False
        self._queue, self._present = [], {}
        self._rest()
        self._free_buffers()
        for unit in trainable:
            unit.gradients.end()
        self.replicated.gradients.end()

    def _free_buffers(self) -> None:
        """Frees the buffers, after the gathers that are still under way.

        The optimizer may write the shards next, which a gather must have read by then.
        """
        for slot in self._slots:
            slot.wait()
            if self._reshard:
                slot.free()

    def _rest(self) -> None:
        for holder in self._holders:
            holder.rest()

    def _recover(self) -> None:
        """Before a forward: cleans up after a backward that an exception ended.

        The gradients of the interrupted step are dropped: some are complete, others are not.
        """
        if not self._backward:
            return
        if not self._end_is_queued:
            raise RuntimeError(
                "every backward must be finished before the next forward, but the last one was "
                "not, because the model's outputs hold no tensor that requires gradients where "
                "it can be found. Call finish_gradient_synchronization() after backward."
            )
        while self._reductions:
            self._reductions.popleft().finish()
        if self.updates is not None:
            self.updates.abandon()
        self._order_digest = 0
        self.history.take()
        self._expect_order(self.units)  # ranks may have disagreed
        begun = [unit for unit in self.units if unit.gradients.begun]
        for unit in begun:
            unit.gradients.discard()
        self.replicated.gradients.discard()
        self._end(begun)


def _in_backward() -> bool:
    """Whether autograd is running on this thread: a forward then is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _check_visible(outputs: Any, call: UnitCall, inputs: Any) -> None:
    """Raises TypeError for outputs that hold no gradient, but hide one or are no tensors at all."""
    known = (Tensor, str, bytes, numbers.Number, torch.dtype, torch.device, type(None))
    leaves = pytree.tree_leaves(outputs)
    hidden = [x for x in leaves if not isinstance(x, known) and not dataclasses.is_dataclass(x)]
    needs_weights = any(unit.trainable_positions() for unit in call.units) or any(
        tensor.requires_grad for tensor in tensors_in(inputs)
    )
    if needs_weights and (hidden or not list(tensors_in(outputs))):
        got = type(hidden[0] if hidden else outputs).__name__
        raise TypeError(
            "a unit must return tensors, or containers or data classes of them, whose gradients "
            f"tell when to gather it again, but {call.units[0].name!r} returned a {got}. Return a "
            "tuple, a dictionary or a data class, or call it under torch.no_grad()."
        )


def _hook(outputs: Any, on_gradient: Callable[[Tensor], None]) -> bool:
    """Hooks the gradients of a module's outputs; returns whether there are any."""
    found = False
    for tensor in tensors_in(outputs) if torch.is_grad_enabled() else ():
        if tensor.requires_grad:
            found = True
            # A parameter that is returned keeps its hooks from one forward to the next.
            if not tensor.is_leaf or on_gradient not in (tensor._backward_hooks or {}).values():
                tensor.register_hook(on_gradient)
    return found
