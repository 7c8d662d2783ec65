"""Late gathers: in made-up traces of a GPU with known answers, and in a step of this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench_harness.traces import kineto
from bench_harness.traces.step import ROOT, gathers, of_rank, over_ranks, summary

MAIN, AUTOGRAD, COMPUTE, NCCL = 11, 12, 7, 20


def span(
    name: str, category: str, start: float, end: float, thread: int, **args: Any
) -> dict[str, Any]:
    where = {"pid": 1, "tid": thread, "args": args}
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, **where}


def launched(name: str, at: float, start: float, end: float, number: int, **where: int) -> Any:
    """A kernel, and the host's call that launched it."""
    thread, stream = where.get("thread", MAIN), where.get("stream", COMPUTE)
    return [
        span("cudaLaunchKernel", "cuda_runtime", at, at + 1, thread, correlation=number),
        span(name, "kernel", start, end, stream, correlation=number),
    ]


def unit(
    prefix: tuple[str, str], name: str, at: float, wait: float, thread: int = MAIN
) -> list[dict[str, Any]]:
    """The two ranges that a wrapper leaves for one gather."""
    return [
        span(f"{prefix[0]}{name}", "user_annotation", at, at + 3, thread),
        span(f"{prefix[1]}{name}", "user_annotation", wait, wait + 2, thread),
    ]


OURS = ("shard_optim::all_gather", "shard_optim::wait_for_all_gather")
FSDP2 = ("FSDP::all_gather", "FSDP::all_gather_copy_out")


@pytest.mark.parametrize("prefix", [OURS, FSDP2])
def test_on_a_gpu_the_computation_waits_from_the_end_of_the_kernel_before(
    tmp_path: Path, prefix: tuple[str, str]
) -> None:
    events = [
        *unit(prefix, " (blocks.0)", 0, 4),
        *launched("ncclDevKernel_AllGather", 1, 5, 30, 1, stream=NCCL),
        # The host launches the block's first kernel at 10; the gather ends 20 after that.
        *launched("gemm", 10, 30, 60, 2),
        *unit(prefix, " (blocks.1)", 12, 20),
        *launched("ncclDevKernel_AllGather", 13, 31, 70, 3, stream=NCCL),
        # The kernel before ends at 60, the gather at 70.
        *launched("gemm", 24, 70, 110, 4),
        # In time: it ends long before the stream is free. Backward runs on another thread.
        *unit(prefix, "", 30, 40, AUTOGRAD),
        *launched("ncclDevKernel_AllGather", 31, 72, 90, 5, stream=NCCL, thread=AUTOGRAD),
        *launched("gemm", 44, 110, 150, 6, thread=AUTOGRAD),
        # A gather that nothing computes with.
        *unit(prefix, " (blocks.2)", 50, 60, AUTOGRAD),
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = kineto.load(path)
    found = gathers(trace, (0, 200_000))
    assert [(each["unit"], each["gather_ms"], each["late_ms"]) for each in found] == [
        ("blocks.0", 0.025, 0.02),
        ("blocks.1", 0.039, 0.01),
        (ROOT, 0.018, 0.0),
    ]
    assert found[0]["late_ns"] == [10_000, 30_000]
    assert summary(found)["gathers"] == 3
    assert [each["unit"] for each in summary(found)["latest_gathers"]] == ["blocks.0"], (
        "ten microseconds are what it takes to notice"
    )
    assert gathers(trace, (1_000_000, 2_000_000)) == []


def test_a_step_without_gathers_has_no_columns() -> None:
    assert summary([]) == {}


def test_a_step_names_the_late_gathers_of_the_rank_that_waited_longest(tmp_path: Path) -> None:
    ranks = []
    for gathered in (40, 1000):  # the second rank waits for the first
        events = [
            span("phase:step", "user_annotation", 0, 3000, MAIN),
            *unit(OURS, " (blocks.0)", 0, 4),
            *launched("ncclDevKernel_AllGather", 1, 5, gathered, 1, stream=NCCL),
            *launched("gemm", 50, 1000, 2000, 2),
        ]
        path = tmp_path / "rank.json"
        path.write_text(json.dumps({"traceEvents": events}))
        trace = kineto.load(path)
        ranks.append(of_rank(trace, trace.phases("step")[0], "GPU kernels"))
    row = over_ranks(ranks)
    assert (row["drawn_rank"], row["late_gathers"], row["late_ms"]) == (0, 0, 0)
    assert row["late_max_ms"] == 0.95
    assert [(late["rank"], late["unit"]) for late in row["latest_gathers"]] == [(1, "blocks.0")]


def test_a_recording_of_somebody_else_s_ranks_lists_late_gathers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bench: Callable[..., Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    events = [
        *unit(FSDP2, " (layers.0)", 0, 4),
        *launched("ncclDevKernel_AllGather", 1, 5, 1005, 1, stream=NCCL),
        *launched("gemm", 5, 1005, 2000, 2),
    ]
    (tmp_path / "rank0.json").write_text(json.dumps({"traceEvents": events}))
    done: subprocess.CompletedProcess[str] = bench(
        "trace", "rank0.json", "--json", "--page", "step.html"
    )
    assert done.returncode == 0, done.stderr
    tables = json.loads(done.stdout)
    assert tables["Gathers"][0]["late (count)"] == 1
    assert tables["Latest gathers"][0]["unit"] == "layers.0"
    assert tables["Latest gathers"][0]["late by (ms)"] == 1.0
    assert '"late":[[0,1000000]]' in (tmp_path / "step.html").read_text()
