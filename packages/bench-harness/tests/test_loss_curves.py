"""Loss curves of ways to train, against a reference, over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tools.pages.loss_curves import WINDOWS, LossCurves, Options, corpus

from bench_harness.core import Row
from bench_harness.display.plots import png_bytes
from bench_harness.report.frame import to_frame

CURVES = LossCurves()
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
    (table, by_seed), (picture,) = CURVES.tables(frame), CURVES.figures(frame)
    assert table.frame["variant"].tolist() == ["fast"]
    assert table.frame["within the spread"].tolist() == [within]
    assert table.frame["largest difference (nats)"].tolist() == pytest.approx([abs(shift)])
    assert table.frame["spread of seeds there (nats)"].tolist() == pytest.approx([0.1])
    assert len(by_seed.frame) == 4
    assert png_bytes(picture.figure).startswith(b"\x89PNG")


def test_ranks_that_end_apart_are_named() -> None:
    table, _ = CURVES.tables(to_frame(rows(0.0, agree=False)))
    assert table.frame["ranks end alike"].tolist() == [False]


def test_the_fastest_step_trains_like_the_reference(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two ranks, two seeds, bf16 weights from fp32 shards: real text, and its loss falls."""
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {**TINY, "batch": 4, "sequence": 32, "steps": 20, "lr": 3e-3}
    (case,) = CURVES.cases(**options, seeds=(0, 1), device="cpu")
    found = CURVES.run(case, lambda text: None)
    assert len(found) == 4
    assert all(row["ranks_agree"] for row in found)
    for row in found:
        assert len(row["losses"]) == 20
        assert row["losses"][-1] < row["losses"][0] - 0.5
    about = {"experiment": case.experiment, "case_key": case.key, "label": case.label}
    frame = to_frame({**about, "status": "ok", **row, "config": case.config} for row in found)
    table, _ = CURVES.tables(frame)
    assert table.frame["within the spread"].tolist() == [True]


def test_every_python_holds_the_text() -> None:
    text = corpus().tobytes().decode()
    assert len(text) > 300_000
    assert "assignment statement" in text


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"steps": WINDOWS - 1}, f"steps must be at least {WINDOWS}, but got 9"),
        ({"seeds": (1,)}, "seeds must be at least two different numbers"),
        ({"seeds": (1, 1)}, "seeds must be at least two different numbers"),
        ({"variants": ("naive",)}, "variants must be the reference and at least one other"),
    ],
)
def test_options_that_cannot_be_compared_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options(**wrong)
