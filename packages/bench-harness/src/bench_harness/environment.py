"""The machine a measurement ran on: hardware, driver, versions, clocks, commit.

Everything here answers without importing torch, so that ``bench-harness env`` is quick and a
parent process never touches a device. Only :func:`describe_torch` and :func:`gpu_now`, which are
called where torch is loaded anyway, ask torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench_harness.core import JsonValue, Row

if TYPE_CHECKING:
    import torch

#: Distributions whose version changes a measurement.
OWN_PACKAGES = ("bench-harness", "basics-model", "flashattn-triton", "ddp-lite", "shard-optim")
PACKAGES = (
    *(*OWN_PACKAGES, "torch", "triton", "numpy", "scipy"),
    *("nvidia-nccl-cu13", "nvidia-cudnn-cu13", "nvidia-cublas"),
)


def package_version(distribution: str) -> str | None:
    """The version of a distribution, installed or run from its source tree; None if absent."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pass
    spec = importlib.util.find_spec(distribution.replace("-", "_"))
    if spec is None or spec.origin is None:
        return None
    project_file = Path(spec.origin).parents[2] / "pyproject.toml"
    if not project_file.is_file():
        return None
    project = tomllib.loads(project_file.read_text(encoding="utf-8")).get("project", {})
    return str(project["version"]) if project.get("name") == distribution else None


def gpu_count() -> int:
    """CUDA devices visible to this process, counted by the driver's management library."""
    with _nvml() as nvml:
        if nvml is None:
            return 0
        present = int(nvml.nvmlDeviceGetCount())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    named = [entry for entry in visible.split(",") if entry.strip() not in ("", "-1")]
    return min(present, len(named))


def resolve_device(device: str) -> str:
    """Turns ``"auto"`` into ``"cuda"`` where a GPU is visible and ``"cpu"`` elsewhere.

    Raises:
        ValueError: the name is none of auto, cpu, cuda.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be one of auto, cpu, cuda, but got {device!r}")
    if device != "auto":
        return device
    return "cuda" if gpu_count() else "cpu"


def _torch_threads() -> int | str:
    """The threads that torch is told to compute with; :func:`describe_torch` has those it took."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = os.environ.get(name, "").partition(",")[0].strip()
        if value.isdecimal() and int(value):
            return int(value)
    return "default"


def describe() -> Row:
    """The fixed facts of the machine and the software, as JSON."""
    memory = psutil.virtual_memory()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_cores": psutil.cpu_count(logical=False),
        "cpu_threads": len(psutil.Process().cpu_affinity())
        if hasattr(psutil.Process, "cpu_affinity")
        else psutil.cpu_count(),
        "memory_gib": round(memory.total / 2**30, 1),
        "torch_threads": _torch_threads(),
        "packages": {name: package_version(name) for name in PACKAGES},
        "git": git_state(Path(__file__).parent),
        **_describe_gpus(),
    }


def compared(description: Mapping[str, JsonValue]) -> Row:
    """The fields that make two timings comparable: hardware, libraries and threads.

    The commit, this toolbox's own versions and free memory take no part: a change of ours is what
    a comparison is there to show.
    """
    packages = description.get("packages", {})
    names = ("cpu", "cpu_cores", "cpu_threads", "memory_gib", "driver", "gpus", "torch_threads")
    return {
        **{name: description.get(name) for name in names},
        "packages": {n: version for n, version in packages.items() if n not in OWN_PACKAGES},
    }


def fingerprint(description: Row) -> str:
    """Twelve hexadecimal digits over the fields of :func:`compared`."""
    hardware = compared(description)
    libraries = hardware.pop("packages")
    canonical = json.dumps([hardware, libraries], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


def measured_on(environment: Mapping[str, Any]) -> str:
    """Hardware and versions in one phrase."""
    names = [gpu["name"] for gpu in environment.get("gpus", [])]
    packages = environment.get("packages", {})
    hardware = f"{len(names)} × {names[0]}" if names else environment.get("cpu", "unknown machine")
    versions = [f"{name} {packages[name]}" for name in ("torch", "triton") if packages.get(name)]
    if environment.get("driver"):
        versions.insert(0, f"driver {environment['driver']}")
    return ", ".join([str(hardware), *versions])


def describe_torch() -> Row:
    """What torch itself reports: its build, CUDA, cuDNN, NCCL, threads, and matmul precision."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
        "torch_threads": torch.get_num_threads(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


def busy() -> float:
    """How many times longer a process takes here because of others: the load over the cores."""
    return max(1.0, psutil.getloadavg()[0] / (psutil.cpu_count() or 1))


def snapshot() -> Row:
    """What changes from case to case: load, free memory, and each GPU's clocks and throttling."""
    return {
        "load_1min": round(psutil.getloadavg()[0], 2),
        "cpus": psutil.cpu_count(),
        "memory_available_gib": round(psutil.virtual_memory().available / 2**30, 1),
        "gpus": _gpu_states(),
    }


def throttled(before: Row, after: Row) -> list[str]:
    """Reasons, other than idling, for which a GPU reports lowered clocks in either snapshot."""
    reasons: set[str] = set()
    for state in (before, after):
        for gpu in state.get("gpus", []):
            reasons.update(gpu["throttle_reasons"])
    return sorted(reasons)


def git_state(folder: Path) -> Row | None:
    """Commit and cleanliness of the repository that holds ``folder``; None outside one."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit, "dirty": bool(changed)}


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    )
    return done.stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def _nvml() -> Iterator[Any]:
    """The initialised management library, or None where there is no NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _describe_gpus() -> Row:
    with _nvml() as nvml:
        if nvml is None:
            return {"driver": None, "gpus": []}
        handles = _handles(nvml)
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "gpus": [
                {
                    "name": nvml.nvmlDeviceGetName(handle),
                    "memory_gib": round(nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30, 1),
                    "power_limit_w": _reading(
                        nvml, "nvmlDeviceGetEnforcedPowerLimit", handle, per=1000
                    ),
                    "nvlinks": _active_links(nvml, handle),
                }
                for handle in handles
            ],
        }


def _gpu_states() -> list[Row]:
    with _nvml() as nvml:
        if nvml is None:
            return []
        return [
            {
                **_sensors(nvml, h),
                "memory_clock_mhz": _reading(
                    nvml, "nvmlDeviceGetClockInfo", h, nvml.NVML_CLOCK_MEM
                ),
                "memory_used_gib": round(nvml.nvmlDeviceGetMemoryInfo(h).used / 2**30, 2),
                "throttle_reasons": _throttle_reasons(nvml, h),
            }
            for h in _handles(nvml)
        ]


def _sensors(nvml: Any, handle: Any) -> Row:
    """Clock, power and temperature of a GPU; None for what its driver does not tell."""
    heat = nvml.NVML_TEMPERATURE_GPU
    return {
        "sm_clock_mhz": _reading(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        "power_w": _reading(nvml, "nvmlDeviceGetPowerUsage", handle, per=1000),
        "temperature_c": _reading(nvml, "nvmlDeviceGetTemperature", handle, heat),
    }


@functools.cache
def _opened(uuid: str) -> tuple[Any, Any]:
    """The library and a GPU's handle, open for the life of the process; None without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return pynvml, None


def gpu_now(device: torch.device) -> dict[str, float]:
    """Clock (MHz), power (W), temperature (°C) of a CUDA device, as far as a driver tells them."""
    if device.type != "cuda":
        return {}
    import torch

    # The number that is the same whichever GPUs a process sees.
    nvml, handle = _opened(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    found = {} if handle is None else _sensors(nvml, handle)
    return {name: float(value) for name, value in found.items() if value is not None}


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]


def _reading(nvml: Any, name: str, *arguments: Any, per: int = 1) -> Any:
    """A sensor's value; None where the board or the container does not offer it."""
    try:
        value = getattr(nvml, name)(*arguments)
    except nvml.NVMLError:
        return None
    return value if per == 1 else value / per


def _active_links(nvml: Any, handle: Any) -> int:
    links = range(nvml.NVML_NVLINK_MAX_LINKS)
    return sum(bool(_reading(nvml, "nvmlDeviceGetNvLinkState", handle, link)) for link in links)


def _throttle_reasons(nvml: Any, handle: Any) -> list[str]:
    bits = _reading(nvml, "nvmlDeviceGetCurrentClocksEventReasons", handle) or 0
    names = {
        "power limit": nvml.nvmlClocksEventReasonSwPowerCap,
        "hardware slowdown": nvml.nvmlClocksThrottleReasonHwSlowdown,
        "software thermal": nvml.nvmlClocksEventReasonSwThermalSlowdown,
        "hardware thermal": nvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "power brake": nvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
    }
    return [name for name, bit in names.items() if bits & bit]
