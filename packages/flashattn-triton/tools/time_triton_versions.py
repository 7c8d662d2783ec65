"""Times flashattn-triton under several versions of Triton, in turns on one GPU.

    cd packages/flashattn-triton
    python tools/time_triton_versions.py rows.jsonl installed /tmp/triton-3.9.0

Each argument after the first is a folder with another version of Triton, as ``pip install
--target`` makes it, or ``installed``. Every version has a process of its own; one case after
another, and within a case one pass after another, the processes take turns, several rounds long, so
that all see the same clocks. A row is appended for each version, case and pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Case:
    """A problem. ``shape``: batch, heads, tokens. ``head_dim``: of query and key."""

    head_dim: int
    value_dim: int
    options: dict[str, Any]
    shape: tuple[int, int, int] = (1, 16, 16384)
    dtype: str = "bfloat16"


CAUSAL: dict[str, Any] = {"causal": True}
CASES = {
    "d64-causal": Case(64, 64, CAUSAL),  # the leaderboard's
    "d64-full": Case(64, 64, {}),
    "d64-causal-short": Case(64, 64, CAUSAL, (16, 32, 1024)),
    "d96-causal": Case(96, 96, CAUSAL),
    "d128-causal": Case(128, 128, CAUSAL),
    "d128-full": Case(128, 128, {}),
    "d128-window": Case(128, 128, CAUSAL | {"window": (1024, 0)}),
    "d128-deterministic": Case(128, 128, CAUSAL | {"deterministic": True}),
    "d192-128-causal": Case(192, 128, CAUSAL),
    "d256-causal": Case(256, 256, CAUSAL),
    "d128-causal-fp32": Case(128, 128, CAUSAL, (2, 8, 4096), "float32"),
}
PASSES = ("forward", "backward", "both")


def work() -> None:
    """Answers each line of standard input, a case and a pass, with a median in milliseconds."""
    import torch
    import triton
    from triton.testing import do_bench

    from flashattn_triton import explain, flash_attention

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed
    prepared: dict[str, Any] = {}
    for line in sys.stdin:
        name, direction, milliseconds = line.split()
        if name not in prepared:
            prepared.clear()
            case = CASES[name]
            torch.manual_seed(0)
            dtype = getattr(torch, case.dtype)
            leaves = [
                torch.randn(*case.shape, width, device="cuda", dtype=dtype, requires_grad=True)
                for width in (case.head_dim, case.head_dim, case.value_dim)
            ]
            prepared[name] = (leaves, case.options, flash_attention(*leaves, **case.options))
        leaves, options, out = prepared[name]

        def forward(leaves: Any = leaves, options: dict[str, Any] = options) -> Any:
            return flash_attention(*leaves, **options)

        def backward(out: Any = out, leaves: Any = leaves) -> Any:
            return torch.autograd.grad(out, leaves, out.detach(), retain_graph=True)

        def both(leaves: Any = leaves) -> Any:
            return torch.autograd.grad(forward().sum(), leaves)

        call = {"forward": forward, "backward": backward, "both": both}[direction]
        row = {
            "ms": do_bench(call, warmup=20, rep=int(milliseconds), return_mode="median"),
            "triton": triton.__version__,
            "torch": torch.__version__,
            "gpu": torch.cuda.get_device_name(),
            "explain": explain(*leaves, **options).splitlines()[0],
        }
        print(json.dumps(row), file=answers, flush=True)


def start(folder: str) -> subprocess.Popen[str]:
    """A process that uses the Triton of ``folder``."""
    environment = dict(os.environ)
    if folder != "installed":
        path = (folder, environment.get("PYTHONPATH", ""))
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, __file__, "--worker"]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)


def main() -> None:
    """Measures, and prints one line for each case and pass."""
    if sys.argv[1:] == ["--worker"]:
        work()
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", type=Path, help="JSON lines are appended to this file")
    parser.add_argument("folders", nargs="+", help="of Triton versions, or 'installed'")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rep", type=int, default=60, help="milliseconds a round")
    arguments = parser.parse_args()
    workers = {folder: start(folder) for folder in arguments.folders}

    def ask(question: str, at_once: bool = False) -> dict[str, dict[str, Any]]:
        answers = {}
        for worker in workers.values() if at_once else ():
            print(question, file=worker.stdin, flush=True)
        for folder, worker in workers.items():
            assert worker.stdout is not None
            if not at_once:
                print(question, file=worker.stdin, flush=True)
            line = worker.stdout.readline()
            if not line:
                raise SystemExit(f"the process of {folder} ended: see its message above")
            answers[folder] = json.loads(line)
        return answers

    for case in arguments.cases:
        for direction in PASSES:
            question = f"{case} {direction} {arguments.rep}"
            ask(question, at_once=True)  # compiles
            rounds = [ask(question) for _ in range(arguments.rounds)]
            said = []
            for folder in workers:
                samples = [round(one[folder]["ms"], 4) for one in rounds]
                row = rounds[0][folder] | {"ms": statistics.median(samples), "samples": samples}
                row |= {"case": case, "pass": direction}
                with arguments.rows.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                said.append(f"{Path(folder).name} {row['ms']:.4f}")
            print(f"{case} {direction}: {', '.join(said)}", flush=True)
    for worker in workers.values():
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
