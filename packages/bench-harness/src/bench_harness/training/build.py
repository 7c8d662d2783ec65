"""From the settings of a variant to a training that can take steps."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from basics_model import CapturedStep
from bench_harness.core import CaseSkipped, Config
from bench_harness.training import settings as of
from bench_harness.training.adapters import (
    Parameters,
    blocks_of,
    make_optimizer,
    matrix_names,
    state_bytes,
)
from bench_harness.training.constructors import Call, construct
from bench_harness.user_code import workload_of
from bench_harness.workload import attention_by_name

if TYPE_CHECKING:
    from torch import Tensor

    from bench_harness.workload import Workload


@dataclass
class Training:
    """A variant that has been built and can take steps.

    Attributes:
        workload: the model, this rank's batch and its precision.
        module: what forward calls: the model, or the wrapper around it.
        numel, gradient_bytes, state_bytes: of the whole model, counted before any parameter is
            sharded.
        finish: makes averaged gradients usable; called after backward.
        close: removes hooks and lets go of what the wrapper holds.
        after_replay: called after each replay of a recorded step, so that lost ranks are named.
        captured: the recorded step, which :meth:`step` replays.
    """

    workload: Workload
    module: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    numel: int
    gradient_bytes: int
    state_bytes: int
    finish: Callable[[], object] = lambda: None
    close: Callable[[], object] = lambda: None
    after_replay: Callable[[], object] | None = None
    captured: CapturedStep[Tensor] | None = None

    def forward(self) -> Tensor:
        """The loss of this rank's batch, with all gradients reset before."""
        self.optimizer.zero_grad(set_to_none=True)
        return self.workload.loss(self.module)

    def backward(self, loss: Tensor) -> None:
        """Gradients, averaged over ranks."""
        self.workload.backward(loss)
        self.finish()

    def update(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()

    def step(self) -> Tensor:
        """A whole training step; returns its loss, detached and still on the device.

        Of a recorded step, the loss is overwritten by the next one.
        """
        return self._step() if self.captured is None else self.captured()

    def _step(self) -> Tensor:
        return self.in_phases(lambda name: nullcontext())

    def in_phases(self, mark: Callable[[str], AbstractContextManager[object]]) -> Tensor:
        """A whole training step, with a context around "forward", "backward" and "optimizer"."""
        with mark("forward"):
            loss = self.forward()
        with mark("backward"):
            self.backward(loss)
        with mark("optimizer"):
            self.update()
        return loss.detach()

    def capture(self) -> None:
        """Records the step as a CUDA graph; takes none. A step must have been taken before."""
        self.captured = CapturedStep(self._step, after_replay=self.after_replay)

    def wait(self) -> None:
        """Waits until the optimizer has updated all parameters."""
        wait = getattr(self.optimizer, "wait", None)
        if wait is not None:
            wait()

    def parameters(self) -> dict[str, Tensor]:
        """The model's parameters by name, whole, on every rank. Collective for sharded ones."""
        self.wait()
        gather = getattr(self.module, "full_parameters", None)
        if gather is not None:
            whole: dict[str, Tensor] = gather()
            return whole
        named = self.workload.module.named_parameters()
        return {name: _whole(parameter.detach()) for name, parameter in named}

    def stats(self) -> dict[str, int | None]:
        """Collectives and bytes of the last step, as a wrapper of ddp-lite counts them."""
        stats = getattr(self.module, "stats", None)
        found = stats() if callable(stats) else None
        return {
            "collectives": getattr(found, "collectives", None),
            "in_backward": getattr(found, "started_in_backward", None),
            "buckets": getattr(found, "reductions", None)
            or len(getattr(self.optimizer, "buckets", ()))
            or None,
            "payload_bytes": getattr(found, "bytes", None),
        }


def _whole(tensor: Tensor) -> Tensor:
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor


def plain(config: Config) -> of.Settings:
    """The variant of a case that has one: a precision, an attention, an optimizer by name."""
    optimizer = Call(config["optimizer"])
    return of.Settings(
        precision=config["precision"], attention=config["attention"], optimizer=optimizer
    )


@contextmanager
def training(variant: of.Settings, config: Config, device: torch.device) -> Iterator[Training]:
    """Builds a variant, from the same initial weights on every call, and frees it afterwards.

    Args:
        config: of the case: ``size`` and dimensions, ``batch`` and ``sequence``, or ``model`` and
            ``input`` of an imported module.

    Raises:
        CaseSkipped: the variant cannot run here; the text says why.
    """
    # What the variant before held is out of reach only now that its function has returned.
    gc.collect()
    if variant.cuda_graph and device.type != "cuda":
        raise CaseSkipped(
            f"cuda_graph must run on a CUDA device, but got {device.type}. Remove cuda_graph."
        )
    # Variants compile the same modules anew; past its limit the compiler would run them uncompiled.
    limits = torch._dynamo.config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)
    # A CUDA graph cannot be recorded on the default stream.
    stream = torch.cuda.stream(torch.cuda.Stream()) if variant.cuda_graph else nullcontext()
    with limits, stream:
        workload = _workload(variant, config, device)
        made = _wrapped(variant, workload)
        try:
            yield made
        finally:
            made.captured = None
            made.close()
            for parameter in workload.module.parameters():
                parameter.grad = None


def _workload(variant: of.Settings, config: Config, device: torch.device) -> Workload:
    workload = workload_of(
        config,
        device,
        precision=variant.precision,
        seed=config.get("seed", 0),
        batch_seed=dist.get_rank() if dist.is_initialized() else 0,
        attention=attention_by_name(variant.attention),
        checkpoint_blocks=variant.checkpoint_blocks,
        keep_attention=variant.keep_attention,
        chunked_loss=variant.loss == "chunked",
        float8_recipe=variant.float8_recipe,
    )
    if variant.compile != "off":
        # Without a GPU nothing is worth generating code for.
        backend = config.get("backend") or ("inductor" if device.type == "cuda" else "aot_eager")
        for part in (
            blocks_of(workload.module) if variant.compile == "blocks" else [workload.module]
        ):
            part.compile(backend=backend, dynamic=False)
    return workload


def _wrapped(variant: of.Settings, workload: Workload) -> Training:
    """Puts the wrapper around the model, and makes the optimizer."""
    module, matrices = workload.module, set[str]()
    if variant.optimizer.name == "muon":
        matrices = matrix_names(blocks_of(module), module)
    whole = (
        workload.parameters(),
        sum(p.nbytes for p in module.parameters() if p.requires_grad),
        state_bytes(variant.optimizer, module, matrices),
    )
    around: Any = module
    if variant.wrapper.name != "none":
        around = construct("wrapper", variant.wrapper, module)
    over = Parameters(
        module=around if variant.wrapper.name == "fully-sharded" else module,
        device=workload.device,
        matrices=matrices,
        capturable=variant.cuda_graph,
    )
    optimizer = make_optimizer(variant.optimizer, over)
    if variant.wrapper.name == "none" and variant.optimizer.get("overlap"):
        optimizer.attach(module)
    wrapper = None if around is module else around
    return Training(
        workload,
        around,
        optimizer,
        *whole,
        getattr(wrapper, "finish_gradient_synchronization", lambda: None),
        getattr(wrapper, "detach", lambda: None),
        getattr(wrapper, "peer_watch", None),
    )
