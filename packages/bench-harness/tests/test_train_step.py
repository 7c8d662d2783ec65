"""Training steps as data: settings, labels, proof, a case with gloo, and its tables."""

from __future__ import annotations

import gc
import json
import math
import statistics
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from tools.course import bucket_model
from torch.distributed.fsdp import FSDPModule

from bench_harness import experiments, options
from bench_harness.core import CaseSkipped
from bench_harness.display.plots import png_bytes
from bench_harness.report.frame import to_frame
from bench_harness.traces.step import over_ranks
from bench_harness.training import constructors, measure, proof
from bench_harness.training import settings as of
from bench_harness.training.build import training
from bench_harness.training.measure import merged
from ranks import run_ranks

ROLES = ("wrapper", "optimizer")
TINY = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 64}
#: The shape of the proof, so that a compiled variant compiles once for both.
PROVEN = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
OFFLOADED = {"name": "adamw", "offload_state": True}
SHARDED = {"optimizer": {"name": "sharded", "reduce_gradients": True, "overlap": "next-forward"}}


@pytest.mark.parametrize(
    ("variant", "label"),
    [
        ("none", "no communication"),
        ("naive", "NaiveDDP"),
        (
            {"wrapper": {"name": "bucketed", "bucket_size_mb": 100}},
            "BucketedDDP(bucket_size_mb=100)",
        ),
        ({"wrapper": {"name": "bucketed", "bucket_size_mb": "auto"}}, "BucketedDDP"),
        (SHARDED, "ShardedOptimizer(reduce_gradients, overlap=next-forward)"),
        (
            {"wrapper": "torch-ddp", "optimizer": "zero-redundancy"},
            "torch DDP + ZeroRedundancyOptimizer",
        ),
        (
            {"wrapper": {"name": "fsdp2", "reshard_after_forward": False}, "optimizer": "adamw"},
            "FSDP2(reshard_after_forward=False)",
        ),
        ({"wrapper": "flat", "optimizer": "sgd"}, "FlatDDP + SGD"),
        (
            {"wrapper": "flat", "optimizer": {"name": "adamw", "lr": 1, "fused": True}},
            "FlatDDP + AdamW(fused)",
        ),
    ],
)
def test_a_label_is_made_from_the_settings(variant: object, label: str) -> None:
    read = of.read(variant, {})  # type: ignore[arg-type]
    assert read.label() == label
    again = of.read(json.loads(json.dumps(read.table())), {})
    assert again == read, "a row's table gives the same settings back"


def test_labels_say_what_differs_and_nothing_else() -> None:
    bf16 = {"precision": "bf16"}
    variants = [of.read("flat", bf16), of.read({"wrapper": "flat", "compile": "blocks"}, bf16)]
    float8 = of.read({"wrapper": "flat", "products": "float8"}, bf16)
    assert of.labels([variants[0], float8]) == ["FlatDDP", "FlatDDP, products=float8"]
    assert [float8.table().get("products"), variants[0].table().get("products")] == ["float8", None]
    assert of.labels(variants) == ["FlatDDP", "FlatDDP, compile=blocks"]
    most = of.read({"wrapper": "overlap", "compile": "blocks"}, bf16)
    assert of.labels([*variants, most]) == ["FlatDDP, compile=off", "FlatDDP", "OverlapDDP"]
    with pytest.raises(ValueError, match="variants must differ, but got 'FlatDDP' twice"):
        of.labels([variants[0], variants[0]])


def test_classes_of_one_name_and_two_learning_rates_have_labels_of_their_own() -> None:
    names = ["a:Averaged(share=2)", "b:Averaged(share=2)", "flat + mine:AdamW", "flat"]
    assert of.labels([of.read(name, {}) for name in names]) == [
        *("a:Averaged(share=2)", "b:Averaged(share=2)", "FlatDDP + mine:AdamW", "FlatDDP"),
    ]
    rates = [of.read({"wrapper": "flat", "optimizer": f"sgd(lr={lr})"}, {}) for lr in (0.1, 0.2)]
    made = of.labels(rates)
    assert made == ["FlatDDP + SGD(lr=0.1)", "FlatDDP + SGD(lr=0.2)"]
    assert [of.read(name, {}) for name in made] == rates


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("fastest", "wrapper must be one of none, naive, .*, but got 'fastest'"),
        ({"wraper": "flat"}, "variant key must be one of wrapper, optimizer, .*, but got 'wraper'"),
        (
            {"wrapper": {"name": "bucketed", "bucket_mb": 1}},
            "bucketed key must be one of bucket_size_mb, .*, but got 'bucket_mb'. Remove",
        ),
        (
            {"wrapper": {"name": "flat", "wire": "bf16"}},
            "flat key must be one of missing_gradients, auto_finish, but got 'wire'",
        ),
        (
            {"wrapper": {"name": "bucketed", "bucket_size_mb": "large"}},
            "bucket_size_mb must be one of 'auto', 'one', 'same', a value of type float, but "
            "got 'large'",
        ),
        ({"wrapper": {"name": "bucketed", "copy": 1}}, "copy must be of type bool"),
        ({"wrapper": 3}, "wrapper must be a name or a table with a name, but got 3"),
        ({"products": "float8"}, "precision must be bf16 beside products=float8, but got fp32"),
        ({"precision": "fp8"}, "variant key precision must be one of 'fp32', 'tf32', 'bf16', but"),
        (
            {"wrapper": "flat", **SHARDED},
            "wrapper must be 'none' where the optimizer has reduce_gradients, but got FlatDDP",
        ),
        (
            {"optimizer": {"name": "sharded", "overlap": "next-forward"}},
            "overlap must come with reduce_gradients",
        ),
        ({"wrapper": "fsdp2", "optimizer": "zero-redundancy"}, "must be an unsharded one under"),
        ({"wrapper": "fsdp2", "optimizer": OFFLOADED}, "offload_state must be off under FSDP2"),
        (
            {"optimizer": {"name": "zero-redundancy", "offload_state": True}},
            "offload_state must be off in ZeroRedundancyOptimizer, but got True. Remove it",
        ),
        (
            {"optimizer": {"name": "adamw", "update_in_backward": True}},
            "update_in_backward must come with wrapper 'fully-sharded'",
        ),
        ({"wrapper": "fsdp2", "optimizer": "muon"}, "elements alike under FSDP2, but got Muon"),
        ({"wrapper": {"name": "fully-sharded", "replicas": 0}}, "replicas must be at least 1"),
        (
            {"wrapper": {"name": "fully-sharded", "replicas": 2, "nccl_max_ctas": 8}},
            "nccl_max_ctas must be left out where replicas is 2",
        ),
        ({"wrapper": "bucketed", "cuda_graph": True}, "off unless .*; but got BucketedDDP. Remove"),
        (
            {
                "wrapper": {"name": "bucketed", "comm_hook": "peer-copy"},
                "cuda_graph": True,
            },
            "off unless .*; but got BucketedDDP.comm_hook=peer-copy.. Remove",
        ),
    ],
)
def test_what_is_wrong_in_a_variant_is_named(variant: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of.read(variant, {})  # type: ignore[arg-type]


def test_a_preset_names_its_file_and_the_key(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = '[train-step]\nvariants = [{ wrapper = { name = "bucketed", bucket_mb = 1 } }]\n'
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(ValueError, match=r"preset mine.toml: train-step: bucketed key must be"):
        options.load_preset("mine.toml")


def test_arguments_are_those_of_the_constructor(tmp_path, monkeypatch) -> None:
    """Names, defaults and kinds come from the signature, here of a class of nobody."""
    (tmp_path / "toy_wrappers.py").write_text(
        "from typing import Literal\n"
        "class Toy:\n"
        "    def __init__(self, module, *, way: Literal['a', 'b'] = 'a', size: float = 25,\n"
        "                 group: object = None, **unknown: object) -> None: ...\n"
        "def made(cls, module, **arguments): return cls(module, **arguments)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    toy, through = "toy_wrappers:Toy", "toy_wrappers:made"
    known = constructors.Constructor(title="Toy", target=toy, through=through)
    takes = constructors._arguments(known)
    assert takes == {"way": ("a", ["'a'", "'b'"]), "size": (25, ["float"])}


@pytest.mark.parametrize("preset", ["train-step", "sharding"])
def test_a_preset_is_checked_without_torch(preset: str) -> None:
    """Arguments, which only the second has, in a process of their own."""
    program = (
        f"import sys; from bench_harness import options; options.load_preset({preset!r}).cases();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_row_keeps_the_arguments_that_its_constructor_had() -> None:
    """A default that is left out of a table means the default of that day."""
    call = of.read({"wrapper": {"name": "bucketed", "bucket_size_mb": "one"}}, {}).wrapper
    found = constructors.resolved(call)
    assert found["bucket_size_mb"] == "one"
    assert found["last_bucket_size_mb"] == 25
    assert found["comm_hook"] == "collectives"


PRESETS = Path(__file__).parents[3] / "tools" / "pages" / "presets"


@pytest.mark.parametrize("preset", ["8b", "fastest-step"])
def test_eight_billion_parameters_are_compared_without_the_step_that_does_not_fit(
    preset: str,
) -> None:
    cases = [
        case
        for case in options.load_preset(str(PRESETS / f"{preset}.toml")).cases()
        if case.config["size"] == "8B"
    ]
    assert {case.config["world_size"] for case in cases} == {2, 4, 8}
    assert len({case.key for case in cases}) == len(cases)
    labels = {
        label.partition("(")[0]
        for case in cases
        for label in of.labels([of.read(variant, {}) for variant in case.config["variants"]])
    }
    assert labels == {"FullyShardedDataParallel", "FSDP2"}


def test_each_step_without_communication_comes_first_and_once() -> None:
    variants = [
        of.read(each, {}) for each in ("flat", "naive", {"wrapper": "flat", "loss": "chunked"})
    ]
    bounded = of.with_bounds(variants)
    assert of.labels(bounded) == [
        *("no communication", "no communication, loss=chunked"),
        *("FlatDDP", "NaiveDDP", "FlatDDP, loss=chunked"),
    ]
    stages = [of.read(each, {}).zero_stage for each in ("flat", SHARDED, "fsdp2")]
    assert stages == [0, 2, 3]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """One case with many kinds of variant, and its rows."""
    experiment = experiments.get("train-step")
    values = options.build(
        experiment,
        {
            "sizes": ["custom"],
            "batches": [2],
            "sequences": [16],
            "rounds": 1,  # test_imported_model.py has two
            "blocks": 4,
            "calls": 1,
            "warmup": 1,
            "interval": 0,
            "profiled": True,
            "all_reduces": True,
            "device": "cpu",
            "coursework": True,
            "variants": [
                *("naive", "flat", "overlap"),
                *({"wrapper": {"name": "bucketed", "bucket_size_mb": s}} for s in (0.01, 0.02, 1)),
                {"wrapper": {"name": "bucketed", "comm_hook": "peer-copy"}},
                {"wrapper": {"name": "bucketed", "comm_hook": "auto"}},
                {"wrapper": "torch-ddp", "optimizer": "zero-redundancy"},
                {"wrapper": "bucketed", "optimizer": "sharded"},
                SHARDED,
                {"wrapper": "fsdp2", "compile": "blocks"},
                "fully-sharded",
                {"wrapper": {"name": "fully-sharded", "replicas": 2}, "optimizer": OFFLOADED},
                {"optimizer": SHARDED["optimizer"] | {"offload_state": True}},
                {
                    "wrapper": "fully-sharded",
                    "optimizer": {"name": "adamw", "update_in_backward": True},
                },
                {
                    "wrapper": "fully-sharded",
                    "optimizer": {"name": "shard_optim:AdamW", "update_in_backward": True},
                },
                {
                    "wrapper": "flat",
                    "checkpoint_blocks": 1,
                    "keep_attention": True,
                    "loss": "chunked",
                    "attention": "flash",
                },
            ],
            **PROVEN,
        },
    )
    (case,) = experiment.cases(**values)
    with pytest.MonkeyPatch.context() as patched:
        folder = tmp_path_factory.mktemp("case")
        patched.chdir(folder)
        rows = experiment.run(case, print)
    json.dumps(rows, allow_nan=False)
    return case, rows, folder


def frame_of(case, rows) -> pd.DataFrame:
    about = {"case_key": case.key, "label": case.label, "status": "ok", "error": None}
    flat = [{**about, **row, **row.get("ended", {}), "config": dict(case.config)} for row in rows]
    return to_frame(flat)


@pytest.mark.processes
def test_every_variant_is_proven_weighed_and_timed(case) -> None:
    case, rows, folder = case
    by_name = {row["variant"]: row for row in rows}
    skipped = by_name.pop("BucketedDDP(comm_hook=peer-copy)")
    assert skipped["ended"]["status"] == "skipped"
    assert "GPUs of one host" in skipped["ended"]["error"]
    for name, row in by_name.items():
        assert "ended" not in row, (name, row["ended"])
        assert len(row["samples_ms"]) == len(row["host_ms"]) == len(row["round"]) == 4
        assert len(row["optimizer_ms"]) == 1
        assert row["compilations"] == 0
        flash = "attention=flash" in name
        assert row["ran"] == "tiled" if flash else row["ran"] in ("flash", "math"), name
        assert set(row["resolved"]) == {row["settings"][role]["name"] for role in ROLES}
        if not name.startswith("no communication"):
            assert row["weight_error"] < 1e-2
            assert row["losses"] == pytest.approx(by_name["NaiveDDP"]["losses"], rel=1e-4)
    assert by_name["FlatDDP"]["collectives"] == 1
    assert by_name["NaiveDDP"]["in_backward"] == 0
    assert by_name["OverlapDDP"]["in_backward"] == by_name["NaiveDDP"]["collectives"]
    assert len(list(folder.glob("*.trimmed.json.gz"))) == len(by_name)


@pytest.mark.processes
def test_profiled_steps_say_which_gathers_were_late(case) -> None:
    case, rows, _ = case
    frame = frame_of(case, rows)
    tables = {table.title: table.frame for table in experiments.get("train-step").tables(frame)}
    counts = tables["Gathers in one profiled step"].set_index("variant")["gathers (count)"]
    # Two blocks, embedding and head, in forward at least.
    assert counts["FullyShardedDataParallel"] >= 4
    assert counts["FSDP2, compile=blocks"] >= 4
    assert len(counts) == 5, "nothing else gathers parameters"


@pytest.mark.parametrize("name", ["adamw", "shard-optim-adamw", "sgd", "muon"])
def test_an_optimizer_updates_everything_and_its_state_is_predicted(name: str) -> None:
    device = torch.device("cpu")
    variant = of.read({"optimizer": name}, {})
    config = {"size": "custom", "batch": 2, "sequence": 16, **TINY}
    with training(variant, config, device) as steps:
        before = {key: value.clone() for key, value in steps.parameters().items()}
        for _ in range(2):
            steps.step()
        for key, value in steps.parameters().items():
            assert not torch.equal(value, before[key]), key
        held = sum(
            value.nbytes
            for state in steps.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim
        )
        assert held == steps.state_bytes
        assert held < 8 * steps.numel or name == "adamw"


def test_state_in_host_memory_is_weighed_apart(case) -> None:
    case, rows, _ = case
    frame = frame_of(case, rows)
    tables = {table.title: table.frame for table in experiments.get("train-step").tables(frame)}
    memory = tables["Memory per rank at its moments"]
    away = memory[memory["variant"].str.contains("offload_state")]
    after = away[away["moment"] == "after the optimizer step"].set_index("variant")
    assert len(after) == 2
    assert (after["optimizer state (GiB)"] == 0).all()
    held, predicted = after["state in host memory (GiB)"], after["predicted there (GiB)"]
    assert (abs(held - predicted) < 0.03 * predicted).all()
    # A mesh of two groups of one rank each divides nothing; two ranks of one group halve it.
    assert held.max() == pytest.approx(2 * held.min(), rel=0.05)
    assert memory[~memory.index.isin(away.index)]["state in host memory (GiB)"].isna().all()


@pytest.mark.processes
def test_tables_relate_each_variant_to_its_step_without_communication(case) -> None:
    case, rows, _ = case
    frame = frame_of(case, rows)
    experiment = experiments.get("train-step")
    tables = {table.title: table.frame for table in experiment.tables(frame)}
    steps = tables["Training steps"].set_index("variant")
    medians = {
        row["variant"]: statistics.median(row["samples_ms"]) for row in rows if "ended" not in row
    }
    expected = medians["FlatDDP"] - medians["no communication"]  # the table's are rounded
    assert steps.loc["FlatDDP", "exposed communication (ms)"] == pytest.approx(expected, abs=0.01)
    assert steps.loc["BucketedDDP(comm_hook=peer-copy)", "status"] == "skipped"
    memory = tables["Memory per rank at its moments"].set_index(["variant", "moment"])
    after = memory.xs("after the optimizer step", level="moment")
    sharded = "ShardedOptimizer(reduce_gradients, overlap=next-forward)"
    assert len(memory) == 4 * (len(rows) - 1)
    full = frame.set_index("variant")["memory"]["FlatDDP"][3]["state_bytes"]
    half = frame.set_index("variant")["memory"][sharded][3]["state_bytes"]
    assert half == pytest.approx(full / 2, rel=0.1)
    assert not after.loc[["FlatDDP", "NaiveDDP"], "prediction missed"].any()
    published = tables["Step times for comparison by column"].set_index("implementation")
    assert list(published.columns[:6]) == [
        *("model_size", "d_model", "num_layers", "world_size"),
        *("avg_step_time_ms", "speedup_vs_naive"),
    ]
    assert published.loc["naive", "speedup_vs_naive"] == pytest.approx(1.0)
    assert "overlap_individual" in published.index
    (fitted,) = bucket_model.table(frame).to_dict("records")
    assert fitted["predicted least overhead T* (ms)"] >= 0
    pictures = experiment.figures(frame)
    assert {picture.name for picture in pictures} >= {"train_steps", "train_step_memory"}
    for picture in pictures:
        assert picture.is_timelines or png_bytes(picture.figure)


def test_the_picture_is_of_the_rank_that_waited_least() -> None:
    ranks = [
        {
            **{f"{name}_ms": value + rank for name in ("communication", "hidden", "idle")},
            "exposed_ms": exposed,
            "overlap_ratio": 0.5,
            "timeline": {"begin_ns": 5 + rank, "window_ns": 9, "exposed_ns": exposed},
            "spans": "kernels",
        }
        for rank, (value, exposed) in enumerate([(5.0, 30.0), (4.0, 2.0)])
    ]
    row = over_ranks(ranks)
    assert (row["drawn_rank"], row["timeline"]["drawn"]) == (1, 1)
    shown = row["timeline"]["ranks"]
    assert [(rank["exposed_ns"], rank["offset_ns"]) for rank in shown] == [(30.0, 0), (2.0, 1)]
    assert (row["exposed_ms"], row["exposed_min_ms"]) == (30.0, 2.0)


def test_the_slowest_and_fullest_rank_counts() -> None:
    def rank(ms: float, held: int) -> dict[str, object]:
        moment = {"moment": "end of forward", "state_bytes": held, "allocated_bytes": None}
        return {
            "variant": "FlatDDP",
            "samples_ms": [ms],
            "host_ms": [ms / 2],
            "optimizer_ms": [1.0],
            "device_allocations": 0,
            "compilations": 0,
            "peak_gib": ms,
            "memory": [moment],
        }

    row = merged([rank(3.0, 10), rank(4.0, 5)])
    assert (row["samples_ms"], row["host_ms"], row["peak_gib"]) == ([4.0], [2.0], 4.0)
    assert row["memory"][0]["state_bytes"] == 10


def wrong_trainings(rank, world_size):
    """What the proof says of trainings that are wrong, and of one that is right; on the way, that
    a variant that was let go of leaves no wrapper with its buckets behind."""
    import ddp_lite
    from bench_harness.training import build

    device = torch.device("cpu")
    config = {"size": "custom", **TINY}
    expected = proof.definition(of.ADAMW, config, device, steps=proof.STEPS)
    said = [proof.disagreement(of.read("flat", {}), expected, config, device)[0]]
    wrapped = build._wrapped

    def silent(variant, workload):  # nothing is averaged
        made = wrapped(variant, workload)
        made.module, made.finish = workload.module, lambda: None
        made.close()
        return made

    def lazy(variant, workload):  # one parameter is never updated
        made = wrapped(variant, workload)
        made.optimizer.param_groups[0]["params"].pop()
        return made

    for kind in ("torch-ddp", "flat"):
        with build.training(of.read(kind, {}), proof.small(config), device) as steps:
            steps.step()
    del steps
    gc.collect()
    wrappers = (torch.nn.parallel.DistributedDataParallel, ddp_lite.DataParallelBase)
    assert not [each for each in gc.get_objects() if isinstance(each, wrappers)]

    def late(variant, workload):  # a last step that is not a number
        made = wrapped(variant, workload)
        last, counts = made.optimizer.param_groups[0]["params"][-1], iter(range(9))

        def spoil(*_):
            if next(counts) == proof.STEPS - 2:
                last.data.fill_(float("nan"))

        made.optimizer.register_step_post_hook(spoil)
        return made

    for fault in (silent, lazy, late):
        build._wrapped = fault
        try:
            said.append(proof.disagreement(of.read("flat", {}), expected, config, device)[0])
        finally:
            build._wrapped = wrapped
    return said


def test_wrong_training_is_found_before_it_is_timed() -> None:
    for outcome in run_ranks(wrong_trainings, 2):
        right, silent, lazy, late = outcome.value
        assert right is None
        assert "must be those of plain averaging" in silent
        assert "must be those of plain averaging" in lazy
        assert "but got an error of inf: [" in late


def test_losses_that_are_no_numbers_or_zero() -> None:
    assert proof.relative_error([1.0, float("nan")], [1.0, 1.0]) == math.inf
    assert proof.relative_error([1.0], [math.inf]) == math.inf
    assert proof.relative_error([0.0, 2.0], [0.0, 2.0]) == 0.0
    assert proof.relative_error([0.5, 2.0], [0.0, 2.0]) == 0.25


def losses_beside_one_another(rank, world_size):
    """What a case keeps of variants whose first losses are these."""
    from bench_harness.training.measure import _compare_losses

    losses = [[1.0, 2.0], [1.0, float("nan")], [1.0, 2.0], [1.0, 3.0]]
    rows = [{"variant": str(number), "losses": each} for number, each in enumerate(losses)]
    _compare_losses([of.read("naive", {})] * 4, rows)
    json.dumps(rows, allow_nan=False)
    return [row.get("ended", {}).get("error") for row in rows]


def test_a_variant_whose_losses_are_no_numbers_takes_no_other_along() -> None:
    (outcome,) = run_ranks(losses_beside_one_another, 1)
    assert outcome.value == [
        None,
        "the first losses must be finite, but got [1.0, nan]",
        None,
        "the first losses must be those of 0, [1.0, 2.0], within 0.001, but got [1.0, 3.0]",
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"wrapper": {"name": "fully-sharded", "communication": "peer-copy"}},
        {"wrapper": {"name": "fsdp2", "symmetric_memory": True}},
        {
            "optimizer": {
                "name": "sharded",
                "reduce_gradients": True,
                "communication": "peer-copy",
            }
        },
        {"products": "float8-rows", "precision": "bf16"},
    ],
)
def test_settings_of_other_machines_skip_the_variant(
    settings: dict[str, object],
) -> None:
    """It must not run over something else."""
    unmet = "peer-copy must have GPUs|must have a group of NCCL|float8 products must have a GPU"
    if not hasattr(FSDPModule, "set_symm_mem_for_comm"):  # torch 2.11
        unmet += "|symmetric_memory must have a torch whose FSDP2"
    variant = of.read(settings, {})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with (
            pytest.raises(CaseSkipped, match=unmet),
            training(
                variant, {"size": "custom", "batch": 2, "sequence": 16, **TINY}, torch.device("cpu")
            ),
        ):
            pass
    finally:
        dist.destroy_process_group()


def test_a_variant_that_fails_alone_makes_its_row_an_error() -> None:
    from bench_harness import runner
    from bench_harness.process import Outcome

    rows = [{"variant": "a"}, {"variant": "b", "ended": {"status": "error", "error": "off"}}]
    value = {"rows": rows, "machine_before": {}, "machine_after": {}}
    outcome = Outcome(status="ok", seconds=1.0, value=value, error=None, detail=None)
    found = runner._rows(outcome, {"experiment": "toy"})
    assert [(row["status"], row["error"]) for row in found] == [("ok", None), ("error", "off")]
    assert all("ended" not in row for row in found)


@pytest.mark.parametrize("bucket_size_mb", [0.02, 1])
def test_sharded_gradients_are_weighed_once_they_are_reduced(bucket_size_mb: float) -> None:
    """However many buckets wait for the step, no gradient is missed or counted twice."""
    from bench_harness.training.measure import weigh_alone

    optimizer = {**SHARDED["optimizer"], "bucket_size_mb": bucket_size_mb}
    config = {
        **TINY, "size": "custom", "batch": 2, "sequence": 16, "device": "cpu", "world_size": 2,
        "first_step": False,
        "variants": [of.read({"optimizer": optimizer}, {}).table()],
    }  # fmt: skip
    (row,) = weigh_alone(config)
    before = next(m for m in row["memory"] if m["moment"] == "before the optimizer step")
    assert before["gradient_bytes"] == pytest.approx(before["predicted_gradient_bytes"], rel=0.03)


def test_the_first_step_makes_the_optimizers_state() -> None:
    """Alone on a CPU, where sizes of tensors are weighed; later steps hold the state throughout."""
    from bench_harness.training.measure import weigh_alone

    variant = {"wrapper": "bucketed", "optimizer": "sharded"}
    held = {}
    for first_step in (True, False):
        options = {"sizes": ("custom",), "variants": (variant,), "lower_bound": False, **TINY}
        cases = experiments.get("train-step").cases(
            **options, world_sizes=(2,), alone=True, first_step=first_step, device="cpu"
        )
        (row,) = weigh_alone(cases[0].config)
        held[first_step] = [moment["state_bytes"] for moment in row["memory"]]
        predicted = [moment["predicted_state_bytes"] for moment in row["memory"]]
        assert predicted == pytest.approx(held[first_step], rel=0.03)
    state = held[False][3]
    assert state > 0
    assert held == {True: [0, 0, 0, state], False: [0, state, state, state]}


def test_nothing_is_left_of_a_variant_when_the_next_one_is_weighed(monkeypatch) -> None:
    """On a GPU it would be subtracted from what the next one holds."""
    from bench_harness.training import moments
    from bench_harness.training.build import Training
    from bench_harness.training.measure import weigh_alone

    left = []

    def held_before(device: torch.device) -> int:
        gc.collect()
        left.append(sum(isinstance(each, Training) for each in gc.get_objects()))
        return 0

    monkeypatch.setattr(moments, "held_before", held_before)
    cases = experiments.get("train-step").cases(
        sizes=("custom",),
        variants=("torch-ddp",),
        world_sizes=(2,),
        alone=True,
        device="cpu",
        **TINY,
    )
    assert len(weigh_alone(cases[0].config)) == 2  # it and the step without communication
    assert left == [0, 0]


@pytest.mark.parametrize(
    ("variant", "stage"),
    [
        ({}, 0),
        ({"optimizer": {"name": "sharded"}}, 1),
        (SHARDED, 2),
        ({"wrapper": "fully-sharded"}, 3),
        ({"wrapper": {"name": "fully-sharded", "reshard_after_forward": False}}, 3),
    ],
    ids=["replicas", "state", "gradients", "parameters", "parameters kept"],
)
def test_what_one_of_two_ranks_holds_at_each_moment_is_predicted(variant, stage) -> None:
    """Weighed on rank 0 alone, in a group whose collectives move nothing."""
    from bench_harness.training.measure import weigh_alone

    settings = of.read(variant, {})
    assert settings.zero_stage == stage
    config = {
        **TINY, "d_model": 64, "d_ff": 256, "size": "custom", "batch": 2, "sequence": 16,
        "device": "cpu", "world_size": 2, "first_step": False,
        "variants": [settings.table()],
    }  # fmt: skip
    (row,) = weigh_alone(config)
    for moment in row["memory"]:
        for part in ("parameter", "gradient", "state"):
            held, predicted = moment[f"{part}_bytes"], moment[f"predicted_{part}_bytes"]
            assert held == pytest.approx(predicted, rel=0.03), (moment["moment"], part)
    kept = row["memory"][-1]["gradient_bytes"]
    assert (kept == 0) == (stage == 2)


def averages_with(rank: int, world_size: int) -> dict[str, str]:
    """What bucketed wrappers say of themselves."""
    said = {}
    for name in ("collectives", "auto"):
        variant = of.read({"wrapper": {"name": "bucketed", "comm_hook": name}}, {})
        wrapped = constructors.construct("wrapper", variant.wrapper, torch.nn.Linear(2, 2))
        said[name] = wrapped.explain()
    return said


class InDtype(torch.nn.Module):
    """A wrapper of somebody else."""

    def __init__(self, module: torch.nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.inner, self.compute_dtype = module, compute_dtype


def test_an_imported_wrapper_gets_the_dtype_that_a_text_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "somebody", sys.modules[__name__])
    variant = of.read({"wrapper": {"name": "somebody:InDtype", "compute_dtype": "bf16"}}, {})
    wrapped = constructors.construct("wrapper", variant.wrapper, torch.nn.Linear(2, 2))
    assert wrapped.compute_dtype is torch.bfloat16


@pytest.mark.processes
def test_without_a_comm_hook_the_collectives_of_published_rows_are_measured() -> None:
    """By name, because ddp-lite's own default takes copies where they are possible."""
    for outcome in run_ranks(averages_with, 2):
        assert "coalesced in place (collectives: as comm_hook asks)" in outcome.value["collectives"]
        assert "(collectives: copies are between GPUs" in outcome.value["auto"]


class Exits(torch.nn.Module):
    """A wrapper of somebody else, which ends the process."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *_: object) -> torch.Tensor:
        raise SystemExit(3)


def proven_beside_one_that_exits(rank: int, world_size: int) -> list[str | None]:
    sys.modules["somebody"] = sys.modules[__name__]
    variants = [of.read(name, {}) for name in ("naive", "somebody:Exits")]
    rows = [{"variant": "first"}, {"variant": "second"}]
    config = {"size": "custom", "batch": 2, "sequence": 16, **TINY}
    measure._prove(variants, rows, config, torch.device("cpu"), lambda text: None)
    return [row.get("ended", {}).get("error") for row in rows]


class RaisesOnRank1(Exits):
    """A wrapper of somebody else, for whose rank 1 the others wait."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            raise RuntimeError("broke")
        return self.module(*inputs)


def proven_on_one_rank_alone(rank: int, world_size: int) -> None:
    sys.modules["somebody"] = sys.modules[__name__]
    measure._PATIENCE_OF_FAILED = timedelta(seconds=1)
    config = {"size": "custom", "batch": 2, "sequence": 16, **TINY}
    variants = [of.read("somebody:RaisesOnRank1", {})]
    measure._prove(variants, [{"variant": "it"}], config, torch.device("cpu"), lambda text: None)


@pytest.mark.processes
def test_a_wrapper_that_raises_on_one_rank_is_named_before_the_case_is_late() -> None:
    outcomes = run_ranks(proven_on_one_rank_alone, 2, check=False, timeout=20.0)
    assert "RuntimeError: it: RuntimeError: broke" in outcomes[1].error


def test_a_wrapper_that_exits_takes_no_other_variant_along() -> None:
    (outcome,) = run_ranks(proven_beside_one_that_exits, 1)
    assert outcome.value == [None, "SystemExit: 3"]
