"""Partition plans and flat buffers: where parameters lie, and which rank updates which of them.

Parameters of one dtype on one device are grouped into buckets. A bucket is one flat range of
``world_size * chunk`` elements; rank r owns elements ``[r * chunk, (r + 1) * chunk)`` of it. The
two partitions differ only in where a bucket puts its parameters:

- ``flat`` packs them back to back and pads the end, so a parameter may straddle ranks
  (ZeRO, Rajbhandari et al. 2020, section 5.1);
- ``whole`` puts each parameter inside one rank's range, the largest first onto the least loaded
  rank (Graham's longest-processing-time rule), so that an optimizer sees real shapes.

A bucket re-points the data of its parameters (``param.data``) into its buffer, so the all-gather of
updated parameters writes straight into them, without a staging copy. Parameters keep identity,
shape, strides, dtype and ``requires_grad``; only their storage is shared.

The file reads from the plan (``plan_buckets``: no tensors, no communication) over one buffer
(``Bucket``) to all of them (``Placement``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from ddp_lite.ranks import Ranks
from ddp_lite.reduce import Waitable
from shard_optim.communication import Communication
from shard_optim.optimizer_class import Groups, Partition, all_params, name_of

PARTITIONS: tuple[Partition, ...] = get_args(Partition)

MIB = 1024**2

# Buckets of a default size: few enough that starting them costs the host little, many enough that
# they overlap with backward and forward, and large enough for the network's full bandwidth.
DEFAULT_BUCKETS = 8
SMALLEST_DEFAULT_MB = 25
LARGEST_DEFAULT_MB = 1000

# What vectorised loads, cuBLAS and Hopper's tensor memory accelerator need at least.
ALIGNMENT_BYTES = 16

# How much faster than all before it together a bucket may grow, where buckets begin small.
RAMP = 2

# A "whole" bucket grows until its parameters outweigh this many times the padding that the largest
# of them can cause, so padding stays under about 1/4 of the bucket at any world size.
_WHOLE_BUCKET_WEIGHT = 4

# Attribute of a parameter of a FullyShardedDataParallel: a ``Sharded``, which says where it lies.
SHARDED = "_sharded"


# --- plans -----------------------------------------------------------------------------------


class Span(NamedTuple):
    """The part of one parameter that one rank owns: elements ``[start, start + length)``."""

    start: int
    length: int


@dataclass(frozen=True, kw_only=True)
class BucketPlan:
    """Where the parameters of one bucket lie and which rank owns what.

    Attributes:
        members: index of each parameter in the list that was planned.
        offsets: first element of each member inside the bucket.
        numels: number of elements of each member.
        chunk: elements that each rank owns, padding included.
        world_size: number of ranks.
    """

    members: tuple[int, ...]
    offsets: tuple[int, ...]
    numels: tuple[int, ...]
    chunk: int
    world_size: int

    @property
    def numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.chunk * self.world_size

    @property
    def padding(self) -> int:
        """Elements of the flat buffer that belong to no parameter."""
        return self.numel - sum(self.numels)

    def span(self, position: int, rank: int) -> Span | None:
        """The part of member ``position`` that ``rank`` owns, or None.

        A parameter without elements belongs to exactly one rank, which then owns an empty span, so
        that its optimizer state exists somewhere.
        """
        offset, numel = self.offsets[position], self.numels[position]
        if numel == 0:
            owner = min(offset // max(self.chunk, 1), self.world_size - 1)
            return Span(0, 0) if rank == owner else None
        begin = max(offset, rank * self.chunk)
        end = min(offset + numel, (rank + 1) * self.chunk)
        return Span(begin - offset, end - begin) if begin < end else None


def plan_buckets(
    numels: Sequence[int],
    *,
    world_size: int,
    partition: Partition,
    bucket_numel: int,
    first_numel: int | None = None,
    alignment: int = 1,
) -> list[BucketPlan]:
    """Plans buckets for parameters of one dtype on one device, in registration order.

    In a flat bucket every rank's range is ``ceil(bucket elements / world_size)`` long, so none owns
    more than one element above the mean (alignment gaps counted as elements).

    Args:
        numels: elements of each parameter.
        world_size: number of ranks, at least 1.
        partition: "flat" or "whole".
        bucket_numel: largest number of elements of a bucket, except that a parameter is never
            split over two buckets, and that a "whole" bucket grows until padding is small.
        first_numel: limit of the first "flat" bucket, if smaller; each further one may hold
            ``RAMP`` times as much as all before it, up to ``bucket_numel``. The first bucket's
            gradients are the last that backward makes, so nothing hides its reduction.
        alignment: parameters start at multiples of this many elements, because matrix kernels
            are slower on misaligned operands.
    """
    first = bucket_numel if first_numel is None else first_numel
    flat, totals, plans = partition == "flat", [0] * world_size, []
    split = _split_by_size(numels, bucket_numel, first)
    for members in split if flat else _split_by_padding(numels, bucket_numel, world_size):
        sizes = [numels[index] for index in members]
        padded = [round_up(size, alignment) for size in sizes]
        offsets = list(accumulate(padded, initial=0))[:-1]
        chunk = -(-(offsets[-1] + sizes[-1]) // world_size)
        if not flat:
            owned = assign_owners(padded, totals)
            chunk = max(sum(padded[at] for at in mine) for mine in owned)
            for rank, mine in enumerate(owned):
                starts = accumulate((padded[at] for at in mine), initial=rank * chunk)
                for at, start in zip(mine, starts, strict=False):
                    offsets[at] = start
        plans.append(
            BucketPlan(
                members=tuple(members),
                offsets=tuple(offsets),
                numels=tuple(sizes),
                chunk=chunk,
                world_size=world_size,
            )
        )
    return plans


def _split_by_size(numels: Sequence[int], bucket_numel: int, first_numel: int) -> list[list[int]]:
    runs: list[list[int]] = []
    room = before = 0
    for index, numel in enumerate(numels):
        if not runs or numel > room:
            runs.append([])
            room = min(bucket_numel, max(first_numel, RAMP * before))
        runs[-1].append(index)
        room -= numel
        before += numel
    return runs


def _split_by_padding(numels: Sequence[int], bucket_numel: int, world_size: int) -> list[list[int]]:
    """Runs of parameters large enough that balancing whole parameters wastes little."""
    runs: list[list[int]] = []
    open_run: list[int] = []
    for index in range(len(numels)):
        open_run.append(index)
        filled = sum(numels[i] for i in open_run)
        largest = max(numels[i] for i in open_run)
        if filled >= max(bucket_numel, _WHOLE_BUCKET_WEIGHT * world_size * largest):
            runs.append(open_run)
            open_run = []
    if open_run and runs:
        runs[-1].extend(open_run)  # a short last run could not be balanced
    elif open_run:
        runs.append(open_run)
    return runs


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below ``number``."""
    return -(-number // multiple) * multiple


def assign_owners(costs: Sequence[int], totals: list[int]) -> list[list[int]]:
    """Divides items over ranks, most costly first, each to the rank with the lowest cost so far.

    Args:
        costs: of each item.
        totals: each rank's cost before, which breaks ties; this assignment is added.

    Returns:
        For every rank, the positions of its items, most costly first.
    """
    owned: list[list[int]] = [[] for _ in totals]
    loads = [0] * len(totals)
    for position in sorted(range(len(costs)), key=lambda position: (-costs[position], position)):
        rank = min(range(len(totals)), key=lambda rank: (loads[rank], totals[rank], rank))
        owned[rank].append(position)
        loads[rank] += costs[position]
        totals[rank] += costs[position]
    return owned


# --- one flat buffer -----------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class Shard:
    """The part of one parameter that this rank updates.

    Attributes:
        param: the whole parameter, as the module knows it.
        index: the parameter's number over all groups in order: its key in a plain state dict.
        name: the parameter's name, for errors.
        span: the owned elements of the flattened parameter.
        begin: their place inside this rank's range of the bucket.
        view: those elements inside the parameter's storage: one-dimensional under "flat", of the
            parameter's own shape under "whole".
    """

    param: Tensor
    index: int
    name: str
    span: Span
    begin: int
    view: Tensor


class Bucket:
    """One flat buffer holding whole parameters, and this rank's shards of them.

    Attributes:
        flat: the buffer, shape (world_size * chunk,).
        owned: this rank's range of it, shape (chunk,).
        shards: this rank's parts of the members, in the plan's order.

    Args:
        params: the members, in the plan's order; one dtype, one device.
        indices: each member's number over all groups.
        names: each member's name, for errors.
        plan: where the members lie.
        shaped: whether shards keep their parameter's shape ("whole").
        communication: of the ranks that share the work.
        ranks: these ranks.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        *,
        indices: Sequence[int],
        names: Sequence[str],
        plan: BucketPlan,
        shaped: bool,
        communication: Communication,
        ranks: Ranks,
    ) -> None:
        self.params = list(params)
        self.indices = list(indices)
        self.names = list(names)
        self.plan = plan
        self.rank = ranks.rank
        self._ranks = ranks
        self._communication = communication
        self.dtype = self.params[0].dtype
        self.device = self.params[0].device
        self.flat = torch.zeros(plan.numel, dtype=self.dtype, device=self.device)
        self.owned = self.flat.narrow(0, self.rank * plan.chunk, plan.chunk)
        self.shards: list[Shard] = []
        self._gather: Waitable | None = None
        self._gather_words = self.describe("the all-gather of updated parameters")
        for position, param in enumerate(self.params):
            self._adopt(param, plan.offsets[position])
            span = plan.span(position, self.rank)
            if span is not None:
                # A number stays a number, so that its state has the shape a full state dict has.
                keep_shape = shaped or param.ndim == 0
                begin = plan.offsets[position] + span.start
                view = param.detach() if keep_shape else self.flat.narrow(0, begin, span.length)
                self.shards.append(
                    Shard(
                        param=param,
                        index=self.indices[position],
                        name=self.names[position],
                        span=span,
                        begin=begin - self.rank * plan.chunk,
                        view=view,
                    )
                )

        self._addresses = [param.data_ptr() for param in self.params]

    def _adopt(self, param: Tensor, offset: int) -> None:
        """Moves the parameter's values into the flat buffer, keeping its shape and strides."""
        view = self.flat.as_strided(param.size(), param.stride(), offset)
        view.copy_(param.detach())
        param.data = view

    def check_storage(self) -> None:
        """Makes sure that the parameters are still views of the buffer that is updated.

        Raises:
            RuntimeError: naming the first that was moved or converted.
        """
        addresses = [param.data_ptr() for param in self.params]
        if addresses == self._addresses:
            return
        moved = next(i for i, a in enumerate(addresses) if a != self._addresses[i])
        param, name = self.params[moved], self.names[moved]
        raise RuntimeError(
            "parameters must stay in the memory that the sharded optimizer updates, but "
            f"{name} was moved or converted since ({self.dtype} on {self.device} then, "
            f"{param.dtype} on {param.device} now). Convert the model first, with model.to(...), "
            "and construct the optimizer then"
        )

    def place(self, position: int) -> Place:
        """Which rank holds which elements of the state of one parameter."""
        param = self.params[position]
        shard = next((s for s in self.shards if s.index == self.indices[position]), None)
        return Place(
            name=self.names[position],
            size=param.size(),
            stride=param.stride(),
            owned=self.plan.span(position, self.rank),
            form=torch.Size([0]) if shard is None else shard.view.size(),
        )

    def describe(self, what: str) -> str:
        """``what`` and this bucket in words, for errors."""
        more = f" and {len(self.names) - 1} more" if len(self.names) > 1 else ""
        return f"{what} ({self.names[0]}{more})"

    @property
    def packed(self) -> bool:
        """Whether the members, row-major, follow each other without gaps from the start."""
        ends = accumulate(self.plan.numels)
        return all(
            offset + numel == end and param.is_contiguous()
            for param, offset, numel, end in zip(
                self.params, self.plan.offsets, self.plan.numels, ends, strict=True
            )
        )

    def launch_gather(self) -> None:
        """Starts the all-gather of updated parameters, in place and asynchronously."""
        if self.plan.world_size > 1 and self.plan.chunk > 0:
            self._gather = self._ranks.together(
                self._gather_words,
                self._communication.all_gather,
                [self.flat],
                [self.owned],
            )

    @property
    def gathering(self) -> bool:
        """Whether an all-gather was launched and not awaited yet."""
        return self._gather is not None

    def wait_gather(self) -> None:
        """Waits for the all-gather. On CUDA the current stream waits, not the host."""
        if self._gather is not None:
            work, self._gather = self._gather, None
            self._ranks.call(self._gather_words, work.wait)


def check_layout(param: Tensor, name: str) -> None:
    """Refuses parameters whose elements are not one dense block of memory.

    Raises:
        ValueError: for sparse, expanded or strided-with-gaps parameters.
    """
    if param.layout != torch.strided or not _is_dense(param):
        strides = param.stride() if param.layout == torch.strided else "none"
        raise ValueError(
            f"a sharded parameter must occupy one dense block of memory, but {name} has layout "
            f"{param.layout}, shape {tuple(param.shape)}, strides {strides}. "
            "Replace it by a contiguous copy first."
        )


def _is_dense(param: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(param.stride(), param.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def check_gradient(grad: Tensor | None, name: str) -> None:
    """Refuses gradients that cannot be sliced.

    Raises:
        ValueError: for a sparse gradient.
    """
    if grad is not None and grad.layout != torch.strided:
        raise ValueError(
            f"gradients must be dense, but got one of layout {grad.layout} for {name}. "
            "Use sparse=False in its embedding."
        )


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """``tensor`` as a vector in the memory order of ``like``, which has the same shape.

    A view if their strides agree, else a copy.
    """
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor.view(-1)
    if tensor.stride() != like.stride():
        tensor = torch.empty_strided(
            like.size(), like.stride(), dtype=tensor.dtype, device=tensor.device
        ).copy_(tensor)
    return tensor.as_strided((tensor.numel(),), (1,))


def in_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, at twice its speed on CUDA: the kernel for several tensors is better.

    Args:
        tensor: of any shape; returned itself if it has the dtype.
        dtype: of the result.
    """
    if tensor.dtype == dtype:
        return tensor
    result = torch.empty_like(tensor, dtype=dtype)
    torch._foreach_copy_([result], [tensor])
    return result


def flat_slice(
    whole: Tensor, size: torch.Size, stride: tuple[int, ...], first: int, count: int
) -> Tensor:
    """Elements ``[first, first + count)`` of a tensor in the memory order of a parameter."""
    like = torch.empty_strided(size, stride, dtype=whole.dtype, device="meta")
    return in_memory_order(whole.detach(), like)[first : first + count]


@dataclass(frozen=True, eq=False)
class Place:
    """Which elements of one tensor this rank holds, and the form in which it holds them.

    Attributes:
        name: of the parameter or buffer, for errors.
        size: of the whole tensor.
        stride: of the whole tensor, whose elements are counted in memory order.
        owned: the first element that this rank holds and their number; None if it keeps no state
            of the tensor.
        form: size of the tensor that holds this rank's elements.
        replicated: whether every rank holds all elements.
    """

    name: str
    size: torch.Size
    stride: tuple[int, ...]
    owned: tuple[int, int] | None
    form: torch.Size
    replicated: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """The first element that this rank holds, and their number."""
        first, count = self.owned or (0, 0)
        return first, count  # which saved state holds: no Span

    @property
    def held(self) -> bool:
        """Whether this rank keeps state of the tensor."""
        return self.owned is not None

    @property
    def whole_here(self) -> bool:
        """Whether this rank's tensor has the size of the whole one."""
        return self.form == self.size

    def flat(self, held: Tensor) -> Tensor:
        """This rank's elements as a vector, from the tensor that holds them."""
        if not self.whole_here:
            return held.detach().reshape(-1)
        return flat_slice(held, self.size, self.stride, 0, self.size.numel())

    def shaped(self, flat: Tensor) -> Tensor:
        """The tensor that holds this rank's elements, from a vector of them."""
        return flat.as_strided(self.size, self.stride) if self.whole_here else flat.view(self.form)

    def beside(self, size: torch.Size) -> Place:
        """Where a tensor of another size lies that belongs to this one, which has one owner."""
        return replace(
            self,
            size=size,
            stride=torch.empty(size, device="meta").stride(),
            owned=(0, size.numel()) if self.held else None,
            form=size if self.whole_here else torch.Size([0]),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Row:
    """One tensor of a training run's state: where its elements lie, and this rank's of them."""

    place: Place
    tensor: Tensor

    @property
    def flat(self) -> Tensor:
        """This rank's elements, as a vector."""
        return self.place.flat(self.tensor)

    @property
    def described(self) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """What the other ranks are told: dtype, shape of the whole, first element, their number."""
        return self.tensor.dtype, tuple(self.place.size), *self.place.span

    def copied(self) -> Row:
        """A copy on the CPU, which training does not change."""
        return Row(place=self.place, tensor=self.tensor.detach().to("cpu", copy=True))


def replicated_place(name: str, tensor: Tensor) -> Place:
    """Where a tensor lies that every rank holds whole."""
    size = tensor.size()
    stride = tensor.stride() if _is_dense(tensor) else torch.empty(size, device="meta").stride()
    return Place(name, size, stride, (0, size.numel()), form=size, replicated=True)


# --- all of them -----------------------------------------------------------------------------


class Placement:
    """Puts trainable parameters into buckets, and remembers which are frozen.

    Args:
        partition: "flat" or "whole".
        bucket_size_mb: size of a bucket in MB (1024² bytes); None chooses by the model's size,
            and begins with smaller ones.

    Raises:
        ValueError: for an unknown partition, or a size that is not positive and finite.

    Attributes:
        bucket_size_mb: as given.
        buckets: all buckets, in the order in which they were made.
        frozen: numbers of the parameters that have no place.
    """

    def __init__(self, partition: Partition, bucket_size_mb: float | None) -> None:
        if partition not in PARTITIONS:
            raise ValueError(
                f"partition must be one of {PARTITIONS}, but got {partition!r}. Use 'flat' unless "
                "the optimizer looks at shapes."
            )
        if bucket_size_mb is not None and not 0 < bucket_size_mb < math.inf:
            raise ValueError(
                f"bucket_size_mb must be positive and finite, but got {bucket_size_mb}. Leave it "
                "out for an eighth of the parameters."
            )
        self.bucket_size_mb = bucket_size_mb
        self.buckets: list[Bucket] = []
        self.frozen: list[int] = []
        self._partition: Partition = partition

    def place(
        self, groups: Groups, added: Iterable[int], communication: Communication, ranks: Ranks
    ) -> list[Bucket]:
        """Makes buckets for added parameters, and for frozen ones that have become trainable.

        Args:
            groups: all groups of parameters.
            added: numbers of parameters that were not placed before.
            communication: of the ranks that share each bucket.
            ranks: these ranks.

        Returns:
            The new buckets, the same on every rank.
        """
        params = all_params(groups)
        kinds: dict[tuple[torch.dtype, torch.device], list[int]] = defaultdict(list)
        candidates, self.frozen = [*self.frozen, *added], []
        for index in candidates:
            if params[index].requires_grad:
                kinds[params[index].dtype, params[index].device].append(index)
            else:
                self.frozen.append(index)
        made = []
        for (dtype, _), members in kinds.items():
            numels = [params[index].numel() for index in members]
            for plan in self._plan(numels, dtype, ranks.size):
                chosen = [members[position] for position in plan.members]
                bucket = Bucket(
                    [params[index] for index in chosen],
                    indices=chosen,
                    names=[name_of(groups, index) for index in chosen],
                    plan=plan,
                    shaped=self._partition == "whole",
                    communication=communication,
                    ranks=ranks,
                )
                made.append(bucket)
        self.buckets += made
        return made

    def _plan(self, numels: Sequence[int], dtype: torch.dtype, world_size: int) -> list[BucketPlan]:
        size_mb, first = self.bucket_size_mb, None
        if size_mb is None:
            share = sum(numels) * dtype.itemsize / DEFAULT_BUCKETS / MIB
            size_mb = min(max(share, SMALLEST_DEFAULT_MB), LARGEST_DEFAULT_MB)
            first = SMALLEST_DEFAULT_MB * MIB // dtype.itemsize
        return plan_buckets(
            numels,
            world_size=world_size,
            partition=self._partition,
            bucket_numel=max(1, int(size_mb * MIB / dtype.itemsize)),
            first_numel=first,
            alignment=max(1, ALIGNMENT_BYTES // dtype.itemsize),
        )
