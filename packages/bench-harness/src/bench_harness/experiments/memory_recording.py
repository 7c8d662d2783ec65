"""Records every allocation of a pass of the model, phase by phase.

On a GPU it is the caching allocator's own history, on a CPU the memory events of the profiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench_harness.subject import workload_of
from bench_harness.traces import kineto
from bench_harness.traces.allocations import (
    FIRST,
    NO_PHASE,
    MemoryEvent,
    from_cuda_history,
    from_profile,
)
from bench_harness.traces.trace import phase
from bench_harness.training.optimizers import optimizer_by_name
from bench_harness.workload import attention_by_name


def record(config: Mapping[str, Any], device: torch.device, snapshot: Path) -> list[MemoryEvent]:
    """Builds the model and runs one pass under the recorder of the device.

    Args:
        snapshot: where the GPU allocator's history is dumped.
    """
    recorder = _CudaRecorder(device, snapshot) if device.type == "cuda" else _CpuRecorder(device)
    with recorder:
        _pass(config, device, recorder)
    return recorder.events


def _pass(config: Mapping[str, Any], device: torch.device, recorder: Any) -> None:
    with recorder.phase("model"):
        workload = workload_of(
            config,
            device,
            precision=config["precision"],
            attention=attention_by_name(config["attention"]),
        )
        optimizer = optimizer_by_name(config["optimizer"], workload.module, device)
    if config["mode"] == "forward":
        with recorder.phase("forward"), torch.no_grad():
            workload.loss()
        return
    if config["second_step"]:
        with recorder.phase(FIRST):
            workload.backward(workload.loss())
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    with recorder.phase("forward"):
        loss = workload.loss()
    with recorder.phase("backward"):
        workload.backward(loss)
    with recorder.phase("optimizer"):
        optimizer.step()


class _CudaRecorder:
    """Records the caching allocator's history, and also dumps it for PyTorch's viewer."""

    def __init__(self, device: torch.device, snapshot: Path) -> None:
        self.events: list[MemoryEvent] = []
        self._device, self._snapshot = device, snapshot
        self._boundaries: list[tuple[str, int]] = []

    def __enter__(self) -> _CudaRecorder:
        torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if exception[0] is None:
                torch.cuda.synchronize(self._device)
                self.events = from_cuda_history(
                    self._entries(), self._boundaries, outermost=_pass.__name__
                )
                torch.cuda.memory._dump_snapshot(str(self._snapshot))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything allocated inside belongs to the phase."""
        # By the history's length: it needs no clock to agree with the allocator's.
        self._boundaries.append((name, len(self._entries())))
        yield
        self._boundaries.append((NO_PHASE, len(self._entries())))

    def _entries(self) -> list[dict[str, Any]]:
        traces = torch.cuda.memory._snapshot()["device_traces"]
        entries: list[dict[str, Any]] = traces[self._device.index or 0]
        return entries


class _CpuRecorder:
    """Records the memory events of torch.profiler."""

    def __init__(self, device: torch.device) -> None:
        self.events: list[MemoryEvent] = []
        self._device = device
        self._stack = ExitStack()
        self._path = Path()

    def __enter__(self) -> _CpuRecorder:
        self._path = Path(self._stack.enter_context(TemporaryDirectory())) / "memory.json"
        self._stack.callback(self._read)
        self._stack.enter_context(kineto.recording(self._path, self._device, memory=True))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.__exit__(*exception)

    def _read(self) -> None:
        if self._path.exists():
            self.events = from_profile(self._path)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Everything allocated inside belongs to the phase."""
        with phase(name, self._device):
            yield
