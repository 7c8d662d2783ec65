"""Gradients reduced straight into shards during backward: ZeRO stage 2.

Each bucket's gradients are packed into one flat buffer as soon as the last of them is accumulated,
and reduce-scattered asynchronously; the parameters' own gradients are freed at once. A rank thus
holds its slice of the averaged gradients and the buffers of a few buckets in flight, never all
gradients.

Every rank launches the same sequence: passes over all buckets, last bucket first. A pass ends when
a parameter's gradient arrives a second time (another backward) or at the optimizer's step; buckets
still incomplete are then launched with zeros for what is missing. A parameter is updated if any
rank had a gradient for it, as under torch's DistributedDataParallel.

After a reduction ``param.grad`` is None, except for one parameter of each bucket, whose ``grad`` is
a stand-in that refuses to be computed with (``refused_gradient.py``): ``torch.nn.utils`` would pass
over None when it clips. After the step it is zeros until ``zero_grad()``, by which the next step
finds that this call was left out. Backward does not ask: its gradients may be dropped (GANs).
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_lite.ranks import Ranks, shortened, start_all_reduce
from ddp_lite.reduce import Waitable
from ddp_lite.transparent import temporarily
from shard_optim.buckets import Bucket
from shard_optim.communication import Communication, check_gradient
from shard_optim.refused_gradient import REDUCED, PendingGradient, ReducedGradient

# Packed gradients that may wait for the network before backward waits for them: enough to ride out
# jitter between ranks, a small part of the memory of any model that needs sharding. At least two
# buckets may always be in flight.
MAX_BYTES_IN_FLIGHT = 1024**3

# A stand-in of more elements is one element in memory, seen at every place.
_MOST_ELEMENTS = 2**16

_FLAGS = "the exchange of which parameters have gradients"


@dataclass(eq=False)
class BucketReduction:
    """What has happened to one bucket's gradients since the last step."""

    bucket: Bucket
    # Positions whose gradients were accumulated in this pass.
    arrived: set[int] = field(default_factory=set)
    # Positions for which this rank had a gradient since the last step.
    present: set[int] = field(default_factory=set)
    # This rank's slice of the averaged gradients, shape (chunk,); None before a launch.
    shard: Tensor | None = None

    def __post_init__(self) -> None:
        self.size = len(self.bucket.params)
        members = shortened(self.bucket.names, 1, " and ")
        self.words = f"the reduce-scatter of gradients ({members})"
        self._packed, self._padding = self.bucket.packed, self.bucket.plan.padding
        numels = self.bucket.plan.numels
        self.shown_at = numels.index(min(numels))
        self.stand_in = StandIn(self.bucket.params[self.shown_at], self.bucket.names[self.shown_at])

    def pack(self, grads: Sequence[Tensor | None]) -> Tensor:
        """Gradients, zeros for None, in a new flat tensor that is laid out like the bucket."""
        bucket = self.bucket
        pairs = zip(bucket.params, grads, strict=True)
        sources = [torch.zeros_like(p) if grad is None else grad for p, grad in pairs]
        if self._packed:
            if self._padding:
                sources.append(bucket.flat.new_zeros(self._padding))
            # One call, where a view of the target for each member costs more than the copies.
            flat: Tensor = torch._utils._flatten_dense_tensors(sources)
            return flat.to(bucket.dtype)
        flat = torch.empty_like(bucket.flat)
        targets = [
            flat.as_strided(param.size(), param.stride(), offset)
            for param, offset in zip(bucket.params, bucket.plan.offsets, strict=True)
        ]
        torch._foreach_copy_(targets, sources)
        return flat


class GradientReducer:
    """Hooks parameters and reduces their gradients bucket by bucket."""

    def __init__(self, communication: Communication, ranks: Ranks) -> None:
        # Called with the parameters whose gradients are about to be reduced.
        self.check_read: Callable[[Iterable[Tensor]], None] = lambda params: None
        self._communication = communication
        self._ranks = ranks
        self._reductions: list[BucketReduction] = []
        self._next = 0  # launched reductions of this pass, in launch order
        self.passes = 0  # over all buckets, since the last step
        # Launched reduce-scatters: the bucket's, what must live until it was awaited, its output.
        self._in_flight: deque[tuple[BucketReduction, Tensor, Tensor, Waitable | None]] = deque()
        self._bytes_in_flight = 0
        self._paused = False
        self._was_paused = False  # since the last step
        self._dropped = False  # reduced gradients, and no backward since
        self.complete = False  # all gradients are reduced, and neither used nor dropped
        self.used_up = False  # some gradients that the last step has used were not dropped
        self._flags: tuple[Tensor, dist.Work | None] | None = None

    def add(self, buckets: Sequence[Bucket]) -> None:
        """Hooks the parameters of new buckets; their place is at the end of the launch order."""
        for bucket in reversed(buckets):
            reduction = BucketReduction(bucket)
            self._reductions.append(reduction)
            for position, param in enumerate(bucket.params):
                # An earlier optimizer, whose step is refused, must not take gradients until then.
                hooks = param._post_accumulate_grad_hooks or {}
                for key in [key for key in hooks if getattr(hooks[key], "reduces", False)]:
                    del hooks[key]
                param.register_post_accumulate_grad_hook(self._hook(reduction, position))

    def _hook(self, reduction: BucketReduction, position: int) -> Callable[[Tensor], None]:
        # A parameter keeps its hooks alive where the garbage collector cannot follow, so a hook
        # that held the bucket would keep all parameters for ever.
        reducer_if_alive = weakref.ref(self)
        arrived, size = reduction.arrived, reduction.size

        def on_gradient(param: Tensor) -> None:
            reducer = reducer_if_alive()
            if reducer is None or reducer._paused:
                return
            # Before a new gradient is reduced into a sum that the user has dropped.
            if position in arrived or reducer._reductions[0].stand_in.dropped:
                reducer.heed_zero_grad()
            if position in arrived:
                reducer._finish_pass()
            arrived.add(position)
            reducer._dropped = False
            if len(arrived) == size:
                reducer._launch_ready()
            if len(arrived) == 1 and type(param.grad) is Tensor:  # not launched
                param.grad = param.grad.as_subclass(PendingGradient)

        on_gradient.reduces = True  # type: ignore[attr-defined]
        return on_gradient

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, gradients accumulate in the parameters and nothing is communicated."""
        self._was_paused = True
        with temporarily(self, "_paused", True):
            yield

    def _launch_ready(self) -> None:
        """Launches complete buckets, but only in the order that all ranks share."""
        while self._next < len(self._reductions):
            reduction = self._reductions[self._next]
            if len(reduction.arrived) < reduction.size:
                return
            self._launch(reduction)
            self._next += 1

    def heed_zero_grad(self) -> None:
        """Drops what was reduced if the module's ``zero_grad()`` has removed the stand-ins."""
        dropped = [r.stand_in.dropped for r in self._reductions if r.stand_in.shown]
        if dropped and all(dropped):
            self.drop()
        elif any(dropped):
            raise RuntimeError(
                "grad of some parameters was set to None after gradients had been reduced, which "
                "reduce_gradients=True cannot drop apart. Drop all by zero_grad(), or freeze these."
            )

    def _finish_pass(self) -> None:
        for reduction in self._reductions[self._next :]:
            self._launch(reduction)
        for reduction in self._reductions:
            reduction.arrived.clear()
        self._next, self.passes = 0, self.passes + 1

    @torch.no_grad()
    def _launch(self, reduction: BucketReduction) -> None:
        bucket = reduction.bucket
        self._bytes_in_flight += bucket.flat.nbytes
        while len(self._in_flight) > 1 and self._bytes_in_flight > MAX_BYTES_IN_FLIGHT:
            self._land()
        if reduction.stand_in.param.dtype != bucket.dtype:
            bucket.check_storage()  # names the conversion; the stand-in could not be shown
        grads = list(map(gradient_of, bucket.params))
        for position, grad in enumerate(grads):
            if grad is not None:
                check_gradient(grad, bucket.names[position])
                reduction.present.add(position)
        self.check_read(p for p, grad in zip(bucket.params, grads, strict=True) if grad is not None)
        packed = reduction.pack(grads)
        for param in bucket.params:
            param.grad = None
        reduction.stand_in.show()
        if self._ranks.size == 1 or bucket.plan.chunk == 0:
            self._in_flight.append((reduction, packed, packed, None))
            return
        output = torch.empty_like(bucket.owned)
        start = self._communication.reduce_scatter
        work = self._ranks.together(reduction.words, start, [output], [packed])
        self._in_flight.append((reduction, packed, output, work))

    def _land(self) -> None:
        """Awaits the oldest reduce-scatter (on CUDA the stream does) and lets its buffer go."""
        reduction, packed, output, work = self._in_flight.popleft()
        self._bytes_in_flight -= packed.nbytes
        if work is not None:
            self._ranks.call(reduction.words, work.wait)
        reduction.shard = output if reduction.shard is None else reduction.shard.add_(output)

    def finish(self) -> None:
        """Completes the reduction of all gradients since the last step; every rank calls it.

        RuntimeError for gradients that no pass covered, that were dropped, or that a step has used.
        """
        for name in (r.stand_in.name for r in self._reductions if r.stand_in.misused):
            raise RuntimeError(
                f"zero_grad() must come between two steps under reduce_gradients=True, but {name} "
                "still has the gradient that the last step used. Call zero_grad() before backward; "
                "to accumulate gradients, step after the last backward only."
            )
        self.used_up = any(reduction.stand_in.kept for reduction in self._reductions)
        if self._dropped and not self.active:
            raise RuntimeError(
                "a step must use the gradients that backward has reduced, but zero_grad() dropped "
                "them on this rank, or grad was replaced. Call zero_grad() before backward or "
                "after step(), on every rank"
            )
        if self.active or any(r.shard is None for r in self._reductions):
            self._finish_pass()
            self._exchange_flags()
        while self._in_flight:
            self._land()
        for reduction in self._reductions:
            for param, name in zip(reduction.bucket.params, reduction.bucket.names, strict=True):
                if gradient_of(param) is not None:
                    raise RuntimeError(
                        f"all gradients must be reduced before a step, but {name} has one that was "
                        "accumulated after the last reduction. Leave the last backward before a "
                        "step out of no_sync()"
                        if self._was_paused
                        else f"gradients must be averaged once, but {name} has one again after its "
                        "reduction. If the model is in a data-parallel wrapper, use the model "
                        "without it, or leave out reduce_gradients=True"
                    )
        self.complete = True

    @property
    def active(self) -> bool:
        """Whether gradients have arrived that no pass has covered yet."""
        return any(reduction.arrived for reduction in self._reductions)

    @property
    def _all_present(self) -> bool:
        return all(len(reduction.present) == reduction.size for reduction in self._reductions)

    def _exchange_flags(self) -> None:
        """Shares which parameters had a gradient; only a rank that lacked one reads the answer."""
        device = self._reductions[0].bucket.device
        if self._all_present:  # needs no copy from the host
            count = sum(reduction.size for reduction in self._reductions)
            flags = torch.ones(count, dtype=torch.uint8, device=device)
        else:
            present = [p in r.present for r in self._reductions for p in range(r.size)]
            flags = torch.tensor(present, dtype=torch.uint8, device=device)
        work = None
        if self._ranks.size > 1:
            work = self._ranks.together(
                _FLAGS, start_all_reduce, self._ranks.communicator, flags, dist.ReduceOp.MAX
            )
        self._flags = (flags, work)

    def slices(self) -> dict[Bucket, Tensor]:
        """After ``finish``: this rank's range of each bucket's averaged gradients."""
        return {r.bucket: r.shard for r in self._reductions if r.shard is not None}

    def unused(self) -> frozenset[int]:
        """After ``finish``: numbers of the parameters that had no gradient on any rank.

        Finding them waits for the device, so only a rank that lacked a gradient looks.
        RuntimeError if none had any, and those of the last step were not dropped.
        """
        if self._all_present:
            return frozenset()
        assert self._flags is not None
        flags, work = self._flags
        if work is not None:
            self._ranks.call(_FLAGS, work.wait)
        numbers = [index for reduction in self._reductions for index in reduction.bucket.indices]
        flagged = zip(numbers, flags.tolist(), strict=True)
        unused = frozenset(number for number, flag in flagged if not flag)
        if self.used_up and len(unused) == len(numbers):
            self.discard(used=True)
            raise RuntimeError(
                "a step must follow a backward, but no rank has a gradient since the last step "
                "used them up. Run backward, or zero_grad() for a step that changes nothing."
            )
        return unused

    def drop(self) -> None:
        """Forgets all gradients reduced since the last step, because the user does."""
        self._dropped = any(r.shard is not None for r in self._reductions) or bool(self._in_flight)
        self.discard()

    def discard(self, *, used: bool = False) -> None:
        """Forgets all gradients reduced since the last step; ``used`` if a step has used them."""
        self._was_paused, self.complete = self._paused, False
        while self._in_flight:
            self._land()
        for reduction in self._reductions:
            reduction.arrived.clear()
            again = self.used_up and not reduction.present  # refused, and may be tried again
            if used and (again or reduction.shown_at in reduction.present):
                reduction.stand_in.use_up()
            else:
                reduction.stand_in.remove()
            reduction.present.clear()
            reduction.shard = None
        self._next = self.passes = 0


# --- gradients that have been reduced -----------------------------------------------------


class StandIn:
    """The stand-in of one parameter's gradient."""

    def __init__(self, param: Tensor, name: str) -> None:
        # A data-parallel wrapper that averages too writes into every gradient that it finds.
        size = param.shape if param.numel() <= _MOST_ELEMENTS else ()
        self._zeros = torch.zeros(size, dtype=param.dtype, device=param.device)
        self.param, self.name = param, name
        self._grad = self._zeros.expand(param.shape).as_subclass(ReducedGradient)
        self.shown = False  # between ``show`` and ``use_up`` or ``remove``
        self._summed = False  # a backward has made a gradient in its place
        self.misused = False  # it adds to a gradient that a step has used
        self_if_alive = weakref.ref(self)

        def before_gradient(grads: tuple[Tensor | None, ...]) -> None:
            if (self := self_if_alive()) is None or grads[0] is None:
                return
            grad = self.param.grad
            self.misused = self.kept or (self.misused and grad is not None)
            self._summed = grad is self._grad or (self._summed and grad is not None)
            if grad is self._grad:
                self.param.grad = None  # autograd would add to it

        # Unlike a hook on the tensor, it does not run in ``torch.autograd.grad``.
        self._node = torch.autograd.graph.get_gradient_edge(param).node
        self._node.register_prehook(before_gradient)

    def show(self) -> None:
        """Makes the stand-in the parameter's ``grad``; call it after the gradient was reduced."""
        self.param.grad, self.shown, self._summed = self._grad, True, False
        self._grad.refusal = REDUCED

    def use_up(self) -> None:
        """Makes it zeros that may be read; call it when a step has used the reduced gradient."""
        self.remove()
        self.param.grad = self._grad
        self._grad.refusal, self._version = "", self._zeros._version

    def remove(self) -> None:
        """Removes the stand-in; call it when there is no reduced gradient any more."""
        self.shown = self._summed = self.misused = False
        if self.param.grad is self._grad:
            self.param.grad = None

    __del__ = remove  # nobody else would

    @property
    def dropped(self) -> bool:
        """Whether somebody has removed it, or a gradient that was made in its place."""
        grad = self.param.grad
        return self.shown and grad is not self._grad and (grad is None or not self._summed)

    @property
    def kept(self) -> bool:
        """Whether a step has used the gradient, and nobody has dropped or zeroed it since."""
        used = self.param.grad is self._grad and not self._grad.refusal
        return used and self._zeros._version == self._version


def gradient_of(param: Tensor) -> Tensor | None:
    """The parameter's own gradient, if it has one that has not been reduced."""
    grad = param.grad
    if type(grad) is PendingGradient:
        with torch._C.DisableTorchFunctionSubclass():
            return grad.as_subclass(Tensor)
    return None if type(grad) is ReducedGradient else grad
