"""Loss curves of ways to train, against a reference, over seeds."""

from __future__ import annotations

from pathlib import Path

import pytest
from tools.pages import loss_curves

from bench_harness.core import Row
from bench_harness.display.plots import png_bytes
from bench_harness.report.frame import to_frame
from bench_harness.training import settings

TINY = {"size": "custom", "d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2}


def rows(shift: float, *, agree: bool = True) -> list[Row]:
    """Two seeds 0.1 apart, of a reference and of a variant whose losses are shifted."""
    return [
        {
            "experiment": "loss-curves", "case_key": "1", "label": "x", "status": "ok",
            "variant": f"{way}, seed {seed}", "way": way, "seed": seed,
            "config": {"steps": 20},
            "losses": [3.0 - 0.05 * step + 0.1 * seed + added for step in range(20)],
            "ranks_agree": agree or way == "plain",
        }
        for seed in (0, 1)
        for way, added in (("plain", 0.0), ("fast", shift))
    ]  # fmt: skip


@pytest.mark.parametrize(("shift", "within"), [(0.09, True), (-0.09, True), (0.11, False)])
def test_a_curve_is_held_against_what_seeds_differ_by(shift: float, within: bool) -> None:
    frame = to_frame(rows(shift))
    (line,) = loss_curves.table(frame).to_dict("records")
    assert line["variant"] == "fast"
    assert line["within the spread"] == within
    assert line["largest difference (nats)"] == pytest.approx(abs(shift))
    assert line["spread of seeds there (nats)"] == pytest.approx(0.1)
    assert png_bytes(loss_curves.figure(frame)).startswith(b"\x89PNG")


def test_ranks_that_end_apart_are_named() -> None:
    table = loss_curves.table(to_frame(rows(0.0, agree=False)))
    assert table["ranks end alike"].tolist() == [False]


def test_the_fastest_step_trains_like_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two ranks, two seeds, bf16 weights from fp32 shards: real text, and its loss falls.

    The reference and the bf16 step without compiler; the others need a GPU for their products.
    """
    monkeypatch.chdir(tmp_path)
    different = {**TINY, "batch": 4, "sequence": 32, "steps": 20, "seeds": [0, 1]}
    optimizer = {"optimizer": {"name": "adamw", "lr": 3e-3}}
    chosen = [settings.read(each, optimizer) for each in loss_curves.VARIANTS[:2]]
    variants = [variant.table() | {"compile": "off"} for variant in chosen]
    case = loss_curves.case(variants, "cpu", **different)
    found = loss_curves.run(case)
    assert len(found) == 4
    assert all(row["ranks_agree"] for row in found)
    for row in found:
        assert len(row["losses"]) == 20
        assert row["losses"][-1] < row["losses"][0] - 0.5
    assert loss_curves.table(to_frame(found))["within the spread"].tolist() == [True]


def test_every_python_holds_the_text() -> None:
    text = loss_curves.corpus().tobytes().decode()
    assert len(text) > 300_000
    assert "assignment statement" in text
