"""Times the forward pass with a bias or ALiBi in several tile shapes, against plain attention.

    python tools/compare_tiles.py bias 64 64x128w4s2 128x64w8s2 -- alibi 64 64x64w4s3

Groups of feature ("plain", "alibi" or "bias"), head_dim and shapes (queries x keys, warps, stages)
are separated by "--". The portable tier attends over 2 x 16 heads x 8,192 tokens, bf16, causal;
the bias is (1, heads, queries, keys). Everything is measured in turns, so that all shapes see the
same clocks: a row has the median over the turns, divided by the median of plain attention in the
shipped shape. "wrong" follows a shape whose output is not the one of the shipped shape. About a
second of compilation, and a tenth of measurement a turn, for each shape.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from flashattn_triton import Tiles, flash_attention
from flashattn_triton.configs import tiling_for
from flashattn_triton.dispatch import describe_gpu

BATCH, HEADS, LENGTH = 2, 16, 8192
TURNS = 7
# As a share of the largest value: half types err by 2^-8, and a wrong shape by order 1.
AGREEMENT = 0.03


def parsed(shape: str) -> Tiles:
    """``"64x128w4s2"`` as what it stands for.

    Raises:
        SystemExit: it is no shape.
    """
    match = re.fullmatch(r"(\d+)x(\d+)w(\d+)s(\d+)", shape)
    if match is None:
        raise SystemExit(f"a shape must be like 64x128w4s2, but got {shape!r}.")
    queries, keys, warps, stages = map(int, match.groups())
    return Tiles(queries, keys, warps, stages, use_tma=True)


def calls(feature: str, inputs: list[Tensor], shapes: list[str]) -> dict[str, Callable[[], Tensor]]:
    """The forward pass in the shipped shape, and in each of ``shapes``."""
    query, key, value = inputs
    head_dim = query.shape[-1]
    slopes, bias = None, None
    if feature == "alibi":
        slopes = torch.exp2(torch.arange(1, HEADS + 1, device="cuda") * (-8 / HEADS))
    elif feature == "bias":
        bias = torch.randn(1, HEADS, LENGTH, LENGTH, device="cuda", dtype=query.dtype)
    memory = describe_gpu(torch.cuda.current_device()).shared_memory
    shipped = tiling_for(memory, head_dim, query.dtype, bias=feature == "bias")

    def attend(tiles: Tiles) -> Tensor:
        out: Tensor = flash_attention(
            query,
            key,
            value,
            layout="bhsd",
            causal=True,
            implementation="triton",
            tiling=replace(shipped, forward=tiles),
            alibi_slopes=slopes,
            bias=bias,
        )
        return out

    given = {"shipped": shipped.forward} | {shape: parsed(shape) for shape in shapes}
    found: dict[str, Callable[[], Tensor]] = {}
    expected = attend(shipped.forward)
    most = AGREEMENT * expected.abs().max().item()
    for name, tiles in given.items():
        try:
            error = (attend(tiles) - expected).abs().max().item()
        except OutOfResources as refusal:
            print(f"{feature} {head_dim} {name}: does not fit: {refusal}")
            continue
        mark = "" if error <= most else " wrong"
        found[name + mark] = functools.partial(attend, tiles)
    return found


@torch.no_grad()
def main(arguments: list[str]) -> int:
    """Measures, and prints one row per shape."""
    groups = [list(group) for dash, group in itertools.groupby(arguments, "--".__eq__) if not dash]
    if not groups or any(len(g) < 2 or g[0] not in ("plain", "alibi", "bias") for g in groups):
        print(__doc__, file=sys.stderr)
        return 2
    torch.manual_seed(0)
    inputs = {
        int(head_dim): [
            torch.randn(BATCH, HEADS, LENGTH, int(head_dim), device="cuda", dtype=torch.bfloat16)
            for _ in range(3)
        ]
        for _, head_dim, *_ in groups
    }
    everything: dict[tuple[str, int, str], Callable[[], Tensor]] = {}
    for feature, width, *shapes in [*(["plain", str(d)] for d in inputs), *groups]:
        found = calls(feature, inputs[int(width)], shapes)
        everything |= {(feature, int(width), name): call for name, call in found.items()}
    times: dict[tuple[str, int, str], list[float]] = {key: [] for key in everything}
    for turn in range(TURNS):
        for key, call in list(everything.items())[:: 1 if turn % 2 == 0 else -1]:
            times[key].append(
                triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median")
            )
    medians = {key: statistics.median(ms) for key, ms in times.items()}
    for (feature, head_dim, name), ms in medians.items():
        ratio = ms / medians["plain", head_dim, "shipped"]
        print(f"{feature:6} {head_dim:4} {name:20} {ms:7.3f} ms {ratio:6.3f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
