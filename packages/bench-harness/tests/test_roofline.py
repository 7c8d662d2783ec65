"""The position of a measurement against the limits of its device."""

from __future__ import annotations

import pandas as pd
import torch

from bench_harness import roofline
from bench_harness.experiments.attention_measure import Problem


def test_the_longer_of_compute_and_memory_is_the_limit() -> None:
    frame = pd.DataFrame(
        {
            "median_ms": [4.0, 4.0, float("nan")],
            "flops": [2e12, None, 1e12],
            "least_bytes": [1e9, 1e9, None],
            "ceiling_tflop_s": 1000.0,
            "bandwidth_gb_s": 500.0,
        }
    )
    found = roofline.with_roofline(frame)
    assert found["roof_ms"].tolist()[:2] == [2.0, 2.0]  # 2 TFLOP at 1000 TFLOP/s; 1 GB at 500 GB/s
    assert found["roof_share"].tolist()[:2] == [50.0, 50.0]
    assert found["intensity"].tolist()[:2] == [2000.0, 0.0]
    assert found["bound"].isna().tolist() == [False, False, True]
    frame["flops"] = [4e12, 0, 0]
    assert roofline.with_roofline(frame)["bound"][0] == "compute"
    assert roofline.with_roofline(frame)["roof_share"][0] == 100.0


def test_the_ceiling_is_that_of_the_clock_at_which_the_samples_ran() -> None:
    frame = pd.DataFrame(
        {
            "median_ms": 4.0,
            "flops": 2e12,
            "least_bytes": 1.0,
            "ceiling_tflop_s": 1000.0,
            "bandwidth_gb_s": 500.0,
            "ceiling_clock_mhz": [1600.0, 1600.0, None],
            "samples_sm_clock_mhz": [[800.0, 800.0, 1600.0], None, [900.0]],
        }
    )
    found = roofline.with_roofline(frame)
    assert found["roof_ms"].tolist() == [4.0, 2.0, 2.0], "half of the clock is half of the rate"
    assert found["clock_mhz"].tolist()[0] == 800.0


def test_rows_without_rates_are_left_as_they_are() -> None:
    frame = pd.DataFrame({"median_ms": [1.0], "flops": [1]})
    assert list(roofline.with_roofline(frame)) == ["median_ms", "flops"]


def test_copies_and_products_have_rates() -> None:
    assert roofline.sustained_rate(torch.device("cpu"), torch.float32) > 0
    assert roofline.memory_bandwidth(torch.device("cpu"), 2**20) > 0


def test_least_traffic() -> None:
    assert sum(roofline.step_bytes(10).values()) == 4 * 10 * (1 + 2 + 7)
    problem = Problem(
        batch=2, heads=4, kv_heads=2, sequence=8, head_dim=16, value_head_dim=8, dtype="bf16",
        causal=True,
    )  # fmt: skip
    tensors = problem.tensors(torch.device("cpu"))
    query, key, value, out = (tensor.nbytes for tensor in tensors)
    assert problem.least_bytes("forward") == query + key + value + out
    assert problem.least_bytes("backward") == 2 * (query + key + value) + 2 * out
    assert problem.least_bytes("forward+backward") == 3 * (query + key + value + out)
