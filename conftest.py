"""Settings every test of the workspace shares."""

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Before torch and NumPy read them. The products of the interpreter and of the simulator are small:
# OpenBLAS's second thread spins on a core that another process of tests wants. A process of several
# computes with one thread, unless the caller has chosen otherwise.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Hundreds of processes of the tests import the same modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Tests of GPUs are asked for, by marker or file. The others are those of a machine without any, and
# share its cores; processes that run them inherit this.
if "PYTEST_XDIST_WORKER" not in os.environ and not any("gpu" in word for word in sys.argv[1:]):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch

from selection import starts_processes

if not torch.cuda.is_available():
    # Triton reads this when a kernel is decorated: before any of ours is imported.
    os.environ["TRITON_INTERPRET"] = "1"
    # A process that compiles for a CPU would start others for Triton's kernels, which import torch,
    # and would ask a compiler what vector instructions there are.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")


with contextlib.suppress(ImportError):  # a machine with GPUs may lack it
    import hypothesis

    # An example takes longer on a machine that is busy, which is no fault of what is tested.
    hypothesis.settings.register_profile("workspace", deadline=None)
    hypothesis.settings.load_profile("workspace")

MOST_PROCESSES = 12
BYTES_PER_PROCESS = 2 * 2**30  # with the ranks that it starts
LONGEST = "test_wheels.py"  # of the files: minutes, in which environments are made


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Number of processes that share the files of tests; 0 runs them in this one.

    There is one more than cores, because tests that start ranks wait more than they compute. A
    process takes seconds to start and hides what tests print, so a single file stays here. So does
    a run on a GPU, whose memory one process of tests may need for itself.
    """
    options = config.option
    if options.collectonly or options.trace or options.capture == "no":
        return 0
    if torch.cuda.is_available():
        return 0
    paths = {Path(argument.partition("::")[0]) for argument in config.args}
    files = MOST_PROCESSES if any(path.is_dir() for path in paths) else len(paths)
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    fitting = psutil.virtual_memory().total // BYTES_PER_PROCESS
    processes = min(cores + 1, files, fitting, MOST_PROCESSES)
    return processes if processes > 1 else 0


@pytest.hookimpl(tryfirst=True)  # before -m chooses by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = torch.cuda.device_count()
    slow_files = set()
    for item in items:
        if isinstance(item, pytest.Function) and starts_processes(item):
            item.add_marker("processes")
            slow_files.add(item.path)
        if item.get_closest_marker("gpu") and devices < 1:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: bash scripts/gpu_tests.sh"))
        if item.get_closest_marker("multi_gpu") and devices < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs: bash scripts/gpu_tests.sh"))
    # A long file that begins last would leave the other processes without work.
    items.sort(key=lambda item: (item.path.name != LONGEST, item.path not in slow_files))


def pytest_collection_finish() -> None:
    """What is there now stays until the end: no collection of garbage need look at it again."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)  # a simulated kernel makes many small objects
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _share_gpus(request: pytest.FixtureRequest) -> None:
    """Processes that test side by side take the GPUs in turn; ranks choose their own."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, …
    if worker and request.node.get_closest_marker("gpu") and torch.cuda.device_count() > 1:
        torch.cuda.set_device(int(worker[2:]) % torch.cuda.device_count())


@pytest.fixture(autouse=True)
def _return_device_memory() -> Iterator[None]:
    """What a large test leaves in torch's cache is given back: other processes test beside it."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
