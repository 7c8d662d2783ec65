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
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    assert {line["experiment"] for line in lines} == {"attention-options"}
    assert lines[0]["config"] == {"batch": 2, "heads": 2, "tokens": 16, "head_dim": 8}
    found = [row for line in lines for row in line["rows"]]
    assert not [row for row in found if "error" in row]
    passes: dict[str, list[str]] = {}
    for row in found:
        passes.setdefault(row["feature"], []).append(row["pass"])
        assert len(row["samples_ms"]) == len(row["plain_samples_ms"]) == 3
        assert row["ratio"] == pytest.approx(row["ms"] / row["plain_ms"])
        assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
        assert row["error_rms"] < 1e-5
        assert row["tier"] == "tiled"
    both = [name for name, of_feature in passes.items() if of_feature == ["forward", "both"]]
    assert {"bias and key mask", "key_lengths", "out_dtype=float32", "softcap"} <= set(both)
    assert passes["jvp"] == ["forward"]
    assert passes["deterministic"] == passes["double backward"] == ["both"]
    assert len(passes) == 19


def test_what_is_wrong_or_late_is_a_row_and_not_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = runpy.run_path(str(TOOL))
    main, limits = given["main"], given["LIMITS"]
    limits.update(dict.fromkeys(limits, -1.0))
    main([str(tmp_path / "wrong.jsonl"), *TINY, "--features", "sinks"])
    main([str(tmp_path / "late.jsonl"), *TINY, "--features", "window", "--seconds", "0"])
    for name, message in (("wrong", "differs from reference"), ("late", "not measured within 0 s")):
        (line,) = (tmp_path / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        (row,) = json.loads(line)["rows"]
        assert row["status"] == "failed"
        assert message in row["error"]
        assert "ms" not in row
    assert "differs from reference" in capsys.readouterr().out


def test_unknown_features_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(TOOL))["main"]
    with pytest.raises(SystemExit):
        main([str(tmp_path / "rows.jsonl"), "--features", "dropout"])
    assert "must be among return_lse" in capsys.readouterr().err
