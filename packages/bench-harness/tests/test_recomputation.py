"""Recomputed blocks: what forward keeps and backward's peak, predicted beside measured."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from tools.pages import recomputation

from bench_harness.core import Row
from bench_harness.report.frame import to_frame
from bench_harness.training import settings
from bench_harness.training.build import training
from bench_harness.training.moments import MOMENTS

CONFIG = {
    "size": "custom", "d_model": 64, "d_ff": 128, "num_layers": 6, "num_heads": 2,
    "vocab_size": 128, "batch": 2, "sequence": 32,
}  # fmt: skip


def row(blocks: int) -> Row:
    variant = {"checkpoint_blocks": blocks, "keep_attention": False, "compile": "off"}
    return {**CONFIG, "settings": variant, "gradient_bytes": 0}


def kept_bytes(blocks: int) -> int:
    """What forward saves for backward, each storage once, without parameters."""
    variant = settings.read({"loss": "chunked", "checkpoint_blocks": blocks}, {})
    with training(variant, CONFIG, torch.device("cpu")) as steps:
        own = {p.untyped_storage().data_ptr() for p in steps.workload.module.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = steps.forward()
        del loss
        return sum(saved.values())


@pytest.mark.parametrize("blocks", [2, 3])
def test_fewer_groups_keep_less(blocks: int) -> None:
    """The prediction falls from one size of groups to the next as what is saved does."""
    few, many = (recomputation.predicted(pd.Series(row(each)))["kept"] for each in (blocks, 1))
    groups = 6 - 6 // blocks
    assert many - few == groups * 2 * 32 * 64 * 4, "one input of a block per group"
    assert kept_bytes(1) - kept_bytes(blocks) == pytest.approx(many - few, rel=0.1)


@pytest.mark.parametrize(("factor", "missed"), [(1.02, False), (1.08, True), (0.92, True)])
def test_peaks_stand_beside_their_predictions(factor: float, missed: bool) -> None:
    rows: list[Any] = []
    for blocks in (0, 1, 2):
        expected = recomputation.predicted(pd.Series(row(blocks)))
        held = {"parameter_bytes": 10.0, "state_bytes": 20.0}
        memory = [
            {"moment": MOMENTS[1], **held, "allocated_bytes": 30 + expected["kept"]},
            {"moment": MOMENTS[2], **held, "peak_bytes": factor * (30 + expected["backward"])},
        ]
        rows.append(row(blocks) | {"status": "ok", "memory": memory, "samples_ms": [4.0, 5.0, 6.0]})
    frame = recomputation.table(to_frame(rows))
    assert frame["blocks recomputed together"].tolist() == ["none", "1", "2"]
    predicted, found = (f"kept by forward{what} (GiB)" for what in (", predicted", ""))
    assert frame[found].tolist() == frame[predicted].tolist()
    assert frame["prediction missed"].tolist() == [missed] * 3
