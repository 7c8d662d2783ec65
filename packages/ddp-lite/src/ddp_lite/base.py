"""What all four wrappers share; a variant is the part that differs.

A synchronised step has four moments, and a variant chooses what happens at the middle two::

    forward                          nothing is sent
    a gradient has been accumulated  Progress.arrived(index)    overlap: start reductions
    finish_gradient_synchronization  _start_remaining()         start what has not been started
                                     wait, put averages back into ``parameter.grad``

While a reduction is in flight the gradient belongs to it and ``parameter.grad`` is None. A
second contribution to the same parameter, from another backward or from a re-entrant checkpoint,
therefore never races with the first: it is averaged on its own and added at the end.
"""

from __future__ import annotations

import functools
import itertools
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Never, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ddp_lite import checks, torch_names
from ddp_lite.buckets import Bucket, ParameterSpec
from ddp_lite.collectives import Averager, broadcast_coalesced
from ddp_lite.consistency import StepCheck
from ddp_lite.diagnostics import (
    RollCall,
    missing_gradients,
    overlapping_backwards,
    unfinished,
    warn_about_environment,
)
from ddp_lite.errors import ModelMismatchError, SynchronizationError
from ddp_lite.exchange import all_gather_json
from ddp_lite.progress import ABSENT, ACCUMULATED, Progress
from ddp_lite.reduction import InPlaceReduction, Reduction
from ddp_lite.stats import SynchronizationStats, WaitTimer, stats_of
from ddp_lite.structure import ModuleWatch, ParameterHooks, shortened
from ddp_lite.transparent import TransparentWrapper
from ddp_lite.uneven import Attendance, AverageOver
from ddp_lite.verification import name_ranks, verify_same_model

MissingGradients = Literal["skip-if-all", "zeros", "error"]
_POLICIES = ("skip-if-all", "zeros", "error")


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
        missing_gradients: MissingGradients = "skip-if-all",
        auto_finish: bool = True,
        **unknown: Never,
    ) -> None:
        torch_names.refuse(type(self), unknown)
        if missing_gradients not in _POLICIES:
            raise ValueError(
                f"missing_gradients must be one of {_POLICIES}, but got {missing_gradients!r}. "
                "Choose one of them"
            )
        checks.check_module(module, DataParallelBase)
        super().__init__(module)
        self.process_group = checks.resolve_group(process_group)
        self.device = checks.common_device(module)
        checks.check_backend(self.process_group, self.device)
        warn_about_environment(self.device)
        self._policy = missing_gradients
        self._auto_finish = auto_finish
        self._roll_call = RollCall(self.process_group, type(self).__name__)
        self._step = -1  # errors of the constructor speak of step 0
        with self._naming_failures_of("the comparison and broadcast of models"):
            verify_same_model(module, self.process_group, self._settings())
            broadcast_coalesced([*module.parameters(), *module.buffers()], self.process_group)

        self._average = Averager(self.process_group, self.device)
        self._timer = WaitTimer(self.device)
        self._step = 0  # synchronised steps completed
        self._changes = 0  # of requires_grad
        self._attendance: Attendance | None = None
        self._in_flight: dict[int, Reduction] = {}  # by the group's place
        self._hooks: list[ParameterHooks] = []  # one, or none once detached
        # A dropped wrapper takes its hooks along.
        weakref.finalize(self, _remove_all, self._hooks).atexit = False
        self._finished_by_backward = False
        self._last_step: Callable[[], SynchronizationStats] | None = None
        self._adopt_parameters()
        if not self._parameters_by_index:
            warnings.warn(
                f"{type(self).__name__}: the module has no trainable parameters, so there is "
                "nothing to synchronise",
                stacklevel=3,
            )

    # -- what a variant chooses --------------------------------------------------------------

    @abstractmethod
    def _plan(self) -> list[tuple[int, ...]]:
        """Groups of parameter indices reduced together, in the order of reduction."""

    def _start_in_backward(self, place: int) -> None:
        """Called during backward when group ``place`` and all groups before it are complete."""

    def _start_remaining(self) -> None:
        """Starts, in the plan's order, every reduction that backward has not started."""
        for place in range(len(self._groups)):
            self._start(place)

    def _reduce(
        self, bucket: Bucket, gradients: Sequence[Tensor | None], extra: Sequence[Tensor]
    ) -> Reduction:
        """Starts reducing the gradients of one group; ``extra`` is to be averaged as well."""
        return InPlaceReduction(bucket, gradients, self._average, extra)

    def _settings(self) -> dict[str, str]:
        """Everything in which ranks must not differ, in words."""
        return {
            "class": type(self).__name__,
            "missing_gradients": self._policy,
            "auto_finish": str(self._auto_finish),
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
        if not self._hooks:
            raise RuntimeError(
                f"a {type(self).__name__} must not be called after detach(), because gradients "
                "are not synchronised any more. Call the module itself, or wrap it again"
            )
        if self._progress.begun and not self._progress.accumulating:
            self._raise_unfinished()
        self._engine_callback_queued = False
        self._finished_by_backward = False
        self._notice_changes()
        if self._attendance is not None and not self._progress.accumulating:
            with self._naming_failures_of("the count of ranks that have a batch"):
                self._attendance.begin_step()
        outputs = self.module(*inputs, **kwargs)
        if self._auto_finish and not self._progress.accumulating:
            self._finish_after_backward_of(outputs)
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
        if self._progress.accumulating:
            raise RuntimeError(
                "finish_gradient_synchronization() must be called outside no_sync(), whose "
                "purpose is to accumulate without synchronising; leave the block first"
            )
        if self._finished_by_backward:
            self._finished_by_backward = False  # another call has other gradients in mind
        else:
            self._finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate locally; the next one outside sends the sum."""
        before = self._progress.accumulating
        self._progress.accumulating = True
        try:
            yield
        finally:
            self._progress.accumulating = before

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
        attendance = Attendance(self.process_group, self.device, average_over)
        self._attendance = attendance
        try:
            yield
            while self._others_have_batches(attendance):
                for parameter in self._parameters_by_index:
                    parameter.grad = None
                self._progress.marks[:] = bytes([ACCUMULATED]) * len(self._specs)  # excused
                self._finish()
                shadow_step()
        finally:
            self._attendance = None

    def _others_have_batches(self, attendance: Attendance) -> bool:
        with self._naming_failures_of("the count of ranks that have a batch"):
            return attendance.begin_shadow_step()

    def sync_buffers(self) -> None:
        """Overwrites the buffers (such as BatchNorm statistics) with rank 0's. Collective."""
        with self._naming_failures_of("the broadcast of buffers"):
            broadcast_coalesced(list(self.module.buffers()), self.process_group)

    def stats(self) -> SynchronizationStats | None:
        """The last synchronised step; None before the first. On CUDA the host waits for it."""
        return None if self._last_step is None else self._last_step()

    def explain(self) -> str:
        """One line: what is sent, when, how and among whom."""
        nbytes = sum(spec.nbytes for spec in self._specs)
        dtypes = {spec.dtype for spec in self._specs}
        how = ", ".join(
            f"{self._average.describe(dtype)} in {str(dtype).removeprefix('torch.')}"
            for dtype in sorted(dtypes, key=str)
        )
        return (
            f"{type(self).__name__}: {nbytes / 2**20:.1f} MB of gradients of {len(self._specs)} "
            f"parameters in {len(self._groups)} reductions, {self._explain_when()}; {how}, "
            f"{self._average.world_size} ranks on {self.device.type}; missing gradients: "
            f"{self._policy}"
        )

    def _explain_when(self) -> str:
        return "one after another after backward"

    def detach(self) -> nn.Module:
        """Removes every hook and returns the module, ready to be wrapped again.

        Flat tensors are let go. On CUDA the current stream waits for reductions under way, because
        their memory is freed here. A wrapper that is no longer referenced detaches itself.
        """
        _remove_all(self._hooks)
        if self.device.type == "cuda":
            for reduction in self._in_flight.values():
                reduction.wait()
        for bucket in self._groups:
            bucket.release()
        self._reset()
        return self.module

    # -- parameters and hooks ----------------------------------------------------------------

    def _adopt_parameters(self) -> None:
        """(Re)builds everything that depends on which parameters are trainable."""
        _remove_all(self._hooks)
        self._watch = ModuleWatch(self.module)
        # Zero-size parameters have nothing to average.
        named = [
            (name, p) for name, p in self.module.named_parameters() if p.requires_grad and p.numel()
        ]
        self._parameters_by_index = [p for _, p in named]
        self._specs = [
            ParameterSpec(index=index, name=name, numel=p.numel(), dtype=p.dtype, device=p.device)
            for index, (name, p) in enumerate(named)
        ]
        self._progress = Progress(len(named), self)
        self._hooks.append(ParameterHooks(self._parameters_by_index, self._progress))
        self._check = None
        if named and self._average.world_size > 1:
            self._check = StepCheck(self._parameters_by_index, self.device)
        self._set_groups(self._plan() if named else [])

    def _set_groups(self, groups: list[tuple[int, ...]]) -> None:
        self._groups = [self._make_bucket(place, indices) for place, indices in enumerate(groups)]
        self._progress.plan(groups)
        self._reset()

    def _make_bucket(self, place: int, indices: tuple[int, ...]) -> Bucket:
        specs = [self._specs[index] for index in indices]
        ends = list(itertools.accumulate(spec.numel for spec in specs))
        world_size = self._average.world_size
        return Bucket(
            index=place,
            names=tuple(spec.name for spec in specs),
            indices=indices,
            parameters=tuple(self._parameters_by_index[index] for index in indices),
            slices=tuple(map(slice, [0, *ends], ends)),
            numel=ends[-1],
            padded_numel=-(-ends[-1] // world_size) * world_size,
            dtype=specs[0].dtype,
            device=specs[0].device,
            process_group=self.process_group,
        )

    def _reset(self) -> None:
        """Back to the state before a backward."""
        self._progress.reset()
        self._absent: set[int] = set()  # parameters without a gradient on this rank
        self._presence: Tensor | None = None  # mean over the ranks of who has which gradient
        self._check_message: Tensor | None = None
        self._engine_callback_queued = False
        self._backward = -1  # which one queued the callback, by the engine's number
        self._in_flight = {}
        self._started: list[int] = []  # places in the order of reduction
        self._collectives_before = (self._average.collectives, self._average.bytes)

    def _notice_changes(self) -> None:
        """Notices what was done to the module since the last forward."""
        watch = self._watch
        for hooks in self._hooks:
            hooks.run_last()
        if watch.has_new_structure():
            change = watch.describe_change()
            if change:
                report = f"{change} since {type(self).__name__} wrapped the module"
                self._roll_call.leave_report(report, self._step + 1)
                raise ModelMismatchError(
                    f"a wrapped module must keep its parameters, but before step {self._step + 1} "
                    f"on rank {self.process_group.rank()} {report}. Change the module first and "
                    "wrap it then: BucketedDDP(wrapped.detach()) after the change"
                )
            self._watch = watch = ModuleWatch(self.module)
        if watch.has_new_requirements():
            with self._naming_failures_of("the comparison of models after requires_grad changed"):
                self._require_the_change_everywhere(watch.changed_requirements())
                verify_same_model(self.module, self.process_group, self._settings())
            accumulating = self._progress.accumulating
            self._adopt_parameters()
            self._progress.accumulating = accumulating

    def _require_the_change_everywhere(self, names: Sequence[str]) -> None:
        """Waits for all ranks to notice a change, for as long as a collective would."""
        changed = ", ".join(shortened(names))
        me, step = self.process_group.rank(), self._step + 1
        self._changes += 1
        absent = self._roll_call.absentees(
            f"change {self._changes}",
            f"requires_grad of {changed} changed on this rank before step {step}, which waits "
            "for all ranks to change it",
            step,
            checks.timeout_of(self.process_group, self.device),
        )
        if absent:
            raise ModelMismatchError(
                f"requires_grad must be changed on all ranks before the same step, but that of "
                f"{changed} changed on rank {me} before step {step} and not on "
                f"{name_ranks(absent)} within the process group's timeout; change it on every "
                "rank"
            )

    # -- during backward ---------------------------------------------------------------------

    def _on_first_gradient(self) -> None:
        if self._auto_finish:
            self._queue_finish()

    def _start(self, place: int, *, again: bool = False) -> None:
        """Takes the gradients of one group and starts reducing them.

        Args:
            again: the group was reduced in this step already and got more gradient since.
        """
        bucket = self._groups[place]
        gradients = [parameter.grad for parameter in bucket.parameters]
        self._note_absent(bucket, gradients, again)
        for parameter in bucket.parameters:
            parameter.grad = None
        self._started.append(place)
        extra = self._messages_for(place, again)
        begin = time.monotonic()
        try:
            self._in_flight[place] = self._reduce(bucket, gradients, extra)
        except RuntimeError as error:
            self._refuse_sparse(bucket, gradients)
            raise self._named(bucket.describe(), begin, error) from error

    def _note_absent(self, bucket: Bucket, gradients: Sequence[Tensor | None], again: bool) -> None:
        if self._policy == "error":
            marks = self._progress.marks
            absent = [index for index in bucket.indices if marks[index] == ABSENT]
        else:
            places = zip(bucket.indices, gradients, strict=True)
            absent = [index for index, gradient in places if gradient is None]
        if again:
            self._absent -= set(bucket.indices) - set(absent)
        else:
            self._absent.update(absent)

    def _refuse_sparse(self, bucket: Bucket, gradients: Sequence[Tensor | None]) -> None:
        for name, gradient in zip(bucket.names, gradients, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise ValueError(
                    f"gradients must be dense, but {name} got a {gradient.layout} gradient in "
                    f"step {self._step + 1}; build its layer with sparse=False"
                )

    def _messages_for(self, place: int, again: bool) -> list[Tensor]:
        """What ranks tell each other with the last group, at no extra collective."""
        if place != len(self._groups) - 1:
            return []
        dtype = self._groups[place].dtype
        dtype = dtype.to_real() if dtype.is_complex else dtype
        messages = []
        if self._check is not None:
            self._check_message = self._check.message(self._step, again, dtype)
            messages.append(self._check_message)
        if self._policy != "zeros":
            self._presence = self._presence_in(dtype)
            messages.append(self._presence)
        return messages

    def _presence_in(self, dtype: torch.dtype) -> Tensor:
        """Who has which gradient: 1 for each parameter that has one on this rank, else 0."""
        if not self._absent:
            return torch.ones(len(self._specs), dtype=dtype, device=self.device)
        present = [float(index not in self._absent) for index in range(len(self._specs))]
        return torch.tensor(present, dtype=dtype, device=self.device)

    # -- after backward ----------------------------------------------------------------------

    def _finish(self) -> None:
        started_in_backward = len(self._started)
        if self.device.type == "cuda":
            self._require_equal_steps()  # of the step before, without waiting for this one's
        with torch.no_grad():
            self._timer.start()
            self._start_remaining()
            for place in list(self._in_flight):
                self._complete(place)
            self._timer.stop()
            self._settle_missing()
            if self._attendance is not None:
                found = [p.grad for p in self._parameters_by_index if p.grad is not None]
                self._attendance.end_step(found)
        self._step += 1
        self._record_stats(started_in_backward)
        self._reset()

    def _complete(self, place: int) -> None:
        """Waits for the reduction of one group and puts its averages back."""
        reduction, bucket = self._in_flight.pop(place), self._groups[place]
        begin = time.monotonic()
        try:
            gradients = reduction.wait()
        except RuntimeError as error:
            raise self._named(bucket.describe(), begin, error) from error
        if self._check_message is not None and place == len(self._groups) - 1:
            assert self._check is not None
            self._check.read(self._check_message)
            if self.device.type != "cuda":
                self._require_equal_steps()
        for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def _require_equal_steps(self) -> None:
        if self._check is not None and self._check.ranks_differ():
            report = self._check.describe([spec.name for spec in self._specs])
            raise self._roll_call.disagreement(report, self._step + 1)

    def _settle_missing(self) -> None:
        if self._policy == "zeros" or self._presence is None:
            return
        if self._policy == "error":
            if float(self._presence.float().min()) < 1 - 0.5 / self._average.world_size:
                with self._naming_failures_of("the exchange of missing gradients' names"):
                    absent = [self._specs[index].name for index in sorted(self._absent)]
                    names = all_gather_json(absent, self.process_group)
                error = missing_gradients(names, self._step + 1)
                self._reset()
                raise error
        elif self._absent:
            anywhere = self._presence.tolist()
            for index in self._absent:
                if anywhere[index] == 0:
                    self._parameters_by_index[index].grad = None

    def _record_stats(self, started_in_backward: int) -> None:
        """Remembers what ``stats`` puts together when it is asked."""
        collectives, nbytes = self._collectives_before
        self._last_step = functools.partial(
            stats_of,
            [self._groups[place] for place in self._started],
            self._timer,
            step=self._step,
            collectives=self._average.collectives - collectives,
            bytes=self._average.bytes - nbytes,
            started_in_backward=started_in_backward,
        )

    # -- synchronising without being asked ---------------------------------------------------

    def _finish_after_backward_of(self, outputs: Any) -> None:
        """Asks to be called when the outermost backward ends.

        A callback queued from inside a re-entrant checkpoint would run when that inner backward
        ends; the gradient of an output is always computed in the outermost one.
        """
        for leaf in pytree.tree_leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._queue_finish)

    def _queue_finish(self, _gradient: Tensor | None = None) -> None:
        if self._progress.accumulating:
            return
        backward = torch._C._current_graph_task_id()
        if self._engine_callback_queued:
            if _gradient is not None and backward != self._backward:
                wrapper, rank = type(self).__name__, self.process_group.rank()
                raise overlapping_backwards(wrapper, rank, self._step + 1)
            return
        self._engine_callback_queued = True
        self._backward = backward
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._finish_in_backward)

    def _finish_in_backward(self) -> None:
        self._finish()
        self._finished_by_backward = True

    # -- errors ------------------------------------------------------------------------------

    @contextmanager
    def _naming_failures_of(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            raise self._named(what, begin, error) from error

    def _named(self, what: str, begin: float, error: RuntimeError) -> Exception:
        """The backend's error with names; our own errors and lack of memory stay themselves."""
        if isinstance(error, SynchronizationError | torch.OutOfMemoryError):
            return error
        seconds = time.monotonic() - begin
        return self._roll_call.failure(what, self._step + 1, seconds, error)

    def _raise_unfinished(self) -> NoReturn:
        marks = self._progress.marks
        arrived = len(marks) - marks.count(ABSENT)
        rank = self.process_group.rank()
        raise unfinished(arrived, rank, self._step, self._auto_finish)


def _remove_all(hooks: list[ParameterHooks]) -> None:
    while hooks:
        hooks.pop().remove()
