"""Gradients of a set of parameters between autograd, which makes them whole, and the optimizer.

During backward ``param.grad`` belongs to autograd and is whole, in the dtype of the computation.
Between steps it belongs to the optimizer and has the shape and dtype of the resting ``param.data``.
A whole gradient that awaits a later reduction is kept here, and a stand-in in ``param.grad`` tells
whether ``zero_grad()`` has dropped it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from shard_optim.refused_gradient import UNREDUCED, GradientShard, ReducedGradient


class GradientStore:
    """Keeps the gradients of earlier backward passes apart from those of the present one."""

    def __init__(self, params: Sequence[nn.Parameter], *, sharded: bool) -> None:
        self._params = params
        self._sharded = sharded  # whether the optimizer gets shards of their gradients
        self._dtypes = [param.dtype for param in params]
        self._reduced: list[Tensor | None] = [None] * len(params)
        self._unreduced: list[Tensor | None] = [None] * len(params)
        self._new: set[int] = set()  # positions without a gradient from earlier passes
        self.begun = False

    def begin(self) -> int:
        """Before the first gradient of a backward pass: puts reduced gradients aside, counted."""
        self.begun, kept = True, 0
        for position, param in enumerate(self._params):
            if param.grad is None:  # also if zero_grad() has dropped what was kept
                self._reduced[position] = self._unreduced[position] = None
            elif getattr(param.grad, "refusal", None) is not UNREDUCED:
                self._reduced[position] = param.grad
            kept += self._reduced[position] is not None
            param.grad = None
        return kept

    def take(self, positions: Sequence[int]) -> list[Tensor | None]:
        """Whole gradients since the last reduction; autograd's own tensors if there are any."""
        grads: list[Tensor | None] = []
        for position in positions:
            param, kept = self._params[position], self._unreduced[position]
            grad = param.grad
            if grad is not None:
                param.grad = None
            if kept is not None:
                self._unreduced[position] = None
                grad = kept if grad is None else kept.add_(grad)
            grads.append(grad)
        return grads

    def keep(self) -> None:
        """Keeps what arrived for a later reduction, summed in the resting dtype."""
        for position, grad in enumerate(self.take(range(len(self._params)))):
            if grad is not None:
                self._unreduced[position] = grad.to(self._dtypes[position])

    def add(self, positions: Sequence[int], reduced: Sequence[Tensor]) -> None:
        """Adds reduced gradients to those put aside."""
        for position, part in zip(positions, reduced, strict=True):
            before = self._reduced[position]
            if before is None:
                self._new.add(position)
                self._reduced[position] = part
            else:
                before.add_(part)

    def drop(self, position: int) -> None:
        """Takes back what this backward pass added: zeros, because no rank had a gradient."""
        if position in self._new:
            self._reduced[position] = None

    def end(self) -> None:
        """After the parameters are at rest: gives all reduced gradients to the optimizer."""
        self.begun = False
        self._new.clear()
        self.give(range(len(self._params)))

    def give(self, positions: Iterable[int]) -> None:
        """Makes reduced gradients those of parameters that are at rest."""
        marked = not self._sharded
        for position in positions:
            param, grad = self._params[position], self._reduced[position]
            if self._unreduced[position] is not None:
                zeros = param.new_zeros(()).expand(param.shape)
                param.grad = stand_in = zeros.as_subclass(ReducedGradient)
                stand_in.refusal = UNREDUCED
            elif grad is not None:
                if not marked:
                    marked = True
                    grad = grad.as_subclass(GradientShard)
                param.grad = grad
                self._reduced[position] = None

    def discard(self) -> None:
        """Forgets every gradient since the last step, of earlier backward passes too."""
        self.take(range(len(self._params)))
        self._reduced = [None] * len(self._params)
