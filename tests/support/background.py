"""Long work of a few tests, done by processes beside the tests before them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest


class Background:
    """A script that reads JSON from standard input and writes JSON lines, once for each input.

    A test module that holds one, in whatever variable, has it started when tests are collected, and
    its tests run last; see the functions below. The processes give way to all others.

    Args:
        script: the Python file.
        inputs: one process for each.
        packages: a folder of packages that the processes find before the installed ones.
    """

    def __init__(self, script: Path, inputs: Sequence[Any], packages: Path | None = None) -> None:
        self._script = script
        self._inputs = inputs
        self._packages = packages
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self) -> None:
        """Starts the processes, unless they have been started."""
        if self._running:
            return
        self._folder = TemporaryDirectory(prefix="background-")
        # Triton's interpreter, if the tests use it, would replace the compiler.
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        if self._packages is not None:
            found = (str(self._packages), os.environ.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, found))
        for number, value in enumerate(self._inputs):
            place = Path(self._folder.name) / str(number)
            place.mkdir()
            (place / "input").write_text(json.dumps(value))
            with (
                (place / "input").open("rb") as given,
                (place / "output").open("wb") as output,
                (place / "errors").open("wb") as errors,
            ):
                process = subprocess.Popen(
                    ["nice", "-n", "19", sys.executable, str(self._script)],
                    env=environment | {"OMP_NUM_THREADS": "1"},
                    stdin=given,
                    stdout=output,
                    stderr=errors,
                )
            self._running.append((process, place))

    def rows(self) -> list[Any]:
        """What all of them wrote, when all have ended well."""
        self.start()
        found: list[Any] = []
        for process, place in self._running:
            process.wait(timeout=1500)  # other work may keep all cores busy
            assert process.returncode == 0, (place / "errors").read_text()[-2000:]
            found += map(json.loads, (place / "output").read_text().splitlines())
        return found

    def stop(self) -> None:
        """Ends what still runs; its results are gone."""
        for process, _ in self._running:
            process.kill()
            process.wait()
        if self._running:
            self._folder.cleanup()


def put_last(items: list[pytest.Item]) -> None:
    """Moves tests of modules with such work behind all others, in place."""
    items.sort(key=lambda item: bool(_of_modules([item])))


def start_all(session: pytest.Session) -> None:
    """Starts the work of all tests that will run; where a plug-in shares them out, none."""
    shared_out = hasattr(session.config, "workerinput")
    if not shared_out and not session.config.option.collectonly:
        for work in _of_modules(session.items):
            work.start()


def stop_all(session: pytest.Session) -> None:
    """Ends what still runs."""
    for work in _of_modules(session.items):
        work.stop()


def _of_modules(items: Sequence[pytest.Item]) -> list[Background]:
    modules = {item.module for item in items if isinstance(item, pytest.Function)}
    return [x for module in modules for x in vars(module).values() if isinstance(x, Background)]
