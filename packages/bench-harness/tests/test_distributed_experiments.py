"""The experiments of several ranks, small, with gloo; and their checks, which must catch errors."""

import json

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from bench_harness import experiments, process, runner
from bench_harness.display.plots import png_bytes
from bench_harness.report.frame import to_frame
from ranks import run_ranks

TINY = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(name, **options):
        experiment = experiments.get(name)
        (case,) = experiment.cases(device="cpu", interval=0.0, **options)
        rows = experiment.run(case, print)
        json.dumps(rows, allow_nan=False)
        sampled = [row for row in rows if "samples_ms" in row]
        texts = {tuple(v for v in row.values() if isinstance(v, str)) for row in sampled}
        assert len(texts) == len(sampled), "text tells rows apart when runs are compared"
        about = {"case_key": case.key, "label": case.label, "status": "ok"}
        frame = to_frame([{**about, **row, "config": dict(case.config)} for row in rows])
        for figure in experiment.figures(frame):
            assert figure.is_timelines or png_bytes(figure.figure)
        return frame, {table.title: table.frame for table in experiment.tables(frame)}

    return run


def test_ranks_of_a_case_say_what_they_do(tmp_path):
    (case,) = experiments.get("allreduce").cases(
        device="cpu", interval=0.0, sizes_mb=(0.01,), samples=2, warmup=1
    )
    said: list[str] = []
    outcome = process.call(
        runner.run_case, case, timeout_s=200, folder=tmp_path, on_progress=said.append
    )
    assert outcome.status == "ok", outcome.detail
    assert sorted(said) == ["rank 0: 0.01 MB", "rank 1: 0.01 MB", "starting 2 ranks"]


def test_allreduce(run):
    frame, tables = run("allreduce", sizes_mb=(0.01, 0.1, 1), samples=3, warmup=1)
    assert len(frame) == 4 * 3
    assert all(len(samples) == 3 for samples in frame["samples_ms"])
    table = tables["Collectives"]
    assert (table["bus bandwidth (GB/s)"] > 0).all()
    assert len(tables["Cost of a collective"]) == 4


def test_too_few_gpus_skip_the_case():
    for name in ("train-step", "allreduce"):
        experiment = experiments.get(name)
        (case, *_) = experiment.cases(device="cuda", world_sizes=(64,))
        with pytest.raises(experiments.CaseSkipped, match="must have 64 CUDA devices"):
            runner.run_case(case, print)


def wrong_results(rank, world_size):
    """What the check of collectives says about results that are wrong."""
    from bench_harness.experiments import allreduce

    device = torch.device("cpu")
    all_reduce, dist.all_reduce = dist.all_reduce, lambda tensor: None
    try:
        allreduce.check("all_reduce", rank, world_size, 8, device)
    except ArithmeticError as error:
        said = str(error)
    finally:
        dist.all_reduce = all_reduce
    for operation in allreduce.OPERATIONS:
        allreduce.check(operation, rank, world_size, 8, device)
    return said


@pytest.fixture(scope="module")
def outcomes():
    """What all functions found, per rank; together because starting ranks is most of the time."""
    return [outcome.value for outcome in run_ranks(wrong_results, 2)]


def test_wrong_results_are_never_timed(outcomes):
    for said in outcomes:
        assert "all_reduce of 8 elements" in said


def test_tables_of_one_failed_cell_beside_a_finished_one(run):
    frame, _ = run("allreduce", sizes_mb=(0.01,), operations=("broadcast",), samples=2, warmup=0)
    lost = {"case_key": "4", "label": "allreduce gloo 4 ranks", "status": "error", "world_size": 4}
    both = pd.concat([frame, pd.DataFrame([lost])], ignore_index=True)
    (table,) = experiments.get("allreduce").tables(both)
    assert list(table.frame["status"]) == ["ok", "error"]
