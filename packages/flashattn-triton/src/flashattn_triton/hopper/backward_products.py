# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Issues the products of the backward kernel on sm_90 that give scores, dP and dQ.

Legend as in ``backward_kernel``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashattn_triton.hopper.products import issue_over_columns, zero_accumulator
from flashattn_triton.hopper.scores import tanh

OWN = gl.constexpr(64)  # keys of one consumer: the rows that one warp group's wgmma computes
STATISTICS = gl.constexpr(16)  # columns of a query: a half adds up to -L / scale, one to -delta


@gluon.jit
def subtract(HALF: gl.constexpr, statistics, s, USE_ACC: gl.constexpr, SCORES: gl.constexpr):
    """Issues the subtraction of one half of the statistics: 0 is L / scale, 1 is delta.

    A product with ones of (OWN, STATISTICS) in registers, and zeros for the other half, adds it up.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    halves = gl.arange(0, STATISTICS, gl.SliceLayout(0, OPERAND)) // (STATISTICS // 2)
    zeros = gl.zeros([OWN, STATISTICS], gl.bfloat16, OPERAND)
    ones = gl.where(gl.expand_dims(halves == HALF, 0), zeros + 1.0, zeros)
    return warpgroup_mma(ones, statistics.permute((1, 0)), s, use_acc=USE_ACC, is_async=True)


@gluon.jit
def soft_cap(s, tanh_scale, statistics, dtype: gl.constexpr, SCORES: gl.constexpr):
    """tanh of raw scores, less L / scale, and the derivative of tanh, rounded to ``dtype``."""
    s = tanh(s * tanh_scale)
    slope = (1.0 - s * s).to(dtype)
    s = warpgroup_mma_wait(0, deps=(subtract(0, statistics, s, True, SCORES),))
    return s, slope


@gluon.jit
def start_scores(
    own_k,
    q_tile,
    statistics,
    COLUMNS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Issues (OWN, QUERIES) scores, less L / scale: L first, for speed, then ranges of columns.

    With a soft-cap L is subtracted later, from their tanh.
    """
    QUERIES: gl.constexpr = q_tile.shape[0]
    s = gl.zeros([OWN, QUERIES], gl.float32, SCORES)
    if not HAS_SOFTCAP:
        s = subtract(0, statistics, s, False, SCORES)
    return issue_over_columns(own_k, q_tile, s, COLUMNS, not HAS_SOFTCAP)


@gluon.jit
def start_dp(own_v, do_tile, statistics, COLUMNS: gl.constexpr, SCORES: gl.constexpr):
    """Issues (OWN, QUERIES) dP, less delta: ranges of columns, then delta, for speed."""
    QUERIES: gl.constexpr = do_tile.shape[0]
    dp = gl.zeros([OWN, QUERIES], gl.float32, SCORES)
    dp = issue_over_columns(own_v, do_tile, dp, COLUMNS, False)
    return subtract(1, statistics, dp, True, SCORES)


@gluon.jit
def start_dq(ds_tile, k_tile, WIDTH: gl.constexpr, CONSUMER: gl.constexpr):
    """Issues a consumer's (64, WIDTH) part of a tile of dQ."""
    D: gl.constexpr = k_tile.shape[1]
    zeros = zero_accumulator(64, WIDTH)
    if D == 128:  # of 64 queries a range of columns
        k_tile = k_tile.slice(CONSUMER * 64, WIDTH, dim=1)
    else:  # of 128 queries half
        ds_tile = ds_tile.slice(CONSUMER * 64, 64, dim=1)
    return warpgroup_mma(ds_tile.permute((1, 0)), k_tile, zeros, use_acc=False, is_async=True)
