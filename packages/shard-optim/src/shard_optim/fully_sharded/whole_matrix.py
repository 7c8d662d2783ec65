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

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from shard_optim.bucket_layout import Place
from shard_optim.communication import all_to_all
from shard_optim.fully_sharded.checks import check_wrapper
from shard_optim.fully_sharded.unit import Cut, Unit, parameter_locations
from shard_optim.fully_sharded.wrapper import FullyShardedDataParallel
from shard_optim.optimizer_class import as_groups, default_settings, settings_of
from shard_optim.optimizer_trial import check_class, check_update


def orthogonalization_cost(shape: torch.Size) -> float:
    """Operations of one Newton-Schulz iteration, up to a factor: elements times the shorter side.

    Args:
        shape: of a matrix; of tensors with more dimensions, the first counts as rows.
    """
    rows = shape[0] if shape else 1
    columns = shape.numel() // max(rows, 1)
    return float(rows * columns * min(rows, columns))


def assign_owners(costs: Sequence[float], world_size: int) -> list[list[int]]:
    """Divides matrices over ranks, most costly first, each to the rank with the lowest cost so far.

    Args:
        costs: of updating each matrix.
        world_size: number of ranks.

    Returns:
        For every rank, the positions of its matrices, most costly first.
    """
    owned: list[list[int]] = [[] for _ in range(world_size)]
    loads = [0.0] * world_size
    for position in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        rank = min(range(world_size), key=lambda rank: (loads[rank], rank))
        owned[rank].append(position)
        loads[rank] += costs[position]
    return owned


@dataclass(eq=False, kw_only=True)
class _Matrix:
    """One sharded parameter.

    Attributes:
        param: this rank's shard.
        name: for errors.
        cut: how the parameter is divided.
        size: of the whole parameter.
        stride: of the whole parameter.
        owner: the rank that updates it.
        whole: on its owner the parameter that is updated, without memory between steps.
    """

    param: Tensor
    name: str
    cut: Cut
    size: torch.Size
    stride: tuple[int, ...]
    owner: int = 0
    whole: nn.Parameter | None = None

    def padded(self, values: Tensor) -> Tensor:
        """A shard as long as every other rank's, (chunk,)."""
        missing = self.cut.chunk - values.numel()
        return torch.cat([values, values.new_zeros(missing)]) if missing else values


@dataclass(kw_only=True)
class _Exchange:
    """An all-to-all under way."""

    what: str
    sent: Tensor
    received: Tensor
    work: dist.Work | None


class WholeMatrixOptimizer(Optimizer):
    """An optimizer class that looks at shapes, over parameters of a sharded model.

    Give it the matrices, and the other parameters to an element-wise optimizer::

        model = FullyShardedDataParallel(model)
        matrices = [p for name, p in model.named_parameters() if "blocks" in name and ...]
        muon = WholeMatrixOptimizer(model, matrices, torch.optim.Muon, lr=0.02)

    Every rank calls ``step``. Hyperparameters are read from ``param_groups`` at every step, so
    learning-rate schedulers work. ``state`` holds the state of the matrices that this rank owns.
    ``save``, ``load``, ``full_state`` and ``load_full_state`` take it like any other optimizer.

    Args:
        model: the sharded model.
        params: parameters of it that are sharded, or groups of them; the same on every rank.
        optimizer_cls: the class.
        cost: what updating a parameter of a given shape costs, to balance the ranks by.
        kwargs: for the class.

    Raises:
        TypeError: if ``model`` is not wrapped, or ``optimizer_cls`` is no optimizer class.
        ValueError: for a parameter that is not a sharded one of ``model``.
    """

    holds_whole_matrices = True

    def __init__(
        self,
        model: FullyShardedDataParallel,
        params: Iterable[Any],
        optimizer_cls: type[Optimizer],
        *,
        cost: Callable[[torch.Size], float] = orthogonalization_cost,
        **kwargs: Any,
    ) -> None:
        check_wrapper(model, FullyShardedDataParallel)
        check_class(optimizer_cls, kwargs)
        groups = as_groups(params)
        check_update(
            optimizer_cls,
            settings_of(groups[0]),
            kwargs,
            where="a WholeMatrixOptimizer",
            remedy=None,
        )
        self.optimizer_cls = optimizer_cls
        self._ranks = model.ranks.shards
        self._location_of: dict[int, tuple[Unit, int]] = parameter_locations(model.units)
        self._matrices: dict[Tensor, _Matrix] = {}
        super().__init__(groups, default_settings(optimizer_cls, groups, kwargs))
        self._owned = assign_owners(
            [cost(matrix.size) for matrix in self._matrices.values()], self._ranks.size
        )
        matrices = list(self._matrices.values())
        for rank, positions in enumerate(self._owned):
            for position in positions:
                matrices[position].owner = rank
        for position in self._owned[self._ranks.rank]:
            matrix = matrices[position]
            one = torch.zeros((), dtype=matrix.param.dtype, device=matrix.param.device)
            matrix.whole = nn.Parameter(one.expand(matrix.size))
        local_groups = []
        for group in self.param_groups:
            wholes = [self.whole_of(param) for param in group["params"]]
            own = [whole for whole in wholes if whole is not None]
            local_groups.append(settings_of(group) | {"params": own})
        self._local = optimizer_cls(local_groups, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only the constructor adds groups, because owners are chosen there."""
        if hasattr(self, "_owned"):
            raise RuntimeError(
                "parameter groups must be given to the constructor of WholeMatrixOptimizer, but "
                "got another one. Make a new optimizer."
            )
        super().add_param_group(param_group)
        for param in self.param_groups[-1]["params"]:
            if id(param) not in self._location_of:
                raise ValueError(
                    "params must be sharded parameters of the model, but got one of shape "
                    f"{tuple(param.shape)} that is not. Give small and foreign parameters to "
                    "another optimizer."
                )
            unit, position = self._location_of[id(param)]
            size, stride = unit.layouts[position]
            self._matrices[param] = _Matrix(
                param=param,
                name=unit.names[position],
                cut=unit.cuts[position],
                size=size,
                stride=stride,
            )

    def whole_of(self, param: Tensor) -> nn.Parameter | None:
        """What stands for a whole parameter in its owner's optimizer; None on other ranks."""
        return self._matrices[param].whole

    def place_of(self, param: Tensor) -> Place:
        """Where a parameter's state lies: whole, on its owner."""
        matrix, rank = self._matrices[param], self._ranks.rank
        numel = matrix.size.numel()
        return Place(
            name=matrix.name,
            size=matrix.size,
            stride=matrix.stride,
            span_of=lambda rank: (0, numel) if rank == matrix.owner else None,
            replicated=False,
            rank=rank,
            form=matrix.size if rank == matrix.owner else torch.Size([0]),
        )

    # --- step --------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all matrices that have a gradient; every rank calls it.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            CollectiveError: if a peer died or timed out.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group, local in zip(self.param_groups, self._local.param_groups, strict=True):
            local.update(settings_of(group))
        rounds = self._rounds()
        arriving = self._send_to_owners(rounds[0]) if rounds else None
        leaving: tuple[list[_Matrix | None], _Exchange] | None = None
        for number, owned in enumerate(rounds):
            assert arriving is not None
            self._wait(arriving)
            received, arriving = arriving.received, None
            if number + 1 < len(rounds):
                arriving = self._send_to_owners(rounds[number + 1])
            updated = self._update(owned[self._ranks.rank], received)
            if leaving is not None:
                self._take_shards(*leaving)
            leaving = (owned, self._send_to_all(owned, updated))
        if leaving is not None:
            self._take_shards(*leaving)
        for param, matrix in self._matrices.items():
            if matrix.whole is not None and matrix.whole in self._local.state:
                self.state[param] = self._local.state[matrix.whole]
        return loss

    def _rounds(self) -> list[list[_Matrix | None]]:
        """For every round the matrix that each rank owns in it, or None."""
        matrices = list(self._matrices.values())
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
        parts, sizes = [], []
        for matrix in owned:
            sizes.append(0 if matrix is None else 2 * matrix.cut.chunk)
            if matrix is not None:
                assert matrix.param.grad is not None
                parts += [matrix.padded(matrix.param.grad), matrix.padded(matrix.param.detach())]
        mine = owned[self._ranks.rank]
        each = 0 if mine is None else 2 * mine.cut.chunk
        return self._start("whole gradients", owned, parts, sizes, [each] * self._ranks.size)

    def _send_to_all(self, owned: Sequence[_Matrix | None], updated: Tensor | None) -> _Exchange:
        """Starts handing every rank its shards of the updated matrices."""
        sizes = [0 if matrix is None else matrix.cut.chunk for matrix in owned]
        mine = owned[self._ranks.rank]
        each = 0 if mine is None else mine.cut.chunk
        parts = [] if updated is None else [updated]
        return self._start("updated matrices", owned, parts, [each] * self._ranks.size, sizes)

    def _start(
        self,
        what: str,
        owned: Sequence[_Matrix | None],
        parts: Sequence[Tensor],
        send_sizes: list[int],
        receive_sizes: list[int],
    ) -> _Exchange:
        first = next(matrix for matrix in owned if matrix is not None)
        empty = torch.empty(0, dtype=first.param.dtype, device=first.param.device)
        sent = torch.cat([empty, *parts])
        received = empty.new_empty(sum(receive_sizes))
        words = f"the exchange of {what} ({first.name})"
        communicator = self._ranks.communicator
        work = self._ranks.together(
            words, all_to_all, received, sent, receive_sizes, send_sizes, communicator
        )
        return _Exchange(what=words, sent=sent, received=received, work=work)

    def _wait(self, exchange: _Exchange) -> None:
        if exchange.work is not None:
            self._ranks.call(exchange.what, exchange.work.wait)

    def _update(self, matrix: _Matrix | None, received: Tensor) -> Tensor | None:
        """Updates this rank's matrix; returns its values, cut for all ranks."""
        if matrix is None:
            return None
        assert matrix.whole is not None
        resting = matrix.whole.data
        # (world_size, gradient or value, chunk) to two flat tensors.
        both = received.view(-1, 2, matrix.cut.chunk).transpose(0, 1).flatten(1)
        grad, value = both[0], both[1]
        matrix.whole.data = value.as_strided(matrix.size, matrix.stride, value.storage_offset())
        matrix.whole.grad = grad.as_strided(matrix.size, matrix.stride, grad.storage_offset())
        self._local.step()
        matrix.whole.grad = None
        matrix.whole.data = resting
        return value

    def _take_shards(self, owned: Sequence[_Matrix | None], exchange: _Exchange) -> None:
        self._wait(exchange)
        sizes = [0 if matrix is None else matrix.cut.chunk for matrix in owned]
        for matrix, part in zip(owned, exchange.received.split(sizes), strict=True):
            if matrix is not None:
                matrix.param.copy_(part[: matrix.param.numel()])

    # --- state -------------------------------------------------------------------------------

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what ``state_dict`` returned on this rank of a group of the same size."""
        super().load_state_dict(state_dict)
        self._local.state.clear()
        for param, matrix in self._matrices.items():
            if matrix.whole is not None and param in self.state:
                self._local.state[matrix.whole] = self.state[param]
