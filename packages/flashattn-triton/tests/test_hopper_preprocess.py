"""The kernels around the Hopper tier's backward pass; interpreted where there is no GPU."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashattn_triton.hopper import backward_common
from flashattn_triton.hopper.preprocess import ROWS, postprocess_kernel, preprocess_kernel
from gluon_simulator import Machine, load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, HEADS = 2, 3
DENSE = {"PACKED": False, "FIELDS": 8, "QUERIES": 128}
#: Of preprocess_kernel: zeros are written everywhere.
ZEROS = {
    "ORDERED": False,
    "STORES": False,
    "EARLY": False,
    "KEYS": 128,
    "IS_CAUSAL": False,
    "HAS_LEFT": False,
    "BOTTOM_RIGHT": False,
}


def strides_div8(x: Tensor) -> list[int]:
    return [s // 8 for s in x.stride()[:3]]


@pytest.mark.parametrize(
    ("n_queries", "head_dim"),
    [(64, 64), (130, 40), (100, 128), (200, 72), (130, 192), (70, 136), (70, 256), (64, 200)],
)
@pytest.mark.parametrize("adds", [False, True])
def test_the_sum_of_dq_is_put_in_order(n_queries: int, head_dim: int, adds: bool) -> None:
    width = 64 if head_dim <= 64 else 128
    parts = 1
    if head_dim > 128:
        width, parts = 64, -(-head_dim // 64)
    n_padded = -(-n_queries // 128) * 128
    dq = torch.randn(BATCH, HEADS, n_padded, parts * width)
    # As wgmma leaves (64, 64) blocks: of row r and column c, c // 8, r // 16, r % 8, c % 8 // 2,
    # r % 16 // 8, c % 2; before those, blocks of rows and of columns.
    blocks = dq.reshape(BATCH * HEADS, n_padded // 64, 4, 2, 8, parts * width // 64, 8, 4, 2)
    lying = blocks.permute(0, 1, 5, 6, 2, 4, 7, 3, 8).contiguous().to(DEVICE)
    dtype = torch.float32 if adds else torch.float16
    wide = torch.full((BATCH, n_queries + 1, HEADS, head_dim + 8), math.nan, dtype=dtype)
    found = wide.to(DEVICE)[:, :n_queries, :, :head_dim].transpose(1, 2)
    if adds:
        found.fill_(3.0)
    shape = {
        "WIDTH": width, "NARROW": head_dim < parts * width, "ADDS": adds, "SUM_PARTS": parts,
        "ROWS": ROWS,
    }  # fmt: skip
    sizes = (n_queries, n_padded, HEADS, head_dim // 8)
    programs = BATCH * HEADS * n_padded // ROWS
    strides = strides_div8(found)
    postprocess_kernel[(programs,)](lying, found, None, *strides, *sizes, -0.25, **shape, **DENSE)
    expected = (-0.25 * dq[:, :, :n_queries, :head_dim] + (3.0 if adds else 0.0)).to(dtype)
    assert torch.equal(found.cpu(), expected)
    memory = torch.as_strided(found, wide.shape, wide.stride(), 0)
    assert memory[:, n_queries:].isnan().all()
    assert memory[..., head_dim:].isnan().all()


@pytest.mark.parametrize("has_dl", [False, True])
@pytest.mark.parametrize("scale", [0.125, -0.3, 1e-30])
@pytest.mark.parametrize(
    ("n_queries", "head_dim", "sum_parts"),
    [(64, 64, 1), (130, 40, 1), (100, 72, 1), (70, 128, 3), (70, 200, 4)],
)
def test_statistics_and_zeros(
    n_queries: int, head_dim: int, sum_parts: int, scale: float, has_dl: bool
) -> None:
    width = next(width for width in (64, 128, 256) if head_dim <= width)
    n_padded = -(-n_queries // 128) * 128
    shape = (BATCH, HEADS, n_queries)
    out, grad_out = torch.randn(2, *shape, head_dim).half()
    lse, dl = 100 * torch.randn(2, *shape)
    lse[..., 3] = -math.inf  # a row that sees no key
    parts = torch.full((BATCH, HEADS, n_padded, 16), math.nan, dtype=torch.bfloat16, device=DEVICE)
    sum_width = width if sum_parts == 1 else 64
    dq = torch.full((BATCH, HEADS, n_padded, sum_parts * sum_width), math.nan, device=DEVICE)
    tensors = [x.to(DEVICE) for x in (out, grad_out, lse, dl)]
    strides = [*strides_div8(out), *strides_div8(grad_out), *(dl.stride() if has_dl else (0, 0, 0))]
    numbers = (n_queries, n_padded, HEADS, n_queries, 0, 0, head_dim // 8, -1 / scale)
    flags = {"WIDTH": width, "NARROW": head_dim < width, "ROWS": ROWS, "HAS_DL": has_dl}
    flags |= {"SUM_PARTS": sum_parts, "SUM_WIDTH": sum_width}
    taken = torch.full((1,), 7, dtype=torch.int32, device=DEVICE)
    preprocess_kernel[(BATCH * HEADS * n_padded // ROWS,)](
        *tensors[:3], tensors[3] if has_dl else None, parts, dq, taken, None, *strides,
        *numbers, **flags, **DENSE, **ZEROS,
    )  # fmt: skip
    halves = parts.cpu().double().unflatten(3, (2, 8))
    assert not halves[..., 3:].any()
    first, second = halves.sum(4).unbind(3)
    far = torch.full(first.shape, -math.copysign(2.0**120, scale), dtype=torch.float64)
    far[..., :n_queries] = torch.where(lse.isinf(), far[..., :n_queries], -lse.double() / scale)
    torch.testing.assert_close(first, far, rtol=2.0**-22, atol=0.0)
    delta = (out.float() * grad_out.float()).sum(3) - (dl if has_dl else 0.0)
    delta[..., 3] = 0.0
    torch.testing.assert_close(second[..., :n_queries], -delta.double(), rtol=1e-5, atol=1e-4)
    assert second.isfinite().all()
    assert not dq.any()
    assert not taken.any()


@pytest.mark.parametrize(
    ("ordered", "lengths", "is_causal", "offset", "band", "seen"),
    [
        (True, (500, 500), True, 0, None, (True, True, True, True)),
        (True, (500, 200), True, -300, None, (False, False, True, True)),
        (True, (500, 244), True, -256, None, (False, False, True, True)),
        (True, (500, 245), True, -255, None, (False, True, True, True)),
        (True, (500, 100), True, 0, 60, (True, True, False, False)),
        (True, (500, 128), False, 10, 138, (True, True, False, False)),
        (True, (500, 129), False, 10, 138, (True, True, True, False)),
        (True, (500, 129), False, 10, 137, (True, True, True, False)),
        (True, (500, 10), True, -1000, None, (False, False, False, True)),
        (True, (500, 10), True, 1000, 900, (True, False, False, False)),
        (True, (500, 0), False, 0, None, (False, False, False, False)),
        (False, (500, 500), True, 0, None, (True, False, False, False)),
        (False, (500, 129), True, 0, None, (True, False, False, False)),
        (False, (500, 128), True, 0, None, (True, True, True, True)),
        (False, (500, 400), True, -200, None, (False, True, False, False)),
        (False, (500, 400), True, 1, None, (False, False, False, False)),
        (False, (500, 100), True, 0, 60, (True, True, False, False)),
    ],
    ids=str,
)
def test_zeros_only_where_no_program_stores(
    ordered: bool,
    lengths: tuple[int, int],
    is_causal: bool,
    offset: int,
    band: int | None,
    seen: tuple[bool, ...],
) -> None:
    """By the walk of the main kernel's programs, which also come to tiles that see no key."""
    n_queries, n_keys = lengths
    x = torch.randn(1, 1, n_queries, 64).half().to(DEVICE)
    lse = torch.randn(1, 1, n_queries, device=DEVICE)
    parts = torch.empty(1, 1, 512, 16, dtype=torch.bfloat16, device=DEVICE)
    dq = torch.full((512, 64), math.nan, device=DEVICE)
    counters = torch.full((5,), 7, dtype=torch.int32, device=DEVICE)
    numbers = (n_queries, 512, 1, n_keys, offset, band or 0, 8, -8.0)
    flags = {"WIDTH": 64, "NARROW": False, "ROWS": ROWS, "HAS_DL": False, "SUM_PARTS": 1}
    flags |= {"SUM_WIDTH": 64, "KEYS": 128, "IS_CAUSAL": is_causal}
    flags |= {"HAS_LEFT": band is not None, "BOTTOM_RIGHT": False}
    flags |= {"STORES": True, "ORDERED": ordered, "EARLY": False}
    preprocess_kernel[(512 // ROWS,)](
        x, x, lse, None, parts, dq, counters, None, *strides_div8(x), *strides_div8(x), 0, 0, 0,
        *numbers, **flags, **DENSE,
    )  # fmt: skip
    assert not counters[: 5 if ordered else 1].any()
    stored = dq.reshape(4, 128, 64)
    assert stored.isnan().flatten(1).all(1).tolist() == list(seen)
    assert not stored[~torch.tensor(seen)].any()


def test_counters_become_zero_where_programs_have_no_tile() -> None:
    """Of packed sequences there are more programs than tiles."""
    x = torch.randn(1, 1, 70, 64).half().to(DEVICE)
    lse = torch.randn(1, 1, 70, device=DEVICE)
    parts = torch.empty(3 * 128, 16, dtype=torch.bfloat16, device=DEVICE)
    counters = torch.full((4,), 7, dtype=torch.int32, device=DEVICE)
    dq = torch.full((3 * 128, 64), math.nan, device=DEVICE)
    table = torch.zeros(4, 8, dtype=torch.int32)
    table[0, 0] = 1
    table[1] = torch.tensor([0, 70, 70, 70, 70, 1, 0, 0])
    flags = {"WIDTH": 64, "NARROW": False, "ROWS": ROWS, "HAS_DL": False, "SUM_PARTS": 1}
    flags |= {"SUM_WIDTH": 64, "ORDERED": True, "STORES": False, "KEYS": 128, "IS_CAUSAL": False}
    flags |= {"HAS_LEFT": False, "BOTTOM_RIGHT": False, "PACKED": True, "FIELDS": 8, "QUERIES": 128}
    flags |= {"EARLY": False}
    preprocess_kernel[(3 * 128 // ROWS,)](
        x, x, lse, None, parts, dq, counters, table.to(DEVICE), *strides_div8(x), *strides_div8(x),
        0, 0, 0, 70, 3 * 128, 1, 70, 0, 0, 8, -8.0, **flags,
    )  # fmt: skip
    assert counters.tolist() == [0, 0, 7, 7]
    assert not dq[:128].any()
    assert dq[128:].isnan().all()


@pytest.mark.parametrize("queries", [64, 128])
def test_zeros_are_where_programs_add(queries: int) -> None:
    """Of short causal problems: every tile is stored by the one that alone comes to it, or zero."""
    pick, keys = random.Random(queries), 128
    functions = load(backward_common, Machine(0, 0))
    names = {"ordered": False, "stores": True, "is_causal": True, "has_left": False}
    options = SimpleNamespace(**names, ring=0, at_once=0, packed=False)
    for _ in range(60):
        n_queries, n_keys = (
            pick.choice([1, 128, 129, 300, 301, pick.randint(1, 700)]) for _ in "qk"
        )
        offset = pick.choice([0, n_keys - n_queries])
        n_tiles = -(-n_queries // queries)
        visits, stored = [0] * n_tiles, set[int]()
        for first_key in range(0, n_keys, keys):
            walked = functions["walk"](first_key, offset, 0, n_tiles, keys, queries, options, 0)
            tiles = range(int(walked[0]), int(walked[1]) + 1)
            own = (first_key, 0, n_keys, offset, None, None)
            storing = functions["steps_that_store"](
                own, walked, (n_tiles, 0, 0), keys, queries, options
            )
            stored |= set(tiles[:storing])
            for tile in tiles:
                visits[tile] += 1
        assert all(visits[tile] == 1 for tile in stored)

        padded = n_tiles * queries
        x = torch.randn(1, 1, n_queries, 64).half().to(DEVICE)
        lse = torch.randn(1, 1, n_queries, device=DEVICE)
        parts = torch.empty(padded, 16, dtype=torch.bfloat16, device=DEVICE)
        dq = torch.full((padded, 64), math.nan, device=DEVICE)
        counters = torch.empty(1, dtype=torch.int32, device=DEVICE)
        numbers = (n_queries, padded, 1, n_keys, offset, 0, 8, -8.0)
        flags = ZEROS | DENSE | {"STORES": True, "IS_CAUSAL": True, "QUERIES": queries}
        flags |= {"WIDTH": 64, "NARROW": False, "ROWS": ROWS, "HAS_DL": False}
        preprocess_kernel[(padded // ROWS,)](
            x, x, lse, None, parts, dq, counters, None, *strides_div8(x), *strides_div8(x), 0, 0, 0,
            *numbers, **flags, SUM_PARTS=1, SUM_WIDTH=64,
        )  # fmt: skip
        without_zeros = dq.reshape(n_tiles, -1).isnan().all(1).nonzero().flatten()
        assert set(without_zeros.tolist()) == stored, (n_queries, n_keys, offset)
