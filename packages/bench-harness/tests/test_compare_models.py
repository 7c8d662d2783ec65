"""A user's model measured twice, edited, and measured on a machine that does not hold still.

Every forward of the model moves the harness's clock by what its source says, so the verdicts do not
depend on how busy the machine is.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

Bench = Callable[..., subprocess.CompletedProcess[str]]

MODEL = """
import itertools
import time
import types

import torch
from torch import nn

from bench_harness import timing

steady = itertools.cycle({milliseconds})
busy = itertools.cycle([20.0, 55.0, 26.0, 90.0, 31.0])

class Timed(nn.Module):
    passed_ns = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        Timed.passed_ns += int(1e6 * next(busy if torch.is_grad_enabled() else steady))
        return self.layer(x)

def perf_counter_ns():
    Timed.passed_ns += 100
    return Timed.passed_ns

timing.time = types.SimpleNamespace(perf_counter_ns=perf_counter_ns, monotonic=time.monotonic)
"""
BEFORE = [20.0, 20.1, 20.2, 20.05, 20.15]
EDITED = [26.0, 26.1, 26.2, 26.05, 26.15]


def measured(bench: Bench, folder: Path, milliseconds: list[float], run: str) -> None:
    (folder / "timed.py").write_text(MODEL.format(milliseconds=milliseconds))
    done = bench(
        *("model", "--model", "timed:Timed", "--input", "float32[2x3]", "--warmups", "5"),
        *("--modes", "forward,forward-backward", "--precisions", "fp32", "--samples", "10"),
        *("--interval", "0", "--device", "cpu", "--output", run),
    )
    assert done.returncode == 0, done.stderr


def test_a_model_measured_twice_and_an_edited_one(bench: Bench, tmp_path: Path) -> None:
    runs = {"before": BEFORE, "again": BEFORE, "edited": EDITED}
    for name, milliseconds in runs.items():
        measured(bench, tmp_path, milliseconds, name)

    def verdicts(a: str, b: str) -> dict[str, str]:
        rows = json.loads(bench("compare", a, b, "--json").stdout)
        return {row["variant"]: row["verdict"] for row in rows["rows"]}

    for (a, b), expected in {
        ("before", "again"): "same",
        ("before", "edited"): "slower",
        ("edited", "before"): "faster",
    }.items():
        found = verdicts(a, b)
        assert (found["forward"], found["training forward"]) == (expected, "cannot tell"), (a, b)
    codes = {
        name: bench("compare", "before", name, "--fail-on", "slower").returncode for name in runs
    }
    assert codes == {"before": 2, "again": 0, "edited": 1}, "a run beside itself is refused"
    for options in ([], ["--markdown"]):
        shown = bench("compare", "before", "edited", *options).stdout
        assert "slower" in shown
        assert "1.29" in shown or "+29." in shown, "the ratio"
