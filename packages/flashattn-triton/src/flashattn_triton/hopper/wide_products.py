# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Issues the products of the backward kernel of heads up to 192 wide, and holds its tile sizes.

Legend as in ``backward_wide``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from flashattn_triton.hopper.backward_products import OWN, subtract
from flashattn_triton.hopper.support import reduce_add

QUERIES = gl.constexpr(64)  # of a step
HALF = gl.constexpr(32)  # queries whose dP a consumer holds at a time
PARTS = gl.constexpr(3)  # of the columns of Q, K and their gradients
PART = gl.constexpr(64)  # columns of one
VALUES = gl.constexpr(128)  # columns of V and dO


@gluon.jit
def start_scores(
    k_smem,
    q_smem,
    statistics_smem,
    opaque_zero,
    slot,
    CONSUMER: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
):
    """Issues (OWN, QUERIES) scores, less L / scale; with a soft-cap that comes later."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    s = gl.zeros([OWN, QUERIES], gl.float32, SCORES)
    if not HAS_SOFTCAP:
        s = subtract(0, statistics_smem.index(slot), s, False, SCORES)
    for part in gl.static_range(PARTS):
        own_k = k_smem.index(opaque_zero + part).slice(CONSUMER * OWN, OWN, dim=0)
        q_part = q_smem.index(slot * PARTS + part)
        s = warpgroup_mma(own_k, q_part.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def start_dp(own_v, do_half, statistics):
    """Issues (OWN, HALF) dP, less delta."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    dp = gl.zeros([OWN, HALF], gl.float32, SCORES)
    dp = warpgroup_mma(own_v, do_half.permute((1, 0)), dp, use_acc=False, is_async=True)
    return subtract(1, statistics, dp, True, SCORES)


@gluon.jit
def start_dk(ds, q_smem, slot, dk, SECOND: gl.constexpr):
    """Issues dSᵀ Q of one half of the queries, by parts of columns."""
    q_0 = q_smem.index(slot * PARTS).slice(SECOND * HALF, HALF, dim=0)
    q_1 = q_smem.index(slot * PARTS + 1).slice(SECOND * HALF, HALF, dim=0)
    q_2 = q_smem.index(slot * PARTS + 2).slice(SECOND * HALF, HALF, dim=0)
    return (
        warpgroup_mma(ds, q_0, dk[0], is_async=True),
        warpgroup_mma(ds, q_1, dk[1], is_async=True),
        warpgroup_mma(ds, q_2, dk[2], is_async=True),
    )


@gluon.jit
def start_dq(ds_tile, k_smem, opaque_zero, THIRD: gl.constexpr, CONSUMER: gl.constexpr):
    """Issues this consumer's columns of a tile of dQ: its own part, or half of the third one."""
    WIDTH: gl.constexpr = PART // 2 if THIRD else PART
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    zero_accumulator = gl.zeros([QUERIES, WIDTH], gl.float32, LAYOUT)
    if THIRD:
        columns = k_smem.index(opaque_zero + 2).slice(CONSUMER * WIDTH, WIDTH, dim=1)
    else:
        columns = k_smem.index(opaque_zero + CONSUMER)
    return warpgroup_mma(
        ds_tile.permute((1, 0)), columns, zero_accumulator, use_acc=False, is_async=True
    )


@gluon.jit
def add_dq(dq_own, tile, dq, THIRD: gl.constexpr):
    """Adds what :func:`start_dq` computed to a tile of the sum."""
    dq_tile_pointers = dq_own[1] if THIRD else dq_own[0]
    dq_tile_pointers += gl.cast(tile, gl.int64) * (QUERIES * PARTS * PART)
    reduce_add(dq_tile_pointers, dq, gl.to_tensor(True))


@gluon.jit
def side_by_side(left, right):
    """Joins two (OWN, HALF) tiles to one (OWN, QUERIES) tile; nothing moves between threads."""
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    joined = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), [OWN, QUERIES])
    return gl.convert_layout(joined, WHOLE, assert_trivial=True)


@gluon.jit
def halves(whole):
    """Splits an (OWN, QUERIES) tile into two (OWN, HALF) tiles; nothing moves between threads."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    left, right = gl.split(gl.permute(gl.reshape(whole, [OWN, 2, HALF]), (0, 2, 1)))
    left = gl.convert_layout(left, LAYOUT, assert_trivial=True)
    return left, gl.convert_layout(right, LAYOUT, assert_trivial=True)
