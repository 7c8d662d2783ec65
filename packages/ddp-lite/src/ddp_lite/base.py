"""What all four wrappers share: construction, the public interface, a step's begin and end.

A wrapper adds which parameters travel together, when they do, and how they are averaged. It hears
of two moments::

    forward                          nothing is sent
    a bucket's gradients are there   _bucket_ready(bucket)    overlap: start its reduction
    backward has ended               _backward_ended()        start what is left, wait for all

``step.py`` has what a wrapper does at these moments, and what else observes them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Never

import torch
import torch.distributed as dist
from torch import nn

from ddp_lite import checks
from ddp_lite.arrivals import TrainableParameters, refuse_parameters_of_others
from ddp_lite.buckets import Bucket, ParameterSpec
from ddp_lite.collectives import Averager
from ddp_lite.migration import refuse_arguments
from ddp_lite.observers import (
    AverageOver,
    Join,
    MissingGradients,
    Policy,
    SameStep,
    StepStats,
    SynchronizationStats,
)
from ddp_lite.step import Step
from ddp_lite.transparent import TransparentWrapper


class DataParallelBase(TransparentWrapper, ABC):
    """Keeps a module's replicas equal: same start, same averaged gradients. Use a subclass.

    The constructor is collective. It checks that all ranks hold the same model, then overwrites
    parameters and buffers with rank 0's.

    Args:
        module: on its device already. Frozen, shared and zero-size parameters are fine, sparse
            gradients are not.
        process_group: ranks to synchronise with: a group or a one-dimensional device mesh. None
            means the default group.
        missing_gradients: what a parameter without a gradient on this rank means.
            ``"skip-if-all"``: it counts as zeros, and if no rank has a gradient, ``grad`` stays
            None everywhere. ``"zeros"``: it counts as zeros always. ``"error"``: every rank
            raises and names it; on CUDA this makes the host wait once a step.
        auto_finish: whether every backward ends with synchronised gradients. False leaves that to
            ``finish_gradient_synchronization``, and until it is called ``grad`` of a parameter may
            be None. True uses a private hook of torch's autograd engine.

    Raises:
        TypeError: ``module`` is no module, is wrapped already or shares a parameter with one that
            is; or an argument is unknown, such as those of torch's ``DistributedDataParallel``.
        ValueError: meta or mixed devices, sparse gradients, an unknown policy, or a backend
            that does not serve the module's device.
        RuntimeError: no process group is initialised.
        ModelMismatchError: on every rank, if the ranks' models or settings differ.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | dist.device_mesh.DeviceMesh | None = None,
        missing_gradients: Policy = "skip-if-all",
        auto_finish: bool = True,
        **unknown: Never,
    ) -> None:
        refuse_arguments(type(self), unknown)
        missing = MissingGradients(missing_gradients)
        checks.check_module(module, DataParallelBase)
        refuse_parameters_of_others(module)
        super().__init__(module)
        self.process_group, self.device = checks.where_to_run(module, process_group)
        self._policy = missing_gradients
        self._average = Averager(self.process_group, self.device)
        self._stats = StepStats(self._average, self.device)
        same_step = [SameStep(self.device)] if self.process_group.size() > 1 else []
        observers = [*same_step, self._stats, missing]
        self._step = Step(type(self), self.process_group, self.device, auto_finish, observers)
        with self._step.naming_failures_of("the comparison and broadcast of models"):
            checks.verify_same_model(module, self._step.ranks, self._settings())
            self._step.ranks.overwrite_with_rank_0([*module.parameters(), *module.buffers()])
        self._step.ranks.step = 1
        self._trainable = TrainableParameters(module, self)
        self._step.adopt(self._trainable, self)
        checks.warn_of_nothing_to_train(self._step.parameters, type(self))

    # -- what a wrapper adds -----------------------------------------------------------------

    @abstractmethod
    def _plan(self, specs: Sequence[ParameterSpec]) -> list[tuple[int, ...]]:
        """Groups of parameter indices that travel together, in the order of reduction."""

    def _bucket_ready(self, bucket: Bucket) -> None:
        """Called in backward when a bucket's gradients, and all before them, have arrived."""

    @abstractmethod
    def _backward_ended(self) -> None:
        """Starts, in the plan's order, what is left, and puts all averages back."""

    def _plan_again(self, arrived: Sequence[int]) -> list[tuple[int, ...]] | None:
        """Called after each step with the order in which gradients arrived; None keeps the plan."""

    @abstractmethod
    def _explain_when(self) -> str:
        """When gradients move, in words."""

    def _settings(self) -> dict[str, str]:
        """Everything in which ranks must not differ, in words."""
        return {
            "class": type(self).__name__,
            "missing_gradients": self._policy,
            "auto_finish": str(self._step.auto_finish),
        }

    # -- using the wrapper -------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the module. No collective runs here.

        Raises:
            UnfinishedSynchronizationError: the last backward was never finished.
            ModelMismatchError: parameters were replaced, added or removed since the last forward,
                or ``requires_grad`` changed, but not alike on all ranks.
            RuntimeError: the wrapper was detached.
        """
        if not torch.is_grad_enabled():
            return self.module(*inputs, **kwargs)
        step = self._step
        accumulating = step.arrivals.accumulating
        step.require_finished()
        step.end_of_backward.begin()
        if self._trainable.have_changed(step, self._settings):
            step.adopt(self._trainable, self)
            step.arrivals.accumulating = accumulating
        if accumulating:
            return self.module(*inputs, **kwargs)
        step.forward_begins()
        outputs = self.module(*inputs, **kwargs)
        step.end_of_backward.watch(outputs, self)
        return outputs

    def finish_gradient_synchronization(self) -> None:
        """Waits for every reduction; afterwards ``parameter.grad`` holds the average.

        With ``auto_finish=True`` the backward has done so already, and this returns at once. It
        then serves gradients that no backward produced, such as on a rank without a batch.
        Otherwise call it on every rank after the last backward of a step and before anything reads
        the gradients. On CUDA only the current stream waits.

        Raises:
            MissingGradientError: policy ``"error"``, on every rank.
            PeerFailureError: a peer died, hangs, or runs other collectives.
            StepMismatchError: on every rank, if ranks make different synchronisations or make them
                from different weights. On CUDA the next call raises it.
            RuntimeError: called inside ``no_sync``.
        """
        if self._step.arrivals.accumulating:
            raise RuntimeError(
                "finish_gradient_synchronization() must be called outside no_sync(), whose "
                "purpose is to accumulate without synchronising. Leave the block first."
            )
        if self._step.end_of_backward.finished:
            self._step.end_of_backward.finished = False  # another call has other gradients in mind
        else:
            self._finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate locally; the next one outside sends the sum."""
        before = self._step.arrivals.accumulating
        self._step.arrivals.accumulating = True
        try:
            yield
        finally:
            self._step.arrivals.accumulating = before

    @contextmanager
    def join(
        self, shadow_step: Callable[[], object], *, average_over: AverageOver = "active"
    ) -> Iterator[None]:
        """For ranks with different numbers of batches; wrap the whole training loop in it.

        A rank that leaves the block before the others takes part in their steps with zeros.
        Inside, every forward outside ``no_sync`` and ``no_grad`` begins a step and must be
        followed by its backward. Gradients accumulated in ``no_sync`` and never sent are lost.

        Args:
            shadow_step: called after each such step with the averages in place; do what the
                loop does there: step the optimizer and zero the gradients.
            average_over: "active" averages over the ranks that had a batch, "world" over all.
        """
        join = Join(average_over)
        self._step.observers.append(join)
        try:
            yield
            join.shadow(self._step, self._finish, shadow_step)
        finally:
            self._step.observers.remove(join)

    def sync_buffers(self) -> None:
        """Overwrites the buffers (such as BatchNorm statistics) with rank 0's. Collective."""
        with self._step.naming_failures_of("the broadcast of buffers"):
            self._step.ranks.overwrite_with_rank_0(list(self.module.buffers()))

    def stats(self) -> SynchronizationStats | None:
        """The last synchronised step; None before the first. On CUDA the host waits for it."""
        return self._stats.last()

    def explain(self) -> str:
        """One line: what is sent, when, how and among whom."""
        specs = self._step.specs
        megabytes = sum(spec.nbytes for spec in specs) / 2**20
        return (
            f"{type(self).__name__}: {megabytes:.1f} MB of gradients of {len(specs)} parameters in "
            f"{len(self._step.buckets)} reductions, {self._explain_when()}; "
            f"{self._average.describe(spec.dtype for spec in specs)}, "
            f"{self._average.world_size} ranks on {self.device.type}; missing gradients: "
            f"{self._policy}"
        )

    def detach(self) -> nn.Module:
        """Removes every hook and returns the module, ready to be wrapped again.

        Flat tensors are let go. On CUDA the current stream waits for reductions under way, because
        their memory is freed here. A wrapper that is no longer referenced detaches itself.
        """
        self._trainable.release()
        self._step.give_up()
        return self.module

    def _finish(self) -> None:
        """Ends the step: called at the end of a backward, or explicitly."""
        arrived = self._step.arrivals.order
        self._step.finish(self._backward_ended)
        if (plan := self._plan_again(arrived)) is not None:
            self._step.plan(plan)
