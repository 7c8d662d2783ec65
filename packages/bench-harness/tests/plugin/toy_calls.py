"""Functions that a process calls; each ends in the way that its name says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench_harness.core import CaseSkipped
from bench_harness.process import temporary_prefix

Progress = Callable[[str], None]


def double(value: int, progress: Progress) -> dict[str, object]:
    progress("half way")
    return {"value": 2 * value, "folder": str(Path.cwd()), "leader": os.getsid(0) == os.getpid()}


def seconds_of_torch(progress: Progress) -> float:
    """Processor time of this process until it has torch."""
    import torch

    assert torch.__version__
    return time.process_time()


def cuda_state(progress: Progress) -> bool:
    import torch

    return bool(torch.cuda._is_in_bad_fork()) or torch.cuda.is_initialized()


def cuda_sum(progress: Progress) -> float:
    import torch

    return float(torch.ones(1000, device="cuda").sum())


def ranks(progress: Progress) -> list[object]:
    from bench_harness.ranks import launch

    return launch(_rank_state, 2, timeout_s=100)


def _rank_state(rank: int, world_size: int, device: object) -> list[object]:
    import torch
    import torch.distributed as dist

    dist.barrier()  # a rank that leaves while another is still connecting makes that one fail
    return [rank, os.getppid(), torch.cuda._is_in_bad_fork()]


def raises(progress: Progress) -> None:
    print("on stdout", flush=True)
    print("on stderr", file=sys.stderr)
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise ValueError("first line\nsecond line") from error


def exits(progress: Progress) -> None:
    sys.exit("a message")


def leaves(progress: Progress) -> None:
    print("last words", flush=True)
    os._exit(3)


def is_killed(progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def skips(progress: Progress) -> None:
    raise CaseSkipped("needs a thing")


def host_out_of_memory(progress: Progress) -> None:
    import torch

    torch.empty(2**50, dtype=torch.uint8)


def caused_by_out_of_memory(progress: Progress) -> None:
    import torch

    try:
        raise torch.OutOfMemoryError("no room")
    except torch.OutOfMemoryError as error:
        raise RuntimeError("rank 1 failed") from error


def not_json(progress: Progress) -> object:
    return {"value": float("inf")}


def hangs_with_children(where: str, progress: Progress) -> None:
    near = subprocess.Popen(["sleep", "600"])
    far = subprocess.Popen(["sleep", "600"], start_new_session=True)
    tempfile.mkdtemp(prefix=temporary_prefix(os.getpid()))
    Path(where).write_text(f"{os.getpid()} {near.pid} {far.pid}")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def leaves_a_child(where: str, progress: Progress) -> str:
    child = subprocess.Popen(["sleep", "600"])
    Path(where).write_text(str(child.pid))
    return "done"


def leaves_an_orphan(where: str, progress: Progress) -> None:
    """Starts a session whose leader ends at once, which leaves an orphan, and dies."""
    script = (
        "import subprocess\n"
        "quiet = subprocess.DEVNULL\n"
        "print(subprocess.Popen(['sleep', '600'], stdout=quiet, stderr=quiet).pid)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], start_new_session=True, capture_output=True, check=True
    )
    Path(where).write_bytes(done.stdout)
    os.kill(os.getpid(), signal.SIGKILL)


def prints_much(megabytes: int, progress: Progress) -> None:
    line = b"x" * ((1 << 20) - 1) + b"\n"
    for _ in range(megabytes):
        os.write(1, line)
    os.write(1, b"the last line\n")
    raise ValueError("printed")
