"""Faults as a user meets them: each is a row or one line with the remedy, and the rest goes on."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench_harness import environment, experiments, store

Bench = Callable[..., subprocess.CompletedProcess[str]]


def rows(folder: Path) -> dict[str, dict[str, Any]]:
    """The last row of every case, by label."""
    text = (folder / "results.jsonl").read_text()
    whole = text[: text.rfind("\n") + 1]  # a run beside this test may be writing the last line
    return {row["label"]: row for row in map(json.loads, whole.splitlines())}


QUICK = ["run", "quick", "--output", "out"]


@pytest.fixture(scope="module", autouse=True)
def killed_run(
    command_line: tuple[list[str], dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, threading.Thread]]:
    """Where ``run quick`` measures until SIGKILL after four cases, and the thread that kills it.

    Started before all tests, because it imports torch, which goes on beside them.
    """
    command, environment_variables = command_line
    folder = tmp_path_factory.mktemp("killed")
    with subprocess.Popen(
        [*command, *QUICK],
        env=environment_variables,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        thread = threading.Thread(target=kill_in_the_middle, args=(process, folder / "out"))
        thread.start()
        try:
            yield folder, thread
        finally:
            process.kill()
            thread.join()


def kill_in_the_middle(process: subprocess.Popen[bytes], folder: Path) -> None:
    while process.poll() is None:
        if (folder / "results.jsonl").exists() and len(rows(folder)) >= 4:
            process.kill()
        time.sleep(0.1)


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr + done.stdout
    return done.stderr


def test_a_hang_a_dead_rank_and_no_memory_are_rows_and_the_rest_is_measured(
    bench: Bench, tmp_path: Path
) -> None:
    kinds = "hangs,rank-dies,raises,host-oom,ok"
    done = bench("toy", "--kinds", kinds, "--output", "out")
    assert done.returncode == 1
    found = rows(tmp_path / "out")
    assert {label.split()[1]: row["status"] for label, row in found.items()} == {
        "hangs": "timeout",
        "rank-dies": "error",
        "raises": "error",
        "host-oom": "oom",
        "ok": "ok",
    }
    assert "still running after 5 s; killed" in found["toy hangs 0"]["error"]
    assert "rank 1" in found["toy rank-dies 0"]["error"]
    assert "SIGKILL" in found["toy rank-dies 0"]["detail"]
    for text in ("timeout toy hangs 0", "error   toy rank-dies 0", "oom     toy host-oom 0"):
        assert text in done.stdout
    assert (tmp_path / "out" / "report.html").is_file()


def test_no_memory_alone_is_a_result(bench: Bench) -> None:
    assert bench("toy", "--kinds", "oom,skips", "--output", "out").returncode == 0


def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["toy", "--kinds", "ok", "--repeats", "3", "--output", "out"]
    flushed = os.fsync

    def full(descriptor: int) -> None:
        if len(rows(tmp_path / "out")) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flushed(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(store.os, "fsync", full)
        message = one_line(bench(*arguments))
    assert "No space left on device" in message
    assert "the same command goes on from there" in message
    assert "toy ok 0" in rows(tmp_path / "out")
    again = bench(*arguments)
    assert again.returncode == 0
    assert len(rows(tmp_path / "out")) == 3


def test_a_damaged_line_costs_its_own_case_only(bench: Bench, tmp_path: Path) -> None:
    arguments = ["toy", "--kinds", "ok", "--repeats", "3", "--output", "out"]
    assert bench(*arguments).returncode == 0
    results = tmp_path / "out" / "results.jsonl"
    lines = results.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2][:40] + b"\x00\xff" + lines[2][50:]
    results.write_bytes(b"".join(lines))
    again = bench(*arguments)
    assert again.returncode == 0
    assert "1 of 3 cases left" in again.stdout
    assert "line 3 is damaged" in " ".join(again.stdout.split())
    assert [line["label"] for line in _readable(results)[-2:]] == ["toy ok 1"] * 2


def _readable(results: Path) -> list[dict[str, Any]]:
    found = []
    for line in results.read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def test_rows_of_a_newer_version_are_one_line(bench: Bench, tmp_path: Path) -> None:
    arguments = ["toy", "--output", "out"]
    assert bench(*arguments).returncode == 0
    results = tmp_path / "out" / "results.jsonl"
    newer = json.loads(results.read_text().splitlines()[0]) | {"schema": 99}
    before = results.read_text() + json.dumps(newer) + "\n"
    results.write_text(before)
    for command in (arguments, ["report", "out"], ["compare", "out", "out"]):
        message = one_line(bench(*command))
        assert "but got 99" in message
        assert "Upgrade bench-harness." in message
    assert results.read_text() == before


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("factories:raises", "raised LookupError: no weights here"),
        ("factories:returns_text", "must be a factory that returns a torch.nn.Module"),
        ("factories:missing", "must be an importable package.module:name"),
        ("no_such_module:make", "No module named 'no_such_module'"),
    ],
)
def test_a_bad_factory_is_one_whole_line_before_anything_is_made(
    bench: Bench, tmp_path: Path, factory: str, message: str
) -> None:
    (tmp_path / "factories.py").write_text(
        "def raises():\n    raise LookupError('no weights here')\n"
        "def returns_text():\n    return 'a model'\n"
    )
    done = bench("model", "--model", factory, "--input", "float32[2x3]")
    assert message in one_line(done)
    # Python keeps what it compiled, if it is not told to leave it.
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"factories.py"}


@pytest.mark.skipif(environment.gpu_count() > 0, reason="needs a machine without a GPU")
def test_a_missing_gpu_skips_the_case_and_says_so(bench: Bench, tmp_path: Path) -> None:
    done = bench(
        "attention",
        "--sequences",
        "128",
        "--head-dims",
        "64",
        "--device",
        "cuda",
        "--output",
        "out",
    )
    assert done.returncode == 0
    (row,) = rows(tmp_path / "out").values()
    assert row["status"] == "skipped"
    assert "must have 1 CUDA device" in row["error"]


@pytest.mark.slow  # the whole quick preset
def test_run_quick_killed_in_the_middle_measures_only_what_is_left(
    killed_run: tuple[Path, threading.Thread], bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, killed = killed_run
    killed.join(timeout=250)
    assert not killed.is_alive()
    before = rows(folder / "out")
    assert len(before) >= 4

    monkeypatch.chdir(folder)
    resumed = bench(*QUICK)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    after = rows(folder / "out")
    assert len(after) > len(before)
    assert f"{len(after) - len(before)} of {len(after)} cases left" in resumed.stdout
    assert all(after[label]["started"] == row["started"] for label, row in before.items())
    assert {row["experiment"] for row in after.values()} == set(experiments.names()) - {"toy"}
    page = (folder / "out" / "report.html").read_text()
    for name in {row["experiment"] for row in after.values()}:
        assert f'<h2 id="{name}">' in page
    assert "Could not be shown" not in page


def test_two_runs_of_the_same_are_never_faster_or_slower(bench: Bench) -> None:
    """Samples of one distribution; they cannot always be told to be the same."""
    for folder in ("first", "second"):
        assert bench("toy", "--kinds", "noisy", "--output", folder).returncode == 0
    done = bench("compare", "first", "second", "--fail-on", "slower")
    assert done.returncode == 0
    assert "1 same" in done.stdout or "1 cannot tell" in done.stdout
