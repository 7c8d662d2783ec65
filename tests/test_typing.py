"""What users write type-checks in strict mode, and what they mistype is refused."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

# Of both type checkers `.ci/run` has the quicker one: mypy takes most of a minute to read torch.
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

PROGRAMS = Path(__file__).parent / "typing"
PACKAGES = sorted(path.stem.removesuffix("_user") for path in PROGRAMS.glob("*_user.py"))
MISTAKEN = sorted(path.stem.removesuffix("_refused") for path in PROGRAMS.glob("*_refused.py"))
Errors = dict[str, dict[int, str]]  # by file name and line


def mypy(folder: Path) -> Errors:
    """What ``mypy --strict`` says about the programs, without this repository's configuration."""
    cache = PROGRAMS.parent.parent / ".mypy_cache" / "users"  # torch takes long the first time
    options = ["--strict", "--config-file=", "--cache-dir", cache, "--no-error-summary"]
    command = [sys.executable, "-m", "mypy", *map(str, options), str(PROGRAMS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, cwd=folder)
    assert done.returncode in (0, 1), done.stderr
    found: Errors = defaultdict(dict)
    for line in done.stdout.splitlines():
        match = re.fullmatch(r"(.+?):(\d+): error: (.*)", line)
        if match is not None:
            found[Path(match[1]).name][int(match[2])] = match[3]
    return found


def pyright(folder: Path) -> Errors:
    """What pyright's strict mode says about the programs."""
    settings = {"include": [str(PROGRAMS)], "typeCheckingMode": "strict", "pythonVersion": "3.11"}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    program = shutil.which("basedpyright", path=str(Path(sys.executable).parent))
    assert program is not None
    command = [program, "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: Errors = defaultdict(dict)
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            line = each["range"]["start"]["line"] + 1
            found[Path(each["file"]).name][line] = f"{each.get('rule')}: {each['message']}"
    return found


QUICKER = pytest.param(pyright, marks=pytest.mark.release)


@pytest.fixture(scope="module", params=[mypy, QUICKER], ids=["mypy", "pyright"])
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Errors:
    return request.param(tmp_path_factory.mktemp("types"))


@pytest.mark.release
@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_used(package: str) -> None:
    tree = ast.parse((PROGRAMS / f"{package}_user.py").read_text())
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    used |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not set(importlib.import_module(package).__all__) - used


@pytest.mark.parametrize("package", PACKAGES)
def test_correct_programs_pass(errors: Errors, package: str) -> None:
    assert not errors[f"{package}_user.py"]


@pytest.mark.parametrize("package", MISTAKEN)
def test_mistakes_are_refused(errors: Errors, package: str) -> None:
    page = PROGRAMS / f"{package}_refused.py"
    lines = enumerate(page.read_text().splitlines(), start=1)
    expected = {number for number, line in lines if line.endswith("# refused")}
    assert expected
    assert set(errors[page.name]) == expected, errors[page.name]
