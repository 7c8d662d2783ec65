"""Fixtures of bench-harness's tests: a plug-in that brings an experiment, and the command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench_harness import cli

SOURCES = Path(__file__).parents[2]
TOY = "toy = toy_plugin:Toy"


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds an installed distribution whose entry point is the experiment "toy"."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(Path(__file__).parent / "plugin", folder, dirs_exist_ok=True)
    metadata = folder / "toy_plugin-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(f"[bench_harness.experiments]\n{TOY}\n")
    return folder


@pytest.fixture
def installed(plugin: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plug-in, importable in this process and in those it starts."""
    monkeypatch.syspath_prepend(plugin)
    return plugin


@pytest.fixture(scope="session")
def command_line(plugin: Path) -> tuple[list[str], dict[str, str]]:
    """How to start the command line with the plug-in: the command, and its environment."""
    paths = [plugin, *(package / "src" for package in SOURCES.iterdir())]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }
    return [sys.executable, "-m", "bench_harness"], environment


@pytest.fixture
def bench(
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line in this process, in an empty current directory and 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in command_line, whose rows have the same id

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = cli.main(arguments)
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(list(arguments), code, captured.out, captured.err)

    return run


@pytest.fixture
def rank() -> dict[str, object]:
    """A rank's timeline of one kernel, as a row keeps it."""
    return {
        "window_ns": 9000,
        "exposed_ns": 0,
        "offset_ns": 0,
        "names": ["gemm"],
        "work": [0],
        "lanes": [{"name": "stream 7", "spans": [0, 9000, 0]}],
        "phases": [["forward", 0, 9000]],
        "late": [[0, 10]],
    }
