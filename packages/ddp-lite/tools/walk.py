"""Counts of ddp-lite's source, its import graph, and the way of one gradient, as a Markdown table.

::

    uv run python packages/ddp-lite/tools/walk.py                 the table
    uv run python packages/ddp-lite/tools/walk.py --walk          every step of the way
    uv run python packages/ddp-lite/tools/walk.py --source OTHER/packages/ddp-lite/src

The way is traced: one parameter, one backward on the fake process group of two ranks, in every
wrapper. Each entry into a function of ddp_lite counts as a call, and each pair of neighbouring
calls in different files as a change of file. Side tasks (missing gradients, comparison of steps,
statistics) are counted apart, because a reader can leave them out.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "ddp_lite"
SIDE_TASKS = {"missing.py", "same_step.py", "stats.py", "join.py", "observers.py", "host_limit.py"}
WRAPPERS = ("NaiveDDP", "FlatDDP", "OverlapDDP", "BucketedDDP")
#: Files that hold the wrappers, in any version of the package.
PAGES = ("wrappers.py", "base.py", "naive.py", "flat.py", "overlap.py", "bucketed.py")


def modules(source: Path) -> dict[str, Path]:
    """Every module of the package and its file."""
    found = {}
    for file in sorted((source / PACKAGE).rglob("*.py")):
        parts = file.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def lines(files: Iterator[Path] | list[Path]) -> int:
    """Lines of all files together."""
    return sum(len(file.read_text().splitlines()) for file in files)


def imports(file: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports anywhere: at the top, in functions, for types."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return found & known.keys()


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Sets of modules that reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            for name in graph[ahead.pop()] - seen:
                seen.add(name)
                ahead.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    found = {
        tuple(sorted(other for other in reach[name] if name in reach[other]))
        for name in graph
        if name in reach[name]
    }
    return [list(circle) for circle in sorted(found)]


def traces(source: Path) -> dict[str, list[tuple[str, str]]]:
    """Calls into the package during one backward of each wrapper: (file, function), in order."""
    program = f"""
import sys, torch, torch.distributed as dist
sys.path.insert(0, {str(source)!r})
from torch.testing._internal.distributed.fake_pg import FakeStore
import {PACKAGE}
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
calls = []
def seen(frame, event, argument):
    code, folder = frame.f_code, "/{PACKAGE}/"
    if event == "call" and folder in code.co_filename and not code.co_name.startswith("<"):
        calls.append((code.co_filename.rsplit(folder)[-1], code.co_qualname))
for name in {WRAPPERS}:
    wrapped = getattr({PACKAGE}, name)(torch.nn.Linear(2, 1, bias=False))
    for _ in range(3):
        wrapped(torch.ones(1, 2)).sum().backward()
        wrapped.zero_grad()
    loss = wrapped(torch.ones(1, 2)).sum()
    calls.clear()
    sys.setprofile(seen)
    loss.backward()
    sys.setprofile(None)
    for call in calls:
        print(name, *call)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    found: dict[str, list[tuple[str, str]]] = {wrapper: [] for wrapper in WRAPPERS}
    for line in done.stdout.splitlines():
        wrapper, file, name = line.split(" ", 2)
        found[wrapper].append((file, name))
    return found


def loaded(source: Path) -> list[Path]:
    """Files of the package that ``from ddp_lite import NaiveDDP`` loads."""
    program = f"""
import sys
sys.path.insert(0, {str(source)!r})
from {PACKAGE} import NaiveDDP
for name, module in sys.modules.items():
    if name.partition(".")[0] == {PACKAGE!r}:
        print(module.__file__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return [Path(line) for line in done.stdout.splitlines()]


def counts(source: Path) -> dict[str, Any]:
    """The rows of the table."""
    known = modules(source)
    files = list(known.values())
    outside = [file for file in files if file.parent.name != "peer"]
    graph = {name: imports(file, known) for name, file in known.items()}
    found = circles(graph)
    loads = loaded(source)
    whole = traces(source)["BucketedDDP"]
    way = [call for call in whole if call[0] not in SIDE_TASKS]
    read = {file for file, _ in way}
    read |= {page for page in PAGES if (source / PACKAGE / page).exists()}
    return {
        "lines of source": lines(files),
        "of them outside `peer/`": lines(outside),
        "files": len(files),
        "import circles, local and typing imports included": f"{len(found)}"
        + (f" ({max(map(len, found))} files)" if found else ""),
        "`from ddp_lite import NaiveDDP` loads, files": len(loads),
        "lines of these files": lines(loads),
        "files of `peer/` among them": sum(file.parent.name == "peer" for file in loads),
        "one gradient in `BucketedDDP`, calls": len(way),
        "the same, files": len({file for file, _ in way}),
        "the same, changes of file": changes(way),
        "the same with side tasks, changes of file": changes(whole),
        "files to read for that way and all four wrappers": len(read),
        "lines of these": lines([source / PACKAGE / name for name in read]),
    }


def changes(calls: list[tuple[str, str]]) -> int:
    """Neighbouring calls in different files."""
    return sum(one[0] != other[0] for one, other in itertools.pairwise(calls))


def main() -> None:
    """Prints the table, or the way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--walk", action="store_true", help="print every call instead")
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    arguments = parser.parse_args()
    source = arguments.source.resolve()
    if arguments.walk:
        for wrapper, whole in traces(source).items():
            way = [call for call in whole if call[0] not in SIDE_TASKS]
            print(f"{wrapper}: " + " > ".join(f"{file[:-3]}.{name}" for file, name in way) + "\n")
        return
    print("| count | value |\n|---|---:|")
    for name, value in counts(source).items():
        print(f"| {name} | {value} |")


if __name__ == "__main__":
    main()
