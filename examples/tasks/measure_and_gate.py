"""Tasks: measure a model of your own, and let a build fail if a change makes it slower.

    python examples/tasks/measure_and_gate.py FOLDER

It measures a model with bench-harness twice, and then a version that waits longer, and asks for
verdicts: the gate stays open for the same model, and closes for the slower one. A workflow compares
the two versions of a pull request in this way.
"""

import subprocess
import sys
from pathlib import Path

MODEL = """
import time
from torch import nn

class Model(nn.Linear):
    def forward(self, x):
        time.sleep({seconds})
        return super().forward(x)

def build():
    return Model(64, 64)
"""


def bench(folder: Path, *arguments: str | Path) -> int:
    """Runs bench-harness in a folder and returns its exit code."""
    command = [sys.executable, "-m", "bench_harness", *map(str, arguments)]
    return subprocess.run(command, cwd=folder).returncode


def main() -> None:
    """Measures all versions and compares them with the first."""
    folder = Path(sys.argv[1]).absolute()
    for name, seconds in (("before", 0.1), ("same", 0.1), ("after", 0.3)):
        version = folder / name
        version.mkdir(parents=True)
        (version / "model.py").write_text(MODEL.format(seconds=seconds))
        model = ["--model", "model:build", "--input", "float32[8x64]", "--device", "cpu"]
        short = ["--modes", "forward", "--samples", "6", "--max-seconds", "1"]
        assert bench(version, "model", *model, *short, "--output", "run") == 0
        assert (version / "run" / "report.html").is_file()
    before, same, after = (folder / name / "run" for name in ("before", "same", "after"))
    assert bench(folder, "compare", before, same, "--fail-on", "slower:50") == 0
    code = bench(folder, "compare", before, after, "--fail-on", "slower:50")
    assert code == 1, f"the gate must close with exit code 1, but got {code}"
    print("measured, and the gate closed")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main()
