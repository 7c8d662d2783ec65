"""Recomputed blocks: what forward keeps and backward's peak, predicted beside measured."""

from __future__ import annotations

import pytest
import torch

from bench_harness.core import Row
from bench_harness.display.plots import png_bytes
from bench_harness.experiments import recomputation
from bench_harness.report.frame import to_frame
from bench_harness.stats import with_summary
from bench_harness.training import moments, settings
from bench_harness.training.build import training
from bench_harness.training.moments import MOMENTS

CONFIG = {
    "size": "custom", "d_model": 64, "d_ff": 128, "num_layers": 6, "num_heads": 2,
    "vocab_size": 128, "batch": 2, "sequence": 32,
}  # fmt: skip
CPU = torch.device("cpu")


def predicted(**given: object) -> Row:
    variant = settings.read({"loss": "chunked", **given}, {})
    with training(variant, CONFIG, CPU) as steps:
        return moments.predicted_recomputation(steps, variant)


def kept_bytes(blocks: int) -> int:
    """What forward saves for backward, each storage once, without parameters."""
    variant = settings.read({"loss": "chunked", "checkpoint_blocks": blocks}, {})
    with training(variant, CONFIG, CPU) as steps:
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
    fallen = kept_bytes(1) - kept_bytes(blocks)
    expected = (
        predicted(checkpoint_blocks=1)["predicted_kept_bytes"]
        - predicted(checkpoint_blocks=blocks)["predicted_kept_bytes"]
    )
    groups = 6 - 6 // blocks
    assert expected == groups * 2 * 32 * 64 * 4, "one input of a block per group"
    assert fallen == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    "given",
    [
        {"precision": "bf16"},
        {"attention": "naive"},
        {"loss": "logits"},
    ],
)
def test_what_the_arithmetic_does_not_cover_has_no_prediction(given: dict[str, str]) -> None:
    assert predicted(**given) == {}


def rows(measured_gib: float) -> list[Row]:
    """A case of two sizes of groups, resting at 3 GiB, whose backward should need 2 GiB more."""
    gib = 2**30
    found: list[Row] = []
    for blocks in (0, 1, 2):
        moment = {"parameter_bytes": gib, "state_bytes": 2 * gib}
        memory = [
            {"moment": MOMENTS[1], **moment, "allocated_bytes": 4 * gib, "peak_bytes": 4 * gib},
            {"moment": MOMENTS[2], **moment, "allocated_bytes": 4 * gib}
            | {"peak_bytes": measured_gib * gib},
        ]
        found.append(
            {"case_key": "1", "label": "x", "status": "ok", "variant": str(blocks)}
            | {"checkpoint_blocks": blocks, "memory": memory, "samples_ms": [4.0, 5.0, 6.0]}
            | {"predicted_kept_bytes": gib, "predicted_backward_bytes": 2 * gib}
        )
    return found


@pytest.mark.parametrize(("measured_gib", "missed"), [(5.1, False), (5.4, True), (4.6, True)])
def test_peaks_stand_beside_their_predictions(measured_gib: float, missed: bool) -> None:
    done = with_summary(to_frame(rows(measured_gib)))
    (table,) = recomputation.tables(done)
    assert table.frame["blocks recomputed together"].tolist() == ["none", "1", "2"]
    assert table.frame["kept by forward (GiB)"].tolist() == [1, 1, 1]
    assert table.frame["peak of backward, predicted (GiB)"].tolist() == [5, 5, 5]
    assert table.frame["prediction missed"].tolist() == [missed] * 3
    (picture,) = recomputation.figures(done)
    assert png_bytes(picture.figure).startswith(b"\x89PNG")


def test_one_size_of_groups_is_no_study() -> None:
    done = with_summary(to_frame(rows(5.0)[:1]))
    assert recomputation.tables(done) == []
    assert recomputation.figures(done) == []
