"""What autograd tells a wrapper: which gradients have arrived, and that a backward has ended.

``TrainableParameters`` puts a hook on every parameter, and looks at each forward whether they are
still the same. The hook is ``Arrivals.arrived``, so it runs once per parameter in every backward.
It is an object of its own because attributes of a ``torch.nn.Module`` are slow to write, and
because autograd's nodes hold it: a wrapper that they held would never be freed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from ddp_lite.buckets import ParameterSpec
from ddp_lite.checks import ModuleWatch, verify_same_model
from ddp_lite.errors import ModelMismatchError, UnfinishedSynchronizationError
from ddp_lite.ranks import name_ranks, shortened

if TYPE_CHECKING:
    from ddp_lite.base import DataParallelBase
    from ddp_lite.step import Step

ABSENT, ACCUMULATED, COUNTED = 0, 1, 2


class Arrivals:
    """Counts the gradients of one step.

    Buckets become ready strictly in order: one that is complete early waits for those before it.

    Parameters hold this object through their hooks, so it must hold neither them nor the wrapper: a
    wrapper that its user has dropped is freed, and gradients that still arrive are ignored.

    Args:
        parameters: how many parameters there are.
        owner: the wrapper. Its ``_bucket_ready`` is called with each bucket as soon as that bucket
            and all before it are complete.

    Attributes:
        owner: as a weak reference.
        accumulating: gradients that arrive now are not to be reduced yet.
        begun: a gradient has arrived that is to be reduced.
        marks: for each parameter ``ABSENT``, ``ACCUMULATED`` (while accumulating) or ``COUNTED``.
        order: parameters in the order in which they were counted.
        next: index of the first bucket that is not ready.
        late: indices of ready buckets whose parameters got more gradient since.
    """

    __slots__ = (
        "_bucket_of",
        "_outstanding",
        "_sizes",
        "accumulating",
        "begun",
        "late",
        "marks",
        "next",
        "order",
        "owner",
    )

    def __init__(self, parameters: int, owner: DataParallelBase) -> None:
        self.owner = weakref.ref(owner)
        self._bucket_of = [0] * parameters
        self.accumulating = False
        self.plan([])

    def plan(self, buckets: Sequence[Sequence[int]]) -> None:
        """Sets the parameter indices of each bucket, in the order of reduction, and resets."""
        self._sizes = [len(indices) for indices in buckets]
        for bucket_index, indices in enumerate(buckets):
            for index in indices:
                self._bucket_of[index] = bucket_index
        self.reset()

    def reset(self) -> None:
        """Back to the state before a backward."""
        self.marks = bytearray(len(self._bucket_of))
        self.order: list[int] = []
        self.begun = False
        self.next = 0
        self.late: set[int] = set()
        self._outstanding = self._sizes.copy()

    def excuse_all(self) -> None:
        """Makes no parameter count as absent, for a rank that has no batch."""
        self.marks[:] = bytes([ACCUMULATED]) * len(self.marks)

    def count(self) -> int:
        """Parameters that got a gradient, to be reduced now or later."""
        return len(self.marks) - self.marks.count(ABSENT)

    def arrived(self, index: int, _parameter: object) -> None:
        """Parameter ``index`` has accumulated a gradient: the hook on every parameter."""
        if self.accumulating:
            self.marks[index] |= ACCUMULATED
            return
        if not self.begun:
            owner = self.owner()
            if owner is None:
                return
            self.begun = True
            owner._step.end_of_backward.queue(owner)
        bucket_index = self._bucket_of[index]
        if bucket_index < self.next:
            self.late.add(bucket_index)
        elif self.marks[index] < COUNTED:
            self.marks[index] = COUNTED
            self.order.append(index)
            self._outstanding[bucket_index] -= 1
            if bucket_index == self.next and not self._outstanding[bucket_index]:
                self._report_ready()

    def _report_ready(self) -> None:
        outstanding, owner = self._outstanding, self.owner()
        while owner is not None and self.next < len(outstanding) and not outstanding[self.next]:
            self.next += 1
            owner._bucket_ready(owner._step.buckets[self.next - 1])


class ParameterHooks:
    """The hook of a wrapper on each of its parameters, run after the hooks of all others.

    A user's hook that ran after the wrapper's would find ``grad`` taken by a reduction.

    Args:
        parameters: the trainable ones, by index.
        arrivals: what the hooks report to.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], arrivals: Arrivals) -> None:
        self._handles: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(functools.partial(arrivals.arrived, index))
            for index, p in enumerate(parameters)
        ]
        self._tables = [_hooks_of(p) for p in parameters]
        self._counts = list(map(len, self._tables))

    def run_last(self) -> None:
        """Moves the hooks behind those that were registered since."""
        if list(map(len, self._tables)) == self._counts:
            return
        for table, handle in zip(self._tables, self._handles, strict=True):
            if handle.id in table:
                table[handle.id] = table.pop(handle.id)
        self._counts = list(map(len, self._tables))

    def remove(self) -> None:
        """Takes the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()


class EndOfBackward:
    """Has a wrapper finish its step when the outermost backward that is under way ends.

    It uses a private interface of torch's autograd engine.

    Args:
        enabled: whether it does.

    Attributes:
        finished: the last backward has finished the step.
    """

    def __init__(self, enabled: bool) -> None:
        self._enabled = enabled
        self.finished = False
        self._queued_by: int | None = None  # which backward, by the engine's number

    def begin(self) -> None:
        """A forward begins: the next backward is another one, and has not finished anything."""
        self.finished = False
        self._queued_by = None

    def forget(self) -> None:
        """The step is over: the next backward is another one."""
        self._queued_by = None

    def watch(self, outputs: Any, owner: DataParallelBase) -> None:
        """Finishes at the end of the backward that computes these outputs' gradients.

        A callback that is queued from inside a re-entrant checkpoint would run when that inner
        backward ends; the gradient of an output belongs to the outermost one. The outputs keep
        ``owner`` alive until then.
        """
        if self._enabled:
            reached = functools.partial(self._reached_output, owner)
            for leaf in pytree.tree_leaves(outputs):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(reached)

    def queue(self, owner: DataParallelBase) -> None:
        """Finishes at the end of the backward that is under way, unless another has asked."""
        if not self._enabled or self._queued_by is not None:
            return

        def finish() -> None:
            owner._finish()
            self.finished = True

        self._queued_by = torch._C._current_graph_task_id()
        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _reached_output(self, owner: DataParallelBase, _gradient: Tensor) -> None:
        step = owner._step
        if step.arrivals.accumulating:
            return
        self.queue(owner)
        if self._queued_by != torch._C._current_graph_task_id():
            raise overlapping_backwards(step.wrapper, step.group.rank(), step.number + 1)


class TrainableParameters:
    """The parameters whose gradients a wrapper synchronises, and its hooks on them.

    Args:
        module: what is wrapped.
        owner: the wrapper. When its user drops it, it takes the hooks along.

    Attributes:
        specs: the parameters, described.
        parameters: the same ones, themselves.
    """

    def __init__(self, module: nn.Module, owner: DataParallelBase) -> None:
        self._module = module
        self._hooks: list[ParameterHooks] = []  # one, or none once released
        weakref.finalize(owner, _remove_all, self._hooks).atexit = False
        self.specs: list[ParameterSpec] = []
        self.parameters: list[nn.Parameter] = []

    def adopt(self, owner: DataParallelBase) -> Arrivals:
        """Finds the parameters and hooks onto them; ``owner`` hears of their gradients."""
        self.release()
        self._watch = ModuleWatch(self._module)
        # Zero-size parameters have nothing to average.
        named = [
            (n, p) for n, p in self._module.named_parameters() if p.requires_grad and p.numel()
        ]
        self.parameters = [p for _, p in named]
        self.specs = [
            ParameterSpec(index=index, name=name, numel=p.numel(), dtype=p.dtype, device=p.device)
            for index, (name, p) in enumerate(named)
        ]
        arrivals = Arrivals(len(named), owner)
        self._hooks.append(ParameterHooks(self.parameters, arrivals))
        return arrivals

    def release(self) -> None:
        """Takes the hooks from the parameters."""
        _remove_all(self._hooks)

    def have_changed(self, step: Step, settings: Callable[[], Mapping[str, str]]) -> bool:
        """Whether ``requires_grad`` changed since the last forward; then they must be adopted.

        Args:
            step: the step that is being made.
            settings: returns those of the wrapper, in words.

        Raises:
            ModelMismatchError: a parameter was added, replaced or removed, or not all ranks made
                the same change.
            RuntimeError: the hooks were removed.
        """
        if not self._hooks:
            raise RuntimeError(
                f"a {step.wrapper} must not be called after detach(), because gradients are not "
                "synchronised any more. Call the module itself, or wrap it again"
            )
        self._hooks[0].run_last()
        if self._watch.has_new_structure():
            if change := self._watch.describe_change():
                report = f"{change} since {step.wrapper} wrapped the module"
                step.ranks.tell(report)
                raise ModelMismatchError(
                    f"a wrapped module must keep its parameters, but before step {step.number + 1} "
                    f"on rank {step.group.rank()} {report}. Change the module first and "
                    f"wrap it then: {step.wrapper}(wrapped.detach()) after the change"
                )
            self._watch = ModuleWatch(self._module)
        if not self._watch.has_new_requirements():
            return False
        with step.naming_failures_of("the comparison of models after requires_grad changed"):
            _await_change_everywhere(self._watch.changed_requirements(), step)
            verify_same_model(self._module, step.ranks, settings())
        return True


def _await_change_everywhere(names: Sequence[str], step: Step) -> None:
    """Waits until all ranks have changed ``requires_grad``, for as long as a collective would.

    Args:
        names: parameters for which this rank changed it.
        step: the step that is being made.

    Raises:
        ModelMismatchError: not all ranks did.
    """
    changed = shortened(names)
    number = step.number + 1
    report = (
        f"requires_grad of {changed} changed on this rank before step {number}, which waits for "
        "all ranks to change it"
    )
    if absent := step.ranks.absentees(report):
        raise ModelMismatchError(
            "requires_grad must be changed on all ranks before the same step, but that of "
            f"{changed} changed on rank {step.group.rank()} before step {number} and not on "
            f"{name_ranks(absent)} within the process group's timeout; change it on every rank"
        )


def refuse_parameters_of_others(module: nn.Module) -> None:
    """Refuses a module whose gradients another wrapper synchronises.

    Raises:
        TypeError: a parameter has the hook of a wrapper that is in use.
    """
    for name, parameter in module.named_parameters():
        if (owner := _owner_of(parameter)) is not None:
            raise TypeError(
                f"module must not share parameters with a wrapped module, but {name} is "
                f"synchronised by a {type(owner).__name__}. Call detach() on that wrapper first, "
                "or put modules that share parameters into one module and wrap that"
            )


def _owner_of(parameter: nn.Parameter) -> nn.Module | None:
    """The wrapper, if there is one in use, that synchronises a parameter's gradient."""
    for hook in _hooks_of(parameter).values():
        target = getattr(getattr(hook, "func", None), "__self__", None)
        if isinstance(target, Arrivals) and (owner := target.owner()) is not None:
            return owner
    return None


def _hooks_of(parameter: nn.Parameter) -> dict[int, Any]:
    hooks: dict[int, Any] | None = parameter._post_accumulate_grad_hooks
    return {} if hooks is None else hooks


def _remove_all(hooks: list[ParameterHooks]) -> None:
    while hooks:
        hooks.pop().remove()


def overlapping_backwards(wrapper: str, rank: int, step: int) -> UnfinishedSynchronizationError:
    """The error for a backward that begins while another one of the same wrapper is under way.

    Args:
        wrapper: its class.
        rank: where.
        step: the step that both belong to.
    """
    return UnfinishedSynchronizationError(
        f"backward passes through one {wrapper} must run one after another, but in step {step} on "
        f"rank {rank} one began while another was under way, or after it had failed. Add the "
        "losses and call backward once, from one thread"
    )
