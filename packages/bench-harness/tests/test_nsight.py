"""Recording with Nsight Systems: which files and programs count, and reports of several ranks.

``nsys`` itself is played by a script that runs the program and leaves the files that the real one
leaves; the export is made up, so that its answers are known.
"""

import json
import pathlib
import sqlite3
import stat
import sys
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from bench_harness import experiments
from bench_harness.display.plots import png_bytes
from bench_harness.report.frame import to_frame
from bench_harness.traces import kineto, nsight
from bench_harness.traces.timeline import timeline
from bench_harness.training.nsight import measure_rank

CPU = torch.device("cpu")
TINY = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}

NSYS = """#!{python}
import pathlib, shutil, subprocess, sys
here = pathlib.Path(__file__).parent
if sys.argv[1] == "--version":
    print("NVIDIA Nsight Systems version 2025.3.1")
elif sys.argv[1] == "profile":
    out = sys.argv.index("-o")
    code = subprocess.run(sys.argv[out + 2 :]).returncode
    pathlib.Path(sys.argv[out + 1]).with_suffix("{suffix}").write_text("a report")
    sys.exit(code or {code})
else:
    assert pathlib.Path(sys.argv[-1]).suffix == ".nsys-rep"
    shutil.copy(here / "export.sqlite", sys.argv[sys.argv.index("-o") + 1])
"""
IMPORTER = """#!{python}
import pathlib, sys
assert pathlib.Path(sys.argv[2]).suffix == ".qdstrm"
pathlib.Path(sys.argv[4]).write_text("a report")
"""


def program(path, text, **values):
    path.write_text(text.format(python=sys.executable, **values))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """A folder that is the whole PATH, with an nsys that needs no importer."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    program(folder / "nsys", NSYS, suffix=".nsys-rep", code=0)
    two_ranks(folder / "export.sqlite")
    return folder


def two_ranks(path):
    """An export of a step on two GPUs, whose processes reuse each other's correlation ids.

    GPU 0 communicates 60 of 100 µs, 20 of them exposed; GPU 1 50, all exposed.
    """
    with closing(sqlite3.connect(path)) as database, database:
        database.executescript(
            """
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INT, end INT, deviceId INT,
                streamId INT, correlationId INT, demangledName INT, globalPid INT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INT, end INT, globalTid INT,
                correlationId INT, nameId INT);
            CREATE TABLE NVTX_EVENTS (start INT, end INT, eventType INT, text TEXT,
                globalTid INT);
            """
        )
        names = ["sm90_xmma_gemm", "ncclDevKernel_AllReduce", "cudaLaunchKernel"]
        database.executemany("INSERT INTO StringIds VALUES (?, ?)", enumerate(names))
        process = [(1 << 56) | (pid << 24) for pid in (500, 501)]
        kernels = [
            (0, 80_000, 0, 7, 1, 0, process[0]),
            (40_000, 100_000, 0, 9, 2, 1, process[0]),
            (200_000, 240_000, 1, 7, 1, 0, process[1]),
            (240_000, 290_000, 1, 9, 2, 1, process[1]),
        ]
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?)", kernels
        )
        launches = [
            (start, start + 10, pid | 500, correlation, 2)
            for start, _, _, _, correlation, _, pid in kernels
        ]
        database.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", launches
        )
        phases = [(0, 100_000, process[0] | 500), (200_000, 300_000, process[1] | 501)]
        database.executemany("INSERT INTO NVTX_EVENTS VALUES (?, ?, 59, 'phase:step', ?)", phases)


def record(folder, code="import pathlib, sys; pathlib.Path(sys.argv[1]).touch()"):
    finished = folder / "finished"
    command = [sys.executable, "-c", code, str(finished)]
    return nsight.record(command, folder / "report", finished=finished, timeout_s=120)


def test_a_report_is_recorded_and_exported(tools, tmp_path):
    assert len(nsight.load(record(tmp_path)).operators) == 4
    assert (tmp_path / "report.nsys-rep").exists()


def test_a_recorded_program_sees_no_secret(tools, tmp_path, monkeypatch):
    """A report holds the whole environment of the program."""
    monkeypatch.setenv("DATABASE_URL", "user:word@host")
    monkeypatch.setenv("NVIDIA_API_KEY", "secret")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    seen = tmp_path / "seen.json"
    code = (
        "import json, os, pathlib, sys; pathlib.Path(sys.argv[1]).touch();"
        f"pathlib.Path({str(seen)!r}).write_text(json.dumps(dict(os.environ)))"
    )
    record(tmp_path, code)
    environment = json.loads(seen.read_text())
    assert not {"DATABASE_URL", "NVIDIA_API_KEY"} & environment.keys()
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["PATH"] == str(tools)


def test_a_raw_recording_is_imported(tools, tmp_path):
    program(tools / "nsys", NSYS, suffix=".qdstrm", code=1)
    with pytest.raises(nsight.NsightError, match="QdstrmImporter of the same version"):
        record(tmp_path)
    program(tools / "QdstrmImporter", IMPORTER)
    assert len(nsight.load(record(tmp_path)).operators) == 4
    assert not (tmp_path / "report.qdstrm").exists()


def test_a_program_that_did_not_finish_has_no_report(tools, tmp_path):
    with pytest.raises(nsight.NsightError, match=r"(?s)nsys profile ended with 1.*half way"):
        record(tmp_path, "raise SystemExit('half way')")


def test_a_failing_importer_is_named(tools, tmp_path):
    program(tools / "nsys", NSYS, suffix=".qdstrm", code=1)
    program(tools / "QdstrmImporter", "#!/bin/sh\necho wrong version >&2; exit 4\n")
    with pytest.raises(nsight.NsightError, match="QdstrmImporter ended with 4: wrong version"):
        record(tmp_path)


def test_a_rank_s_part_is_its_gpu_s_and_its_process_s(tools):
    first, second = (nsight.load(tools / "export.sqlite", device) for device in (0, 1))
    assert first.phases("step") == [(0, 100_000)]
    assert second.phases("step") == [(200_000, 300_000)]
    assert first.overlap((0, 100_000)).exposed_ns == 20_000
    assert second.overlap((200_000, 300_000)).exposed_ns == 50_000
    assert first.launches[1].start_ns == 0
    assert second.launches[1].start_ns == 200_000
    with pytest.raises(nsight.NsightError, match="must hold kernels of GPU 5, but got none"):
        nsight.load(tools / "export.sqlite", 5)


def test_a_report_must_hold_every_rank(tools):
    from bench_harness.training.nsight import read

    assert nsight.devices(tools / "export.sqlite") == [0, 1]
    with pytest.raises(nsight.NsightError, match=r"of 3 ranks must hold .* but got those of 2"):
        read(tools / "export.sqlite", 3)


def step_case(*variants):
    (case,) = experiments.get("train-step").cases(
        sizes=("custom",),
        batches=(2,),
        sequences=(16,),
        variants=variants,
        warmup=1,
        nsight=True,
        device="cpu",
        **TINY,
    )
    return case


@pytest.mark.slow  # every rank is a program that imports torch
def test_a_step_is_a_program_that_nsys_can_run(tools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with closing(sqlite3.connect(tools / "export.sqlite")) as database, database:
        # A program that sees the machine's third and fourth GPU counts them from 0.
        database.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = deviceId + 2")
    (row,) = experiments.get("train-step").run(step_case("overlap"), print)
    # The figures are the made-up export's; the counts are the wrapper's own.
    assert (row["exposed_ms"], row["exposed_min_ms"]) == (0.05, 0.02)
    assert row["in_backward"] == row["collectives"] > 1
    left = [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert left == ["step-0.nsys-rep"]


def test_one_report_is_recorded_per_variant(tools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def record(command, report, *, finished, timeout_s):
        config = json.loads(pathlib.Path(command[-2]).read_text())
        asked.append((config["recorded"]["wrapper"]["name"], report.name))
        finished.write_text('{"collectives": 3, "in_backward": 0, "payload_bytes": 12}')
        export = report.with_suffix(".sqlite")
        export.write_bytes((tools / "export.sqlite").read_bytes())
        return export

    monkeypatch.setattr(nsight, "record", record)
    case = step_case("naive", "overlap")
    experiment = experiments.get("train-step")
    rows = experiment.run(case, print)
    assert asked == [("naive", "step-0"), ("overlap", "step-1")]
    assert [row["variant"] for row in rows] == ["NaiveDDP", "OverlapDDP"]
    about = {"case_key": case.key, "label": case.label, "status": "ok"}
    frame = to_frame([{**about, **row, "config": dict(case.config)} for row in rows])
    tables = {table.title: table for table in experiment.tables(frame)}
    table = tables["Communication in one profiled step"]
    assert set(table.frame["spans"]) == {"GPU kernels (Nsight Systems)"}
    pictures = experiment.figures(frame)
    assert pictures
    assert all(each.is_timelines or png_bytes(each.figure) for each in pictures)


def test_the_recorded_step_marks_its_phases(tmp_path):
    (variant,) = step_case("naive").config["variants"]
    config = {**step_case("naive").config, "recorded": variant}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with kineto.recording(tmp_path / "trace.json", CPU):
            measure_rank(0, 1, CPU, config)
    finally:
        dist.destroy_process_group()
    trace = kineto.load(tmp_path / "trace.json")
    [window] = trace.phases("step")
    names = [name for name, *_ in timeline(trace, window)["phases"]]
    assert names == ["forward", "backward", "optimizer"]


def test_a_replayed_step_is_not_recorded_as_something_else(tools, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    case = step_case({"wrapper": "torch-ddp", "cuda_graph": True})
    (row,) = experiments.get("train-step").run(case, print)
    assert row["ended"]["status"] == "skipped"
    assert "Record it with --profiled." in row["ended"]["error"]


@pytest.mark.parametrize("name", ["train-step", "profile"])
def test_without_nsys_the_case_is_skipped(name, tools):
    (tools / "nsys").unlink()
    experiment = experiments.get(name)
    case = experiment.cases(sizes=("custom",), nsight=True, device="cpu", **TINY)[0]
    with pytest.raises(experiments.CaseSkipped, match="nsys must be on the PATH"):
        experiment.run(case, print)
