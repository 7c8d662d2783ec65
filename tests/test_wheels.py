"""Every package builds alone, carries what a release needs, and imports in a clean environment."""

import email.parser
import os
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMES = sorted(path.parent.name for path in (ROOT / "packages").glob("*/pyproject.toml"))
SIBLING_REQUIREMENTS = {
    "bench-harness": {"basics-model", "ddp-lite", "flashattn-triton", "shard-optim"}
}
UV = shutil.which(os.environ.get("UV", "uv"))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(UV is None, reason="building needs uv, which is not on the PATH"),
]


def uv(*args: object, cwd: Path) -> str:
    """Runs uv outside any project and returns its standard output."""
    environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
    done = subprocess.run(
        [UV, *map(str, args)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and wheel of every package."""
    folder = tmp_path_factory.mktemp("dist")
    uv("build", "-q", "--all-packages", "--out-dir", folder, cwd=ROOT)
    return folder


@pytest.fixture(scope="session")
def constraints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The locked versions, so that the clean environments need no second copy of torch."""
    path = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    export = ["export", "-q", "--frozen", "--no-hashes", "--no-emit-workspace", "--all-packages"]
    path.write_text(uv(*export, "--no-annotate", "--no-header", cwd=ROOT))
    return path


def find(dist: Path, name: str, suffix: str) -> Path:
    [path] = dist.glob(f"{name.replace('-', '_')}-*{suffix}")
    return path


@pytest.mark.parametrize("name", NAMES)
def test_wheel_contents(dist: Path, name: str) -> None:
    module = name.replace("-", "_")
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(find(dist, name, ".whl")) as wheel:
        files = wheel.namelist()
        [metadata_file] = [f for f in files if f.endswith(".dist-info/METADATA")]
        metadata = email.parser.Parser().parsestr(wheel.read(metadata_file).decode())
        [licence] = [f for f in files if f.endswith(".dist-info/licenses/LICENSE")]
        assert wheel.read(licence).startswith(b"MIT License")
    tops = {f.partition("/")[0] for f in files}
    assert tops == {module, metadata_file.partition("/")[0]}
    assert f"{module}/py.typed" in files
    assert not [f for f in files if "test" in Path(f).name.lower()]
    assert metadata["Version"] == project["version"]
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    assert len(str(metadata.get_payload())) > 500, "the README becomes the index page"

    requirements = metadata.get_all("Requires-Dist") or []
    siblings = {r for r in requirements if r.startswith(tuple(NAMES))}
    assert len(siblings) == len(SIBLING_REQUIREMENTS.get(name, set()))
    assert all(">=" in r and "<" in r for r in siblings), siblings
    assert all("linux" in r for r in requirements if r.startswith("triton"))


@pytest.mark.parametrize("name", NAMES)
def test_sdist_contents(dist: Path, name: str) -> None:
    with tarfile.open(find(dist, name, ".tar.gz")) as sdist:
        files = [f.partition("/")[2] for f in sdist.getnames()]
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"} <= set(files)
    assert f"src/{name.replace('-', '_')}/py.typed" in files
    assert not [f for f in files if f.startswith("tests")]


def installed_and_imported(dist: Path, constraints: Path, name: str, folder: Path) -> str:
    """Installs a package into an environment of its own, imports it; returns what is installed."""
    python = folder / "venv" / "bin" / "python"
    uv("venv", "-q", folder / "venv", cwd=folder)
    install = ["pip", "install", "-q", "--python", python, "--link-mode", "symlink"]
    uv(*install, "-c", constraints, "-f", dist, find(dist, name, ".whl"), cwd=folder)
    module = name.replace("-", "_")
    program = (
        f"import {module}, sys; assert {str(ROOT)!r} not in {module}.__file__;"
        f"[getattr({module}, public) for public in {module}.__all__]"
    )
    # torch says so by itself where NumPy, which it can do without, is not installed.
    numpy = "ignore:Failed to initialize NumPy"
    command = [python, "-W", "error", "-W", numpy, "-c", program]
    subprocess.run(command, check=True, cwd=folder, timeout=120)
    return uv("pip", "freeze", "--python", python, cwd=folder)


@pytest.fixture(scope="session")
def environments(
    dist: Path, constraints: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[str]]]:
    """Each package in a clean environment: two at a time, because most of it is one process."""
    with ThreadPoolExecutor(2) as pool:
        yield {
            name: pool.submit(
                installed_and_imported, dist, constraints, name, tmp_path_factory.mktemp(name)
            )
            for name in NAMES
        }


@pytest.mark.parametrize("name", NAMES)
def test_imports_in_a_clean_environment(environments: dict[str, Future[str]], name: str) -> None:
    """Only the declared requirements are there; siblings come from the folder just built."""
    installed = environments[name].result()
    present = {other for other in NAMES if f"{other}==" in installed or f"{other} @" in installed}
    assert present == {name} | SIBLING_REQUIREMENTS.get(name, set())
