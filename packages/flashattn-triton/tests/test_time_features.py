"""The tool that times optional features, on a problem that takes no time."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "time_features.py"
pytest.importorskip("bench_harness")
TINY = ["--batch=2", "--tokens=16", "--heads=2", "--head-dim=8", "--turns=3", "--processes=0"]


def test_a_row_for_each_feature_and_pass(tmp_path: Path) -> None:
    main = runpy.run_path(str(TOOL))["main"]
    rows = tmp_path / "rows.jsonl"
    main([str(rows), *TINY])
    found = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert not [row for row in found if "error" in row]
    passes: dict[str, list[str]] = {}
    for row in found:
        passes.setdefault(row["feature"], []).append(row["pass"])
        assert len(row["samples_ms"]) == len(row["plain_samples_ms"]) == 3
        assert row["ratio"] == pytest.approx(row["ms"] / row["plain_ms"])
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    both = [name for name, of_feature in passes.items() if of_feature == ["forward", "both"]]
    assert {"bias and key mask", "key_lengths", "out_dtype=float32", "softcap"} <= set(both)
    assert passes["jvp"] == ["forward"]
    assert passes["deterministic"] == passes["double backward"] == ["both"]
    assert len(passes) == 18


def test_unknown_features_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(TOOL))["main"]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "rows.jsonl"), "--features", "dropout"])
    assert "must be among return_lse" in capsys.readouterr().err
