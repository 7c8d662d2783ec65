"""Packed sequences on the Hopper tier: the table of tiles, and the kernels on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from flashattn_triton import flash_attention_varlen, triton_versions

pytest.importorskip("triton")
if triton_versions.refusal() is not None:
    pytest.skip(str(triton_versions.refusal()), allow_module_level=True)

from flashattn_triton.hopper.schedule import (
    FIELDS,
    SEQUENCES,
    most_tiles,
    packed_tiles_kernel,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


Lengths = list[tuple[int, int]]


def table_of(
    lengths: Lengths,
    spare: tuple[int, int],
    heads: int,
    group: int,
    rows: tuple[int, int],
    side: int,
) -> Any:
    """The table of queries (side 0) or keys (1) by the definition.

    ``spare``: tokens behind the last sequence, which are one more.
    """
    own = [*lengths, ((spare[0], 0), (0, spare[1]))[side]]
    ends = [list(accumulate(column)) for column in zip(*lengths, strict=True)]
    ends[side].append(ends[side][-1] + spare[side])
    ends[1 - side].append((ends[0][-1], -1)[1 - side])
    order = sorted(range(len(own)), key=lambda i: -own[i][1 - side])
    shapes = []
    for i in order:
        tiles = -(-own[i][side] // rows[side])
        if side == 0 and tiles == 0:  # which has statistics
            tiles = min((*[n for _, n in lengths], spare[1])[i], 1)
        at_a_time = min(max(-(-group // max(tiles, 1)), 1), heads)
        shapes.append((tiles, at_a_time, -(-heads // at_a_time) if tiles else 0))
    groups = sum(n for _, _, n in shapes)
    found: list[list[int]] = []
    for i, (tiles, at_a_time, n_groups) in zip(order, shapes, strict=True):
        (n_queries, n_keys), first = own[i], len(found)
        entry = [first, ends[0][i], n_queries, ends[1][i], n_keys, at_a_time, groups - 1, i]
        found += [entry] * tiles
        groups -= n_groups
    return found


@pytest.mark.parametrize("spare", [(0, 0), (300, 0), (0, 300), (7, 130)], ids=str)
@pytest.mark.parametrize("sequences", [1, 5, SEQUENCES - 1, SEQUENCES + 3])
def test_the_tables_of_tiles(sequences: int, spare: tuple[int, int]) -> None:
    pick, rows = Random(sequences), (128, 64)
    lengths = [
        (pick.choice([0, 1, pick.randint(0, 400)]), pick.choice([0, 128, pick.randint(0, 400)]))
        for _ in range(sequences)
    ]
    expected = [table_of(lengths, spare, 6, 4, rows, side) for side in (0, 1)]
    starts = [
        torch.tensor([0, *accumulate(column)], dtype=torch.int32, device=DEVICE)
        for column in zip(*lengths, strict=True)
    ]
    tokens = [int(starts[side][-1]) + spare[side] for side in (0, 1)]
    for side in (0, 1):
        assert len(expected[side]) <= most_tiles(tokens[side], sequences, rows[side])
    before = 1 + len(expected[0])
    table = torch.full((before + 1 + len(expected[1]), FIELDS.value), -1, dtype=torch.int32)
    table = table.to(DEVICE)
    packed_tiles_kernel[(2 * -(-(sequences + 1) // SEQUENCES),)](
        *starts, table, sequences, *tokens, 6, 4, before * FIELDS.value,
        ROWS=rows[0], KEY_ROWS=rows[1], FIELDS=FIELDS.value, SEQUENCES=SEQUENCES,
    )  # fmt: skip
    for part, entries in zip(table.split([before, len(table) - before]), expected, strict=True):
        assert part[0, 0] == len(entries)
        assert part[1:].tolist() == entries


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture
def attend() -> Iterator[Callable[..., Any]]:
    """The tier by name on a case; whatever it allocates is full of NaN, or of large integers."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")

    def on(case: Any, **keywords: Any) -> Callable[..., Any]:
        longest = [max(column) for column in zip(*case.seqlens, strict=True)]
        starts = case.cu_seqlens("cuda")
        if torch.equal(*starts):  # as one tensor, which says that lengths are equal
            starts = (starts[0], starts[0])
        given = {**case.keywords, "implementation": "hopper", "return_lse": True, **keywords}
        return lambda q, k, v: flash_attention_varlen(q, k, v, *starts, *longest, **given)

    torch.use_deterministic_algorithms(True)
    try:
        yield on
    finally:
        torch.use_deterministic_algorithms(False)


RAGGED = ((300, 300), (0, 0), (1, 1), (1023, 799), (64, 512), (0, 77), (65, 0), (2000, 2000))
LENGTHS = {
    "ragged": RAGGED,
    "one": ((777, 777),),
    "one token each": ((1, 1),) * 9,
    "whole tiles": ((128, 128), (256, 384), (512, 512)),
    "no keys": ((130, 0), (5, 0)),
    "no queries": ((0, 130), (0, 5)),
    "many": ((37, 37), (200, 130), (129, 129)) * 60,
    "long": ((3000, 3000), (56, 56)),
}

pytest_gpu = pytest.mark.gpu
all_kernels = pytest.mark.parametrize(
    "head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str
)


@pytest_gpu
@all_kernels
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(
    name: str,
    causal: str,
    head_dims: tuple[int, int],
    packed_case: Any,
    attend: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    case = packed_case((4, 2), LENGTHS[name], head_dims, "bf16", causal=causal)
    assert_close_to_oracle(attend(case), make_inputs(case, "cuda"))


@pytest_gpu
@pytest.mark.parametrize(
    ("heads", "head_dims", "options"),
    [
        ((6, 1), (96, 96), {"causal": "top-left"}),
        ((5, 5), (40, 40), {"causal": "bottom-right"}),
        ((16, 4), (64, 64), {"causal": "top-left", "scale": -0.2}),
        ((4, 2), (128, 128), {"causal": "top-left", "window": (100, None)}),
        ((4, 2), (128, 128), {"window": (200, 130)}),
        ((4, 2), (80, 80), {"window": (None, 70), "causal": "bottom-right-window"}),
        ((6, 1), (144, 72), {"causal": "top-left", "window": (100, None)}),
        ((4, 2), (192, 128), {"window": (200, 130), "softcap": 5.0}),
        ((6, 1), (248, 200), {"causal": "top-left", "window": (100, None)}),
        ((4, 2), (256, 256), {"window": (200, 130), "softcap": 5.0}),
    ],
    ids=str,
)
def test_heads_and_masks(
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    options: dict[str, Any],
    packed_case: Any,
    attend: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    case = packed_case(heads, RAGGED, head_dims, "fp16", **options)
    assert_close_to_oracle(attend(case), make_inputs(case, "cuda"))


@pytest_gpu
@pytest.mark.timeout(120, method="thread")  # ends the process even if a kernel never does
@pytest.mark.parametrize("seed", range(10))
def test_random_lengths(
    seed: int, packed_case: Any, attend: Any, make_inputs: Any, assert_close_to_oracle: Any
) -> None:
    pick = Random(seed)
    for _ in range(5):
        lengths = tuple(
            (pick.randint(0, 400), pick.randint(0, 400)) for _ in range(pick.randint(1, 12))
        )
        head_dims = pick.choice([(64, 64), (128, 128), (192, 128), (256, 256)])
        causal = pick.choice(["none", "top-left", "bottom-right"])
        case = packed_case((4, 2), lengths, head_dims, "bf16", causal=causal)
        assert_close_to_oracle(attend(case), make_inputs(case, "cuda"))


@pytest_gpu
@all_kernels
@pytest.mark.parametrize("causal", ["none", "top-left"])
def test_what_other_sequences_hold_does_not_matter(
    causal: str, head_dims: tuple[int, int], packed_case: Any, attend: Any, make_inputs: Any
) -> None:
    """NaN and infinity in the middle one; the others' results stay what they are, bit for bit."""
    lengths = ((200, 200), (100, 100), (333, 333))
    case = packed_case((4, 2), lengths, head_dims, "bf16", causal=causal)
    inputs = make_inputs(case, "cuda")
    grad_out = inputs.grad_out.clone()
    results = []
    for poison in (None, math.nan, math.inf):
        leaves = [x.detach().clone() for x in (inputs.query, inputs.key, inputs.value)]
        if poison is not None:
            for x in (*leaves, grad_out):
                x[200:300] = poison
        leaves = [x.requires_grad_() for x in leaves]
        out, lse = attend(case)(*leaves)
        gradients = torch.autograd.grad(out, leaves, grad_out)
        rows = [out, *gradients, lse.transpose(0, 1)]
        results.append([torch.cat([x[:200], x[300:]]) for x in rows])
    for found in results:
        assert all(torch.isfinite(x).all() for x in found)
        for i in (0, 2, 3, 4):  # dQ is added up in any order
            assert torch.equal(found[i], results[0][i])
        torch.testing.assert_close(found[1], results[0][1], rtol=2**-7, atol=1e-5)


@pytest_gpu
@pytest.mark.timeout(120, method="thread")  # ends the process even if a kernel never does
@all_kernels
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_deterministic_gradients(
    causal: str,
    head_dims: tuple[int, int],
    packed_case: Any,
    attend: Any,
    make_inputs: Any,
    assert_close_to_oracle: Any,
) -> None:
    """They are right, and bit-identical when repeated."""
    case = packed_case((4, 2), RAGGED, head_dims, "bf16", causal=causal)
    inputs = make_inputs(case, "cuda")
    attention = attend(case, deterministic=True)
    assert_close_to_oracle(attention, inputs)
    leaves = [inputs.query, inputs.key, inputs.value]
    first, *again = [
        torch.autograd.grad(attention(*leaves)[0], leaves, inputs.grad_out) for _ in range(10)
    ]
    for gradients in again:
        assert all(torch.equal(a, b) for a, b in zip(gradients, first, strict=True))


@pytest_gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_agrees_with_the_sequences_one_by_one(head_dim: int, attend: Any, packed_case: Any) -> None:
    """Strided views, no gradient of the logsumexp, a limit that is longer than any sequence."""
    from flashattn_triton import flash_attention

    lengths = ((513, 513), (40, 40), (1200, 1200))
    case = packed_case((4, 2), lengths, (head_dim, head_dim), "bf16", causal="top-left")
    tokens = sum(n for n, _ in lengths)
    wide = torch.randn(tokens, 8, head_dim + 8, device="cuda").bfloat16()
    leaves = [wide[:, a:b, :head_dim].requires_grad_() for a, b in ((0, 4), (4, 6), (6, 8))]
    starts = case.cu_seqlens("cuda")
    grad_out = torch.randn(tokens, 4, head_dim, device="cuda").bfloat16()
    keywords: dict[str, Any] = {"causal": True, "implementation": "hopper"}
    out = flash_attention_varlen(*leaves, *starts, tokens, tokens, **keywords)
    actual = (out, *torch.autograd.grad(out, leaves, grad_out))
    first = 0
    for n, _ in lengths:
        rows = slice(first, first + n)
        one = [x[rows].detach().unsqueeze(0).requires_grad_() for x in leaves]
        expected = flash_attention(*one, layout="bshd", **keywords)
        wanted = torch.autograd.grad(expected, one, grad_out[rows].unsqueeze(0))
        for a, e in zip(actual, (expected, *wanted), strict=True):
            torch.testing.assert_close(a[rows], e.squeeze(0), rtol=2**-6, atol=2**-9)
        first += n


@pytest_gpu
def test_starts_may_lie_anywhere_and_graphs_replay(attend: Any) -> None:
    """``cu_seqlens`` at an address that is no multiple of 16, whose contents change in a graph."""
    spare = torch.zeros(6, dtype=torch.int32, device="cuda")
    starts = spare[1:5]
    contents = [
        torch.tensor(x, dtype=torch.int32) for x in ([0, 100, 101, 500], [0, 300, 300, 500])
    ]
    q, k, v = (torch.randn(500, 4, 64, device="cuda").bfloat16() for _ in range(3))

    def run(implementation: str) -> Tensor:
        return flash_attention_varlen(
            q, k, v, starts, starts, 500, 500, causal=True, implementation=implementation
        )

    starts.copy_(contents[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run("hopper")
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        out = run("hopper")
    for content in contents:
        starts.copy_(content)
        graph.replay()
        torch.testing.assert_close(out, run("triton"), rtol=2**-6, atol=2**-9)
