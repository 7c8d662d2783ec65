"""Every shipped tiling compiled for GPUs that are not there: fits, and spills no more than said.

The compiler runs in other processes, because Triton's interpreter, which the tests use where there
is no GPU, replaces it in this one; most start when tests are collected. Under a causal mask a
kernel contains the loop without a mask, so that this takes all loops; ``python compile_kernels.py
--shipped`` prints all registers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from background import Background
from flashattn_triton import triton_versions
from flashattn_triton.configs import tiling_for
from flashattn_triton.problem import MAX_HEAD_DIM_BACKWARD

pytestmark = pytest.mark.nightly

SCRIPT = Path(__file__).with_name("compile_kernels.py")
# KB of shared memory of one block (CUDA C++ programming guide, table of compute capabilities).
SHARED_MEMORY = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # fp16 has the tiles of bf16
# Bytes of stack that a thread may use: 16 registers, saved around the loops rather than in them.
MOST_STACK = 64
# fp32 operands are split into three parts; wide ones do not fit the registers, also within loops.
MOST_STACK_FP32 = {64: MOST_STACK, 128: 576, 256: 512}
# Triton 3.9 has ptxas 13.4 allocate registers at a lower level, because of an error in it. At that
# program's own level this kernel has 40 bytes, and under Triton 3.6 48. Keys: Triton's version,
# architecture, head_dim, dtype, kernel.
MORE_STACK = {((3, 9), a, 256, "bf16", "key_pass_kernel"): 104 for a in (90, 100)}


# Rows of the table: head_dim and dtype. Above 512 there is no backward pass.
KINDS = [
    *((head_dim, dtype) for head_dim in (64, 128, 256) for dtype in DTYPES),
    (512, "bf16"),
    (576, "bf16"),
]


def requests(architecture: int) -> list[dict[str, Any]]:
    """Every row of the table that the architecture selects, both backward forms included."""
    found = []
    for head_dim, name in KINDS:
        tiling = tiling_for(SHARED_MEMORY[architecture] * 1024, head_dim, DTYPES[name])
        request: dict[str, Any] = {
            "architecture": architecture,
            "head_dim": head_dim,
            "dtype": name,
            "tiling": tiling.pack(),
            "options": {"causal": True},
            "backward": head_dim <= MAX_HEAD_DIM_BACKWARD,
        }
        found.append(request)
        if tiling.fused is not None:
            two_pass = {"options": {"causal": True, "deterministic": True}, "forward": False}
            found.append(request | two_pass)
    return found


# With ALiBi slopes, a bias and prefixes, where shared memory is scarce or tiles are wide: the
# pipeline keeps tiles of the bias in shared memory too.
WITH_TENSORS = [(86, 64, "bf16"), (86, 128, "bf16"), (86, 256, "bf16"), (90, 256, "bf16"),
                (86, 256, "fp32")]  # fmt: skip
TENSORS = [
    request | {"tensors": ["alibi_slopes", "bias", "prefix_lengths"]}
    for kind in WITH_TENSORS
    for request in requests(kind[0])
    if kind == (request["architecture"], request["head_dim"], request["dtype"])
]
# With a bias, alone or beside a mask of keys, and the tiles that were measured for it.
WITH_BIAS = [
    {
        "architecture": 90,
        "head_dim": head_dim,
        "dtype": "bf16",
        "tiling": tiling_for(232448, head_dim, torch.bfloat16, bias=True).pack(),
        "options": {"causal": True},
        "backward": False,
        "tensors": tensors,
        "bias": dtype,
    }
    for head_dim in (64, 128)
    for tensors, dtype in ((["bias"], "fp32"), (["bias"], "bf16"), (["bias", "mask"], "fp32"))
]
# Half types of a bias are compared by lines of PTX.
HALF_BIAS = [
    x | {"tensors": ["bias"], "bias": "bf16"}
    for a in (80, 120)
    for x in requests(a)
    if (x["head_dim"], x["dtype"]) == (64, "bf16")
]
COMPILING = Background(
    SCRIPT,
    [
        [x for a in part for x in requests(a)] + more
        for part, more in (
            ((90, 100, 80), TENSORS[:3] + WITH_BIAS),
            ((86, 89, 120), TENSORS[3:] + HALF_BIAS),
        )
    ],
)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return COMPILING.rows()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kernel_compiles(rows: list[dict[str, Any]]) -> None:
    kernels = {"flash_forward_kernel", "preprocess_kernel", "key_pass_kernel", "query_pass_kernel"}
    compiled = {
        (r["architecture"], r["head_dim"], r["dtype"], r["kernel"])
        for r in rows
        if not r["tensors"]
    }
    expected = {
        (a, d, t, k)
        for a in SHARED_MEMORY
        for d, t in KINDS
        for k in (kernels if d <= MAX_HEAD_DIM_BACKWARD else {"flash_forward_kernel"})
    }
    assert compiled == expected


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_gradient_of_a_bias_compiles(rows: list[dict[str, Any]]) -> None:
    compiled = [
        (r["architecture"], r["head_dim"], r["dtype"])
        for r in rows
        if r["kernel"] == "bias_pass_kernel"
    ]
    halves = [(x["architecture"], x["head_dim"], x["dtype"]) for x in HALF_BIAS if x["backward"]]
    assert sorted(compiled) == sorted(WITH_TENSORS + halves)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_shared_memory_suffices(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert row["shared"] <= SHARED_MEMORY[row["architecture"]] * 1024, row


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_registers_suffice(rows: list[dict[str, Any]]) -> None:
    """Of the kernels whose tiles were chosen for this; others with a bias may spill."""
    for row in rows:
        if row["kernel"] == "bias_pass_kernel":
            assert row["stack"] <= MOST_STACK, row
        if row["tensors"]:
            continue
        fp32 = row["dtype"] == "fp32"
        most = MOST_STACK_FP32[row["head_dim"]] if fp32 else MOST_STACK
        kind = (row["architecture"], row["head_dim"], row["dtype"], row["kernel"])
        most = MORE_STACK.get((triton_versions.installed(), *kind), most)
        assert row["stack"] <= most, row


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_bias_leaves_as_many_warps_on_a_multiprocessor(rows: list[dict[str, Any]]) -> None:
    """By registers (65,536 of them) and by shared memory (228 KB, 1 KB of each block reserved)."""

    def warps(row: dict[str, Any]) -> int:
        registers = -(-row["registers"] // 8) * 8 * 32 * row["warps"]
        blocks: int = min(65536 // registers, 228 * 1024 // (row["shared"] + 1024))
        return blocks * row["warps"]

    forward = [r for r in rows if r["kernel"] == "flash_forward_kernel" and r["architecture"] == 90]
    for head_dim in (64, 128):
        kind = [r for r in forward if (r["head_dim"], r["dtype"]) == (head_dim, "bf16")]
        [plain], both = ([r for r in kind if r["tensors"] == t] for t in ([], ["bias"]))
        assert {biased["bias"] for biased in both} == {"fp32", "bf16"}
        for biased in both:
            assert biased["stack"] == 0, biased
            assert warps(biased) >= warps(plain), (biased, plain)


def test_one_version_serves_every_size_of_a_problem() -> None:
    """Batch, heads, lengths, aligned strides, scale and window differ; nothing compiles again.

    Kernels of the portable tier have another version where heads are grouped, in which a program of
    the key pass adds up the heads of its group. Which properties of lengths choose between a few
    versions of the Hopper tier's kernels is said in count_compilations.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, str(SCRIPT.with_name("count_compilations.py"))],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    counts = json.loads(result.stdout)
    any_lengths = {name: counts.pop(name) for name in list(counts) if "/" in name}
    passes = {"flash_forward_kernel": 1, "key_pass_kernel": 1, "query_pass_kernel": 1}
    preprocess = {"preprocess_kernel": 1}
    main = {"hopper_forward_kernel": 1, "hopper_backward_kernel": 1, "postprocess_kernel": 1}
    assert counts == {
        "portable, as many key heads": passes | preprocess,
        "portable, grouped heads": passes,
        "portable, gradient of the logsumexp": preprocess,
        "hopper": main | preprocess,
        "hopper, gradient of the logsumexp": preprocess,
    }
    assert len(any_lengths) == 8
    for name, versions in any_lengths.items():
        narrow = name.endswith(" 64/64")  # with other tiles for few queries
        most = {"hopper_forward_kernel": 5 if narrow else 2, "packed_tiles_kernel": 3}
        most |= dict.fromkeys(("preprocess_kernel", "postprocess_kernel"), 1)
        if name.endswith("dense 128/128"):  # others for few keys
            most |= {"preprocess_kernel": 2, "hopper_backward_kernel": 4}
        for kernel, n in versions.items():
            assert n <= most.get(kernel, 2), (name, versions)
