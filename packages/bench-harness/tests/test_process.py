"""A call in a process of its own: every way it can end, and nothing left behind."""

from __future__ import annotations

import importlib
import multiprocessing.context
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from bench_harness import process, runner
from bench_harness.process import Outcome
from processes import all_end


@pytest.fixture
def calls(installed: Path) -> ModuleType:
    return importlib.import_module("toy_calls")


def call(
    function: Callable[..., object], *args: object, folder: Path, timeout_s: float = 120.0
) -> Outcome:
    return process.call(
        function, *args, timeout_s=timeout_s, folder=folder, on_progress=lambda text: None
    )


def test_a_value_comes_back_with_progress(calls: ModuleType, tmp_path: Path) -> None:
    heard: list[str] = []
    outcome = process.call(
        calls.double, 21, timeout_s=120, folder=tmp_path, on_progress=heard.append
    )
    assert outcome.status == "ok"
    assert outcome.value == {"value": 42, "folder": str(tmp_path), "leader": True}
    assert heard == ["half way"]
    assert outcome.error is None
    assert outcome.seconds > 0


def test_what_comes_back_makes_nobody_import_torch(tmp_path: Path) -> None:
    """Ctrl-C in an import of torch may abort the process; its version is a class of its own."""
    found = process.asked(runner._describe_torch, timeout_s=60)
    assert type(found["torch"]) is str


def test_cuda_is_untouched_in_a_new_process(calls: ModuleType, tmp_path: Path) -> None:
    assert call(calls.cuda_state, folder=tmp_path).value is False


def test_ranks_are_forked_from_the_call_s_process_and_may_use_cuda(
    calls: ModuleType, tmp_path: Path
) -> None:
    """Each is a child of the process that the fork server made, not of a server of its own."""
    outcome = call(calls.ranks, folder=tmp_path)
    assert outcome.status == "ok", outcome.detail
    (first, parent, bad), (second, other, also_bad) = outcome.value
    assert (first, second) == (0, 1)
    assert parent == other
    assert not bad
    assert not also_bad


@pytest.mark.gpu
def test_every_new_process_may_use_cuda(calls: ModuleType, tmp_path: Path) -> None:
    outcomes = [call(calls.cuda_sum, folder=tmp_path) for _ in range(2)]
    assert [outcome.value for outcome in outcomes] == [1000.0, 1000.0], outcomes[0].error


def test_a_process_has_torch_without_importing_it(calls: ModuleType, tmp_path: Path) -> None:
    """In processor time, which other work on the machine does not lengthen."""
    assert call(calls.seconds_of_torch, folder=tmp_path).value < 1.0  # importing it takes longer


@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("raises", "error", "ValueError: first line"),
        ("exits", "error", "SystemExit: a message"),
        ("leaves", "error", "ended with exit code 3 before it returned a result"),
        ("is_killed", "error", "ended by SIGKILL"),
        ("skips", "skipped", "needs a thing"),
        ("host_out_of_memory", "oom", "DefaultCPUAllocator"),
        ("caused_by_out_of_memory", "oom", "rank 1 failed"),
        ("not_json", "error", "ValueError"),
    ],
)
def test_every_bad_end_is_an_outcome(
    calls: ModuleType, tmp_path: Path, name: str, status: str, error: str
) -> None:
    outcome = call(getattr(calls, name), folder=tmp_path)
    assert outcome.status == status
    assert outcome.error is not None
    assert error in outcome.error
    assert "\n" not in outcome.error
    assert outcome.value is None


def test_a_failure_keeps_traceback_and_output(calls: ModuleType, tmp_path: Path) -> None:
    detail = call(calls.raises, folder=tmp_path).detail
    assert detail is not None
    for text in ("KeyError: 'inner'", "second line", "on stdout", "on stderr", "toy_calls.py"):
        assert text in detail
    assert "last words" in (call(calls.leaves, folder=tmp_path).detail or "")


def test_the_deadline_kills_everything_the_call_started(calls: ModuleType, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    for timeout_s in (1.5, 6.0, 24.0):  # on a busy machine the call has not begun by the first
        outcome = call(calls.hangs_with_children, str(pids), folder=tmp_path, timeout_s=timeout_s)
        assert outcome.status == "timeout"
        assert outcome.error == f"still running after {timeout_s:g} s; killed"
        assert outcome.seconds < 250  # the call would sleep for 600
        if pids.exists():
            break
    assert all_end(int(pid) for pid in pids.read_text().split())


def test_what_a_finished_call_left_running_is_killed(calls: ModuleType, tmp_path: Path) -> None:
    outcome = call(calls.leaves_a_child, str(tmp_path / "pid"), folder=tmp_path)
    assert outcome.value == "done"
    assert all_end([int((tmp_path / "pid").read_text())])


def program(plugin: Path, *lines: str) -> list[str]:
    """A Python program that may call functions of ``toy_calls`` without waiting for torch."""
    start = (
        f"import sys; sys.path.insert(0, {str(plugin)!r})",
        "import multiprocessing.forkserver, os, signal, toy_calls",
        "from pathlib import Path",
        "from bench_harness import process",
        "process.PRELOAD = []",
    )
    return [sys.executable, "-c", "\n".join([*start, *lines])]


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose name is short enough for a socket below it."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


def test_a_killed_parent_takes_the_call_along(
    plugin: Path, tmp_path: Path, temporary: Path
) -> None:
    """The parent gets SIGKILL, so no code of its own can clean up."""
    pids = tmp_path / "pids"
    call = f"toy_calls.hangs_with_children, {str(pids)!r}, timeout_s=200, folder=Path('.')"
    with subprocess.Popen(
        program(plugin, f"process.call({call}, on_progress=print)"),
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as parent:
        try:
            deadline = time.monotonic() + 100
            while not (pids.exists() and pids.read_text()) and time.monotonic() < deadline:
                assert parent.poll() is None
                time.sleep(0.05)
            made = {folder.name.partition("-")[0] for folder in temporary.iterdir()}
        finally:
            parent.kill()
    assert made == {"bench", "pymp"}
    assert all_end(int(pid) for pid in pids.read_text().split())
    deadline = time.monotonic() + 100
    while list(temporary.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []


def test_a_fork_server_that_dies_is_started_again(plugin: Path, tmp_path: Path) -> None:
    call = "process.call(toy_calls.double, 1, timeout_s=200, folder=Path('.'), on_progress=print)"
    done = subprocess.run(
        program(
            plugin,
            f"assert {call}.status == 'ok'",
            "os.kill(multiprocessing.forkserver._forkserver._forkserver_pid, signal.SIGKILL)",
            f"print({call})",
        ),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert "Outcome(status='ok'" in done.stdout, done.stdout + done.stderr


def test_a_program_from_standard_input_may_call(plugin: Path, tmp_path: Path) -> None:
    """Its file, which a new process would read again, does not exist."""
    call = "process.call(toy_calls.double, 1, timeout_s=200, folder=Path('.'), on_progress=print)"
    *_, text = program(plugin, f"print({call})", "print(__file__)")
    done = subprocess.run(
        [sys.executable, "-"], input=text, cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    assert "Outcome(status='ok'" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("<stdin>\n")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to a supervisor")
def test_an_orphan_in_a_session_of_its_own_is_killed_with_a_killed_call(
    calls: ModuleType, tmp_path: Path
) -> None:
    outcome = call(calls.leaves_an_orphan, str(tmp_path / "pid"), folder=tmp_path)
    assert outcome.error is not None
    assert "SIGKILL" in outcome.error
    assert all_end([int((tmp_path / "pid").read_text())])


def test_of_much_output_the_end_is_kept_and_nothing_reaches_the_disk(
    calls: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = psutil.Process().memory_info().rss
    outcome = call(calls.prints_much, 200, folder=tmp_path)
    assert outcome.detail is not None
    assert outcome.detail.endswith("xxx\nthe last line")
    assert len(outcome.detail) < 6000
    assert psutil.Process().memory_info().rss - before < 50 << 20
    assert list(tmp_path.iterdir()) == []


def test_a_fork_server_that_cannot_live_is_an_error_and_not_an_interruption(
    calls: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(process: object) -> None:
        raise EOFError

    monkeypatch.setattr(multiprocessing.context.ForkServerProcess, "start", ended)
    outcome = call(calls.double, 1, folder=tmp_path)
    assert outcome.status == "error"
    assert "fork server" in (outcome.error or "")
