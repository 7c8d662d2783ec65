"""``bench-harness trace``: recordings of other programs, of several tools, and of none."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

Bench = Callable[..., subprocess.CompletedProcess[str]]

#: As a user writes it: a schedule, steps, and torch's own exporter.
SOMEONE = """
import torch
from torch.profiler import ProfilerActivity, profile, schedule

model = torch.nn.Linear(64, 64)
with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3)) as p:
    for _ in range(5):
        model(torch.ones(64, 64)).sum().backward()
        p.step()
p.export_chrome_trace("own.json.gz")
"""


def span(name: str, category: str, start: float, end: float, thread: int) -> dict[str, object]:
    where = {"pid": 1, "tid": thread, "args": {}}
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, **where}


def gpu_trace(path: Path, rank: int, waits: float) -> None:
    """Two steps on a GPU, 0 to 200 µs, whose all-reduce begins at 60 and waits for the others."""
    events = [
        span("ProfilerStep#5", "user_annotation", 0, 90, 1),
        span("ProfilerStep#6", "user_annotation", 90, 190, 1),
        span("sm90_xmma_gemm_bf16", "kernel", 0, 100, 7),
        span("ncclDevKernel_AllReduce_Sum_f32", "kernel", 60, 120 + waits, 20),
        span("vectorized_elementwise_kernel", "kernel", 150, 200, 7),
    ]
    content = {"distributedInfo": {"rank": rank, "world_size": 2}, "traceEvents": events}
    path.write_text(json.dumps(content))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_ranks_of_somebody_else_s_run(bench: Bench, folder: Path) -> None:
    gpu_trace(folder / "a.json", 0, waits=20)
    gpu_trace(folder / "b.json", 1, waits=0)
    done = bench("trace", "a.json", "b.json", "--json", "--page", "lanes.html")
    assert done.returncode == 0, done.stderr
    tables = json.loads(done.stdout)
    first, second = tables["Time"]
    assert first["recording"] == "a.json rank 0"
    assert (first["tool"], first["spans"]) == ("torch.profiler", "GPU kernels")
    # Of 80 µs of communication, 40 are beside the product; each figure is half of two steps.
    assert (first["communication (ms)"], first["exposed (ms)"]) == (0.04, 0.02)
    assert (first["hidden (%)"], second["exposed (ms)"]) == (50.0, 0.01)
    assert (first["steps (count)"], first["per step (ms)"]) == (2, 0.1)
    assert first["computing (ms)"] + first["exposed (ms)"] + first["idle (ms)"] == 0.1
    assert tables["Longest kernels"][0]["kernel"] == "sm90_xmma_gemm_bf16"
    assert tables["Work"][0]["matmul (%)"] == pytest.approx(100 * 100 / 230, abs=0.1)
    assert "<title>a.json rank 0, b.json rank 1" in (folder / "lanes.html").read_text()
    shown = bench("trace", "a.json").stdout
    assert "Longest kernels" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())


# Raised as an error inside the profiler of torch 2.11, this would end the process.
@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_a_script_s_own_recording_on_this_machine(bench: Bench, folder: Path) -> None:
    exec(compile(SOMEONE, "someone.py", "exec"), {})
    tables = json.loads(bench("trace", "own.json.gz", "--json").stdout)
    (time,) = tables["Time"]
    assert time["spans"] == "host operators (CPU)"
    assert time["steps (count)"] == 3
    assert "hidden (%)" not in time, "nothing was communicated"
    assert any(kernel["work"] == "matmul" for kernel in tables["Longest kernels"])


def test_an_export_of_nsight_systems_with_two_gpus(bench: Bench, folder: Path) -> None:
    with closing(sqlite3.connect(folder / "report.sqlite")) as database, database:
        database.executescript(
            "CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);"
            "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT, "
            "streamId INT, correlationId INT, demangledName INT);"
            "INSERT INTO StringIds VALUES (0, 'sm90_gemm'), (1, 'ncclDevKernel_AllReduce');"
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (0, 1000000, 0, 7, 1, 0), "
            "(0, 3000000, 1, 7, 2, 0), (1000000, 4000000, 0, 9, 3, 1), "
            "(3000000, 4000000, 1, 9, 4, 1);"
        )
    tables = json.loads(bench("trace", "report.sqlite", "--json").stdout)
    assert [row["recording"] for row in tables["Time"]] == [
        *("report.sqlite GPU 0", "report.sqlite GPU 1")
    ]
    assert [row["exposed (ms)"] for row in tables["Time"]] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, "which is no file"),
        ("text.json", b"no JSON", "cannot be read as one: JSONDecodeError"),
        ("rows.json", b'{"rows": []}', "which is other JSON"),
        (
            "browser.json",
            b'{"traceEvents": [{"ph": "X", "cat": "blink", "name": "a", "ts": 1, "dur": 1}]}',
            "a Chrome trace of another tool",
        ),
        (
            "odd.json",
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "late", "dur": []}]}',
            "cannot be read as one",
        ),
        ("torn.json.gz", b"\x1f\x8b\x08\x00torn", "cannot be read as one"),
        ("report.nsys-rep", b"binary", "Run nsys export --type=sqlite report.nsys-rep"),
        ("report.ncu-rep", b"NVR\x00\xff\xfe", "cannot be read as one"),
        ("old.sqlite", b"SQLite format 3\x00 torn", "an export of Nsight Systems 2022.1 or newer"),
        ("tree.hatchet", b'[{"frame": {"name": "ROOT"}, "children": []}]', "which is other JSON"),
    ],
)
def test_what_is_no_recording_is_one_line(
    bench: Bench,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    content: bytes | None,
    message: str,
) -> None:
    monkeypatch.setenv("PATH", str(folder))  # without nsys
    if content is not None:
        (folder / name).write_bytes(content)
    done = bench("trace", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_dry_run_says_what_will_be_skipped(
    bench: Bench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))
    planned = ["profile", "--sizes", "small", "--sequences", "128", "--nsight", "--dry-run"]
    shown = bench(*planned).stdout
    assert "skipped: nsys must be on the PATH" in shown
    assert "0 of 1 case to run" in shown
    (case,) = json.loads(bench(*planned, "--json").stdout)["cases"]
    assert case["missing"].startswith("nsys must be on the PATH")
