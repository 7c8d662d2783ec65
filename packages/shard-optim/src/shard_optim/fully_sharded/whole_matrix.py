"""Optimizers that need whole matrices, such as Muon, over parameters that live in shards.

Each matrix has an owner, which keeps its optimizer state. A step goes through rounds; in a round
every rank owns at most one matrix:

    all-to-all     every rank sends the owners its shards of their matrices' values and gradients
    update         each owner updates its whole matrix
    all-to-all     every owner sends all ranks their shards of the updated matrix

The first exchange of a round runs while the round before is updated. So a rank never holds more
than two whole matrices and their gradients, and each matrix is updated once, not on every rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shard_optim.bucket_plan import assign_owners
from shard_optim.communication import all_to_all
from shard_optim.fully_sharded.own_shards import OwnShards
from shard_optim.origin import sharded_of
from shard_optim.parameter_groups import Groups, all_params
from shard_optim.place import Place
from shard_optim.shard_update import stand_in


def orthogonalization_cost(shape: torch.Size) -> int:
    """Operations of a Newton-Schulz iteration, up to a factor: elements times the shorter side."""
    rows = shape[0] if shape else 1  # also of tensors with more dimensions
    columns = shape.numel() // max(rows, 1)
    return rows * columns * min(rows, columns)


@dataclass(eq=False, kw_only=True)
class _Matrix:
    """One sharded parameter."""

    param: Tensor  # this rank's shard
    place: Place  # where the parameter lies
    chunk: int  # elements of each rank's shard, padding included
    owner: int = 0  # the rank that updates it
    # On its owner the parameter that is updated, without memory between steps.
    whole: nn.Parameter | None = None

    def padded(self, values: Tensor) -> Tensor:
        """A shard as long as every other rank's, (chunk,)."""
        missing = self.chunk - values.numel()
        return torch.cat([values, values.new_zeros(missing)]) if missing else values


@dataclass
class _Exchange:
    """An all-to-all under way, for the matrix that each rank owns in one round, or None."""

    owned: Sequence[_Matrix | None]
    what: str
    received: Tensor
    sent: Tensor  # which must live as long
    work: dist.Work


class WholeMatrices(OwnShards):
    """Updates each parameter whole, on the rank that owns it, with a class that looks at shapes."""

    def __init__(
        self, groups: Groups, make: Callable[..., Optimizer], kwargs: Mapping[str, Any]
    ) -> None:
        self._matrices: dict[Tensor, _Matrix] = {}
        for param in all_params(groups):
            found = sharded_of(param)
            if found is None or found.place.replicated:
                raise ValueError(
                    "params must be sharded parameters of the model, but got one of shape "
                    f"{tuple(param.shape)} that is not. Give small and foreign parameters to "
                    "another optimizer."
                )
            self._ranks = found.ranks.shards
            chunk = -(-found.place.size.numel() // self._ranks.size)
            self._matrices[param] = _Matrix(param=param, place=found.place, chunk=chunk)
        self._by_name = matrices = sorted(self._matrices.values(), key=lambda m: m.place.name)
        costs = [orthogonalization_cost(matrix.place.size) for matrix in matrices]
        self._owned = assign_owners(costs, [0] * self._ranks.size)
        for rank, positions in enumerate(self._owned):
            for matrix in (matrices[position] for position in positions):
                matrix.owner = rank
                if rank == self._ranks.rank:
                    matrix.whole = stand_in(matrix.param, matrix.place.size)
        super().__init__(groups, make, kwargs)

    def add_group(self, group: dict[str, Any]) -> None:
        """Only the constructor takes groups, because owners are chosen there."""
        raise RuntimeError(
            "parameter groups must be given to the constructor where matrices are updated whole, "
            "but got another one. Make a new optimizer."
        )

    def updated(self, param: Tensor) -> Tensor | None:
        """The whole parameter in its owner's optimizer; None on other ranks."""
        return self._matrices[param].whole

    def _adopt(self, group: Mapping[str, Any]) -> dict[str, Any]:
        adopted = super()._adopt(group)
        if not adopted["params"] and group["params"]:
            first = self._matrices[group["params"][0]]
            adopted["params"] = [stand_in(first.param, first.place.size)]
        return adopted

    def place_of(self, param: Tensor) -> Place:
        """Where a parameter's state lies: whole, on its owner."""
        matrix = self._matrices[param]
        mine, size = matrix.owner == self._ranks.rank, matrix.place.size
        return dataclasses.replace(
            matrix.place,
            owned=(0, size.numel()) if mine else None,
            form=size if mine else torch.Size([0]),
        )

    # --- step --------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self, **kwargs: Any) -> None:
        rounds = self._rounds()
        self._before = [dict(group) for group in self._optimizer.param_groups]
        if not rounds:
            self._optimizer.step(**kwargs)
        arriving = self._send_to_owners(rounds[0]) if rounds else None
        leaving = None
        for number, owned in enumerate(rounds):
            assert arriving is not None
            received, arriving = self._received(arriving), None
            if number + 1 < len(rounds):
                arriving = self._send_to_owners(rounds[number + 1])
            updated = self._update(owned[self._ranks.rank], received, kwargs)
            if leaving is not None:
                self._take_shards(leaving)
            leaving = self._start("updated matrices", owned, updated, width=1, to_owners=False)
        if leaving is not None:
            self._take_shards(leaving)

    def _rounds(self) -> list[list[_Matrix | None]]:
        """For every round the matrix that each rank owns in it, or None."""
        matrices = self._by_name  # the order of groups may be another one on another rank
        owned = [
            [matrices[p] for p in positions if matrices[p].param.grad is not None]
            for positions in self._owned
        ]
        return [
            [mine[number] if number < len(mine) else None for mine in owned]
            for number in range(max(map(len, owned)))
        ]

    def _send_to_owners(self, owned: Sequence[_Matrix | None]) -> _Exchange:
        """Starts gathering each matrix's gradient and value on its owner."""
        parts = []
        for matrix in owned:
            if matrix is not None:
                assert matrix.param.grad is not None
                parts += [matrix.padded(matrix.param.grad), matrix.padded(matrix.param.detach())]
        return self._start("whole gradients", owned, parts, width=2, to_owners=True)

    def _start(
        self,
        what: str,
        owned: Sequence[_Matrix | None],
        parts: Sequence[Tensor],
        *,
        width: int,
        to_owners: bool,
    ) -> _Exchange:
        """Starts sending ``width`` values of each element to the owners, or back from them."""
        first = next(matrix for matrix in owned if matrix is not None)
        theirs = [0 if matrix is None else width * matrix.chunk for matrix in owned]
        mine = [theirs[self._ranks.rank]] * self._ranks.size
        receive_sizes, send_sizes = (mine, theirs) if to_owners else (theirs, mine)
        empty = torch.empty(0, dtype=first.param.dtype, device=first.param.device)
        sent = torch.cat([empty, *parts])
        received = empty.new_empty(sum(receive_sizes))
        words = f"the exchange of {what} ({first.place.name})"
        sizes = receive_sizes, send_sizes
        ranks = self._ranks
        work = ranks.together(words, all_to_all, received, sent, *sizes, ranks.communicator)
        return _Exchange(owned, words, received, sent, work)

    def _received(self, exchange: _Exchange) -> Tensor:
        self._ranks.call(exchange.what, exchange.work.wait)
        return exchange.received

    def _take_shards(self, exchange: _Exchange) -> None:
        """Copies this rank's shards of updated matrices into its parameters."""
        sizes = [0 if matrix is None else matrix.chunk for matrix in exchange.owned]
        parts = self._received(exchange).split(sizes)
        for matrix, part in zip(exchange.owned, parts, strict=True):
            if matrix is not None:
                matrix.param.copy_(part[: matrix.param.numel()])

    def _update(
        self, matrix: _Matrix | None, received: Tensor, kwargs: Mapping[str, Any]
    ) -> list[Tensor]:
        """Updates this rank's matrix; returns its values, cut for all ranks, if it has one."""
        for group, before in zip(self._optimizer.param_groups, self._before, strict=True):
            group.clear()  # what a class counts in its groups, it counts once a step
            group.update(before)
        if matrix is None:
            self._optimizer.step(**kwargs)
            return []
        assert matrix.whole is not None
        resting = matrix.whole.data
        # (world_size, gradient or value, chunk) to two flat tensors.
        both = received.view(-1, 2, matrix.chunk).transpose(0, 1).flatten(1)
        grad, value = both[0], both[1]
        layout = matrix.place.size, matrix.place.stride
        matrix.whole.data = value.as_strided(*layout, value.storage_offset())
        matrix.whole.grad = grad.as_strided(*layout, grad.storage_offset())
        self._optimizer.step(**kwargs)
        matrix.whole.grad = None
        matrix.whole.data = resting
        return [value]
