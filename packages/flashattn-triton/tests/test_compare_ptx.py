"""tools/compare_ptx.py, on a package whose kernels are files: what differs is found and named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).parents[1] / "tools/compare_ptx.py"
SCRIPT = """
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import small_package

FOLDER = Path(small_package.__file__).parent

@dataclasses.dataclass
class Request:
    options: dict[str, Any]
    architecture: int = 90

def shipped():
    return [Request({"causal": False})]

def compiled_kernels(request):
    for path in sorted(FOLDER.glob("*.kernel")):
        yield path.stem, SimpleNamespace(asm={"ptx": path.read_text()})

def launch(request):
    assert request.architecture == 90

def compiled(work):
    work()
    return compiled_kernels(None)
"""


def test_kernels_that_compile_to_something_else_are_named(tmp_path: Path) -> None:
    package = tmp_path / "packages/small"
    for folder in ("tools", "tests", "src/small_package"):
        (package / folder).mkdir(parents=True)
    shutil.copy(TOOL, package / "tools")
    for name in ("compile_kernels", "compile_hopper"):
        (package / f"tests/{name}.py").write_text(SCRIPT, encoding="utf-8")
    source = package / "src/small_package"
    (source / "__init__.py").touch()
    (source / "same.kernel").write_text("mul", encoding="utf-8")
    (source / "changed.kernel").write_text("add", encoding="utf-8")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "--quiet", "-m", "first"], check=True)

    def compare(*arguments: str) -> tuple[int, list[str]]:
        command = [sys.executable, package / "tools/compare_ptx.py", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        return result.returncode, (result.stdout + result.stderr).splitlines()

    kept = str(tmp_path / "kept")
    assert compare("HEAD", "--only", "hopper", "--keep", kept) == (
        0,
        ["2 kernels compared: 0 differ; 0 on one side only"],
    )
    (source / "changed.kernel").write_text("sub", encoding="utf-8")
    (source / "new.kernel").write_text("mov", encoding="utf-8")
    request = '{"architecture": 90, "options": {"causal": false}}'
    found = [f"differs: hopper changed 1 {request}", f"only in OTHER: hopper new 1 {request}",
             "2 kernels compared: 1 differ; 1 on one side only"]  # fmt: skip
    assert compare(kept, "--only", "hopper") == (1, found)
    status, said = compare("no-such-commit")
    assert status == 1
    assert "a side must be a commit that holds packages/small/, but got 'no-such-commit'" in said[0]
