"""The opt-in tuning command: what it tries, what it chooses, and what it writes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashattn_triton import flash_attention, tune
from flashattn_triton.configs import TABLE, Tiles, Tiling
from flashattn_triton.dispatch import GPU, check_tiling
from flashattn_triton.problem import MAX_HEAD_DIM_BACKWARD

HOPPER = GPU(name="a GPU of compute capability 9.0", capability=(9, 0), shared_memory=227 * 1024)
ONE = [Tiles(64, 64, 4, 2)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_it_says_that_it_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune.main([]) == 2
    assert "measures on a GPU" in capsys.readouterr().err


@pytest.mark.parametrize("role", tune.KERNELS)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_candidate_is_compiled_correctly(
    role: str, head_dim: int, dtype: torch.dtype
) -> None:
    shapes = [*tune.candidates(role, head_dim, dtype.itemsize)]
    assert len(shapes) > 1
    safe = Tiles(16, 16, 4, 1)
    for shape in shapes:
        kernels = {"forward": safe, "key_pass": safe, "query_pass": safe, role: shape}
        check_tiling(Tiling(**kernels), HOPPER, dtype)  # raises otherwise


@pytest.mark.parametrize("role", tune.KERNELS)
def test_what_is_shipped_is_a_candidate(role: str) -> None:
    """Of the rows that were measured."""
    for (kilobytes, head_dim, itemsize), tiling in TABLE.items():
        shape = getattr(tiling, role)
        if head_dim > MAX_HEAD_DIM_BACKWARD and role != "forward":
            continue  # no kernel has these shapes
        if kilobytes > 160 and shape is not None:
            shape = dataclasses.replace(shape, use_tma=False)  # with which each is tried as well
            assert shape in [*tune.candidates(role, head_dim, itemsize)], (head_dim, itemsize)


class Here:
    """An executor that runs what it is given at once, in this process."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Takes the pool's arguments."""

    def __enter__(self) -> Here:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to wait for."""

    def submit(self, *_: Any) -> Here:
        return self

    def result(self) -> None:
        """Nothing was compiled."""


Measure = Callable[[tune.Problem, Tiling, str], dict[str, Any]]


def stopwatch(milliseconds: Callable[[str, Tiles, Tiling], float | None]) -> Measure:
    """``tune.measure`` with invented times."""

    def measure(problem: tune.Problem, tiling: Tiling, role: str) -> dict[str, Any]:
        shape = getattr(tiling, role)
        ms = milliseconds(role, shape, tiling)
        return {"role": role, **vars(shape), "ms": ms, "note": ""}

    return measure


@pytest.fixture
def absent_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(tune, "describe_gpu", lambda index: HOPPER)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: HOPPER.name)


@pytest.mark.usefixtures("absent_gpu")
@pytest.mark.parametrize("fused_wins", [False, True])
def test_the_fastest_of_each_kernel_is_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fused_wins: bool
) -> None:
    fastest = Tiles(64, 64, 4, 2)

    def milliseconds(role: str, shape: Tiles, tiling: Tiling) -> float | None:
        if shape.use_tma:
            return None  # does not fit
        two_pass = tiling.fused is None and role == "query_pass"
        penalty = 1.0 if two_pass and fused_wins else 0.0
        return (1.0 if shape == fastest else 2.0) + penalty

    monkeypatch.setattr(tune, "measure", stopwatch(milliseconds))
    table = tmp_path / "table.json"
    arguments = ["--head-dim", "64", "--mask", "causal", "--output", str(table)]
    assert tune.main(arguments) == 0
    written = json.loads(table.read_text())
    (entry,) = written["entries"]
    tiling = Tiling.unpack(entry["tiling"])
    assert tiling.forward == tiling.key_pass == tiling.query_pass == fastest
    assert tiling.fused == (fastest if fused_wins else None)
    assert (entry["head_dim"], entry["dtype"], entry["causal"]) == (64, "bf16", True)
    assert {row["role"] for row in written["rows"]} == set(tune.KERNELS)
    assert written["gpu"] == HOPPER.name


@pytest.mark.gpu
def test_a_table_is_written_and_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune, "candidates", lambda role, head_dim, itemsize: ONE)
    table = tmp_path / "table.json"
    problem = ["--head-dim", "64", "--mask", "causal", "--length", "512", "--heads", "2"]
    assert tune.main([*problem, "--jobs", "2", "--output", str(table)]) == 0
    written = json.loads(table.read_text())
    assert any(row["ms"] is not None for row in written["rows"])
    tiling = Tiling.unpack(written["entries"][0]["tiling"])
    q, k, v = (torch.randn(1, 2, 200, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    out = flash_attention(q, k, v, causal=True, tiling=tiling)
    expected = flash_attention(q, k, v, causal=True, implementation="reference")
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
