"""One unit: its shards, the buffer it is gathered into, and the reduction of its gradients.

Every parameter of a unit is cut into ``world_size`` equal ranges of its elements, the last one
padded, and rank r holds range r. One kernel casts this rank's ranges to the dtype of the
computation, straight into its part of the result, unless the communication casts as it sends. A
coalesced all-gather writes each parameter to its place, where cached views with the parameter's own
shape and strides become ``param.data``; a coalesced reduce-scatter reads straight from autograd's
gradients. No kernel copies whole parameters or packs gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.ranks import shortened, start_all_reduce
from ddp_lite.reduce import Waitable
from shard_optim.bucket_plan import round_up
from shard_optim.communication import (
    Communication,
    all_gather,
    as_sent,
    check_gradient,
    in_dtype,
    traced,
)
from shard_optim.fully_sharded.gradient_store import GradientStore
from shard_optim.fully_sharded.unit_plan import UnitPlan, is_quantised
from shard_optim.mesh import Mesh
from shard_optim.place import Place, in_memory_order

# Parameters start at multiples of this many elements: at least the 128 bytes of a cache line.
ALIGNMENT = 128


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one parameter is divided over the ranks."""

    numel: int  # elements of the whole parameter
    chunk: int  # elements of each rank's range, padding included
    shard_offset: int  # first element of the range in the rank's flat tensor of shards
    whole_offset: int  # first element of the whole parameter in the buffer it is gathered into

    def owned(self, rank: int) -> tuple[int, int]:
        """The parameter's elements that ``rank`` holds, as (first, count)."""
        first = min(rank * self.chunk, self.numel)
        return first, min(self.chunk, self.numel - first)


def plan_cuts(numels: Sequence[int], world_size: int) -> tuple[list[Cut], int, int]:
    """Equal ranges of parameters at aligned offsets; elements of a rank's shards, and of all."""
    cuts, shard, whole = [], 0, 0
    for numel in numels:
        chunk = -(-numel // world_size)
        cuts.append(Cut(numel=numel, chunk=chunk, shard_offset=shard, whole_offset=whole))
        shard += round_up(chunk, ALIGNMENT)
        whole += round_up(chunk * world_size, ALIGNMENT)
    return cuts, shard, whole


class ReducePlan:
    """Where averages of some of a unit's gradients lie in one flat tensor: at aligned offsets."""

    def __init__(self, positions: list[int], cuts: Sequence[Cut], rank: int) -> None:
        self.positions = positions  # of the parameters
        # Elements of each part that the reduction fills, that belong to the parameter, and in all.
        self.chunks = [cuts[position].chunk for position in positions]
        self.counts = [cuts[position].owned(rank)[1] for position in positions]
        self.sizes = [round_up(chunk, ALIGNMENT) for chunk in self.chunks]

    def parts(self, flat: Tensor, lengths: list[int]) -> Sequence[Tensor]:
        """The beginnings of the parts, of these lengths; usually these are the parts."""
        parts = torch.split_with_sizes(flat, self.sizes)
        if lengths == self.sizes:  # each further view costs the host time
            return parts
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]


class Slot:
    """A buffer into which units are gathered, one after the other.

    Views of it are made once and stay valid: only the memory behind them comes and goes. A unit's
    parameters are valid while the unit owns the slot and the generation is the present one; a new
    forward begins a new generation, because the shards may have been updated.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.whole = torch.zeros(numel, dtype=dtype, device=device)
        self._memory, self._nbytes = self.whole.untyped_storage(), self.whole.nbytes
        self._held = True
        self._stream = self._current_stream()  # whose work the memory may be reused after
        # The unit that was gathered into it last; None after the memory was freed.
        self.owner: Unit | None = None
        self.generation = -1  # the forward in which that unit was gathered
        self.work: Waitable | None = None  # the gather of that unit, until it has been waited for

    def take(self, unit: Unit, generation: int) -> None:
        """Makes ``unit`` the owner, and allocates the memory if it was freed."""
        self.wait()
        if not self._held:
            self._held = True
            self._stream = self._current_stream()
            self._memory.resize_(self._nbytes)
        self.owner, self.generation = unit, generation

    def free(self) -> None:
        """Gives the memory back to the allocator.

        The current stream has waited for the gather, and its kernels may still read the values. The
        allocator waits for the stream on which the memory was allocated before it reuses the
        memory; so the allocator must be told if the current stream is another one.
        """
        if self._held:
            stream = self._current_stream()
            if stream is not None and stream != self._stream:
                self.whole.record_stream(stream)
            self._held, self.owner = False, None
            self._memory.resize_(0)

    def _current_stream(self) -> torch.Stream | None:
        if self.whole.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.whole.device)

    def wait(self) -> None:
        """Waits for the gather into this slot. On CUDA the current stream waits, not the host."""
        if self.work is not None:
            work, self.work = self.work, None
            assert self.owner is not None
            with traced("wait_for_all_gather", self.owner.name):
                self.owner.ranks.call(self.owner.gather_words, work.wait)


@dataclass(eq=False)
class UnitReduction:
    """A reduction under way."""

    unit: Unit  # whose gradients are averaged
    plan: ReducePlan  # where the averages lie in ``output``
    # The whole gradients, which must live until the reduce-scatter has been awaited.
    inputs: list[Tensor]
    output: Tensor  # this rank's averages
    work: Waitable
    all_reduce: dist.Work | None = None  # the all-reduce across replicas, once it has been started

    def start_all_reduce(self) -> None:
        """Starts the all-reduce of this rank's shard across replicas, if there are any."""
        unit = self.unit
        if unit.replicas is not None and self.all_reduce is None:
            unit.ranks.call(unit.reduce_words, self.work.wait)
            self.all_reduce = unit.replicas.together(
                unit.all_reduce_words,
                start_all_reduce,
                unit.replicas.communicator,
                self.output,
                dist.ReduceOp.AVG,
            )

    def finish(self) -> None:
        """Waits for the collectives, and adds this rank's averages to its gradients."""
        self.wait()
        self.store()

    def wait(self) -> None:
        """Waits for the collectives. On CUDA the current stream waits, not the host."""
        unit = self.unit
        if unit.replicas is None:
            unit.ranks.call(unit.reduce_words, self.work.wait)
        else:
            self.start_all_reduce()
            assert self.all_reduce is not None
            unit.replicas.call(unit.all_reduce_words, self.all_reduce.wait)
        self.inputs.clear()  # before the averages take more memory

    def store(self) -> None:
        """Adds this rank's averages, in the parameters' dtype, to its gradients."""
        unit, plan = self.unit, self.plan
        received = plan.parts(in_dtype(self.output, unit.dtype), plan.counts)
        unit.gradients.add(plan.positions, received)


class Unit:
    """Parameters that are gathered together. See the module's text.

    Args:
        plan: which parameters. They hold their whole values; afterwards, their shards.
        communication: of the ranks that hold a shard each.
        compute_dtype, reduce_dtype: as for ``FullyShardedDataParallel``.
    """

    def __init__(
        self,
        plan: UnitPlan,
        *,
        ranks: Mesh,
        communication: Communication,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.name, self.names, self.params = plan.name, plan.names, plan.params
        self.repeated = plan.repeated
        self.ranks, self.replicas = ranks.shards, ranks.replicas
        rank, world_size = ranks.shards.rank, ranks.shards.size
        self._communication = communication
        self.dtype, self.device = self.params[0].dtype, self.params[0].device
        self.gather_dtype = self.dtype if is_quantised(self.dtype) else compute_dtype or self.dtype
        # Whether shards are cast before they are gathered, and averages after they have arrived:
        # unless the communication does it, and nothing averages them once more.
        casts = not getattr(communication, "casts", False)
        self._casts = casts and self.gather_dtype != self.dtype
        self._casts_averages = casts or self.replicas is not None
        self._reduce_dtype = reduce_dtype
        numels = [param.numel() for param in self.params]
        self.cuts, self.shard_numel, self.whole_numel = plan_cuts(numels, world_size)
        self.places = []  # where each parameter lies
        # This rank's ranges of all parameters, flat.
        self.shard = torch.zeros(self.shard_numel, dtype=self.dtype, device=self.device)
        # The part of ``shard`` that belongs to each parameter: its vector ``param.data`` at rest.
        self.shard_views = []
        self._plain: list[bool] = []  # whether a contiguous gradient is reduced as it is
        for name, param, cut in zip(self.names, self.params, self.cuts, strict=True):
            self._plain.append(param.is_contiguous() and cut.chunk * world_size == cut.numel)
            first, count = cut.owned(rank)
            view = self.shard[cut.shard_offset : cut.shard_offset + count]
            view.copy_(in_memory_order(param.detach(), param)[first : first + count])
            self.shard_views.append(view)
            size, stride = param.size(), param.stride()
            self.places.append(Place(name, size, stride, (first, count), view.size()))
            param.data = view
        self.gradients = GradientStore(self.params, sharded=True)
        members = shortened(self.names, 1, " and ")
        self.gather_words = f"the all-gather of parameters ({members})"
        self.reduce_words = f"the reduce-scatter of gradients ({members})"
        self.all_reduce_words = f"the all-reduce of gradient shards ({members})"
        self.resting = True
        self.uses = 0  # calls under way that read the parameters
        # Positions whose gradients are complete in this backward pass.
        self.arrived: set[int] = set()
        self.expected = 0  # number of gradients that this backward pass will make
        self.hooked: set[int] = set()  # positions whose parameters report their gradients
        # Where the averages of the last reduction lie, in which the parameters took part that
        # required gradients then.
        self.reduce_plan = ReducePlan([], self.cuts, rank)

    # --- gather ------------------------------------------------------------------------------

    def whole_parameter(self, position: int) -> Tensor:
        """One parameter, whole, in new memory; every rank of the group calls this."""
        cut = self.cuts[position]
        place = self.places[position]
        own = self.shard[cut.shard_offset : cut.shard_offset + cut.chunk]
        flat = own.new_empty(cut.chunk * self.ranks.size)
        words = f"the all-gather of {self.names[position]}"

        def gather() -> None:
            all_gather(as_sent(flat), as_sent(own), self.ranks.communicator).wait()

        self.ranks.together(words, gather)
        return flat.as_strided(place.size, place.stride)

    def use(self, slot: Slot) -> None:
        """Fixes where this unit is gathered, and makes the views that ``param.data`` will be."""
        self.slot = slot
        rank, world_size = self.ranks.rank, self.ranks.size
        self._ranges = [self.shard[c.shard_offset : c.shard_offset + c.chunk] for c in self.cuts]
        self._targets = [
            slot.whole[c.whole_offset : c.whole_offset + c.chunk * world_size] for c in self.cuts
        ]
        # Shards that are cast become this rank's part of the result, which is gathered in place.
        self._sources = self._ranges
        if self._casts:
            self._sources = [target.chunk(world_size)[rank] for target in self._targets]
        self.whole_views = [
            slot.whole.as_strided(place.size, place.stride, cut.whole_offset)
            for place, cut in zip(self.places, self.cuts, strict=True)
        ]
        self._targets = [as_sent(target) for target in self._targets]
        self._sources = [as_sent(source) for source in self._sources]

    def gathered(self, generation: int) -> bool:
        """Whether the slot holds this unit's present values, or will when its gather ends."""
        return self.slot.owner is self and self.slot.generation == generation

    def launch_gather(self, generation: int, phase: str) -> None:
        """Starts gathering. Work enqueued before on the current stream may still read the slot."""
        slot = self.slot
        slot.take(self, generation)
        with traced("all_gather", self.name):
            if self._casts:
                torch._foreach_copy_(self._sources, self._ranges)
            slot.work = self.ranks.together(
                f"{self.gather_words} {phase}",
                self._communication.all_gather,
                self._targets,
                self._sources,
            )

    def materialize(self) -> None:
        """Makes whole values the parameters' data; RuntimeError if these are no longer shards."""
        if self.resting:
            self._check_shards()
            self.resting = False
            for param, whole in zip(self.params, self.whole_views, strict=True):
                param.data = whole

    def _check_shards(self) -> None:
        for param, shard, name in zip(self.params, self.shard_views, self.names, strict=True):
            if param.data_ptr() != shard.data_ptr():
                raise RuntimeError(
                    "a sharded parameter must stay in the memory that it was given by "
                    f"FullyShardedDataParallel, but {name} was moved, cast, or assigned other "
                    "data. Move and cast the module before it is wrapped; later, copy into the "
                    "parameter with copy_() or load_state_dict()."
                )

    def rest(self) -> None:
        """Makes the shards the parameters' data."""
        if not self.resting:
            self.resting = True
            for param, shard in zip(self.params, self.shard_views, strict=True):
                param.data = shard

    # --- gradients ---------------------------------------------------------------------------

    def trainable_positions(self) -> list[int]:
        """Positions of the parameters that require gradients."""
        return [position for position, param in enumerate(self.params) if param.requires_grad]

    def launch_reduction(self) -> tuple[UnitReduction, list[int]]:
        """Starts averaging gradients, zeros for missing ones; also gives positions that had one."""
        positions = self.trainable_positions()
        if positions != self.reduce_plan.positions:
            self.reduce_plan = ReducePlan(positions, self.cuts, self.ranks.rank)
        plan = self.reduce_plan
        grads = self.gradients.take(positions)
        present = [
            position for position, grad in zip(positions, grads, strict=True) if grad is not None
        ]
        # Usually a gradient divides evenly and is contiguous: one view, which costs the host least.
        inputs = [
            grad.view(-1)
            if self._plain[position]
            and grad is not None
            and grad.layout == torch.strided
            and grad.is_contiguous()
            else self._whole_gradient(position, grad)
            for position, grad in zip(positions, grads, strict=True)
        ]
        self.arrived.clear()
        dtypes = {grad.dtype for grad in inputs}
        dtype = self._reduce_dtype or inputs[0].dtype
        if dtype == torch.float16:
            dtype = torch.float32
        if dtypes != {dtype}:
            sizes = [grad.numel() for grad in inputs]
            converted = torch.empty(sum(sizes), dtype=dtype, device=self.device).split(sizes)
            torch._foreach_copy_(converted, inputs)
            inputs = list(converted)
        into = dtype if self._casts_averages else self.dtype
        output = torch.empty(sum(plan.sizes), dtype=into, device=self.device)
        targets = plan.parts(output, plan.chunks)
        with traced("reduce_scatter", self.name):
            work = self.ranks.together(
                self.reduce_words, self._communication.reduce_scatter, targets, inputs
            )
        return UnitReduction(self, plan, inputs, output, work), present

    def _whole_gradient(self, position: int, grad: Tensor | None) -> Tensor:
        """The gradient as a vector that divides evenly over the ranks."""
        cut = self.cuts[position]
        padded = cut.chunk * self.ranks.size
        if grad is None:
            return torch.zeros(padded, dtype=self.gather_dtype, device=self.device)
        check_gradient(grad, self.names[position])
        flat = in_memory_order(grad, self.whole_views[position])
        padding = padded - cut.numel
        return torch.nn.functional.pad(flat, (0, padding)) if padding else flat
