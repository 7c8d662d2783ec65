"""Where the time of a recorded step goes, on traces made by hand and on a recorded CPU step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import flashattn_triton
from bench_harness.roofline import step_work
from bench_harness.traces import kineto
from bench_harness.traces.step import PARTS, waterfall
from bench_harness.traces.trace import Event, Trace, kind, phase
from bench_harness.workload import language_model, language_model_config
from ddp_lite.peer.signals import signal_kernel

HOST, GPU = (1, 1), (0, 7)


def kernel(name: str, start: int, end: int, launch: int | None = None) -> Event:
    return Event(name, start, end, GPU, end - start, correlation=launch)


def host(name: str, start: int, end: int, thread: tuple[int, int] = HOST) -> Event:
    return Event(name, start, end, thread, end - start)


def test_every_nanosecond_of_a_gpu_step_counts_once() -> None:
    """Kernels on several streams, ranges of the host, copies within and between devices."""
    ms = 1_000_000
    compute = [
        kernel("nvjet_tst_256x128", 10 * ms, 20 * ms),
        kernel("triton_poi_fused_add_0", 15 * ms, 23 * ms),  # 5 ms of it under the product
        kernel("hopper_forward_kernel", 23 * ms, 25 * ms),
        kernel("vectorized_elementwise_kernel", 30 * ms, 31 * ms, 1),  # launched in the loss
        kernel("multi_tensor_apply_kernel", 40 * ms, 44 * ms, 2),  # launched by the optimizer
        kernel("adamw_kernel", 44 * ms, 45 * ms),  # of a recorded step: no host launched it
        kernel("nvjet_tst_64x64", 44 * ms, 45 * ms, 3),  # a product of the optimizer, as in Muon
        kernel("softmax", 50 * ms, 51 * ms, 4),  # launched by another thread during the loss
        kernel("nvjet_outside", 200 * ms, 300 * ms),
    ]
    trace = Trace(
        on_device=True,
        compute=compute,
        operators=compute,
        communication=[kernel("ncclDevKernel_AllGather", 22 * ms, 28 * ms)],
        copies=[
            kernel("Memcpy PtoP (Device -> Device)", 60 * ms, 62 * ms),
            kernel("Memcpy DtoD (Device -> Device)", 63 * ms, 64 * ms),
        ],
        ranges=[host("loss", 1, 5), host("Optimizer.step#AdamW.step", 6, 9)],
        launches={
            1: host("cudaLaunchKernel", 2, 3),
            2: host("cudaLaunchKernel", 7, 8),
            3: host("cuLaunchKernelEx", 8, 9),
            4: host("cudaLaunchKernel", 2, 3, (1, 2)),
        },
    )
    found = waterfall(trace, (5 * ms, 105 * ms))
    assert found == pytest.approx(
        {
            "matrix products": 10,
            "attention": 2,
            "optimizer": 5,
            "loss": 1,
            "norms and elementwise": 3 + 1,
            "copies": 1,
            "communication, exposed": 3 + 2,
            "idle, waiting for the host": 100 - 28,
        }
    )
    assert sum(found.values()) == pytest.approx(100)


def test_kernels_of_flashattn_triton_are_attention() -> None:
    folder = Path(flashattn_triton.__file__).parent
    sources = [file.read_text() for file in folder.rglob("*.py")]
    names = [name for text in sources for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)]
    assert {"hopper_forward_kernel", "key_pass_kernel"} <= set(names)
    assert {kind(name) for name in names} == {"fused attention"}
    assert kind("triton_red_fused_preprocess") == "other"
    assert kind(signal_kernel.__name__) == "communication"


def test_a_recorded_step_on_a_cpu(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    device = torch.device("cpu")
    shape = {"size": "custom", "d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 2}
    config = {**shape, "vocab_size": 256, "batch": 2, "sequence": 32}
    work = language_model(config, device, precision="fp32", chunked_loss=True)
    optimizer = torch.optim.AdamW(work.module.parameters())
    path = tmp_path / "trace.json"
    with kineto.recording(path, device), phase("step", device):
        work.backward(work.loss())
        optimizer.step()
    trace = kineto.load(path)
    found = waterfall(trace, trace.phases("step")[0])
    assert tuple(found) == PARTS
    for part in ("matrix products", "attention", "optimizer", "loss", "norms and elementwise"):
        assert found[part] > 0, part
    assert found["communication, exposed"] == 0


def test_work_of_a_step_with_and_without_recomputation() -> None:
    model = language_model_config({"size": "small", "sequence": 128})
    blocks = 12 * (4 * 768**2 + 3 * 768 * 3072) * 2 * 128
    head = 2 * 128 * 768 * 10_000
    scores = 12 * 128 * 129 // 2 * 768 * 2 * 2
    plain = step_work(model, 1, 128)
    assert plain == {"matrix products": 3 * (blocks + head), "attention": scores * 7 // 2}
    recomputed = step_work(model, 1, 128, recomputed=True)
    assert recomputed["matrix products"] - plain["matrix products"] == blocks
    assert recomputed["attention"] - plain["attention"] == scores
    kept = step_work(model, 1, 128, recomputed=True, keep_attention=True)
    assert kept == recomputed | {"attention": plain["attention"]}
