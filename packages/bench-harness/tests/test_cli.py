"""The command line as a user types it; what signals end is started in processes of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from bench_harness import cli, experiments

Bench = Callable[..., subprocess.CompletedProcess[str]]
HEAVY = {"torch", "pandas", "matplotlib", "scipy", "numpy", "rich.console", "psutil"}


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def keys_of(folder: Path) -> list[object]:
    return [row["case_key"] for row in rows(folder) if row.get("variant") != "double"]


SLOW = ["toy", "--kinds", "slow", "--repeats", "3", "--seconds", "1.5"]


@pytest.fixture(scope="module", autouse=True)
def interrupted_run(
    command_line: tuple[list[str], dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Where a run of three cases begins, and its process, which gets Ctrl-C in the second case.

    Started before all tests, because it imports torch, which goes on beside them.
    """
    command, environment = command_line
    place = tmp_path_factory.mktemp("interrupted")
    # Ignored signals are inherited by children, and a shell's background job ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(
            [*command, *SLOW],
            env=environment,
            cwd=place,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    folder = place / "runs" / "toy-01"
    with started as process:
        thread = threading.Thread(target=interrupt_second, args=(process, folder))
        thread.start()
        try:
            yield place, process
        finally:
            process.kill()
            thread.join()


def interrupt_second(process: subprocess.Popen[str], folder: Path) -> None:
    deadline = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < deadline:
        if (folder / "results.jsonl").exists() and "\n" in (folder / "results.jsonl").read_text():
            time.sleep(0.3)  # into the second
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to all of the group
            return
        time.sleep(0.05)


def test_help_lists_every_experiment_and_loads_nothing_heavy(
    command_line: tuple[list[str], dict[str, str]],
) -> None:
    (python, *_), environment = command_line
    program = (
        "import sys, bench_harness.cli as cli, bench_harness.experiments as experiments\n"
        "assert cli.main(['--help']) == 0\n"
        "for name in experiments.names():\n"
        "    assert cli.main([name, '--help']) == 0, name\n"
        f"loaded = {HEAVY!r} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded & {'torch', 'pandas', 'matplotlib'} else 0)\n"
    )
    done = subprocess.run(
        [python, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    for name in ("toy", "model", "run", "report", "compare", "preset", "env"):
        assert f"  {name} " in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())


def test_results_are_printed_as_json_and_nothing_else(bench: Bench) -> None:
    done = bench("toy", "--output", "out", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {case["status"] for case in found["cases"]} == {"ok"}
    assert found["tables"]["toy"]["Toy <times>"][0]["median (ms)"] > 0
    assert json.loads(bench("report", "out", "--json").stdout)["tables"] == found["tables"]
    assert "environment id" in json.loads(bench("env", "--json").stdout)


@pytest.mark.parametrize("name", experiments.names())
def test_help_of_an_experiment_teaches_by_commands_that_work(
    bench: Bench, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    for package in ("my", "my_package"):  # what the examples call a reader's own
        (tmp_path / package).mkdir()
        (tmp_path / package / "model.py").write_text(
            "from torch import nn\ndef build():\n    return nn.Linear(512, 2)\n"
        )
        (tmp_path / package / "kernels.py").write_text("def attend(q, k, v):\n    return v\n")
    shown = bench(name, "--help").stdout
    experiment = experiments.get(name)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert experiment.guide in " ".join(shown.split())
    assert len(experiment.examples) >= 2
    for example in experiment.examples:
        assert f"\n    bench-harness {example}\n" in shown
        planned = bench(*shlex.split(example), "--dry-run")
        assert planned.returncode == 0, planned.stderr
        assert name in planned.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["modle"], "command must be one of "),
        (["toy", "--no-such-option"], "No such option: --no-such-option"),
        (["toy", "--kinds", "ok,odd"], "toy: kinds must be one of ok, slow, raises"),
        (["toy", "--repeats", "many"], "toy: repeats must be of type int, but got 'many'"),
        (["toy", "--repeats", "0"], "toy: repeats must be at least 1, but got 0"),
        (["model", "--sizes", ""], "model: sizes must hold a value, but got none"),
        (["compare", "a", "b", "--json", "--markdown"], "--json or --markdown, but got both"),
        (["compare", "a", "b", "--tolerance", "5"], "Invalid value for '--tolerance'"),
        (["toy", "--timeout", "inf"], "Invalid value for '--timeout'"),
        (["toy", "--output", ""], "--output must be a folder, but got ''. Name one."),
        (["toy", "--only", "nothing"], "--only must name one of the experiments toy"),
        (["run"], "Missing argument"),
        (["run", "quik"], "assignment, attention, memory, "),
        (
            ["run", "none.toml"],
            "preset none.toml must be a file in UTF-8, but got an error: No such",
        ),
        (
            ["report", "nowhere"],
            "must be a run folder, but got nowhere, which has no results.jsonl",
        ),
        (["compare", "a", "b"], "RUN must be a run folder, but got a,"),
        (["preset", "quik"], "assignment, attention, memory, "),
        (
            ["toy", "--output", "file/run"],
            "must be a folder to write to, but got file/run (Not a directory)",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    bench: Bench, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "file").write_text("")
    done = bench(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr + done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"file"}


@pytest.mark.slow  # a command line that imports torch
def test_a_run_stopped_then_resumed(
    interrupted_run: tuple[Path, subprocess.Popen[str]],
    bench: Bench,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One run of three cases, ended by Ctrl-C in its second; test_faults.py has SIGKILL.

    On a busy machine the thread that interrupts it may see the second case end, too.
    """
    place, stopped = interrupted_run
    output, errors = stopped.communicate(timeout=250)
    assert stopped.returncode == 130
    kept = re.search(r"([12]) of 3 cases kept in runs/toy-01", output)
    assert kept, output
    assert errors == ""

    monkeypatch.chdir(place)
    folder = place / "runs" / "toy-01"
    resumed = bench(*SLOW)
    assert resumed.returncode == 0
    output = resumed.stdout
    assert f"{3 - int(kept[1])} of 3 cases left" in output
    assert len(set(keys_of(folder))) == len(keys_of(folder)) == 3
    for name in ("env.json", "run.json", "report.html", "figures/toy-line.png"):
        assert (folder / name).is_file()
    assert "| slow | 0 | plain | 1.01" in (folder / "tables/toy-times.md").read_text()
    assert "\x1b" not in output  # no colours where there is no terminal
    assert all(len(line) <= 80 for line in output.splitlines())
    assert "Report: runs/toy-01/report.html" in output.splitlines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_first_seconds_ends_cleanly(
    command_line: tuple[list[str], dict[str, str]], tmp_path: Path, number: signal.Signals
) -> None:
    """While the fork server imports torch; Ctrl-C reaches it too, and it keeps no pipe open."""
    command, environment = command_line
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        started = subprocess.Popen(
            [*command, "toy", "--output", "out"],
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with started as process:
        try:
            deadline = time.monotonic() + 100
            while not any("forkserver" in line for line in children_of(process.pid)):
                assert process.poll() is None, "it ended before it had a fork server"
                assert time.monotonic() < deadline, "it has no fork server"
                time.sleep(0.02)
            time.sleep(0.3)
            (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
            process.wait(100)
            ended = time.monotonic()
            _, errors = process.communicate(timeout=100)
            held_s = time.monotonic() - ended
        finally:
            process.kill()
    assert (process.returncode, errors) == (128 + number, "")
    assert held_s < 1, "as tee sees it, which waits for the last who could write"


@pytest.mark.parametrize(
    "end", ["raise RecursionError", "raise ImportError('initialization failed')", "return 2"]
)
def test_ctrl_c_that_an_import_turns_into_another_error_is_ctrl_c(
    command_line: tuple[list[str], dict[str, str]], end: str
) -> None:
    """Compiled modules do so, as pybind11's: it is no error of the command line."""
    (python, *_), environment = command_line
    program = (
        "import signal, bench_harness.__main__ as command_line, bench_harness.cli as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "def main():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        f"        {end}\n"
        "cli.main = main\n"
        "command_line.run()\n"
    )
    done = subprocess.run([python, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "")


def test_ctrl_c_is_answered_before_the_package_is_imported(
    command_line: tuple[list[str], dict[str, str]],
) -> None:
    (python, *_), environment = command_line
    program = (
        "import sys, bench_harness.__main__\n"
        "print({'psutil', 'typer', 'bench_harness.core'} & set(sys.modules))\n"
    )
    done = subprocess.run([python, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("set()", "")


def children_of(pid: int) -> Iterator[str]:
    """The command lines of a process's children, without those that end meanwhile."""
    with suppress(psutil.Error):
        for child in psutil.Process(pid).children():
            with suppress(psutil.Error):
                yield " ".join(child.cmdline())


def test_help_is_fast(command_line: tuple[list[str], dict[str, str]]) -> None:
    """It imports little; a count, because times of a busy machine are noise."""
    command, environment = command_line
    done = subprocess.run(
        [*command, "--help"],
        env=environment | {"PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "bench_harness.cli" in imported
    assert not {"torch", "triton", "numpy", "pandas", "scipy", "matplotlib", "jinja2"} & imported
    assert len(imported) < 400


def test_a_folder_that_turns_unusable_is_one_line(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "artifacts").write_text("in the way")
    done = bench("toy", "--output", "out")
    assert done.returncode == 2
    assert "Not a directory" in done.stderr or "File exists" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_report_is_rebuilt_and_equal_samples_are_the_same(bench: Bench, tmp_path: Path) -> None:
    assert bench("toy", "--kinds", "ok,artifact", "--output", "out").returncode == 0
    (tmp_path / "out" / "report.html").unlink()
    rebuilt = bench("report", "out")
    assert rebuilt.returncode == 0
    *_, page, said = rebuilt.stdout.rstrip().splitlines()
    assert page == "Report: out/report.html"
    assert "plain takes" in said or "scatter or drift" in said
    assert "/trace.txt" in (tmp_path / "out" / "report.html").read_text()
    (tmp_path / "again").mkdir()
    with (tmp_path / "again" / "results.jsonl").open("w") as file:
        for row in rows(tmp_path / "out"):
            file.write(json.dumps({**row, "started": "later"}) + "\n")
    same = bench("compare", "out", "again")
    assert same.returncode == 0
    assert "4 same" in same.stdout


def test_a_reader_that_leaves_does_not_change_the_exit_code(
    bench: Bench, command_line: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    command, environment = command_line
    assert bench("toy", "--output", "a").returncode == 0
    (tmp_path / "b").mkdir()
    with (tmp_path / "b" / "results.jsonl").open("w") as file:
        for row in rows(tmp_path / "a"):
            file.write(json.dumps({**row, "started": "later", "samples_ms": [99.0] * 20}) + "\n")
    full = "bench-harness: system: No space left on device\n"
    # The same streams print a table of a dry run and JSON, which need a third of the time.
    for arguments, code, error in (
        ("compare a b --fail-on slower | head -c 1", 1, ""),
        ("compare a b --fail-on slower --markdown 2>&1 | true", 1, ""),
        ("toy --dry-run | head -c 1", 0, ""),
        ("toy --dry-run >&- 2>&-", 0, ""),
        ("toy --dry-run > /dev/full", 2, full),
        ("toy --dry-run > listed; grep -q toy listed", 0, ""),
        ("toy --dry-run --json > /dev/full", 2, full),
    ):
        line = f"set -o pipefail; {shlex.join(command)} {arguments}"
        done = subprocess.run(
            ["bash", "-c", line],
            env=environment | {"COLUMNS": "0"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stderr) == (code, error), arguments


def test_a_page_is_not_written_over_rows(bench: Bench, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert bench("toy", "--output", name).returncode == 0
    before = (tmp_path / "a/results.jsonl").read_bytes()
    for page in ("a/results.jsonl", "a"):
        done = bench("compare", "a", "b", "--page", page)
        message = f"bench-harness: --page must be a file NAME.html, but got {page}. Add .html.\n"
        assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert (tmp_path / "a/results.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match="--page must be a file"):
        cli._write_page(Path("trace.json"), "")


def test_a_preset_file_runs_and_only_narrows_it(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        'description = "kinds"\n[[toy]]\nkinds = ["ok"]\n[[toy]]\nkinds = ["skips", "raises"]\n'
    )
    done = bench("run", "mine.toml", "--only", "skips,raises", "--output", "out")
    assert done.returncode == 1  # a case failed
    assert [row["status"] for row in rows(tmp_path / "out")] == ["skipped", "error"]
    assert "needs a device that is not here" in done.stdout
    assert "ValueError: this case raises" in done.stdout


def test_a_dry_run_lists_and_creates_nothing(bench: Bench, tmp_path: Path) -> None:
    listed = bench("toy", "--kinds", "ok,raises", "--dry-run")
    assert listed.returncode == 0
    assert "toy raises 0" in listed.stdout
    assert "2 of 2 cases to run, at most 6 min 40 s by their limits" in listed.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_shipped_preset_is_printed_to_be_copied(bench: Bench, tmp_path: Path) -> None:
    copy = bench("preset", "quick")
    assert copy.returncode == 0
    (tmp_path / "mine.toml").write_text(copy.stdout)
    listed = bench("run", "mine.toml", "--dry-run")
    assert listed.returncode == 0, listed.stderr
    assert "into runs/mine-01" in listed.stdout


def test_env_and_version(bench: Bench) -> None:
    shown = bench("env")
    assert shown.returncode == 0
    assert "environment id" in shown.stdout
    assert bench("--version").stdout.startswith("bench-harness 0.")


def test_a_terminal_without_dashes_gets_the_whole_run(
    command_line: tuple[list[str], dict[str, str]], tmp_path: Path
) -> None:
    """A label may hold what an encoding does not: it is shown otherwise, and the run goes on."""
    command, environment = command_line
    done = subprocess.run(
        [*command, "attention", "--dry-run", "--sequences", "8,16", "--variants", "naive"],
        env={**environment, "PYTHONIOENCODING": "ascii"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "s8?16" in done.stdout
