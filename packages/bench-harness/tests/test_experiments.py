"""Every experiment, small, on this machine: rows with the right meaning, tables, pictures."""

import contextlib
import json
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import psutil
import pytest
import torch
from tools.course import precision
from tools.pages.rows import measure, read

from bench_harness import experiments, runner, timing
from bench_harness.activations import saved_for_backward
from bench_harness.core import Bars, Case, Timelines
from bench_harness.display.plots import png_bytes
from bench_harness.experiments import profile
from bench_harness.report.frame import to_frame
from bench_harness.traces import kineto
from bench_harness.traces.trace import phase
from bench_harness.workload import too_large

TINY = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
ALL = experiments.names()


def measured(case, rows):
    """Rows as the runner stores them."""
    about = {"experiment": case.experiment, "label": case.label, "case_key": case.key}
    return [{**about, "status": "ok", **row, "config": dict(case.config)} for row in rows]


def failed(case, status):
    return {
        "experiment": case.experiment,
        "label": case.label,
        "case_key": case.key,
        "status": status,
        "error": "why",
        "config": dict(case.config),
    }


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs an experiment's cases in this process and checks what holds for all of them."""
    monkeypatch.chdir(tmp_path)

    def run(name, **options):
        experiment = experiments.get(name)
        rows = []
        if "interval" in experiment.Options.__dataclass_fields__:
            options = {"interval": 0.0, **options}  # the least number of samples is enough
        for case in experiment.cases(device="cpu", **options):
            said = []
            found = experiment.run(case, said.append)
            json.dumps(found, allow_nan=False)
            assert said, "a case says what it does"
            assert all(row["variant"] for row in found)
            check_identities(found)
            rows += measured(case, found)
        frame = to_frame(rows)
        tables = {table.title: table for table in experiment.tables(frame)}
        for table in tables.values():
            check_columns(table)
        figures = experiment.figures(frame)
        assert len({figure.name for figure in figures}) == len(figures)
        for figure in figures:
            if isinstance(figure.figure, Bars):
                assert figure.figure.unit
                assert png_bytes(figure.figure)
                continue
            if isinstance(figure.figure, Timelines):
                assert all(line["ranks"] for line in figure.figure.values())
                continue
            assert png_bytes(figure.figure).startswith(b"\x89PNG")
            for plot in figure.figure.axes:
                assert "(" in plot.get_xlabel() or "(" in plot.get_ylabel(), "axes carry units"
        return frame, tables, figures

    return run


def check_identities(rows):
    """Text tells rows with samples apart, which is how two runs are compared."""
    sampled = [row for row in rows if "samples_ms" in row]
    assert len({tuple(v for v in row.values() if isinstance(v, str)) for row in sampled}) == len(
        sampled
    )


def check_columns(table):
    """Measured columns say their unit; whole-number settings and names need none."""
    plain = {
        *("size", "model", "d_model", "num_layers", "head_dim", "heads", "batch", "batch per rank"),
        *("model_size", "world_size", "sequence", "avg_step_time_ms", "speedup_vs_naive"),
        *("tokens/s", "TFLOP/s"),
    }
    for name in table.frame.columns:
        numeric = pd.api.types.is_numeric_dtype(table.frame[name].dtype)
        if numeric and table.frame[name].dtype != bool and name not in plain:
            assert "(" in name, f"{table.title}: {name} needs a unit"
    assert len(table.frame)


@pytest.mark.parametrize("name", ALL)
def test_cases_are_pure_json_and_distinct(name):
    experiment = experiments.get(name)
    cases = experiment.cases()
    assert cases
    assert [case.key for case in cases] == [case.key for case in experiment.cases()]
    assert len({case.key for case in cases}) == len(cases)
    assert len({case.label for case in cases}) == len(cases)
    assert experiment.summary
    for field in experiment.Options.__dataclass_fields__.values():
        assert field.metadata["help"]


def test_listing_experiments_and_cases_loads_no_heavy_library():
    program = (
        "import sys; from bench_harness import experiments\n"
        "for name in experiments.names(): experiments.get(name).cases(device='cpu')"
        " if name != 'accounting' else experiments.get(name).cases()\n"
        "heavy = {'torch', 'pandas', 'matplotlib', 'scipy', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("status", ["oom", "timeout", "error", "skipped"])
def test_a_report_of_failed_cases_only_is_still_a_report(name, status):
    experiment = experiments.get(name)
    frame = to_frame(failed(case, status) for case in experiment.cases()[:3])
    for table in experiment.tables(frame):
        assert isinstance(table.frame, pd.DataFrame)
    assert experiment.figures(frame) == []


def test_a_cold_start_of_the_whole_step_has_nothing_before_it(run):
    frame, tables, _ = run(
        "model", sizes=("custom",), batch=2, sequences=(16,), modes=("whole-step",),
        warmups=(0, 1), samples=3, **TINY,
    )  # fmt: skip
    assert frame["phase"].tolist() == ["step", "step"]
    cold, _ = frame["samples_ms"]
    assert frame["first_ms"].tolist()[0] == cold[0], "the first sample is the first step"
    assert frame["label"].str.contains("whole-step warm-up").all()
    assert tables["Effect of warm-up"].frame["warm-up (steps)"].tolist() == [0, 1]


def test_model(run):
    frame, tables, _ = run(
        "model",
        sizes=("custom",),
        batch=2,
        sequences=(16,),
        precisions=("fp32", "bf16"),
        attentions=("naive", "flash"),
        warmups=(0, 1),
        samples=3,
        **TINY,
    )
    assert len(frame) == 2 * 4 * 5  # warm-ups × variants × phases
    assert set(frame["phase"]) == {"forward", "training forward", "backward", "optimizer", "step"}
    assert all(len(samples) == 3 for samples in frame["samples_ms"])
    step, forward = (frame[frame["phase"] == p].iloc[0]["flops"] for p in ("step", "forward"))
    assert step == 3 * forward
    assert {"Effect of warm-up", "First step against steady state"} <= tables.keys()
    # On a CPU that others use too, the product that utilisation refers to may be the slower one.
    assert tables["Time per phase"].frame["MFU (%)"].dropna().gt(0).all()
    assert set(zip(frame["attention"], frame["ran"], strict=True)) == {
        *(("naive", "naive"), ("flash", "tiled")),
    }


def test_a_large_model_on_few_cores_is_expected_to_take_minutes(monkeypatch):
    """By passes: seven for the default modes, three for a whole step, one for inference."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    model = experiments.get("model")
    (large,) = model.cases(device="cpu")
    (small,) = model.cases(
        device="cpu", sizes=("custom",), d_model=32, d_ff=64, num_layers=1, num_heads=2
    )
    assert 150 < model.work_s(large) < 400
    assert model.work_s(small) == pytest.approx(6.0, abs=0.1)
    step, forward = (
        model.work_s(model.cases(device="cpu", modes=(mode,))[0])
        for mode in ("whole-step", "forward")
    )
    assert 6 * forward < model.work_s(large) < 3 * step < 10 * forward


def test_model_forward_only_runs_nothing_else(run):
    frame, _, figures = run(
        "model", sizes=("custom",), sequences=(8,), modes=("forward",), samples=2, **TINY
    )
    assert set(frame["phase"]) == {"forward"}
    assert figures == []


def test_model_and_input_go_together():
    with pytest.raises(ValueError, match="model and input must be given together"):
        experiments.get("model").cases(model="a:b")


def test_precision_of_the_course(tmp_path):
    measure(precision.case("cpu"), precision.run, tmp_path / "rows.jsonl")
    rows = {row["variant"]: row for row in read(tmp_path / "rows.jsonl")}
    assert rows["fp32 += fp32"]["value"] == pytest.approx(10.00013, abs=1e-4)
    assert rows["fp16 += fp16"]["value"] == pytest.approx(9.953125, abs=1e-5)
    assert rows["fp32 += fp16"]["value"] == rows["fp32 += fp32(fp16)"]["value"]
    assert rows["fp32 += fp16"]["value"] == pytest.approx(10.00214, abs=1e-4)
    assert rows["bf16"]["parameters"] == rows["fp16"]["gradients"] == "float32"
    assert rows["fp16"]["fc1"] == "float16"


def test_accounting():
    experiment = experiments.get("accounting")
    (plain,) = experiment.cases()
    of_sizes = to_frame(measured(plain, experiment.run(plain, print)))
    assert [table.title for table in experiment.tables(of_sizes)] == ["Model sizes by calculation"]
    assert len(experiment.figures(of_sizes)) == 1
    (case,) = experiment.cases(coursework=True)
    frame = to_frame(measured(case, experiment.run(case, print)))
    sizes, mesh = (table.frame for table in experiment.tables(frame))
    assert sizes.set_index("size").loc["xl", "parameters (count)"] == 1_998_235_200
    values = mesh.set_index("quantity")["value (in unit)"]
    assert values["total"] == pytest.approx(3517.58)
    assert values["compute-bound batch, overall, transfers at once"] == pytest.approx(20444.4)
    assert (mesh["derivation"].str.len() > 3).all()
    (flops,) = experiment.figures(frame)
    assert png_bytes(flops.figure)


def test_memory(run):
    frame, tables, figures = run(
        "memory",
        sizes=("custom",),
        batch=2,
        sequences=(16,),
        precisions=("fp32",),
        **TINY,
    )
    phases = frame[frame["kind"] == "phase"].set_index(["mode", "phase"])
    parameters = 4 * phases["parameters"].iloc[0]
    assert phases.loc[("step", "model"), "end_bytes"] == pytest.approx(parameters, rel=0.05)
    # Parameters, gradients and two moments; small leftovers of the loss aside.
    assert phases.loc[("step", "optimizer"), "end_bytes"] == pytest.approx(4 * parameters, rel=0.1)
    assert phases.loc[("forward", "forward"), "end_bytes"] < 1.2 * parameters
    peak = tables["Peak memory"].frame.set_index("mode")["peak (MiB)"]
    assert peak["step"] > peak["forward"]
    assert frame["residual_bytes"].max() == 2 * 16 * 32 * 4
    assert len(figures) == 2
    stacks = tables["Stacks of the largest allocations"].frame["stack, innermost first"]
    assert stacks.str.contains("aten::").all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash"])
def test_memory_predicts_what_is_kept_for_backward(run, precision, attention):
    shape = {"d_model": 128, "d_ff": 320, "num_layers": 3, "num_heads": 4, "vocab_size": 500}
    frame, tables, _ = run(
        "memory",
        sizes=("custom",),
        batch=2,
        sequences=(96,),
        precisions=(precision,),
        modes=("step",),
        attention=attention,
        **shape,
    )
    ends = frame[frame["kind"] == "phase"].set_index("phase")["end_bytes"]
    expected = saved_for_backward(
        SimpleNamespace(**shape), 2, 96, precision=precision, attention=attention, device="cpu"
    )
    # All but the loss, a scalar or two, to the byte.
    assert 0 <= ends["forward"] - ends["model"] - sum(expected.values()) < 64
    kept = tables["Kept for backward"].frame.iloc[0]
    assert kept["kept (MiB)"] == pytest.approx(kept["predicted (MiB)"], rel=1e-3)
    assert kept["prediction missed"] == False  # noqa: E712 - a numpy bool
    phases = tables["Peak memory per phase"].frame.set_index("phase")
    ratio = phases["peak (MiB)"] / phases["predicted peak (MiB)"]
    assert ratio["forward"] == pytest.approx(1, rel=1e-3)
    assert ratio.between(0.99, 1.15).all()


def test_memory_off_its_prediction_is_flagged(run):
    frame, tables, _ = run(
        "memory",
        sizes=("custom",),
        batch=4,
        sequences=(64,),
        precisions=("fp32",),
        modes=("step",),
        **TINY | {"vocab_size": 2000},
    )
    assert not tables["Kept for backward"].frame["prediction missed"].any()
    grown = frame.assign(
        end_bytes=frame["end_bytes"] + (frame["phase"] == "forward") * 2**21,
        peak_bytes=frame["peak_bytes"] + (frame["phase"] == "backward") * 2**22,
    )
    found = {table.title: table.frame for table in experiments.get("memory").tables(grown)}
    assert found["Kept for backward"]["prediction missed"].all()
    missed = found["Peak memory per phase"].set_index("phase")["prediction missed"]
    assert missed["backward"]
    assert not missed["model"]


def test_profile(run, tmp_path):
    frame, tables, _ = run(
        "profile", sizes=("custom",), batch=4, sequences=(32,), warmup=1, **TINY | {"d_ff": 1024}
    )
    phases = frame[frame["kind"] == "phase"].set_index("phase")
    assert list(phases.index) == ["inference", "forward", "backward", "optimizer"]
    assert phases.loc["optimizer", "matmul_share"] == 0
    assert (phases["busy_ms"] <= phases["window_ms"] * 1.01).all()
    kernels = frame[(frame["kind"] == "kernel") & (frame["phase"] == "backward")]
    assert (kernels["work"] == "matmul").any()
    assert (kernels["total_ms"].diff().dropna() <= 0).all(), "longest first"
    parts = frame[frame["kind"] == "range"]
    assert set(parts["range"]) == {"attention.scores", "attention.softmax", "attention.output"}
    assert (tmp_path / "trace.trimmed.json.gz").exists()
    assert not (tmp_path / "trace.json").exists()
    whole = tables["Inference against a training step"].frame.set_index("what")
    step = phases.loc[["forward", "backward", "optimizer"]]
    assert whole.loc["training step", "kernels (ms)"] == pytest.approx(step["busy_ms"].sum(), 1e-3)
    assert whole.loc["training step", "matmul (%)"] == pytest.approx(
        100 * step["matmul_ms"].sum() / step["busy_ms"].sum(), rel=1e-3
    )
    assert whole.loc["forward + backward", "matmul (%)"] > whole.loc["training step", "matmul (%)"]
    older = frame.drop(columns="timeline")  # published rows of before have none
    assert [each.name for each in experiments.get("profile").figures(older)] == ["profile_phases"]


def test_warm_up_is_a_range_of_its_own(tmp_path):
    (case,) = experiments.get("profile").cases(
        sizes=("custom",), batch=1, sequences=(16,), warmup=2, device="cpu", **TINY
    )
    device = torch.device("cpu")
    with kineto.recording(tmp_path / "trace.json", device):
        profile.profiled(case.config, device, contextlib.nullcontext())
    trace = kineto.load(tmp_path / "trace.json")
    ((begin, end),), (inference,) = trace.phases("warm-up"), trace.phases("inference")
    assert end <= inference[0]
    softmax = [
        each
        for each in trace.ranges
        if each.name == "attention.softmax" and begin <= each.start_ns < end
    ]
    assert len(softmax) == 2 * 2 * TINY["num_layers"]  # steps × (inference, forward) × blocks


def test_a_phase_is_an_nvtx_range_where_there_is_a_gpu(monkeypatch):
    seen = []
    monkeypatch.setattr(timing, "synchronize", lambda device: seen.append("synchronized"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("ended"))
    with phase("warm-up", torch.device("cuda")):
        seen.append("work")
    assert seen == ["synchronized", "phase:warm-up", "work", "synchronized", "ended"]


def test_a_model_that_no_cpu_memory_holds_is_skipped_before_it_is_built(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=20e9))
    experiment = experiments.get("model")
    large, small = experiment.cases(device="cpu", sizes=("2.7B", "small"), sequences=(128,))
    told = "needs about 55 GB beside activations, but this machine has 20 GB"
    assert told in str(experiment.missing(large))
    assert experiment.missing(small) is None
    with pytest.raises(experiments.CaseSkipped, match=told):
        runner.run_case(large, print)
    config = {"size": "2.7B", "device": "cpu"}
    assert too_large(config | {"modes": ["forward"]}) is None
    assert too_large(config | {"device": "cuda"}) is None
    assert "109 GB" in str(too_large(config | {"world_size": 2}))


def test_profile_says_so_when_nsight_is_missing(monkeypatch, tmp_path):
    (tmp_path / "case").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    experiment = experiments.get("profile")
    case = experiment.cases(nsight=True, device="cpu", sizes=("small",), sequences=(128,))[0]
    monkeypatch.chdir(folder := tmp_path / "case")
    with pytest.raises(experiments.CaseSkipped, match="nsys must be on the PATH"):
        experiment.run(case, print)
    assert not list(folder.iterdir())


def test_fitted_constants_are_found_again():
    import numpy as np

    from bench_harness.experiments.allreduce import solved

    size, bandwidth, per_call = 8e9, 3e11, 4e-5
    counts = np.array([2.0, 8.0, 80.0, 435.0])
    found = solved(counts, size / counts, size / counts / bandwidth + counts * per_call)
    assert 1 / found.per_byte_s == pytest.approx(bandwidth)
    assert found.overhead_s == pytest.approx(per_call)


def sweep_of(*sizes):
    """Settings of a step without communication, and of buckets of these sizes."""
    wrappers = [{"name": "none"}, *({"name": "bucketed", "bucket_size_mb": s} for s in sizes)]
    return [{"wrapper": wrapper} for wrapper in wrappers]


def test_bucket_sweep_is_drawn_even_where_noise_makes_the_overhead_negative():
    from tools.course.bucket_model import figure, table

    rows = pd.DataFrame(
        {
            "case_key": "a",
            "label": "cell",
            "variant": ["no communication", "bucketed 1", "bucketed 2", "bucketed 4"],
            "settings": sweep_of(1.0, 2.0, 4.0),
            "buckets": [None, 8, 4, 2],
            "gradient_bytes": 2**23,
            "median_ms": [5.0, 4.0, 4.5, 4.9],
            "samples_ms": [[5.0] * 3, [4.0] * 3, [4.5] * 3, [4.9] * 3],
        }
    )
    assert png_bytes(figure(rows))
    (line,) = table(rows).to_dict("records")
    assert line["least overhead T* (ms)"] == 0
    with pytest.raises(ValueError, match="a sweep of three bucket sizes"):
        figure(rows.iloc[:3])


def test_memory_in_order_begins_with_the_pass_that_is_drawn():
    from tools.course.memory_order import figure

    line = {
        "time_ms": [0.0, 1.0, 900.0, 901.0, 902.0],
        "bytes": {"model": [2**30] * 5, "first step": [0, 2**31, 2**30, 2**30, 2**30],
                  "forward": [0, 0, 2**30, 2**32, 2**30]},
        "phase_starts_ms": {"model": 0.0, "first step": 1.0, "forward": 900.0},
    }  # fmt: skip
    rows = pd.DataFrame({"timeline": [None, line]})
    (plot,) = figure(rows).axes
    assert [text.get_text() for text in plot.texts] == ["forward"]
    assert plot.get_ylabel() == "memory in use (GiB), 6 at most"
    assert [area.get_label() for area in plot.collections] == ["held before", "forward"]
    assert plot.get_ylim()[0] == 0
    with pytest.raises(ValueError, match="too many values"):
        figure(pd.DataFrame({"timeline": [line, line]}))


def test_all_reduces_alone_predict_the_same_optimum_where_the_model_holds():
    from tools.course.bucket_model import table

    size, bandwidth, per_call = 8e9, 3e11, 4e-4
    counts = [8.0, 80.0, 400.0]
    steps = [100 + 1e3 * (size / n / bandwidth + n * per_call) for n in counts]
    link = [1e6, 1e7, 1e8]
    rows = pd.DataFrame(
        {
            "case_key": "a",
            "label": "cell",
            "variant": ["no communication", *(f"bucketed {n:g}" for n in counts)],
            "settings": sweep_of(*counts),
            "buckets": [None, *counts],
            "gradient_bytes": size,
            "samples_ms": [[step] * 3 for step in (100.0, *steps)],
        }
    )
    rows["all_reduce"] = None
    rows.at[0, "all_reduce"] = {
        "size_bytes": link,
        "samples_ms": [[1e3 * (per_call + s / bandwidth)] * 3 for s in link],
    }
    rows["largest_parameter_bytes"] = 1e6
    (line,) = table(rows).to_dict("records")
    assert line["all-reduce w (GB/s)"] == pytest.approx(300, rel=1e-3)
    assert line["all-reduce o (µs)"] == pytest.approx(400, rel=1e-3)
    best = (size * per_call * bandwidth) ** 0.5
    assert line["best bucket b* (MiB)"] == pytest.approx(best / 2**20, rel=1e-3)
    for name in ("best bucket b* (MiB)", "least overhead T* (ms)"):
        assert line[f"predicted {name}"] == pytest.approx(line[name], rel=1e-3)
    assert line["prediction missed"] is False
    shown = rows.assign(status="ok", world_size=2, device="cuda")
    shown["settings"] = [{"optimizer": {"name": "adamw"}, **each} for each in rows["settings"]]
    tables = {each.title: each for each in experiments.get("train-step").tables(shown)}
    (alone,) = tables["Cost of a collective"].frame.to_dict("records")
    assert (alone["backend"], round(alone["overhead o (µs)"])) == ("nccl", 400)
    faster = rows.copy()
    faster.at[0, "all_reduce"] = {
        "size_bytes": link,
        "samples_ms": [[1e3 * (per_call + s / bandwidth) / 2] * 3 for s in link],
    }
    (line,) = table(faster).to_dict("records")
    assert line["prediction missed"] is True
    rows["largest_parameter_bytes"] = 2e9  # a bucket holds at least one parameter
    (line,) = table(rows).to_dict("records")
    assert line["best bucket b* (MiB)"] == pytest.approx(2e9 / 2**20, rel=1e-3)


def test_allreduce_fit_finds_overhead_and_bandwidth():
    from bench_harness.experiments.allreduce import fit_table

    sizes = [2**20 * n for n in (1, 10, 100, 1000)]
    rows = pd.DataFrame(
        {
            "backend": "nccl",
            "world_size": 2,
            "variant": "all_reduce",
            "size_bytes": sizes,
            "samples_ms": [[1e3 * (30e-6 + size / 3e11)] * 5 for size in sizes],
        }
    )
    (line,) = fit_table(rows)[0].frame.to_dict("records")
    assert line["overhead o (µs)"] == pytest.approx(30, rel=1e-3)
    assert line["bandwidth w (GB/s)"] == pytest.approx(300, rel=1e-3)


def test_case_timeouts_leave_the_ranks_time_to_report():
    for name in ("train-step", "allreduce"):
        (case, *_) = experiments.get(name).cases(device="cpu")
        assert isinstance(case, Case)
        assert case.timeout_s >= 300
