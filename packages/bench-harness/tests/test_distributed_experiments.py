"""The experiments of several ranks, small, with gloo; and their checks, which must catch errors."""

import gc
import json
import socket
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.distributed as dist

from bench_harness import experiments
from bench_harness.experiments.ddp import over_ranks
from bench_harness.experiments.steps import averaged_gradients
from bench_harness.report.frame import to_frame
from bench_harness.report.plots import png_bytes
from bench_harness.timing import Samples
from ranks import run_ranks

TINY = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}


@pytest.fixture(scope="module", autouse=True)
def first_machine(command_line, tmp_path_factory):
    """Where two machines measure, the process that is the first, and what the second is asked.

    Started before all tests, because it imports torch, which goes on beside them.
    """
    command, environment = command_line
    place = tmp_path_factory.mktemp("machines")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first, second = (
        [
            *("allreduce", "--sizes-mb", "0.01", "--operations", "all_reduce"),
            *("--samples", "3", "--device", "cpu", "--world-sizes", "2", "--nnodes", "2"),
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
        yield place, process, second
        process.kill()


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(name, **options):
        experiment = experiments.get(name)
        (case,) = experiment.cases(device="cpu", **options)
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


def test_ddp(run, tmp_path):
    frame, tables = run(
        "ddp",
        sizes=("custom",),
        batches=(2,),
        sequences=(16,),
        bucket_sizes_mb=(0.01, 0.02, 1),
        rounds=1,
        blocks=3,
        calls=1,
        warmup=1,
        **TINY,
    )
    lines = frame.set_index("variant")
    assert list(lines.index) == [
        *("none", "naive", "flat", "overlap"),
        *("bucketed 0.01 MB", "bucketed 0.02 MB", "bucketed 1 MB", "default buckets"),
        *("torch-ddp", "torch-ddp-tuned"),
    ]
    assert all(len(samples) == 3 for samples in frame["samples_ms"])
    assert lines.loc["none", "communication_ms"] == 0
    for name in lines.index.drop("none"):
        line = lines.loc[name]
        assert line["communication_ms"] > 0
        assert line["gradient_error"] < 1e-5
    # Wrappers that communicate after backward can hide nothing there.
    assert lines.loc["flat", "collectives"] == 1
    assert lines.loc["naive", "in_backward"] == 0
    assert lines.loc["overlap", "in_backward"] == lines.loc["naive", "collectives"]
    assert lines.loc["bucketed 0.01 MB", "buckets"] > lines.loc["bucketed 1 MB", "buckets"]
    published = tables["Step times for comparison by column"]
    assert list(published.columns[:7]) == [
        *("implementation", "model_size", "d_model", "num_layers", "world_size"),
        *("avg_step_time_ms", "speedup_vs_naive"),
    ]
    naive = published.set_index("implementation").loc["naive"]
    assert naive["speedup_vs_naive"] == pytest.approx(1.0)
    link = lines.loc["none", "all_reduce"]  # all-reduces alone, from the same run
    assert [len(samples) for samples in link["samples_ms"]] == [10] * len(link["size_bytes"])
    (fitted,) = tables["Bucket overhead model"].to_dict("records")
    assert fitted["predicted least overhead T* (ms)"] >= 0
    assert len(list(tmp_path.glob("*.trimmed.json.gz"))) == len(lines)


def test_the_picture_is_of_the_rank_that_waited_least():
    ranks = [
        {
            **{f"{name}_ms": value + rank for name in ("communication", "hidden", "idle")},
            "exposed_ms": exposed,
            "overlap_ratio": 0.5,
            "timeline": rank,
            "spans": "kernels",
        }
        for rank, (value, exposed) in enumerate([(5.0, 30.0), (4.0, 2.0)])
    ]
    row = over_ranks(ranks)
    assert (row["drawn_rank"], row["timeline"]) == (1, 1)
    assert (row["exposed_ms"], row["exposed_min_ms"]) == (30.0, 2.0)
    assert (row["communication_ms"], row["communication_min_ms"]) == (5.0, 5.0)


def test_allreduce(run):
    frame, tables = run("allreduce", sizes_mb=(0.01, 0.1, 1), samples=3, warmup=1)
    assert len(frame) == 4 * 3
    assert all(len(samples) == 3 for samples in frame["samples_ms"])
    table = tables["Collectives"]
    assert (table["bus bandwidth (GB/s)"] > 0).all()
    assert len(tables["Cost of a collective"]) == 4


def test_optimizer(run):
    frame, tables = run(
        "optimizer", size="custom", batch=2, sequence=16, rounds=1, samples=2, warmup=1, **TINY
    )
    memory = tables["Memory per rank at three moments"].set_index(["variant", "moment"])
    after = memory.xs("after the optimizer step", level="moment")
    full = after.loc["unsharded", "optimizer state (MiB)"]
    for variant in ("sharded-flat", "sharded-whole", "zero-redundancy"):
        assert after.loc[variant, "optimizer state (MiB)"] == pytest.approx(full / 2, rel=0.1)
    assert not after["prediction missed"].loc[["unsharded", "sharded-flat"]].any()
    parts = ["parameters (MiB)", "gradients (MiB)", "optimizer state (MiB)"]
    for moment in ("after initialisation", "before the optimizer step", "after the optimizer step"):
        line = memory.loc[("unsharded", moment)]
        assert line["predicted sum (MiB)"] == pytest.approx(line[parts].sum(), rel=0.01)
    before = memory.xs("before the optimizer step", level="moment")
    assert (before["predicted activations (MiB)"] > 0).all()
    assert (before["predicted peak (MiB)"] >= before["predicted sum (MiB)"]).all()
    times = frame[frame["phase"].notna()]
    assert set(times["phase"]) == {"step", "optimizer"}
    assert all(len(samples) == 2 for samples in times["samples_ms"])


@pytest.mark.slow  # a command line that imports torch
def test_the_same_command_on_two_machines_measures_one_case(first_machine, bench, monkeypatch):
    """Two agents on loopback, one rank each; both folders hold the rows of all ranks."""
    place, other, second_machine = first_machine
    monkeypatch.chdir(place)
    done = bench(*second_machine)
    output, _ = other.communicate(timeout=200)
    assert other.returncode == 0, output
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


@pytest.mark.parametrize("part", ["parameter", "gradient", "state"])
def test_any_part_of_the_optimizer_s_memory_that_is_off_is_flagged(part):
    held = {"parameter": 400, "gradient": 400, "state": 800}
    held[part] *= 1.03
    row = {
        "case_key": "a",
        "label": "optimizer",
        "status": "ok",
        "variant": "unsharded",
        "moment": "after the optimizer step",
        "phase": None,
        "parameters": 100,
        "predicted_state_bytes": 800,
        "allocated_bytes": 1600,
        "peak_bytes": 1600,
        "config": {
            "size": "custom",
            "world_size": 2,
            "batch": 1,
            "sequence": 8,
            "precision": "fp32",
            "device": "cpu",
            **TINY,
        },
    }
    right = {f"{name}_bytes": round(value, -2) for name, value in held.items()}
    wrong = {f"{name}_bytes": value for name, value in held.items()}
    frame = to_frame([{**row, **right}, {**row, **wrong, "moment": "before the optimizer step"}])
    memory = experiments.get("optimizer").tables(frame)[0].frame
    assert list(memory["prediction missed"]) == [False, True]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "rdzv_endpoint host:port with a fixed port"),
        ({"nnodes": 2, "rdzv_endpoint": "host"}, "received .*rdzv_endpoint='host'"),
        ({"nnodes": 2, "rdzv_endpoint": "host:0"}, "with a fixed port"),
        (
            {"nnodes": 2, "rdzv_endpoint": "host:1", "node_rank": 2},
            "node_rank must be from 0 to 1; received 2",
        ),
        ({"nnodes": 0}, "nnodes must be at least 1; received 0"),
    ],
)
def test_machines_that_do_not_fit_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        experiments.get("ddp").cases(**options)


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
    for name in ("ddp", "allreduce", "optimizer"):
        experiment = experiments.get(name)
        options = {"world_sizes": (64,)} if name == "allreduce" else {"world_size": 64}
        (case, *_) = experiment.cases(device="cuda", **options)
        with pytest.raises(experiments.CaseSkipped, match="needs 64 CUDA devices"):
            experiment.run(case, print)


def wrong_results(rank, world_size):
    """What each experiment's check says about results that are wrong."""
    from bench_harness.experiments import allreduce, optimizer
    from bench_harness.experiments.steps import Wrapped, check_gradients, train_step, wrapped
    from bench_harness.workload import language_model

    said = []
    device = torch.device("cpu")
    config = {"size": "custom", "batch": 2, "sequence": 8, **TINY}
    workload = language_model(config, device, precision="fp32", batch_seed=rank)
    expected = averaged_gradients(workload)
    with wrapped("flat", {}, workload.module) as way:
        train_step(workload, way, None)
        said.append(f"flat: {check_gradients('flat', workload.module, expected):.0e}")
    train_step(workload, Wrapped(workload.module, lambda: None), None)  # nothing is averaged
    try:
        check_gradients("silent", workload.module, expected)
    except ArithmeticError as error:
        said.append(str(error))
    for parameter in workload.module.parameters():
        parameter.grad = None
    try:
        check_gradients("dropped", workload.module, expected)
    except ArithmeticError as error:
        said.append(str(error))

    all_reduce, dist.all_reduce = dist.all_reduce, lambda tensor: None
    try:
        allreduce.check("all_reduce", rank, world_size, 8, device)
    except ArithmeticError as error:
        said.append(str(error))
    finally:
        dist.all_reduce = all_reduce
    for operation in allreduce.OPERATIONS:
        allreduce.check(operation, rank, world_size, 8, device)

    make = optimizer.make_optimizer
    optimizer.make_optimizer = lambda variant, module, device: (
        torch.optim.SGD(module.parameters(), lr=0.1)
        if variant == "sharded-flat"
        else make(variant, module, device)
    )
    try:
        optimizer.check("sharded-flat", device)
    except ArithmeticError as error:
        said.append(str(error))
    finally:
        optimizer.make_optimizer = make
    optimizer.check("sharded-flat", device)
    return said


def everything(rank, world_size):
    found = wrong_results(rank, world_size), hooks_left(rank, world_size)
    return *found, torch_wrappers_left(rank, world_size)


@pytest.fixture(scope="module")
def outcomes():
    """What all functions found, per rank; together because starting ranks is most of the time."""
    return [outcome.value for outcome in run_ranks(everything, 2)]


def test_wrong_results_are_never_timed(outcomes):
    for (flat, silent, dropped, reduced, stepped), *_ in outcomes:
        assert flat.startswith("flat: ")
        assert "silent: the gradient of" in silent
        assert "must have a gradient" in dropped
        assert "all_reduce of 8 elements" in reduced
        assert "must equal unsharded AdamW" in stepped


def hooks_left(rank, world_size):
    """How many collectives a plain backward starts after each kind of wrapper was taken off."""
    from bench_harness.experiments.steps import WRAPPERS, train_step, wrapped
    from bench_harness.workload import language_model

    config = {"size": "custom", "batch": 1, "sequence": 4, **TINY}
    workload = language_model(config, torch.device("cpu"), precision="fp32", batch_seed=rank)

    def turn(kind):
        with wrapped(kind, {}, workload.module) as way:
            train_step(workload, way, None)

    equal = {}
    for kind in WRAPPERS:
        turn(kind)
        with wrapped("none", {}, workload.module) as way:
            train_step(workload, way, None)
            grad = next(workload.module.parameters()).grad.clone()
        other = grad.clone()
        dist.broadcast(other, src=0)
        equal[kind] = bool(torch.equal(grad, other)) and rank != 0
    return equal


def torch_wrappers_left(rank, world_size):
    """How many of torch's wrappers, with their buckets, live when the next one's turn begins."""
    from bench_harness.experiments import ddp
    from bench_harness.workload import language_model, optimizer_class

    counts = {"rounds": 1, "warmup": 1, "blocks": 1, "calls": 1, "profiled": False}
    device = torch.device("cpu")
    config = {"size": "custom", "batch": 1, "sequence": 4, **TINY, **counts}
    workload = language_model(config, device, precision="fp32", batch_seed=rank)
    optimizer = optimizer_class("adamw", device)(workload.module.parameters(), lr=1e-5)
    (_, variant) = ddp.expand(("torch-ddp",), ())
    expected = averaged_gradients(workload)
    left = []

    def count():
        gc.collect()
        wrapper = torch.nn.parallel.DistributedDataParallel
        left.append(sum(isinstance(each, wrapper) for each in gc.get_objects()))

    ddp._check(variant, workload, expected, "fp32")
    count()
    ddp._turn(variant, workload, optimizer, config, Samples(), 0, Path("unused"))
    count()
    return left


def test_a_wrapper_leaves_nothing_behind(outcomes):
    _, still_averaged, torch_wrappers = outcomes[-1]
    assert torch_wrappers == [0, 0]
    # The ranks' batches differ, so equal gradients would mean that something still averages them.
    assert not any(still_averaged.values()), still_averaged


def test_tables_of_one_failed_cell_beside_a_finished_one(run):
    frame, _ = run("allreduce", sizes_mb=(0.01,), operations=("broadcast",), samples=2, warmup=0)
    lost = {"case_key": "4", "label": "allreduce gloo 4 ranks", "status": "error", "world_size": 4}
    both = pd.concat([frame, pd.DataFrame([lost])], ignore_index=True)
    (table,) = experiments.get("allreduce").tables(both)
    assert list(table.frame["status"]) == ["ok", "error"]
