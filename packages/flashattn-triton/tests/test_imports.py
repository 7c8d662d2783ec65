"""Which module of the package imports which: in one direction, wherever the import stands."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import flashattn_triton

PACKAGE = Path(flashattn_triton.__file__).parent


def imports(path: Path) -> set[str]:
    """The package's modules that a file names, also within functions and for types alone."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                found |= {node.module, f"{node.module}.{alias.name}"}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("flashattn_triton.")}


def test_no_imports_go_in_a_circle() -> None:
    modules = {
        ".".join(("flashattn_triton", *path.relative_to(PACKAGE).with_suffix("").parts)): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    assert len(modules) > 30
    edges = {name: imports(path) & modules.keys() for name, path in modules.items()}
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, which names the circle


def test_integrations_are_built_from_public_calls() -> None:
    for path in (PACKAGE / "integrations").glob("*.py"):
        used = {name for name in imports(path) if name.count(".") == 2}
        public = {f"flashattn_triton.{name}" for name in flashattn_triton.__all__}
        names = ("problem", "integrations", "context_parallel")
        siblings = tuple(f"flashattn_triton.{name}." for name in names)
        assert all(name.startswith(siblings) for name in used - public), path
