"""Records every allocation of a pass of the model, phase by phase.

On a GPU it is the caching allocator's own history, on a CPU the memory events of the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch

from bench_harness.traces import kineto
from bench_harness.traces.allocations import (
    FIRST,
    NO_PHASE,
    MemoryEvent,
    from_cuda_history,
    from_profile,
)
from bench_harness.traces.trace import phase
from bench_harness.training.build import plain, training

#: Everything that is allocated inside belongs to the phase of that name.
_Mark: TypeAlias = Callable[[str], AbstractContextManager[None]]


def record(config: Mapping[str, Any], device: torch.device, snapshot: Path) -> list[MemoryEvent]:
    """Builds the model and runs one pass under the recorder of the device.

    Args:
        snapshot: where the GPU allocator's history is dumped, for PyTorch's viewer.
    """
    if device.type == "cuda":
        return _of_cuda(config, device, snapshot)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "memory.json"
        with kineto.recording(path, device, memory=True):
            _pass(config, device, lambda name: phase(name, device))
        return from_profile(path)


def _of_cuda(config: Mapping[str, Any], device: torch.device, snapshot: Path) -> list[MemoryEvent]:
    # Boundaries are lengths of the history: they need no clock to agree with the allocator's.
    boundaries: list[tuple[str, int]] = []

    def entries() -> list[dict[str, Any]]:
        traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
        return traces[device.index or 0]

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        boundaries.append((name, len(entries())))
        yield
        boundaries.append((NO_PHASE, len(entries())))

    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    try:
        _pass(config, device, mark)
        torch.cuda.synchronize(device)
        events = from_cuda_history(entries(), boundaries, outermost=_pass.__name__)
        torch.cuda.memory._dump_snapshot(str(snapshot))
        return events
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _pass(config: Mapping[str, Any], device: torch.device, mark: _Mark) -> None:
    with ExitStack() as stack:
        with mark("model"):
            steps = stack.enter_context(training(plain(config), config, device))
        if config["mode"] == "forward":
            with mark("forward"), torch.no_grad():
                steps.workload.loss()
            return
        if config["second_step"]:
            with mark(FIRST):
                steps.step()
                steps.optimizer.zero_grad(set_to_none=True)
        with mark("forward"):
            loss = steps.workload.loss()
        with mark("backward"):
            steps.backward(loss)
        with mark("optimizer"):
            steps.update()
