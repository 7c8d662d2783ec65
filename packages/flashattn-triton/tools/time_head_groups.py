"""Times the forward kernel with its heads in groups of several sizes, on a cool GPU.

    python packages/flashattn-triton/tools/time_head_groups.py results/head_groups.jsonl

``hopper/balance.py`` chooses the size by a calculation; tests/test_hopper_balance.py compares it
with the rows of this tool. Needs a GPU of compute capability 9.0. A row, one problem: the median in
milliseconds by size, and FlashAttention-3's if fa3-fwd is installed. All take turns in random
order, two timed calls each, after pauses of four times as long, so that the GPU's power does not
limit its clock.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench_harness.environment import describe, measured_on
from flashattn_triton.hopper import forward
from flashattn_triton.mask_and_bias import NOTHING, Given
from flashattn_triton.problem import new_problem

# (head_dim, value head_dim, batch, query heads, key heads, length), sizes.
PROBLEMS = [
    ((128, 128, 64, 16, 16, 512), (2, 3, 6, 16, 44, 66, 102, 132)),
    ((128, 128, 32, 16, 16, 1024), (2, 3, 6, 30, 33, 51, 66)),
    ((128, 128, 16, 16, 16, 2048), (2, 3, 6, 17, 24, 30, 33, 66)),
    ((128, 128, 8, 16, 16, 4096), (3, 4, 8, 16, 17, 24, 32)),
    ((128, 128, 4, 16, 16, 8192), (4, 8, 9, 12, 16)),
    ((128, 128, 2, 16, 16, 16384), (2, 4, 5, 6, 8)),
    ((128, 128, 1, 16, 16, 16384), (2, 4, 5, 6)),
    ((128, 128, 8, 32, 8, 4096), (8, 16, 17, 32)),
    ((64, 64, 64, 16, 16, 512), (2, 6, 66)),
    ((64, 64, 32, 16, 16, 1024), (2, 3, 6, 33)),
    ((64, 64, 16, 16, 16, 2048), (26, 32, 44, 53, 96)),
    ((64, 64, 8, 16, 16, 4096), (13, 16, 24, 32, 44, 48)),
    ((64, 64, 4, 16, 16, 8192), (6, 8, 12, 16, 24, 25)),
    ((64, 64, 2, 16, 16, 16384), (3, 6, 8, 12, 13, 16)),
    ((64, 64, 1, 16, 16, 16384), (6, 8, 13, 16)),
    ((96, 96, 4, 16, 16, 8192), (4, 8, 9, 12)),
    ((192, 128, 4, 16, 16, 8192), (4, 8, 9, 12)),
    ((256, 256, 8, 16, 16, 4096), (4, 8, 16, 17)),
    ((256, 256, 4, 16, 16, 8192), (4, 6, 8, 9, 12)),
    ((256, 256, 2, 16, 16, 16384), (2, 4, 5, 6)),
]
# The same, packed.
PACKED = [
    ((128, 128, 64, 16, 16, 512), (1, 2, 4, 8, 16)),
    ((128, 128, 32, 16, 16, 1024), (1, 2, 4, 8, 16)),
    ((128, 128, 16, 16, 16, 2048), (1, 2, 4, 8, 16)),
    ((128, 128, 8, 16, 16, 4096), (1, 2, 4, 8, 16)),
    ((64, 64, 40, 16, 4, 777), (1, 2, 4, 8, 16)),
]
NAMES = ("head_dim", "value_dim", "batch", "heads", "kv_heads", "length")
PAUSE = 4.0  # times what ran before it
FA3 = 0  # in place of a size


def samples(call: Callable[[], object], cache: torch.Tensor) -> list[float]:
    """Milliseconds of two calls after one that is not counted; caches are overwritten before."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(3)]
    for begin, end in events:
        cache.zero_()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events[1:]]


def measure(
    problem: Sequence[int], sizes: Sequence[int], seconds: float, *, packed: bool
) -> dict[str, Any]:
    """Medians of a row. All outputs of this package are the same, bit for bit."""
    head_dim, value_dim, batch, heads, kv_heads, length = problem
    torch.manual_seed(0)
    given, longest = NOTHING, (length, length)
    if packed:
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * length
        given = Given(cu_seqlens_q=starts, cu_seqlens_k=starts)
        batch, length = 1, batch * length
    like: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    tensors = (
        torch.randn(batch, heads, length, head_dim, **like),
        torch.randn(batch, kv_heads, length, head_dim, **like),
        torch.randn(batch, kv_heads, length, value_dim, **like),
    )
    calls: dict[int, Callable[[], Any]] = {}
    outputs = []
    for size in sizes:
        asked = new_problem(head_dim=head_dim, longest=longest, causal=True)
        with mock.patch.object(forward, "heads_at_a_time", return_value=size):
            call = forward.HopperForwardCall(*tensors, asked, given)
        calls[size] = functools.partial(call, tensors, given)
        outputs.append(calls[size]()[0])
    assert all(torch.equal(out, outputs[0]) for out in outputs)
    with contextlib.suppress(ImportError):
        fa3 = importlib.import_module("fa3_fwd_interface")
        heads_last = [x.transpose(1, 2).contiguous() for x in tensors]
        calls[FA3] = lambda: fa3.flash_attn_func(*heads_last, causal=True)
        if packed:
            tokens = [x[0] for x in heads_last]
            calls[FA3] = lambda: fa3.flash_attn_varlen_func(
                *tokens, starts, starts, *longest, causal=True
            )
        calls[FA3]()
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    found: dict[int, list[float]] = {size: [] for size in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for size in random.sample(list(calls), len(calls)):
            begin = time.perf_counter()
            found[size] += samples(calls[size], cache)
            time.sleep(PAUSE * (time.perf_counter() - begin))
    medians = {size: round(statistics.median(each), 4) for size, each in found.items()}
    beside = {"fa3_fwd_ms": medians.pop(FA3)} if FA3 in medians else {}
    return {"median_ms": {str(size): each for size, each in medians.items()}, **beside}


def main() -> None:
    """Measures all problems."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path, help="file to write")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each problem")
    arguments = parser.parse_args()
    machine = describe()
    with arguments.rows.open("w", encoding="utf-8") as file:
        for number, (problem, sizes) in enumerate([*PROBLEMS, *PACKED]):
            packed = number >= len(PROBLEMS)
            row = {
                "measured_on": measured_on(machine),
                "commit": (machine["git"] or {}).get("commit"),
                "programs": torch.cuda.get_device_properties(0).multi_processor_count,
                **dict(zip(NAMES, problem, strict=True)),
                "packed": packed,
                **measure(problem, sizes, arguments.seconds, packed=packed),
            }
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
