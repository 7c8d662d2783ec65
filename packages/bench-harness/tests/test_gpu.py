"""The experiments on GPUs: device events, kernels, allocator history, NCCL."""

import json
import pickle

import pytest
import torch

from bench_harness import experiments
from bench_harness.display.plots import png_bytes
from bench_harness.report.frame import to_frame

TINY = {"d_model": 128, "d_ff": 512, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
pytestmark = pytest.mark.gpu


@pytest.fixture
def run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(name, **options):
        experiment = experiments.get(name)
        rows = []
        if "interval" in experiment.Options.__dataclass_fields__:
            options = {"interval": 0.0, **options}
        for case in experiment.cases(device="cuda", **options):
            found = experiment.run(case, print)
            json.dumps(found, allow_nan=False)
            about = {"case_key": case.key, "label": case.label, "status": "ok"}
            rows += [{**about, **row, "config": dict(case.config)} for row in found]
        frame = to_frame(rows)
        for figure in experiment.figures(frame):
            assert figure.is_timelines or png_bytes(figure.figure)
        return frame, {table.title: table.frame for table in experiment.tables(frame)}

    return run


def test_model_has_both_clocks(run):
    frame, tables = run(
        "model",
        sizes=("custom",),
        sequences=(64,),
        precisions=("fp32", "tf32", "bf16"),
        attentions=("naive", "flash"),
        warmups=(2,),
        samples=3,
        **TINY,
    )
    for wall, device in zip(frame["samples_ms"], frame["samples_device_ms"], strict=True):
        assert all(d <= w for w, d in zip(wall, device, strict=True))
    assert tables["Time per phase"]["MFU (%)"].dropna().between(0, 100).all()


def test_attention(run):
    variants = (
        *("flashattn-triton", "flashattn-triton-portable", "flashattn-triton-compiled", "naive"),
        *("naive-compiled", "flex", "sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-math"),
    )
    frame, tables = run(
        "attention",
        sequences=(256,),
        head_dims=(64,),
        heads=2,
        variants=variants,
        passes=("forward", "training forward", "backward", "forward+sum+backward"),
        rep_ms=30.0,
        warmup_ms=10.0,
    )
    assert "ended" not in frame, list(frame["ended"].dropna())
    assert set(frame["variant"]) == set(variants)
    assert (frame["clock"] == "do_bench").all()
    naive = frame[frame["variant"] == "naive"].iloc[0]
    assert naive["saved_bytes"] == pytest.approx(naive["predicted_saved_bytes"], rel=0.1)
    assert len(tables["Attention passes"]) == len(variants)


def test_attention_peers_take_what_they_say(run):
    """FlexAttention and PyTorch's kernels with grouped heads, windows, soft-caps, features."""
    for options in (
        {"features": ("alibi", "bias")},
        {"kv_heads": 2},
        {"window": (64, -1)},
        {"masks": ("full",), "window": (64, 32), "softcap": 20.0},
    ):
        frame, _ = run(
            "attention",
            sequences=(256,),
            head_dims=(64,),
            heads=4,
            variants=("flashattn-triton", "flex", "sdpa-flash"),
            passes=("forward",),
            rep_ms=5.0,
            warmup_ms=1.0,
            **options,
        )
        timed = frame[frame["samples_ms"].notna()]["variant"]
        assert set(timed) >= {"flashattn-triton", "flex"}


def test_running_out_of_memory_has_its_own_type(run):
    with pytest.raises(torch.OutOfMemoryError):
        run("attention", head_dims=(16,), sequences=(2**19,), variants=("naive",))
    torch.cuda.empty_cache()


def test_memory_history_agrees_with_the_allocators_own_figures(run, tmp_path):
    torch.cuda.empty_cache()
    frame, tables = run(
        "memory", sizes=("custom",), sequences=(64,), precisions=("fp32",), modes=("step",), **TINY
    )
    phases = frame[frame["kind"] == "phase"].set_index("phase")
    assert list(phases.index) == ["model", "forward", "backward", "optimizer"]
    parameters = 4 * phases["parameters"].iloc[0]
    assert phases.loc["model", "end_bytes"] == pytest.approx(parameters, rel=0.1)
    # Parameters, gradients, two moments; and the workspace that cuBLAS keeps.
    assert 0.95 * 4 * parameters < phases.loc["optimizer", "end_bytes"] < 4 * parameters + 2**27
    assert any(".py:" in source for source in tables["Largest allocations"]["allocated by"])
    stacks = tables["Stacks of the largest allocations"]["stack, innermost first"]
    assert stacks.str.endswith("_pass").all()
    with (tmp_path / "memory_snapshot.pickle").open("rb") as file:
        assert pickle.load(file)["device_traces"]


@pytest.mark.parametrize("attention", ["naive", "sdpa", "flash"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_predicts_what_is_kept_for_backward(run, precision, attention):
    _, tables = run(
        "memory",
        sizes=("custom",),
        batch=4,
        sequences=(512,),
        precisions=(precision,),
        modes=("step",),
        attention=attention,
        **TINY | {"d_model": 512, "d_ff": 2048, "num_heads": 8, "vocab_size": 2000},
    )
    (kept,) = tables["Kept for backward"].to_dict("records")
    # cuBLAS keeps a workspace of at most 32 MiB; attention's logarithms may be padded.
    assert -1 < kept["kept (MiB)"] - kept["predicted (MiB)"] < 40
    assert kept["predicted (MiB)"] > 80
    assert not kept["prediction missed"]
    assert not tables["Peak memory per phase"]["prediction missed"].any()


def test_matmul_kernels_dominate_backward(run):
    frame, _ = run(
        "profile",
        sizes=("custom",),
        sequences=(256,),
        **TINY | {"d_model": 1024, "d_ff": 4096, "num_heads": 8},
    )
    phases = frame[frame["kind"] == "phase"].set_index("phase")
    assert (phases["spans"] == "GPU kernels").all()
    assert phases.loc["backward", "matmul_share"] > 50
    assert phases.loc["optimizer", "matmul_share"] == 0
    assert {"attention.scores", "attention.softmax", "attention.output"} <= set(
        frame["range"].dropna()
    )


@pytest.mark.multi_gpu
def test_recorded_steps_train_alike(run):
    variants = [
        {"wrapper": wrapper, "cuda_graph": True}
        for wrapper in (
            "torch-ddp",
            "fully-sharded",
            {"name": "fully-sharded", "prefetch": 2},
            {"name": "fully-sharded", "communication": "peer-copy"},
        )
    ]
    frame, tables = run(
        "train-step",
        sizes=("custom",),
        batches=(2,),
        sequences=(64,),
        precision="bf16",
        compile="blocks",
        rounds=1,
        blocks=2,
        calls=2,
        warmup=2,
        profiled=True,
        variants=variants,
        **TINY,
    )
    assert "ended" not in frame, list(frame["ended"].dropna())
    assert frame["settings"].map(lambda settings: settings["cuda_graph"]).all()
    lines = frame.set_index("variant")
    assert (lines["host_ms"].map(min) < lines["samples_ms"].map(min)).all()
    parts = tables["Where the time of one profiled step goes"]
    assert (parts[parts["part"] == "optimizer"]["time (ms)"] > 0).all()
    copies = lines[lines.index.str.contains("communication=peer-copy")]
    assert (copies["communication_ms"] > 0).all(), "replayed copies and signals are found"


@pytest.mark.multi_gpu
def test_train_step(run):
    frame, tables = run(
        "train-step",
        sizes=("custom",),
        batches=(2,),
        sequences=(64,),
        precision="bf16",
        rounds=1,
        blocks=2,
        calls=2,
        warmup=2,
        profiled=True,
        variants=(
            "naive",
            "flat",
            "overlap",
            "bucketed",
            {"wrapper": {"name": "bucketed", "wire_dtype": "bf16"}},
            {"wrapper": {"name": "bucketed", "comm_hook": "peer-copy"}},
            {
                "optimizer": {
                    "name": "sharded",
                    "reduce_gradients": True,
                    "communication": "peer-copy",
                }
            },
            {"wrapper": "torch-ddp", "optimizer": "zero-redundancy"},
            {"optimizer": {"name": "sharded", "reduce_gradients": True, "overlap": "next-forward"}},
            {"wrapper": "fsdp2", "compile": "blocks"},
            "fully-sharded",
        ),
        **TINY,
    )
    assert "ended" not in frame, list(frame["ended"].dropna())
    lines = frame.set_index("variant")
    assert (lines["spans"] == "GPU kernels").all()
    assert lines.loc["no communication", "communication_ms"] == 0
    # One after another on one stream after backward: nothing is left to hide under but copies.
    assert lines.loc["FlatDDP", "exposed_ms"] > 0.5 * lines.loc["FlatDDP", "communication_ms"]
    memory = tables["Memory per rank at its moments"]
    assert (memory["peak until then (GiB)"] >= memory["allocated (GiB)"]).all()


def test_a_rank_is_weighed_alone(run):
    frame, _ = run(
        "train-step",
        sizes=("custom",),
        sequences=(64,),
        world_sizes=(4,),
        alone=True,
        variants=("torch-ddp", {"wrapper": "bucketed", "optimizer": "sharded"}),
        **TINY,
    )
    state = {row["variant"]: row["memory"][3]["state_bytes"] for _, row in frame.iterrows()}
    assert state["BucketedDDP + ShardedOptimizer"] < 0.3 * state["torch DDP"]


@pytest.mark.multi_gpu
def test_allreduce(run):
    frame, tables = run("allreduce", sizes_mb=(1, 4, 16), samples=4, warmup=2)
    assert set(frame["backend"]) == {"nccl"}
    assert (tables["Collectives"]["bus bandwidth (GB/s)"] > 0).all()
