"""Tasks: measure a model of your own, and let a build fail if a change makes it slower.

    python examples/tasks/measure_and_gate.py FOLDER

It measures a model with bench-harness, as it is and with sixteen times its layers, and asks for a
verdict. A workflow does the same with the two versions of a pull request.
"""

import subprocess
import sys
from pathlib import Path

from torch import nn


def build() -> nn.Module:
    """The model before the change."""
    return nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))


def changed() -> nn.Module:
    """The model after a change that makes it slower."""
    return nn.Sequential(*(build() for _ in range(16)))


def bench(*arguments: str | Path) -> int:
    """Runs bench-harness where this file can be imported; returns its exit code."""
    command = [sys.executable, "-m", "bench_harness", *map(str, arguments)]
    return subprocess.run(command, cwd=Path(__file__).parent).returncode


def main() -> None:
    """Measures both and compares them."""
    folder = Path(sys.argv[1]).absolute()
    for name in ("build", "changed"):
        model = ["--model", f"measure_and_gate:{name}", "--input", "float32[64x256]"]
        short = ["--modes", "forward", "--samples", "6", "--max-seconds", "1"]
        assert bench("model", *model, *short, "--device", "cpu", "--output", folder / name) == 0
        assert (folder / name / "report.html").is_file()
    assert bench("compare", folder / "build", folder / "build", "--fail-on", "slower") == 0
    code = bench("compare", folder / "build", folder / "changed", "--fail-on", "slower:50")
    assert code == 1, f"the gate must close with exit code 1, but got {code}"
    print("measured, and the gate closed")


if __name__ == "__main__":
    main()
