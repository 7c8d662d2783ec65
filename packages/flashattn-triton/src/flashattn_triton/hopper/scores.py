# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Scores and probabilities of one tile in registers, on sm_90: masks, maxima, soft-caps' tanh."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flashattn_triton.hopper.support import exp2, keep_between, keep_where, reciprocal

LOG2_E = gl.constexpr(1.4426950408889634)


@gluon.jit
def tanh(x):
    """As ``primitives.tanh``, but exp2 and the reciprocal are the special function unit's alone."""
    far = 1.0 - 2.0 * reciprocal(1.0 + exp2(x * (2.0 * LOG2_E)))
    y = x * x
    near = x + x * y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0))))
    return gl.where(y < 0.0625, near, far)


@gluon.jit
def _only_columns(x, first, stop, n_rows, OTHER: gl.constexpr):
    """``x`` in the columns of each row from its ``first`` to its ``stop`` - 1, OTHER elsewhere.

    ``first``, ``stop``: (rows,) int32 tensors; one of them may be None. ``n_rows``: with ``first``,
    the rows from this one on are OTHER; or None. Of every eight columns of a row, four threads hold
    two neighbours each. What is known of a column when the kernel is compiled is compared with the
    bound less what only the thread knows; of less than 64 columns, less the bound.
    """
    LAYOUT: gl.constexpr = x.type.layout
    pairs = gl.reshape(x, [x.shape[0], x.shape[1] // 8, 4, 2])
    PAIRS: gl.constexpr = pairs.type.layout
    EIGHTS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, PAIRS))
    eights = gl.expand_dims(gl.arange(0, x.shape[1] // 8, gl.SliceLayout(0, EIGHTS)) * 8, 0)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, PAIRS))
    threads = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, COLUMNS)) * 2, 1)
    neighbours = gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, COLUMNS)), 0)
    columns = gl.expand_dims(gl.expand_dims(eights, 2), 3)
    columns += gl.expand_dims(gl.expand_dims(neighbours, 0), 1)
    past = gl.expand_dims(gl.expand_dims(threads, 0), 1)
    if first is not None and stop is not None:
        n_seen = _each_row(gl.maximum(stop - first, 0), PAIRS)
    bound = stop if first is None else first
    behind = x.shape[1]
    if x.shape[1] < 64:
        # The backward kernel of 192 columns, which takes halves of 32 queries. Were the bounds to
        # depend on the step, as below, Triton 3.9 would compute the addresses of its operands in
        # registers of each thread.
        columns -= _each_row(bound, PAIRS)
        bound *= 0
        behind = 1 << 30  # more than any two positions differ by
    if n_rows is not None:
        rows = gl.arange(0, x.shape[0], bound.type.layout)
        bound = gl.where(rows < n_rows, bound, behind)
    bound = _each_row(bound, PAIRS) - past
    if first is None:
        pairs = keep_where("lt", pairs, columns, bound, OTHER)
    elif stop is None:
        pairs = keep_where("ge", pairs, columns, bound, OTHER)
    else:
        pairs = keep_between(pairs, columns, bound, n_seen, OTHER)
    return gl.convert_layout(gl.reshape(pairs, x.shape), LAYOUT, assert_trivial=True)


@gluon.jit
def _each_row(x, PAIRS: gl.constexpr):
    """A number of each row (rows,) as (rows, 1, 1, 1)."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, PAIRS)))
    x = gl.expand_dims(gl.convert_layout(x, ROWS, assert_trivial=True), 1)
    return gl.expand_dims(gl.expand_dims(x, 2), 3)


@gluon.jit
def where_seen(x, first_row, first_key, band, OPTIONS: gl.constexpr, OTHER: gl.constexpr):
    """``x`` of a tile (queries, keys) where the mask does not hide the key, OTHER elsewhere."""
    N_KEYS, offset, width = band
    ROWS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    stop = gl.full([x.shape[0]], N_KEYS - first_key, gl.int32, ROWS)
    diagonal = gl.arange(0, x.shape[0], ROWS) + (first_row + offset - first_key)
    first = None
    if OPTIONS.is_causal:
        stop = gl.minimum(stop, diagonal + 1)
    if OPTIONS.has_left:
        first = diagonal - width
    return _only_columns(x, first, stop, None, OTHER)


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
        # The exponential of such a score is 0, and it is no row's maximum.
        HIDDEN: gl.constexpr = float("inf") if OPTIONS.negative else -float("inf")
        s = where_seen(s, first_row, first_key, band, OPTIONS, HIDDEN)
    return s


@gluon.jit
def probabilities(s, scale_log2, diagonal, limits, OPTIONS: gl.constexpr, MASKED: gl.constexpr):
    """P of a tile of (keys, queries) scores from which L / scale has been subtracted.

    For the backward kernels, whose tiles are transposed, and which need no maximum. If MASKED, P is
    0 where the mask hides the key: query i sees the rows from ``diagonal + i - band`` to
    ``diagonal + i``, which are among the first ``n_keys``; ``limits`` are both numbers.
    """
    exponents = s * scale_log2
    if MASKED:
        band, n_keys = limits
        keys = gl.arange(0, s.shape[0], gl.SliceLayout(1, s.type.layout))
        # A key is seen by the tile's queries from ``first`` to ``stop`` - 1.
        first = keys * 0
        stop = None
        if OPTIONS.is_causal:
            first = keys - diagonal
        if OPTIONS.has_left:
            stop = keys - diagonal + band + 1
        n_keys = n_keys if OPTIONS.ragged else None
        exponents = _only_columns(exponents, first, stop, n_keys, -float("inf"))
    return exp2(exponents)


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
