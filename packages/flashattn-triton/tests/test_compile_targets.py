"""Shipped tilings, compiled for GPUs that are not there: they fit and do not spill.

The compiler runs in other processes, because Triton's interpreter, which the tests use where there
is no GPU, replaces it in this one. This is a cut through the table that takes a minute of compiler
time; ``python compile_kernels.py --shipped`` compiles all of it for all architectures.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flashattn_triton.configs import tiling_for

SCRIPT = Path(__file__).with_name("compile_kernels.py")
# KB of shared memory of one block (CUDA C++ programming guide, table of compute capabilities).
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
CUT = [
    (90, 64, True),
    (90, 128, True),
    (80, 64, True),
    (86, 128, True),
    (89, 64, True),
    (100, 64, True),
    (120, 64, True),
]
# Bytes of stack that a thread may use: 16 registers, saved around the loops rather than in them.
MOST_STACK = 64


def compile_on(architectures: list[int]) -> list[dict[str, Any]]:
    import torch

    requests = [
        {
            "architecture": architecture,
            "head_dim": width,
            "dtype": "bf16",
            "tiling": tiling_for(
                SHARED_MEMORY[architecture] * 1024,
                width,
                torch.bfloat16,
            ).pack(),
            "options": {"causal": is_causal},
        }
        for architecture, width, is_causal in CUT
        if architecture in architectures
    ]
    return run_script(json.dumps(requests))


def run_script(requests: str, *arguments: str) -> list[dict[str, Any]]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        input=requests,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    def results() -> Iterator[list[dict[str, Any]]]:
        with ThreadPoolExecutor(2) as pool:
            yield from pool.map(compile_on, ([90], [80, 86, 89, 100, 120]))

    return [row for part in results() for row in part]


@pytest.mark.slow
def test_every_kernel_compiles(rows: list[dict[str, Any]]) -> None:
    kernels = {"flash_forward_kernel", "prepare_kernel", "key_pass_kernel", "query_pass_kernel"}
    assert {row["kernel"] for row in rows} == kernels
    assert {row["architecture"] for row in rows} == set(SHARED_MEMORY)


@pytest.mark.slow
def test_shared_memory_suffices(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[row["architecture"]] * 1024, row


@pytest.mark.slow
def test_registers_suffice(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["stack"] <= MOST_STACK, row


@pytest.mark.slow
def test_lengths_are_recompiled_for_only_by_divisibility() -> None:
    lengths = [1024, 4096, 2048, 1021, 2043, 64, 77]
    (counts,) = run_script("", "--lengths", *map(str, lengths))
    assert "flash_forward_kernel" in counts
    for name, versions in counts.items():
        assert versions[:3] == [1, 1, 1], name
        assert max(versions) <= 2, name
