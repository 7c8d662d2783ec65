# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Scores and probabilities of one tile in registers, on sm_90: masks, maxima, soft-caps' tanh."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn_triton.hopper.support import exp2, reciprocal

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def tanh(x):
    """As ``primitives.tanh``, but exp2 and the reciprocal are the special function unit's alone."""
    far = 1.0 - 2.0 * reciprocal(1.0 + exp2(x * (2.0 * LOG2_E)))
    y = x * x
    near = x + x * y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0))))
    return gl.where(y < 0.0625, near, far)


@gluon.jit
def seen_keys(s, first_row, first_key, band, OPTIONS: gl.constexpr):
    """Which of the (queries, keys) scores the mask does not hide."""
    N_KEYS, offset, width = band
    LAYOUT: gl.constexpr = s.type.layout
    keys = gl.expand_dims(gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    last = gl.full([s.shape[0]], N_KEYS - 1 - first_key, gl.int32, gl.SliceLayout(1, LAYOUT))
    diagonal = gl.arange(0, s.shape[0], gl.SliceLayout(1, LAYOUT)) + (
        first_row + offset - first_key
    )
    if OPTIONS.is_causal:
        last = gl.minimum(last, diagonal)
    seen = keys <= gl.expand_dims(last, 1)
    if OPTIONS.has_left:
        seen = seen & (keys >= gl.expand_dims(diagonal - width, 1))
    return seen


@gluon.jit
def mask_scores(s, first_row, first_key, band, OPTIONS: gl.constexpr):
    """Replaces (queries, keys) scores by ones whose exponential is 0 where the mask hides the key.

    For the forward kernel, which takes maxima of scores.
    """
    seen = seen_keys(s, first_row, first_key, band, OPTIONS)
    return gl.where(seen, s, float("inf") if OPTIONS.negative else -float("inf"))


@gluon.jit
def scores_tile(s, tanh_scale, first_row, first_key, band, masked, OPTIONS: gl.constexpr):
    """Soft-capped and masked scores, for the forward kernel; exp2's operand applies the scale.

    ``s``: Q Kᵀ of one tile (queries, keys). ``tanh_scale``: None without a soft-cap.

    The backward kernels share :func:`probabilities` instead: their scores are capped in between
    products, because the tensor cores subtract logsumexps, and they take no maximum.
    """
    if tanh_scale is not None:
        s = tanh(s * tanh_scale)
    if masked:
        s = mask_scores(s, first_row, first_key, band, OPTIONS)
    return s


@gluon.jit
def probabilities(s, scale_log2, diagonal, limits, OPTIONS: gl.constexpr, MASKED: gl.constexpr):
    """P of a tile of (keys, queries) scores from which L / scale has been subtracted.

    For the backward kernels, whose tiles are transposed, and which need no maximum. If MASKED, P is
    0 where the mask hides the key: query i sees the rows from ``diagonal + i - band`` to
    ``diagonal + i``, which are among the first ``n_keys``; ``limits`` are both numbers.
    """
    p = exp2(s * scale_log2)
    if MASKED:
        band, n_keys = limits
        LAYOUT: gl.constexpr = p.type.layout
        keys = gl.arange(0, p.shape[0], gl.SliceLayout(1, LAYOUT))
        last = diagonal + gl.arange(0, p.shape[1], gl.SliceLayout(0, LAYOUT))
        if OPTIONS.is_causal:
            p = gl.where(gl.expand_dims(keys, 1) <= gl.expand_dims(last, 0), p, 0.0)
        if OPTIONS.has_left:
            p = gl.where(gl.expand_dims(keys, 1) >= gl.expand_dims(last - band, 0), p, 0.0)
        if OPTIONS.ragged:
            p = gl.where(gl.expand_dims(keys < n_keys, 1), p, 0.0)
    return p


@gluon.jit
def largest(s, scale_log2, NEGATIVE: gl.constexpr, INTEGERS: gl.constexpr):
    """Row maxima of s · scale_log2; the scale's sign says which of the scores those are.

    With INTEGERS, which takes a scale that is not negative, of rows with a score above 0 only: of
    others it is the smallest.
    """
    if NEGATIVE:
        found = gl.min(s, 1)
    elif INTEGERS:
        found = gl.max(s.to(gl.int32, bitcast=True), 1).to(gl.float32, bitcast=True)
    else:
        found = gl.max(s, 1)
    return found * scale_log2


@gluon.jit
def finite_max(row_max, BLIND_ROWS: gl.constexpr):
    """``row_max``, but 0 where a row has seen no key yet, because -inf - -inf is NaN."""
    if BLIND_ROWS:
        return gl.where(row_max == -float("inf"), 0.0, row_max)
    return row_max


@gluon.jit
def pad_columns(x, LAYOUT: gl.constexpr):
    """(rows, columns) to (rows, 2 · columns), padded with zeros in registers of their own."""
    NARROW: gl.constexpr = x.type.layout
    padded = gl.join(x, gl.zeros([x.shape[0], x.shape[1]], gl.float32, NARROW))
    padded = gl.reshape(gl.permute(padded, (0, 2, 1)), [x.shape[0], 2 * x.shape[1]])
    return gl.convert_layout(padded, LAYOUT, assert_trivial=True)


@gluon.jit
def sums_of_columns(x):
    """(rows, columns) to sums of each row within threads, (rows, 8).

    A thread holds two neighbours of every eight columns of a row. It adds up every eighth column in
    chains of its own, and lanes exchange nothing, in every step: that is left for the end.
    """
    EIGHT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    eighths = gl.sum(gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8]), 1)
    return gl.convert_layout(eighths, EIGHT, assert_trivial=True)


@gluon.jit
def factors_like(factors, sums):
    """A number for each row, as a factor of :func:`sums_of_columns`."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    return gl.expand_dims(gl.convert_layout(factors, LAYOUT, assert_trivial=True), 1)


@gluon.jit
def add_to_first(sums, x):
    """Adds a number for each row to the first one of its :func:`sums_of_columns`."""
    columns = gl.arange(0, sums.shape[1], gl.SliceLayout(0, sums.type.layout))
    return sums + gl.where(gl.expand_dims(columns, 0) == 0, factors_like(x, sums), 0.0)
