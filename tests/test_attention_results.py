"""The rows of scripts/bench_attention.py: merging, naming, statistics."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script's module, which imports its neighbours by name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("attention_rows")


def test_a_mark_is_missing(rows: Any) -> None:
    with pytest.raises(ValueError, match="must hold the marks"):
        rows.rendered("no marks", None)


def row(ms: float, **changes: Any) -> dict[str, Any]:
    cell = {"batch": 1, "heads": 2, "length": 512, "head_dim": 64, "causal": True, "dtype": "bf16"}
    where = {"set": "lengths", "implementation": "flashattn-triton", "gpu": "one", "commit": "a"}
    return {**cell, **where, "pass": "both", "ms": ms, **changes}


def test_newer_rows_replace_the_same_cell(rows: Any) -> None:
    old = [row(1.0), row(2.0, **{"pass": "forward"}), row(3.0, length=1024), row(4.0, gpu="other")]
    new = [row(5.0, commit="b", kv_heads=None)]
    assert rows.merged(old, new) == [old[2], old[3], *new]
    assert rows.merged(old, [row(5.0, kv_heads=1)]) == [*old, row(5.0, kv_heads=1)]


def test_grouped_heads_are_told_apart(rows: Any) -> None:
    frame = rows.frame_of([row(1.0), row(2.0, kv_heads=1), row(3.0, kv_heads=None, length=1024)])
    assert list(frame["problem"]) == ["1 × 2 × 512", "1 × 2/1 × 512", "1 × 2 × 1024"]


def test_lost_cells_are_listed(rows: Any) -> None:
    peer = {"implementation": "SDPA flash"}
    given = [row(1.1), row(1.0, **peer), row(0.5, length=1024), row(1.0, length=1024, **peer)]
    frame = rows.frame_of(given)
    assert "slower in 1 of 2 cells" in rows.lost_cells(frame, 1.0)
    assert "1.100 against 1.000 ms, 1.10" in rows.lost_cells(frame, 1.0)
    assert "slower in 0 of 2 cells" in rows.lost_cells(frame, 1.2)


def test_a_slow_problem_has_quantiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    bench = importlib.import_module("bench_attention")
    monkeypatch.setattr(bench.triton.testing, "do_bench", lambda *_, **__: [7.0])
    samples = bench.sampled_by_the_board(lambda: None, [], 5)
    assert bench.statistics_of(samples)["ms"] == 7.0
