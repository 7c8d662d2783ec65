"""The part that all four wrappers share: construction, and the calls of a training loop.

``engine.py`` has the step itself, ``wrappers.py`` the answers that differ between the wrappers.
"""

from __future__ import annotations

import warnings
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Never

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ddp_lite import model
from ddp_lite.engine import Engine, Plan, When
from ddp_lite.grad_hooks import refuse_averaged_parameters
from ddp_lite.missing import MissingGradients, Policy
from ddp_lite.ranks import Ranks, resolve_group
from ddp_lite.reduce import Way
from ddp_lite.same_step import SameStep
from ddp_lite.stats import StepStats, SynchronizationStats
from ddp_lite.transparent import TransparentWrapper, temporarily


class DataParallelBase(TransparentWrapper, ABC):
    """Keeps a module's replicas equal: same start, same averaged gradients. Use a subclass.

    The constructor is collective. It checks that all ranks hold the same model, then overwrites
    parameters and buffers with rank 0's.

    Args:
        module: on its device already. Frozen, shared and zero-size parameters are fine, sparse
            gradients are not.
        process_group: ranks to synchronise with: a group or a one-dimensional device mesh. None
            means the default group.
        missing_gradients: the meaning of a parameter without a gradient on this rank.
            ``"skip-if-all"``: it counts as zeros, and if no rank has a gradient, ``grad`` stays
            None everywhere. ``"zeros"``: it counts as zeros always. ``"error"``: every rank
            raises and names it; on CUDA this makes the host wait once a step.
        auto_finish: every backward ends with synchronised gradients. False leaves that to
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

    # The answers of a wrapper. ``_plan`` and ``_when`` are documented in ``Engine``.
    _plan: Plan
    _when: ClassVar[When]
    _way: Way
    _rebucket: bool = False
    _settings: Mapping[str, str] = MappingProxyType({})  # further ones, which ranks compare
    _words: str

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | DeviceMesh | None = None,
        missing_gradients: Policy = "skip-if-all",
        auto_finish: bool = True,
        **unknown: Never,
    ) -> None:
        if unknown:
            from ddp_lite.migration import refuse_arguments

            refuse_arguments(type(self), unknown)
        missing = MissingGradients(missing_gradients)
        model.check_module(module, DataParallelBase)
        refuse_averaged_parameters(module)
        super().__init__(module)
        self.process_group, self.device = resolve_group(process_group), model.common_device(module)
        model.check_backend(self.process_group, self.device)
        self._policy = missing_gradients
        self._stats: StepStats | None = None
        self._ranks = Ranks(self.process_group, self.device, type(self).__name__)
        settings = {"class": type(self).__name__, "missing_gradients": missing_gradients}
        settings |= {"auto_finish": str(auto_finish), **self._settings}
        what = "the comparison and broadcast of models"
        self._ranks.together(what, self._make_models_equal, settings)
        self._ranks.step = 1
        self._watch = model.ModuleWatch(module, self._ranks)
        self._same_step = SameStep(self.device)
        self._engine = Engine(
            self._ranks,
            plan=self._plan,
            when=self._when,
            way=self._way,
            rebucket=self._rebucket,
            auto_finish=auto_finish,
            tasks=[self._same_step, missing] if self._ranks.size > 1 else [missing],
        )
        self._adopt()
        self.pass_on()
        if not self._engine.parameters:
            warnings.warn(
                f"{type(self).__name__}: the module has no trainable parameters, so there is "
                "nothing to synchronise",
                stacklevel=3,
            )

    def _make_models_equal(self, settings: dict[str, str]) -> None:
        model.verify_same_model(self.module, self._ranks, settings)
        self._ranks.overwrite_with_rank_0([*self.module.parameters(), *self.module.buffers()])

    def _adopt(self) -> None:
        """Synchronises the module's trainable parameters from here on."""
        self._engine.adopt(self._watch.trainable())

    # -- using the wrapper ---------------------------------------------------------------------

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
        engine = self._engine
        engine.begin_forward()
        if self._watch.has_changed():
            self._adopt()
        outputs = self.module(*inputs, **kwargs)
        engine.finish_after_backward_of(outputs)
        return outputs

    def finish_gradient_synchronization(self) -> None:
        """Waits for every reduction; afterwards ``parameter.grad`` holds the average.

        With ``auto_finish=True`` the backward has done so already, and this returns at once. It
        then serves gradients that no backward produced, such as on a rank without a batch.
        Otherwise call it on every rank after the last backward of a step and before anything reads
        the gradients. On CUDA only the current stream waits.

        Raises:
            MissingGradientError: policy ``"error"``, on every rank.
            ModelMismatchError: a parameter's dtype or size changed since the module was wrapped.
            PeerFailureError: a peer died, hangs, or runs other collectives.
            StepMismatchError: on every rank, if ranks make different synchronisations or make them
                from different weights. On CUDA the next call raises it.
            RuntimeError: called inside ``no_sync``.
        """
        if self._engine.arrivals.accumulating:
            raise RuntimeError(
                "finish_gradient_synchronization() must be called outside no_sync(), whose "
                "purpose is to accumulate without synchronising. Leave the block first."
            )
        if self._engine.finished:
            self._engine.finished = False  # another call has other gradients in mind
        else:
            self._engine.finish()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes inside only accumulate locally; the next one outside sends the sum."""
        return temporarily(self._engine.arrivals, "accumulating", True)

    def different_weights(self) -> AbstractContextManager[None]:
        """Synchronises gradients that ranks compute at different weights, on all ranks alike.

        Elsewhere such a step raises ``StepMismatchError``. Sharpness-aware minimisation needs it:
        each rank moves its weights by its own gradient, and the gradients at the moved weights are
        averaged. Run that forward and backward inside, and restore the weights after it.
        """
        return temporarily(self._same_step, "compare_weights", False)

    @contextmanager
    def join(
        self,
        shadow_step: Callable[[], object],
        *,
        average_over: Literal["active", "world"] = "active",
    ) -> Iterator[None]:
        """For ranks with different numbers of batches; wrap the whole training loop in it.

        A rank that leaves the block before the others takes part in their steps with zeros.
        Inside, every backward outside ``no_sync`` is a step. Gradients accumulated in ``no_sync``
        and never sent are lost.

        Args:
            shadow_step: called after each such step with the averages in place; do there the same
                as in the loop: step the optimizer and zero the gradients.
            average_over: "active" averages over the ranks that had a batch, "world" over all.
        """
        from ddp_lite.join import Join

        join = Join(average_over)
        self._engine.tasks.append(join)
        try:
            yield
            join.shadow(self._engine, shadow_step)
        finally:
            self._engine.tasks.remove(join)

    def sync_buffers(self) -> None:
        """Overwrites the buffers (such as BatchNorm statistics) with rank 0's. Collective."""
        buffers = list(self.module.buffers())
        self._ranks.together("the broadcast of buffers", self._ranks.overwrite_with_rank_0, buffers)

    def stats(self) -> SynchronizationStats | None:
        """The last synchronised step. Statistics are kept from the first call on.

        Returns:
            None until a step has ended after the first call. On CUDA the host waits for the step.
        """
        if self._stats is None:
            self._stats = StepStats(self.device)
            self._stats.begin(self._engine)
            self._engine.tasks.append(self._stats)
        return self._stats.last()

    def explain(self) -> str:
        """One line: what is sent, when, how and among whom."""
        engine = self._engine
        megabytes = sum(spec.nbytes for spec in engine.specs) / 2**20
        dtypes = sorted({str(spec.dtype).removeprefix("torch.") for spec in engine.specs})
        return (
            f"{type(self).__name__}: {megabytes:.1f} MB of gradients of {len(engine.specs)} "
            f"parameters in {len(engine.buckets)} reductions, {self._words}; "
            f"{' and '.join(dtypes)}, {self._ranks.size} ranks on {self.device.type}; "
            f"missing gradients: {self._policy}"
        )

    def detach(self) -> nn.Module:
        """Removes every hook and returns the module, ready to be wrapped again.

        Flat tensors are let go. On CUDA the current stream waits for reductions under way, because
        their memory is freed here. A wrapper that is no longer referenced detaches itself.
        """
        self._engine.detach()
        return self.module
