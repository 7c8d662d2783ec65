"""One gradient's way from autograd's hook to the averaged ``.grad``, in the order of events.

======================  ========================================================================
forward                 nothing is sent
backward                1. ``arrived``: a parameter has accumulated its gradient
                        2. ``_start``: its bucket is complete and its reduction starts; from here
                           on ``parameter.grad`` is None
end of backward         3. ``finish``: the remaining buckets start, and all are waited for
                        4. ``_put_back``: ``parameter.grad`` is the average
======================  ========================================================================

While a reduction is in flight the gradient belongs to it and ``parameter.grad`` is None. A second
contribution to the same parameter, from another backward or from a re-entrant checkpoint,
therefore never races with the first: it is averaged on its own and added at the end.

The engine knows neither the module nor the wrapper. A wrapper gives it three answers: which
parameters travel together (``plan``), when (``when``) and in which way (``way``). Everything else
that happens in a step is a ``SideTask``.

Hooks on parameters hold ``Arrivals``, which holds the engine weakly, so an engine that nobody uses
is freed at once and takes its hooks along. Outputs hold the engine until their backward has run.
"""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddp_lite.buckets import Bucket, ParameterSpec, make_buckets
from ddp_lite.errors import MissingGradientError, UnfinishedSynchronizationError
from ddp_lite.grad_hooks import Hooks, leaf_behind, remove_all, tensors_in
from ddp_lite.model import refuse_other_gradients
from ddp_lite.ranks import Ranks, broadcast
from ddp_lite.reduce import Averager, Reduction, Way

When = Literal["one by one after backward", "after backward", "in backward"]
Plan = Callable[[Sequence[ParameterSpec]], list[tuple[int, ...]]]

ABSENT, ACCUMULATED, COUNTED = 0, 1, 2

_nbytes, _dtype = attrgetter("nbytes"), attrgetter("dtype")


class SideTask:
    """Sees every step from outside. Each method is an event, in this order."""

    def begin(self, engine: Engine) -> None:
        """A step is about to begin, or the last one was given up."""

    def taken(self, engine: Engine, bucket: Bucket, absent: Sequence[int], again: bool) -> None:
        """A bucket is about to be reduced; this rank has no gradient of the parameters ``absent``.

        ``again``: for the second time in this step, because more gradient has arrived since.
        """

    def message(self, engine: Engine, dtype: torch.dtype, again: bool) -> Tensor | None:
        """A tensor of this real dtype to average in place together with the last bucket.

        It costs no extra collective. ``again`` is that of ``taken`` for the last bucket.
        """

    def message_averaged(self, engine: Engine) -> None:
        """The tensor that ``message`` returned last holds its average."""

    def backward_ended(self, engine: Engine) -> None:
        """Nothing more will arrive; the remaining reductions start after this."""

    def averaged(self, engine: Engine) -> None:
        """All averages are in place, and the step is over unless this raises."""


# -- 1. a gradient arrives ---------------------------------------------------------------------


class Arrivals:
    """The gradients of one step that have arrived. The hook of every parameter is ``arrived``.

    Attributes:
        engine: weakly held.
        accumulating: gradients that arrive now are not to be reduced yet.
        begun: a gradient has arrived that is to be reduced.
        marks: for each parameter ``ABSENT``, ``ACCUMULATED`` (while accumulating) or ``COUNTED``.
        order: parameters in the order in which they were counted.
        bucket_of: for each parameter the index of its bucket.
        outstanding: for each bucket the number of gradients that have not arrived.
        next: index of the first bucket that was not started in backward.
        late: indices of started buckets whose parameters got more gradient since.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = weakref.ref(engine)
        self.accumulating = False
        self.use([], 0)

    def use(self, buckets: Sequence[Bucket], parameters: int) -> None:
        """Counts the parameters of these buckets."""
        self.bucket_of = [0] * parameters
        for bucket in buckets:
            for index in bucket.indices:
                self.bucket_of[index] = bucket.index
        self.reset(buckets)

    def reset(self, buckets: Sequence[Bucket]) -> None:
        """Back to the state before a backward."""
        self.begun = False
        self.marks = bytearray(len(self.bucket_of))
        self.order: list[int] = []
        self.outstanding = [len(bucket.indices) for bucket in buckets]
        self.next = 0
        self.late: set[int] = set()

    def arrived(self, index: int, _parameter: object) -> None:
        """Parameter ``index`` has accumulated a gradient."""
        if self.accumulating:
            self.marks[index] |= ACCUMULATED
            return
        if not self.begun:
            self._first_arrived()
        bucket_index = self.bucket_of[index]
        if bucket_index < self.next:
            self.late.add(bucket_index)
        elif self.marks[index] < COUNTED:
            self.marks[index] = COUNTED
            self.order.append(index)
            outstanding = self.outstanding[bucket_index] - 1
            self.outstanding[bucket_index] = outstanding
            if not outstanding and bucket_index == self.next:
                self._completed()

    def _first_arrived(self) -> None:
        engine = self.engine()
        if engine is not None:  # else its user has dropped it
            self.begun = True
            engine.finish_after_this_backward()
            if engine.ranks.has_own_connections:
                engine.ranks.follow_timeout()

    def _completed(self) -> None:
        """Starts buckets in the plan's order, on which all ranks agree; early ones wait."""
        engine, outstanding = self.engine(), self.outstanding
        if engine is None or engine.when != "in backward":
            return
        while self.next < len(outstanding) and not outstanding[self.next]:
            self.next += 1
            with torch.no_grad():  # backward(create_graph=True) would record what is done here
                engine._start(engine.buckets[self.next - 1])


# -- 2., 3. and 4. -----------------------------------------------------------------------------


class Engine:
    """Averages the gradients of some parameters over the ranks, step by step.

    Args:
        ranks: to average over.
        plan: ``plan(specs)`` returns the groups of parameter indices that travel together, in the
            order of reduction; ``specs`` are in the expected order of the gradients' arrival.
        when: reductions start one after another or all at once after backward, or in backward.
        way: starts the average of a bucket.
        rebucket: plan again after the first step, in the order in which rank 0's gradients
            arrived.
        auto_finish: the end of a backward ends the step.
        tasks: are told of each event in this order.

    Attributes:
        ranks, when, way, auto_finish: as given. ``way`` may be exchanged between two steps.
        average: the collective, which also counts.
        tasks: as given, and those that were added.
        arrivals: the gradients that have arrived.
        specs: the parameters, described.
        parameters: the same ones, themselves.
        buckets: the parameters that travel together, in the order of reduction.
        started: buckets whose gradients were taken in this step, in this order.
        finished: the last backward has ended its step.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        plan: Plan,
        when: When,
        way: Way,
        rebucket: bool,
        auto_finish: bool,
        tasks: Sequence[SideTask],
    ) -> None:
        self.ranks, self.when, self.way, self.auto_finish = ranks, when, way, auto_finish
        self.average = Averager(ranks)
        self.tasks = list(tasks)
        self.arrivals = Arrivals(self)
        self.specs: list[ParameterSpec] = []
        self.parameters: list[nn.Parameter] = []
        self.buckets: list[Bucket] = []
        self.finished = False
        self._plan, self._rebucket, self._rebucket_next = plan, rebucket, rebucket
        self._process = os.getpid()
        self._told = ranks.size == 1  # that some gradients are not averaged
        self._backward: int | None = None  # the one that ends the step, by autograd's number
        self._hooks: list[Hooks] = []  # one, or none before ``adopt`` and after ``detach``
        weakref.finalize(self, remove_all, self._hooks).atexit = False

    def adopt(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Averages the gradients of these parameters; none may be frozen with accumulated ones."""
        for spec, mark, p in zip(self.specs, self.arrivals.marks, self.parameters, strict=True):
            if mark == ACCUMULATED and p.grad is not None and not p.requires_grad:
                raise UnfinishedSynchronizationError(
                    "a parameter must be trainable until gradients that no_sync() has accumulated "
                    f"are averaged, but {spec.name} was frozen before. Freeze it after the next "
                    "backward outside no_sync(), or drop the gradients by zero_grad()"
                )
        self.detach()
        named = list(named)
        self.parameters = [parameter for _, parameter in named]
        self.specs = [
            ParameterSpec(index=index, name=name, numel=p.numel(), dtype=p.grad_dtype or p.dtype)
            for index, (name, p) in enumerate(named)
        ]
        self._hooks.append(Hooks(self.parameters, self.arrivals.arrived, self.ranks.owner))
        self._rebucket_next = self._rebucket
        # Backward meets the parameters that were registered last first.
        self._use(self.specs[::-1] if self.when == "in backward" else self.specs)

    def _use(self, specs: Sequence[ParameterSpec]) -> None:
        plan = self._plan(specs) if specs else []
        self.buckets = make_buckets(plan, self.specs, self.parameters, self.ranks.group)
        self.arrivals.use(self.buckets, len(self.specs))
        self._begin_step()

    def _begin_step(self) -> None:
        self.arrivals.reset(self.buckets)
        self.started: list[Bucket] = []
        self._in_flight: dict[Bucket, Reduction] = {}
        self._backward = None
        for task in self.tasks:
            task.begin(self)

    def begin_forward(self) -> None:
        """Call first in every forward outside ``no_grad``: the next backward is another one.

        Raises:
            UnfinishedSynchronizationError: a backward produced gradients that never became
                averages.
            RuntimeError: the hooks were removed.
        """
        task = torch._C._current_graph_task_id()  # -1 outside backward
        if self.arrivals.begun and not self.arrivals.accumulating and task == -1:
            raise self._unfinished()
        if not self._hooks:
            raise RuntimeError(
                f"a {self.ranks.owner} must not be called after detach(), because gradients are "
                "not synchronised any more. Call the module itself, or wrap it again"
            )
        if task != self._backward:  # else a checkpoint of the wrapper repeats the forward
            self.finished, self._backward = False, None
        self._hooks[0].run_last()

    # 2. A bucket's reduction starts.

    def _start(self, bucket: Bucket, again: bool = False) -> None:
        if os.getpid() != self._process:
            self.ranks.require_same_process()
        gradients = [parameter.grad for parameter in bucket.parameters]
        absent: list[int] = []
        if not _as_wrapped(bucket, gradients):
            refuse_other_gradients([self.specs[i] for i in bucket.indices], gradients, self.ranks)
            pairs = zip(bucket.indices, gradients, strict=True)
            absent = [index for index, gradient in pairs if gradient is None]
        for task in self.tasks:
            task.taken(self, bucket, absent, again)
        for parameter in bucket.parameters:
            parameter.grad = None
        self.started.append(bucket)
        messages = self._messages(bucket.dtype, again) if bucket is self.buckets[-1] else ()
        begin = time.monotonic()
        try:
            self._in_flight[bucket] = self.way(self.average, bucket, gradients, messages)
        except RuntimeError as error:
            self.ranks.raise_named(bucket.describe(), begin, error)

    def _messages(self, dtype: torch.dtype, again: bool) -> Sequence[Tensor]:
        real = dtype.to_real() if dtype.is_complex else dtype
        found = [task.message(self, real, again) for task in self.tasks]
        return [message for message in found if message is not None]

    # 3. Backward has ended.

    def finish(self) -> None:
        """Starts the remaining reductions, waits for all and ends the step.

        ``DataParallelBase.finish_gradient_synchronization`` lists the errors.
        """
        if self.ranks.has_own_connections and not self.arrivals.begun:
            self.ranks.follow_timeout()
        with torch.no_grad():
            for task in self.tasks:
                task.backward_ended(self)
            for bucket in self.buckets[self.arrivals.next :]:
                self._start(bucket)
                if self.when == "one by one after backward":
                    self._put_back(bucket)
            if self.arrivals.late:
                self._reduce_again(sorted(self.arrivals.late))
            for bucket in list(self._in_flight):
                self._put_back(bucket)
            try:
                for task in self.tasks:
                    task.averaged(self)
            except MissingGradientError:  # on every rank, so that all may go on
                self._begin_step()
                raise
        self.ranks.step += 1
        arrived = self.arrivals.order
        self._begin_step()
        if self._rebucket_next:
            self._rebucket_next = False
            self._use([self.specs[index] for index in self._order_of_rank_0(arrived)])

    def _reduce_again(self, late: Sequence[int]) -> None:
        """Buckets that got more gradient after they had been started."""
        buckets = [self.buckets[index] for index in late]
        for bucket in buckets:
            # The earlier average joins the later gradient; averaging an average changes nothing.
            self._put_back(bucket)
        if len(buckets) < len(self.buckets):
            # A rank that does this alone would meet other buckets of ranks in the next step. All
            # buckets meet their likes there, and ``SameStep`` finds the difference. Comparing the
            # words is all that ranks do here.
            self.ranks.together(f"a second reduction of the buckets {list(late)}", lambda: None)
        for bucket in buckets:
            self._start(bucket, again=True)

    def _order_of_rank_0(self, arrived: Sequence[int]) -> list[int]:
        """Parameters in the order in which they arrived there; the others last, in reverse."""
        everything = [*arrived, *range(len(self.specs) - 1, -1, -1)]
        order = torch.tensor(list(dict.fromkeys(everything)), device=self.ranks.device)
        what = "the broadcast of the observed order"
        self.ranks.together(what, broadcast, self.ranks.control, order)
        return [int(index) for index in order.tolist()]

    # 4. The average comes back.

    def _put_back(self, bucket: Bucket) -> None:
        begin = time.monotonic()
        try:
            averages = self._in_flight.pop(bucket).wait()
        except RuntimeError as error:
            self.ranks.raise_named(bucket.describe(), begin, error)
        if bucket is self.buckets[-1]:
            for task in self.tasks:  # before another collective starts, see ``SameStep``
                task.message_averaged(self)
        for parameter, average in zip(bucket.parameters, averages, strict=True):
            if parameter.grad is None:
                parameter.grad = average
            else:
                parameter.grad.add_(average)

    # When has backward ended? Private functions of torch's autograd engine tell.

    def finish_after_backward_of(self, outputs: Any) -> None:
        """Ends the step with the backward that computes these outputs' gradients.

        A callback that is queued from inside a re-entrant checkpoint would run when that inner
        backward ends; the gradient of an output belongs to the outermost one.
        """
        if self.auto_finish and self._backward is None:
            for tensor in tensors_in(outputs):
                # A parameter that is returned would keep this hook, and has its own.
                if tensor.requires_grad and not tensor.is_leaf:
                    tensor.register_hook(partial(self._reached_output, leaf_behind(tensor)))

    def _reached_output(self, leaf: Any, _gradient: Tensor) -> None:
        if self.arrivals.accumulating or not self._accumulates(leaf):
            return
        self.finish_after_this_backward()
        if self._backward != torch._C._current_graph_task_id():
            raise UnfinishedSynchronizationError(
                f"backward passes through one {self.ranks.owner} must run one after another, but "
                f"in step {self.ranks.step} on rank {self.ranks.rank} one began while another was "
                "under way, or after it had failed. Add the losses and call backward once, from "
                "one thread"
            )

    def _accumulates(self, leaf: Any) -> bool:
        """Whether the backward under way writes ``grad``, as ``torch.autograd.grad`` does not."""
        try:
            return torch._C._will_engine_execute_node(leaf)
        except RuntimeError:  # the gradient that was asked for is this leaf's
            again = torch.is_grad_enabled()  # create_graph=True: a backward is to follow
            asked = getattr(leaf, "variable", None)
            if not (self._told or again) and any(asked is p for p in self.parameters):
                self._told = True
                words = "averages gradients of backward(), not those of torch.autograd.grad()"
                warnings.warn(f"{self.ranks.owner} {words}", stacklevel=2)
            return False

    def finish_after_this_backward(self) -> None:
        """Calls ``finish`` when the backward under way ends, unless it will be called already."""
        if self.auto_finish and self._backward is None:
            self._backward = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._backward_has_ended)

    def _backward_has_ended(self) -> None:
        self.finish()
        self.finished = True

    # The end.

    def detach(self) -> None:
        """Takes the hooks from the parameters and lets go of all gradients under way.

        On CUDA the current stream waits for them, because their memory is freed here.
        """
        remove_all(self._hooks)
        if not self.buckets:
            return
        if self.ranks.device.type == "cuda":
            for pending in self._in_flight.values():
                pending.wait()
        for bucket in self.buckets:
            bucket.release()
        self._begin_step()

    # -- errors --------------------------------------------------------------------------------

    def _unfinished(self) -> UnfinishedSynchronizationError:
        remedy = (
            "That backward raised an error. To go on without it, call detach() and wrap the "
            "module again, on all ranks"
            if self.auto_finish
            else "Call finish_gradient_synchronization() after backward, or use no_sync() or "
            "auto_finish=True"
        )
        marks = self.arrivals.marks
        return UnfinishedSynchronizationError(
            "every backward must be finished before the next forward, but after step "
            f"{self.ranks.step - 1} a backward produced gradients of "
            f"{len(marks) - marks.count(ABSENT)} parameters on rank {self.ranks.rank} that were "
            f"never synchronised, so an optimizer step would make the ranks differ. {remedy}"
        )


def _as_wrapped(bucket: Bucket, gradients: Sequence[Any]) -> bool:
    """False if a gradient may not have its parameter's bytes: gloo ends who receives others."""
    try:
        return sum(map(_nbytes, gradients)) == bucket.nbytes and (
            bucket.dtype is torch.float32 or set(map(_dtype, gradients)) == {bucket.dtype}
        )
    except (AttributeError, RuntimeError):  # None, sparse
        return False
