"""Imports respect the architecture: shard-optim stands on ddp-lite, the harness on all."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.parent for path in (ROOT / "packages").glob("*/pyproject.toml"))
SIBLINGS = {path.name.replace("-", "_") for path in PACKAGES}
# The siblings that a package may import; one that is not listed imports none.
ALLOWED = {"bench_harness": SIBLINGS, "shard_optim": {"ddp_lite"}}
# Import names that differ from the distribution's.
DISTRIBUTIONS = {"PIL": "pillow", "pynvml": "nvidia-ml-py"}


def imported_modules(source: Path) -> set[str]:
    """Top-level names of every absolute import of a file, at any depth of nesting."""
    names = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def declared(package: Path) -> set[str]:
    """Normalised names of the package's requirements, extras included."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in project.get("optional-dependencies", {}).values():
        requirements += extra
    return {re.match(r"[\w.-]+", line)[0].lower() for line in requirements}


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_imports_are_declared_and_point_one_way(package: Path) -> None:
    own = package.name.replace("-", "_")
    sources = list((package / "src").rglob("*.py"))
    assert sources
    for source in sources:
        for name in imported_modules(source) - set(sys.stdlib_module_names) - {own}:
            if name in SIBLINGS:
                assert name in ALLOWED.get(own, ()), f"{source} imports its sibling {name}"
            distribution = DISTRIBUTIONS.get(name, name.replace("_", "-"))
            assert distribution in declared(package), f"{source} imports undeclared {name}"


# Imports each module in a process of its own, forked from one that has torch.
IMPORTS = """
import importlib, os, sys, torch, warnings

def state():
    return dict(os.environ), torch.get_num_threads(), len(warnings.filters)

for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        before = state()
        importlib.import_module(name)
        assert state() == before, f"{name} changes the environment, threads or warnings"
        assert not torch.cuda.is_initialized(), name
        assert not torch.distributed.is_available() or not torch.distributed.is_initialized(), name
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""


def test_import_has_no_effects() -> None:
    """No device, process group, thread-count, environment or warning-filter change at import."""
    modules = [package.name.replace("-", "_") for package in PACKAGES]
    subprocess.run([sys.executable, "-c", IMPORTS, *modules], check=True, timeout=120)
