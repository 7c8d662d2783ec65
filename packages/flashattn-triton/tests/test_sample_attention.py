"""Samples of the Hopper forward kernel: how tools/sample_attention.py counts them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = Path(__file__).resolve().parents[1]
PAGE = PACKAGE.parents[1] / "docs" / "explanations" / "kernels.md"
COLUMNS = ("Source", "# Samples", "Instructions Executed", "stall_barrier", "stall_long_sb")
# Two consumers, each with a loop that 100 warps pass, and what lies around them.
CODE = [
    ("MOV R1, R2", 50, 4, 0, 0),
    *[
        ("HGMMA.64x64x16.F32.BF16 R1, R2", 20, 100, 5, 0),
        ("@!P0 MUFU.EX2 R1, R2", 30, 100, 0, 0),
        ("@P1 BRA 0x10", 10, 99, 0, 10),
    ],
    ("STG.E R1", 40, 4, 0, 0),
    *[
        ("HGMMA.64x64x16.F32.BF16 R1, R2", 20, 100, 0, 0),
        ("MUFU.EX2 R1, R2", 20, 100, 0, 0),
        ("IADD3 R1, R2", 0, 100, 0, 0),
    ],
    ("EXIT", 0, 4, 0, 0),
    ("SYNCS.ARRIVE R1", 70, 120, 0, 70),  # the producer's loop has no products
]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = PACKAGE / "tools" / "sample_attention.py"
    spec = importlib.util.spec_from_file_location("sample_attention", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def page(code: Sequence[tuple[object, ...]]) -> str:
    lines = [COLUMNS, *code]
    return '"Kernel Name","k"\n' + "\n".join(",".join(f'"{x}"' for x in line) for line in lines)


def test_loops_of_consumers_are_told_from_the_rest(tool: ModuleType) -> None:
    bodies = tool.loops(tool.instructions(page(CODE)))
    assert [[tool.opcode(line) for line in body] for body in bodies] == [
        ["HGMMA", "MUFU", "BRA"],
        ["HGMMA", "MUFU", "IADD3"],
    ]
    found = {row["kind"]: row for row in tool.kinds(bodies)}
    assert found["exponentials"] == {
        "kind": "exponentials", "instructions": 1, "share_pct": 50.0
    }  # fmt: skip
    assert found["matrix products"]["share_pct"] == 35.0
    assert found["waits at barriers"]["share_pct"] == 15.0
    assert found["addresses and others"] == {
        "kind": "addresses and others", "instructions": 1, "share_pct": 0.0
    }  # fmt: skip


def test_no_samples_have_no_loops(tool: ModuleType) -> None:
    assert tool.loops(tool.instructions("")) == []
    assert tool.loops(tool.instructions(page([("EXIT", 1, 1, 0, 0)]))) == []


def test_the_page_shows_the_measured_rows(tool: ModuleType) -> None:
    rows = (PACKAGE / "results" / "forward_samples.jsonl").read_text().splitlines()
    assert tool.table(map(json.loads, rows)) in PAGE.read_text()
