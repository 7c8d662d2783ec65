"""The way of one call from Python to the kernel: calls, files and changes of file, and host time.

    python packages/flashattn-triton/tools/walk.py [--walk]

The portable tier is traced in Triton's interpreter, without a GPU; nothing is launched, so that
times are those of Python alone. Each entry into a function of the package counts as a call, and
each pair of neighbouring calls in different files as a change of file. On a GPU the tables of tiles
(``configs.py``) come to the first call. ``--walk`` prints every step.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Step = tuple[str, str]  # file and function
REPEATS, CALLS = 30, 200


def trace(call: Callable[[], object], root: str) -> list[Step]:
    """Every entry into a function below ``root``."""
    steps: list[Step] = []

    def note(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and code.co_name[0] != "<":
            steps.append((code.co_filename.removeprefix(root), code.co_name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return steps


def least_time(call: Callable[[], object]) -> float:
    """The least time of a call, in microseconds."""
    least = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        least = min(least, (time.perf_counter() - start) / CALLS * 1e6)
    return least


def kinds() -> dict[str, Callable[[], object]]:
    """Calls by name."""
    import torch

    from flashattn_triton import flash_attention

    query, key, value = torch.randn(3, 1, 2, 64, 16).unbind()
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    sinks, ones = torch.zeros(2), torch.ones(1, 2, 64, 16)
    keywords: dict[str, Any] = {"causal": True, "implementation": "triton"}
    return {
        "forward": lambda: flash_attention(query, key, value, **keywords),
        "forward, sinks": lambda: flash_attention(query, key, value, sinks=sinks, **keywords),
        "both passes": lambda: torch.autograd.grad(
            flash_attention(*leaves, **keywords), leaves, ones
        ),
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--walk", action="store_true", help="print every step")
    arguments = parser.parse_args()
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are decorated
    warnings.simplefilter("ignore")
    import torch

    from flashattn_triton import launch, op
    from flashattn_triton.portable import backward, forward

    def launch_nothing(self: launch.Launch, addresses: Mapping[str, int]) -> None:
        """Takes the place of a launch."""

    launch.Launch.__call__ = launch_nothing  # type: ignore[method-assign]
    assert forward is not None
    assert backward is not None
    torch.set_num_threads(1)
    root = f"{Path(op.__file__).parent}/"
    print(
        "| call | functions | files | changes of file | host time (us) |\n|---|---:|---:|---:|---:|"
    )
    for name, call in kinds().items():
        op._cache.clear()
        for which in ("first", "repeated"):
            steps = trace(call, root)
            files = {file for file, _ in steps}
            changes = sum(a[0] != b[0] for a, b in itertools.pairwise(steps))
            took = f"{least_time(call):.0f}" if which == "repeated" else ""
            print(f"| {name}, {which} | {len(steps)} | {len(files)} | {changes} | {took} |")
            if arguments.walk:
                print("\n".join(f"    {file:28} {function}" for file, function in steps))


if __name__ == "__main__":
    main()
