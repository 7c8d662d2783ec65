"""A whole training step as one CUDA graph, for steps that wait for the host.

A step of a deep model launches thousands of kernels, each of which costs the host microseconds. A
CUDA graph holds all launches with their arguments, and one call launches them together; see the
programming guide of CUDA, "CUDA Graphs", and ``torch.cuda.graph``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

Outputs = TypeVar("Outputs")


class CaptureError(RuntimeError):
    """A step could not be recorded as a CUDA graph."""


class CapturedStep(Generic[Outputs]):
    """Records a step once, and replays it with new inputs.

    A replay launches the same kernels on the same memory. So the step must do the same at every
    call, must not read values on the host (``.item()``, ``print``), and keeps what Python computed
    when it was recorded; a learning rate that changes has to be a tensor. Take a few steps before
    recording, so that everything is compiled and the optimizer has its state, all on the stream
    that is recorded, which must not be the default one::

        torch.cuda.set_stream(torch.cuda.Stream())  # before the model's first forward
        for _ in range(3):
            step(tokens, targets)
        captured = CapturedStep(step, tokens, targets)
        loss = captured(tokens, targets)

    Collectives over NCCL are recorded too, and every rank must replay equally often. NCCL's
    watchdog does not see them: a lost rank is noticed at the next collective outside the graph.

    Args:
        step: a function of tensors; recording calls it once, but carries nothing out.
        inputs: tensors on the current device, of the shapes, dtypes that every call will have.
        after_replay: called as soon as a replay has been launched, on the stream that it runs on,
            such as what watches copies between GPUs; what it raises, the call raises.

    Attributes:
        outputs: what the step returned when it was recorded; every replay overwrites its tensors.

    Raises:
        CaptureError: without CUDA, on the default stream, or if the step does something that cannot
            be recorded, such as to count on the host. In the last case the process's random
            generators and memory may be left in the middle of the recording: end the process.
    """

    def __init__(
        self,
        step: Callable[..., Outputs],
        *inputs: Tensor,
        after_replay: Callable[[], object] | None = None,
    ) -> None:
        if not torch.cuda.is_available():
            raise CaptureError(
                "a step can be recorded as a CUDA graph only on a CUDA device, but torch sees "
                "none. Call the step itself."
            )
        stream = torch.cuda.current_stream()
        if stream == torch.cuda.default_stream():
            raise CaptureError(
                "a step must be recorded on the stream of its first calls, which must not be the "
                "default stream. Call torch.cuda.set_stream(torch.cuda.Stream()) before the "
                "model's first forward."
            )
        self._after_replay = after_replay
        self._inputs = [given.clone() for given in inputs]
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may ask for events meanwhile.
        recording = torch.cuda.graph(self._graph, stream=stream, capture_error_mode="thread_local")
        hook = register_optimizer_step_pre_hook(lambda optimizer, *_: check_counters(optimizer))
        try:
            with recording:
                self.outputs: Outputs = step(*self._inputs)
        except RuntimeError as error:
            raise CaptureError(
                "a step must launch the same kernels at every call and never wait for them to be "
                f"recorded as a CUDA graph, but got: {error}. Start anew without recording."
            ) from error
        finally:
            hook.remove()

    def __call__(self, *inputs: Tensor) -> Outputs:
        """Carries the step out with these inputs; returns :attr:`outputs`.

        Raises:
            ValueError: if an input has another shape or dtype than the recorded one.
        """
        check_inputs(self._inputs, inputs)
        for recorded, given in zip(self._inputs, inputs, strict=True):
            recorded.copy_(given, non_blocking=True)
        self._graph.replay()
        if self._after_replay is not None:
            self._after_replay()
        return self.outputs


def check_counters(optimizer: Optimizer) -> None:
    """Raises CaptureError if the optimizer counts its steps on the host."""
    for state in optimizer.state.values():
        for key, value in state.items():
            on_host = isinstance(value, Tensor) and value.is_cpu and value.dim() == 0
            if on_host or type(value) is int:
                raise CaptureError(
                    f"{key!r} of {type(optimizer).__name__} must be on the GPU to be recorded as a "
                    "CUDA graph, but is on the host, where no replay changes it. Pass "
                    "capturable=True if the class has it, or step outside the recorded step."
                )


def check_inputs(recorded: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Raises ValueError unless the given tensors are like the recorded ones."""
    expected, found = ([(tuple(x.shape), x.dtype) for x in each] for each in (recorded, given))
    if found != expected:
        raise ValueError(
            f"a recorded step takes inputs of the recorded shapes and dtypes {expected}, but got "
            f"{found}. Record another step for them, or call the step itself."
        )
