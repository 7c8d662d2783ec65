"""Updates of a unit's parameters during backward, as soon as their gradients have been averaged.

The user's own optimizer steps once for every unit, over those of its parameters that had a gradient
on this rank, and on CUDA on a stream of its own. All others keep their gradients for the user's
``step()`` after backward. It computes the same whenever it is called, and every rank updates other
elements, so a rank may update a parameter early and another rank late. After backward one parameter
of each updated unit carries a ``ReducedGradient``, until the user's ``step()``.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shard_optim.fully_sharded.deferred_hooks import run_deferred
from shard_optim.fully_sharded.unit import Unit, UnitReduction
from shard_optim.origin import Watched, watched
from shard_optim.parameter_groups import all_params, in_words
from shard_optim.refused_gradient import UNREDUCED, USED, ReducedGradient
from shard_optim.shard_update import settings_of

_log = logging.getLogger("shard_optim")

# Updates under way, each of which holds this rank's averages of one unit.
MAX_UPDATES = 2


class UpdateInBackward:
    """Updates the units of one model by one optimizer. Its construction is collective."""

    def __init__(self, optimizer: Optimizer, units: Sequence[Unit], device: torch.device) -> None:
        self.optimizer, self._watched = optimizer, _checked(optimizer, units)
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._group_of: dict[Tensor, int] = {}
        self._claimed: dict[Unit, set[int]] = {}  # positions that this backward updates
        self._updated: list[nn.Parameter] = []  # one of each unit that has been updated
        self._refusing: dict[nn.Parameter, ReducedGradient] = {}  # their gradients, made once
        self._pending = False  # a backward has updated units, and no step has followed
        # Settings of the groups that have been used since the last step, in words, by number.
        self._settings: dict[int, dict[str, str]] = {}
        # Events after updates, and averages that these read. Memory that ``record_stream`` protects
        # would not be used again while a CUDA graph is recorded.
        self._running: deque[tuple[torch.cuda.Event, Tensor]] = deque()
        self_if_alive = weakref.ref(self)  # an optimizer does not keep the model alive

        def before_step(args: Any, kwargs: Any) -> None:
            if (self := self_if_alive()) is not None:
                self._before_step(args, kwargs)

        self._watched.before_step = before_step

    # --- during backward -----------------------------------------------------------------------

    def begin(self, params: Iterable[nn.Parameter]) -> None:
        """Before a backward pass; RuntimeError if gradients are left from the one before."""
        grads = [param.grad for param in params if param.grad is not None]
        if self._pending or any(getattr(g, "refusal", None) is not UNREDUCED for g in grads):
            raise RuntimeError(
                "under update_in_backward() every backward outside no_sync() must be followed by "
                "step() and zero_grad(set_to_none=True), but got another backward before "
                f"{'step' if self._pending else 'zero_grad'}(). To accumulate gradients, run all "
                "backward passes but the last under no_sync()."
            )
        groups = enumerate(self.optimizer.param_groups)
        self._group_of = {param: number for number, group in groups for param in group["params"]}

    def claim(self, unit: Unit, present: Iterable[int]) -> None:
        """When a unit's reduction is launched: those that had a gradient will be updated."""
        self._claimed[unit] = {at for at in present if unit.params[at] in self._group_of}

    def check_arrival(self, unit: Unit, position: int) -> None:
        """When a gradient arrives; RuntimeError if those of its unit have been given away."""
        if self._claimed.get(unit):
            raise RuntimeError(
                "under update_in_backward() each parameter must get its gradient once in a "
                f"backward, but that of {unit.names[position]} in {unit.name!r} grew after its "
                "reduction, as in re-entrant checkpoints that share it. Pass use_reentrant=False "
                "to checkpoint(), or leave update_in_backward() out."
            )

    def finish(self, reduction: UnitReduction) -> None:
        """Waits for a reduction, and updates what was claimed, after the stream's work so far."""
        reduction.wait()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            while len(self._running) >= MAX_UPDATES:
                current.wait_event(self._running.popleft()[0])
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):  # none on a CPU
            reduction.store()
            if positions := sorted(self._claimed.get(reduction.unit, ())):
                self._update(reduction.unit, positions)
        if self._stream is not None:
            self._running.append((self._stream.record_event(), reduction.output))

    @torch.no_grad()
    def _update(self, unit: Unit, positions: Sequence[int]) -> None:
        params = [unit.params[position] for position in positions]
        members = defaultdict(list)
        for param in params:
            members[self._group_of[param]].append(param)
        groups, materialized = self.optimizer.param_groups, not unit.resting
        unit.rest()
        self._updated.append(params[0])
        try:
            unit.gradients.give(positions)
            run_deferred(params)
            for number in members.keys() - self._settings.keys():
                self._settings[number] = in_words(groups[number], identities=True)
            # What a class counts in its groups, the user's step counts.
            self.optimizer.param_groups = [
                settings_of(groups[number]) | {"params": own} for number, own in members.items()
            ]
            self._watched.in_update = True
            self.optimizer.step()
        finally:
            self.optimizer.param_groups, self._watched.in_update = groups, False
            for param in params:
                param.grad = None
            if materialized:
                unit.materialize()

    # --- afterwards ----------------------------------------------------------------------------

    def end(self) -> None:
        """After a backward that was not paused: gradients that were used refuse to be read."""
        self._pending = True
        for param in self._updated:
            if param not in self._refusing:
                zeros = param.new_zeros(()).expand(param.shape)
                self._refusing[param] = zeros.as_subclass(ReducedGradient)
                self._refusing[param].refusal = USED
            param.grad = self._refusing[param]
        self._clear()

    def _before_step(self, args: Any, kwargs: Any) -> None:
        """Before the user's ``step``; RuntimeError if units have not been updated as it asks."""
        if kwargs.get("closure", (*args, None)[1]) is not None:  # after the optimizer itself
            raise RuntimeError(
                "step() must come after backward under update_in_backward(), but got a closure "
                "that runs backward inside. Call the closure first, then step()."
            )
        for number, used in self._settings.items():
            now = in_words(self.optimizer.param_groups[number], identities=True)
            for key in (key for key in used if used[key] != now.get(key)):
                raise RuntimeError(
                    f"{key} must be set before backward under update_in_backward(), which has "
                    f"updated units with {key}={used[key]}, but got {key}={now.get(key)} in "
                    "step(). Set it before backward, and step schedulers after step(); for this "
                    f"step set it back to {used[key]}."
                )
        self._pending = False
        self._settings.clear()
        for param, refusing in self._refusing.items():
            if param.grad is refusing:
                param.grad = None

    def abandon(self) -> None:
        """After a backward that an exception ended."""
        self._settings.clear()
        if self._updated:
            _log.warning(
                "a backward pass was interrupted after it had updated %d units. Load the last "
                "checkpoint: other parameters, and other ranks, may not have been updated.",
                len(self._updated),
            )
        self._clear()

    def _clear(self) -> None:
        """Makes the current stream wait for all updates, and forgets them."""
        for each in (self._claimed, self._updated, self._running):
            each.clear()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def _checked(optimizer: Any, units: Sequence[Unit]) -> Watched:
    """What is known of the optimizer, after checks."""
    name = type(optimizer).__name__
    known = watched(optimizer) if isinstance(optimizer, Optimizer) else None
    if known is None or known.tells_origin:  # a ShardedOptimizer steps over all parameters at once
        raise TypeError(
            "optimizer must be a plain torch.optim.Optimizer over the model's parameters, but got "
            f"{name}. Pass torch.optim.AdamW(model.parameters())."
        )
    held = set(all_params(optimizer.param_groups))
    for unit in units:
        for each, param in zip(unit.names, unit.params, strict=True):
            if param.requires_grad and param not in held:
                raise ValueError(
                    "optimizer must hold every trainable parameter of the model's units, but got "
                    f"{name} without {each}. Make it from the model's parameters()."
                )
    known.check_first(optimizer)
    return known
