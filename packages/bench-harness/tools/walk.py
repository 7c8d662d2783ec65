"""Lists the files of bench_harness that a command enters, in whichever of its processes.

    python packages/bench-harness/tools/walk.py train-step --sizes small ...

Without arguments it walks the smallest case of ``train-step``, from the command line to its report.
A file counts if a function of it is called, and not for what it does while it is imported. Every
process of the command is watched: the first folder of ``PYTHONPATH`` holds a ``sitecustomize`` that
does so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import bench_harness

CASE = (
    "train-step --device cpu --size custom --d-model 32 --d-ff 64 --num-layers 1 --num-heads 2 "
    "--vocab-size 64 --sequences 8 --variants naive,flat --rounds 1 --blocks 3 --calls 1 "
    "--warmup 1 --interval 0"
)
#: Forked processes and their main threads inherit what it starts.
WATCH = """
import sys, threading

known = set()

def called(frame, event, argument):
    file = frame.f_code.co_filename
    if file in known or not (file.startswith({package!r}) and file.endswith(".py")):
        return
    caller = frame
    while caller is not None:
        runs = caller.f_code.co_name == "<module>" and caller.f_code.co_filename
        if runs and runs.startswith({package!r}) and not runs.endswith("__main__.py"):
            return
        caller = caller.f_back
    known.add(file)
    with open({seen!r}, "a") as seen:
        seen.write(file + "\\n")

threading.settrace(called)
sys.settrace(called)
"""


def walk(arguments: list[str]) -> list[str]:
    """Files that ``bench-harness`` with these arguments enters, relative to the package."""
    package = Path(bench_harness.__file__).parent
    with tempfile.TemporaryDirectory(prefix="walk-") as name:
        seen, folder = Path(name) / "seen", Path(name) / "first"
        folder.mkdir()
        seen.touch()
        content = WATCH.format(package=f"{package}{os.sep}", seen=str(seen))
        (folder / "sitecustomize.py").write_text(content)
        path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "bench_harness", *arguments]
        subprocess.run(
            command,
            cwd=name,
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        files = {Path(line) for line in seen.read_text().splitlines()}
    return sorted(str(file.relative_to(package)) for file in files)


if __name__ == "__main__":
    found = walk(sys.argv[1:] or CASE.split())
    print("\n".join([*found, f"{len(found)} files"]))
