"""Flat buffers of parameters: gathered after an update, awaited by the forward that reads them.

A bucket re-points the data of its parameters (``param.data``) into its buffer, so the all-gather of
updated parameters writes straight into them, without a staging copy. Parameters keep identity,
shape, strides, dtype and ``requires_grad``; only their storage is shared. ``bucket_plan.py`` says
where they lie.

Under ``overlap="next-forward"`` each module waits for its own parameters just before it runs, so
the all-gathers of later layers overlap the computation of earlier ones. A compiled module waits
before its compiled code starts, for everything inside it: a wait in the middle would cut its graph
in two.

The file reads from one buffer (``Bucket``) over all of them (``Placement``) to the modules that
wait (``ForwardWaits``).
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ddp_lite.ranks import MEBIBYTE, Ranks, shortened
from ddp_lite.reduce import Waitable
from shard_optim.bucket_plan import BucketPlan, Partition, plan_buckets
from shard_optim.communication import Communication
from shard_optim.fully_sharded.unit_plan import is_compiled
from shard_optim.parameter_groups import Groups, all_params, name_of
from shard_optim.place import Place

PARTITIONS: tuple[Partition, ...] = get_args(Partition)

# Buckets of a default size: few enough that starting them costs the host little, many enough that
# they overlap with backward and forward, and large enough for the network's full bandwidth.
DEFAULT_BUCKETS = 8
SMALLEST_DEFAULT_MB = 25
LARGEST_DEFAULT_MB = 1000

# What vectorised loads, cuBLAS and Hopper's tensor memory accelerator need at least.
ALIGNMENT_BYTES = 16


@dataclass(eq=False, kw_only=True)
class Shard:
    """The part of one parameter that this rank updates."""

    param: Tensor  # the whole parameter, as the module knows it
    index: int  # the parameter's number over all groups in order: its key in a plain state dict
    place: Place  # the owned elements of the parameter
    begin: int  # the first of them inside this rank's range of the bucket
    # Those elements inside the parameter's storage: one-dimensional under "flat", of the
    # parameter's own shape under "whole".
    view: Tensor


class Bucket:
    """One flat buffer holding whole parameters, and this rank's shards of them.

    Args:
        params: the members, in the plan's order; one dtype, one device.
        indices: each member's number over all groups.
        shaped: whether shards keep their parameter's shape ("whole").
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
        self.params, self.indices, self.names = list(params), list(indices), list(names)
        self.plan, self._ranks, self._communication = plan, ranks, communication
        rank, self.dtype, self.device = ranks.rank, params[0].dtype, params[0].device
        # The buffer, shape (world_size * chunk,).
        self.flat = torch.zeros(plan.numel, dtype=self.dtype, device=self.device)
        self.owned = self.flat.narrow(0, rank * plan.chunk, plan.chunk)  # this rank's, (chunk,)
        self.shards: list[Shard] = []  # this rank's parts of the members, in the plan's order
        self.places: list[Place] = []  # where the state of each member lies
        self._gather: Waitable | None = None
        members = shortened(self.names, 1, " and ")
        self._gather_words = f"the all-gather of updated parameters ({members})"
        for position, (param, name) in enumerate(zip(params, names, strict=True)):
            offset, span = plan.offsets[position], plan.span(position, rank)
            adopted = self.flat.as_strided(param.size(), param.stride(), offset)
            adopted.copy_(param.detach())
            param.data = adopted
            first, count = span or (0, 0)
            # A number stays a number, so that its state has the shape a full state dict has.
            keep_shape = shaped or param.ndim == 0
            view = param.detach() if keep_shape else self.flat.narrow(0, offset + first, count)
            form = torch.Size([0]) if span is None else view.size()
            place = Place(name, param.size(), param.stride(), span, form)
            self.places.append(place)
            if span is not None:
                begin, index = offset + first - rank * plan.chunk, self.indices[position]
                shard = Shard(param=param, index=index, place=place, begin=begin, view=view)
                self.shards.append(shard)
        self._addresses = [param.data_ptr() for param in self.params]

    def check_storage(self) -> None:
        """Raises RuntimeError for a parameter that is no longer a view of the buffer."""
        addresses = [param.data_ptr() for param in self.params]
        if addresses == self._addresses:
            return
        moved = next(i for i, a in enumerate(addresses) if a != self._addresses[i])
        param, name = self.params[moved], self.names[moved]
        raise RuntimeError(
            "parameters must stay in the memory that the sharded optimizer updates, but "
            f"{name} was moved or converted since ({self.dtype} on {self.device} then, "
            f"{param.dtype} on {param.device} now). Convert the model first, with model.to(...), "
            "and construct the optimizer then, and only one over these parameters"
        )

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
                self._gather_words, self._communication.all_gather, [self.flat], [self.owned]
            )

    def wait_gather(self) -> None:
        """Waits for the all-gather. On CUDA the current stream waits, not the host."""
        if self._gather is not None:
            work, self._gather = self._gather, None
            self._ranks.call(self._gather_words, work.wait)


class Placement:
    """Puts trainable parameters into buckets, and remembers which are frozen."""

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
        self.buckets: list[Bucket] = []  # all buckets, in the order in which they were made
        self.frozen: list[int] = []  # numbers of the parameters that have no place
        self._partition: Partition = partition

    def place(
        self, groups: Groups, added: Iterable[int], communication: Communication, ranks: Ranks
    ) -> list[Bucket]:
        """Makes the same buckets on every rank for added and for now trainable parameters."""
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
            share = sum(numels) * dtype.itemsize / DEFAULT_BUCKETS / MEBIBYTE
            size_mb = min(max(share, SMALLEST_DEFAULT_MB), LARGEST_DEFAULT_MB)
            first = SMALLEST_DEFAULT_MB * MEBIBYTE // dtype.itemsize
        return plan_buckets(
            numels,
            world_size=world_size,
            partition=self._partition,
            bucket_numel=max(1, int(size_mb * MEBIBYTE / dtype.itemsize)),
            first_numel=first,
            alignment=max(1, ALIGNMENT_BYTES // dtype.itemsize),
        )


# --- modules that wait ------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class WaitingCall:
    """Takes the place of a module's call: waits for what it reads, then calls it."""

    waits: ForwardWaits  # whose parameters are awaited
    call: Callable[..., Any]  # the module's own call, compiled or not
    compiled: bool  # whether it is
    buckets: list[Bucket] = field(default_factory=list)  # to wait for, each once
    keys: set[int] = field(default_factory=set)  # identities of the parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Waits if it must, and calls the module."""
        waits = self.waits
        if waits.pending:
            for bucket in self.buckets:
                bucket.wait_gather()
            waits.unread -= self.keys
        return self.call(*args, **kwargs)


class _WaitingParameters(dict[str, Any]):
    """The table of a module's own parameters; listing it waits for all attached optimizers' first.

    ``parameters()``, averages of weights, ``state_dict()`` and copies do; single attributes do not.
    """

    def __init__(self, own: dict[str, Any], waits: ForwardWaits) -> None:
        super().__init__(own)
        self.waits = [*getattr(own, "waits", ()), waits]

    def items(self) -> Any:
        """Waits, and lists the parameters."""
        for waits in self.waits:
            if waits.pending:
                waits.wait_all()
        return super().items()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Waits; copies and pickles are ordinary tables."""
        return dict, (dict(self.items()),)


class ForwardWaits:
    """Makes every read of parameters through a module tree wait first.

    A module's parameters are awaited when it is called, or the outermost compiled module around it;
    all, when those of any module are listed. ``check_read`` finds parameters that were read too
    early: they receive a gradient although their module was not called.

    Args:
        module: the root, after every ``compile()`` of a module in it.
        hook_gradients: whether every gradient calls ``check_read``; else somebody else does.
    """

    def __init__(
        self, module: nn.Module, wait_all: Callable[[], None], *, hook_gradients: bool
    ) -> None:
        self._module, self._hook_gradients, self.wait_all = module, hook_gradients, wait_all
        self.pending = False  # whether all-gathers may be under way
        # Identities of the parameters that were not awaited since they were launched.
        self.unread: set[int] = set()
        self._calls: dict[nn.Module, WaitingCall] = {}
        self._names: dict[int, str] = {}
        if _is_compiled(module):
            module.register_state_dict_pre_hook(lambda *_: wait_all())
            module.register_load_state_dict_pre_hook(lambda *_: wait_all())

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Makes the modules that own parameters of these buckets wait for them too."""
        bucket_of = {id(param): bucket for bucket in buckets for param in bucket.params}
        for bucket in buckets:
            self._names |= zip(map(id, bucket.params), bucket.names, strict=True)
        for owner, reader in _owners_and_readers(self._module):
            table = owner._parameters  # compiled code would look into it
            if not _is_compiled(reader) and self not in getattr(table, "waits", ()):
                owner._parameters = _WaitingParameters(table, self)
            for key in map(id, owner.parameters(recurse=False)):
                if key in bucket_of:
                    if reader not in self._calls:
                        # Around the call, where ``module.compile()`` puts its own, and not in a
                        # hook: a hook would become part of a compiled module's graph, or be left
                        # out of one made without it, and it costs several times as much.
                        own = reader._compiled_call_impl or reader._call_impl
                        waiting = WaitingCall(waits=self, call=own, compiled=_is_compiled(reader))
                        reader.__dict__["_compiled_call_impl"] = waiting  # not copied or pickled
                        self._calls[reader] = waiting
                    call = self._calls[reader]
                    call.keys.add(key)
                    if bucket_of[key] not in call.buckets:
                        call.buckets.append(bucket_of[key])
        check_if_alive = weakref.WeakMethod(self.check_read)  # keeps no other parameters alive

        def on_gradient(param: Tensor) -> None:
            if (check_read := check_if_alive()) is not None:
                check_read((param,))

        params = (param for bucket in buckets for param in bucket.params)
        for param in params if self._hook_gradients else ():
            param.register_post_accumulate_grad_hook(on_gradient)

    def started(self) -> None:
        """All-gathers were launched: from here on, reads must wait."""
        self.pending = True
        self.unread = set(self._names)

    def settled(self) -> None:
        """All all-gathers were awaited: any read is safe."""
        self.pending = False

    def check_read(self, params: Iterable[Tensor]) -> None:
        """RuntimeError if one of these got a gradient although its module was not called."""
        for param in params if self.pending and self.unread else ():
            if id(param) in self.unread:
                raise RuntimeError(
                    'under overlap="next-forward" a parameter may be read only inside its own '
                    f"module's forward, but {self._names[id(param)]} received a gradient although "
                    "its module was not called, or was compiled after attach(); compile before "
                    "attach(), call wait() before the forward, or use overlap=None"
                )


def _owners_and_readers(root: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Every module with the one whose call reads its parameters, for each path that leads to it.

    That is the outermost one that is compiled, or of a class of torch's that reads parameters of
    modules inside it without calling them, or else the last with a forward (no ``ParameterList``).
    """
    reads_inside = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
    seen: set[tuple[nn.Module, nn.Module]] = set()
    paths = [(root, root, False)]
    while paths:
        module, reader, fixed = paths.pop()
        if not fixed and getattr(module.forward, "__func__", None) is not nn.Module.forward:
            reader = module
        fixed = fixed or _is_compiled(module) or isinstance(module, reads_inside)
        if (pair := (module, reader)) not in seen:
            seen.add(pair)
            yield pair
            paths += [(child, reader, fixed) for child in module.children()]


def _is_compiled(module: nn.Module) -> bool:
    call = module._compiled_call_impl
    return call.compiled if isinstance(call, WaitingCall) else is_compiled(module)
