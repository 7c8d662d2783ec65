"""Imports of bench_harness point one way: between files, and between folders.

Every import counts, also those inside functions and under TYPE_CHECKING. A folder is one node of
the second graph, and so is each file beside the folders.
"""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import bench_harness

SOURCES = Path(bench_harness.__file__).parent
#: From the command line down to the leaf; each may import those behind it.
LAYERS = ("cli", "session", "runner", "experiments", "training", "traces", "display", "core")


def modules() -> dict[str, Path]:
    """Files by the name of their module, without the package's."""
    found = {}
    for file in SOURCES.rglob("*.py"):
        parts = file.relative_to(SOURCES).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(file: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in the file."""
    every, prefix, found = modules(), "bench_harness", set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [n if n.partition(".")[2] in every else node.module for n in names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {n.partition(".")[2] for n in names if n.partition(".")[0] == prefix}
    return found


def graph(level: int | None) -> dict[str, set[str]]:
    """What imports what; names are cut to ``level`` parts."""

    def cut(name: str) -> str:
        return ".".join(name.split(".")[:level])

    found: dict[str, set[str]] = {}
    for name, file in modules().items():
        targets = {cut(target) for target in imported(file)} - {cut(name)}
        found.setdefault(cut(name), set()).update(targets)
    return found


@pytest.mark.parametrize("level", [None, 1], ids=["files", "folders"])
def test_no_import_circle(level: int | None) -> None:
    try:
        list(TopologicalSorter(graph(level)).static_order())
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_a_circle_would_be_found() -> None:
    with pytest.raises(CycleError):
        list(TopologicalSorter({**graph(1), "core": {"cli"}}).static_order())


def test_layers_are_in_order_and_the_leaf_imports_nothing() -> None:
    arrows = graph(1)
    assert arrows["core"] == set()
    for position, name in enumerate(LAYERS):
        above = set(LAYERS[:position]) & arrows[name]
        assert not above, f"{name} imports {above}"
