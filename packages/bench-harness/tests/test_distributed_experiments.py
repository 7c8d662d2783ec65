"""The experiments of several ranks, small, with gloo; and their checks, which must catch errors."""

import json
import subprocess

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from bench_harness import experiments, process, runner
from bench_harness.display.plots import png_bytes
from bench_harness.report.frame import to_frame
from processes import free_port
from ranks import run_ranks

TINY = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}


@pytest.fixture(scope="module", autouse=True)
def first_machine(command_line, tmp_path_factory):
    """Where two machines measure, the process that is the first, and what the second is asked.

    Started before all tests, because it imports torch, which goes on beside them.
    """
    command, environment = command_line
    place = tmp_path_factory.mktemp("machines")
    port = free_port()
    first, second = (
        [
            *("allreduce", "--sizes-mb", "0.01", "--operations", "all_reduce"),
            *("--samples", "3", "--interval", "0"),
            *("--device", "cpu", "--world-sizes", "2", "--nnodes", "2"),
            *("--rdzv-endpoint", f"localhost:{port}", "--node-rank", str(number)),
            *("--output", f"node-{number}", "--timeout", "200"),
        ]
        for number in range(2)
    )
    with subprocess.Popen(
        [*command, *first],
        cwd=place,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield place, process, second
        finally:
            process.kill()


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
            assert png_bytes(figure.figure)
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


@pytest.mark.slow  # a command line that imports torch
def test_the_same_command_on_two_machines_measures_one_case(first_machine, bench, monkeypatch):
    """Two agents on loopback, one rank each; both folders hold the rows of all ranks."""
    place, other, second_machine = first_machine
    monkeypatch.chdir(place)
    done = bench(*second_machine)
    output, _ = other.communicate(timeout=200)
    assert other.returncode == 0, output + (place / "node-0" / "results.jsonl").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (
        [json.loads(line) for line in (place / folder / "results.jsonl").read_text().splitlines()]
        for folder in ("node-0", "node-1")
    )
    assert len(first) == len(second) == 1
    assert first[0]["case_key"] == second[0]["case_key"]
    assert first[0]["config"]["world_size"] == 2
    assert first[0]["samples_ms"] == second[0]["samples_ms"]
    assert len(first[0]["samples_ms"]) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "rdzv_endpoint host:port with a fixed port"),
        ({"nnodes": 2, "rdzv_endpoint": "host"}, "but got .*rdzv_endpoint='host'"),
        ({"nnodes": 2, "rdzv_endpoint": "host:0"}, "with a fixed port"),
        (
            {"nnodes": 2, "rdzv_endpoint": "host:1", "node_rank": 2},
            "node_rank must be from 0 to 1, but got 2",
        ),
        ({"nnodes": 0}, "nnodes must be at least 1, but got 0"),
    ],
)
def test_machines_that_do_not_fit_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        experiments.get("train-step").cases(**options)


def test_machines_share_a_case_whatever_their_number():
    cases = [
        experiments.get("allreduce").cases(
            device="cpu", nnodes=2, rdzv_endpoint="host:29400", node_rank=number
        )
        for number in range(2)
    ]
    ((first,), (second,)) = cases
    assert first.key == second.key
    assert first.config["world_size"] == 4
    assert (first.placement["node_rank"], second.placement["node_rank"]) == (0, 1)


def test_too_few_gpus_skip_the_case():
    for name in ("train-step", "allreduce"):
        experiment = experiments.get(name)
        options = {"world_sizes": (64,)} if name == "allreduce" else {"world_size": 64}
        (case, *_) = experiment.cases(device="cuda", **options)
        with pytest.raises(experiments.CaseSkipped, match="must have 64 CUDA devices"):
            experiment.run(case, print)


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
