"""Compares the host time of calls that repeat between two commits, in turns within one run.

    python tools/compare_host_time.py BASE [OTHER] [--rounds 5]

BASE and OTHER are commits; without OTHER it is the working tree. On a GPU the problem is so small
that the GPU waits for the host, so that the time from call to call is the host's; on a CPU it is
only good to find out that the tool works. Prints, for each kind of call, the least time of a call
in microseconds on either side, and OTHER divided by BASE: below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from compare_ptx import check_out

CALLS, REPEATS = 100, 30


def kinds() -> dict[str, Callable[[], object]]:
    """What is timed, by name: forward passes without a gradient, and both passes."""
    import torch

    from flashattn_triton import flash_attention, flash_attention_varlen

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dense = [
        torch.randn(1, 4, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    rows = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in dense]
    tokens = [x.detach()[0].requires_grad_() for x in rows]
    starts = torch.tensor([0, 50, 128], device=device, dtype=torch.int32)
    sinks = torch.zeros(4, device=device, dtype=torch.bfloat16, requires_grad=True)
    bias = torch.zeros(1, 4, 128, 128, device=device, dtype=torch.bfloat16)
    attend = {
        "dense": (dense, lambda: flash_attention(*dense, causal=True)),
        "dense, portable": (
            dense,
            lambda: (
                flash_attention(*dense, causal=True, implementation="triton")
                if device == "cuda"
                else flash_attention(*dense, causal=True)
            ),
        ),
        "bshd": (rows, lambda: flash_attention(*rows, causal=True, layout="bshd")),
        "packed": (
            tokens,
            lambda: flash_attention_varlen(*tokens, starts, starts, 78, 78, causal=True),
        ),
        "sinks": ([*dense, sinks], lambda: flash_attention(*dense, causal=True, sinks=sinks)),
        "bias": (dense, lambda: flash_attention(*dense, causal=True, bias=bias)),
    }
    timed: dict[str, Callable[[], object]] = {}
    for name, (leaves, call) in attend.items():
        grad = torch.ones_like(call())

        def forward(call: Callable[[], object] = call) -> None:
            with torch.no_grad():
                call()

        def both(call=call, leaves=leaves, grad=grad) -> None:  # type: ignore[no-untyped-def]
            torch.autograd.grad(call(), leaves, grad)

        timed |= {f"{name}, forward": forward, f"{name}, both passes": both}
    return timed


def measure() -> dict[str, float]:
    """The least time of each kind of call, in microseconds."""
    import torch

    torch.set_num_threads(1)
    timed = kinds()
    least = dict.fromkeys(timed, float("inf"))
    # In turns: what comes first in a process is slower, whatever it is.
    for _ in range(REPEATS):
        for name, call in timed.items():
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            least[name] = min(least[name], (time.perf_counter() - start) / CALLS * 1e6)
    return least


def main(arguments: Sequence[str] | None = None) -> int:
    """Compares, prints, and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="commit")
    parser.add_argument("other", nargs="?", help="commit; the working tree if left out")
    parser.add_argument("--rounds", type=int, default=5, help="turns of either side")
    given = parser.parse_args(arguments)
    least: dict[str, dict[str, float]] = {"BASE": {}, "OTHER": {}}
    with tempfile.TemporaryDirectory() as scratch:
        packages = {
            "BASE": check_out(given.base, Path(scratch) / "base"),
            "OTHER": check_out(given.other, Path(scratch) / "other"),
        }
        for _ in range(given.rounds):
            for side, package in packages.items():
                result = subprocess.run(
                    [sys.executable, __file__, "--measure"],
                    env=os.environ | {"PYTHONPATH": str(package / "src")},
                    capture_output=True,
                    text=True,
                    check=True,
                )
                for name, x in json.loads(result.stdout.splitlines()[-1]).items():
                    least[side][name] = min(x, least[side].get(name, x))
    for name, base in least["BASE"].items():
        other = least["OTHER"][name]
        print(f"{name:28} BASE {base:7.1f} us   OTHER {other:7.1f} us   {other / base:.2f}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure()))
    else:
        raise SystemExit(main())
