# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Products of tiles of which only the first columns are in use, for both kernels on sm_90.

Tiles in shared memory are 64 or 128 columns wide, because Gluon's shapes are powers of two, and the
TMA fills them up with zeros. At head_dim 96 a quarter of all products would be of those zeros. So
the columns that are in use form ranges: one range of all columns, or two, the first 64 columns and
those of the others that are in use. A sum over columns, as in Q·Kᵀ, takes the ranges one after
another. Where the columns are those of the result, as in P·V, each range has an accumulator, and a
tuple holds them.

Each range is a product, so that as many are in flight as there are ranges.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from flashattn_triton.hopper.support import multiply_if

FIRST = gl.constexpr(64)  # columns of the first range, if there are two


@gluon.jit
def issue_over_columns(a, b, acc, COLUMNS: gl.constexpr, USE_ACC: gl.constexpr = True):
    """Starts ``acc + a bᵀ`` over the first COLUMNS columns of both, which are in shared memory.

    Without USE_ACC, ``acc`` is taken for zeros.
    """
    if a.shape[1] == COLUMNS:
        acc = warpgroup_mma(a, b.permute((1, 0)), acc, use_acc=USE_ACC, is_async=True)
    else:
        REST: gl.constexpr = COLUMNS - FIRST
        a_first, b_first = a.slice(0, FIRST, dim=1), b.slice(0, FIRST, dim=1)
        acc = warpgroup_mma(a_first, b_first.permute((1, 0)), acc, use_acc=USE_ACC, is_async=True)
        a_rest, b_rest = a.slice(FIRST, REST, dim=1), b.slice(FIRST, REST, dim=1)
        acc = warpgroup_mma(a_rest, b_rest.permute((1, 0)), acc, is_async=True)
    return acc


@gluon.jit
def zero_columns(ROWS: gl.constexpr, WIDTH: gl.constexpr, COLUMNS: gl.constexpr):
    """Accumulators of (ROWS, COLUMNS), by ranges, of four warps."""
    if COLUMNS == WIDTH:
        WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
        accs = (gl.zeros([ROWS, WIDTH], gl.float32, WHOLE),)
    else:
        REST: gl.constexpr = COLUMNS - FIRST
        LEFT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, FIRST, 16])
        RIGHT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, REST, 16])
        accs = (  # type: ignore[assignment]
            gl.zeros([ROWS, FIRST], gl.float32, LEFT),
            gl.zeros([ROWS, REST], gl.float32, RIGHT),
        )
    return accs


@gluon.jit
def issue_columns(a, b, accs):
    """Starts ``accs + a b``. ``a`` is an operand in registers, ``b`` a tile in shared memory."""
    if len(accs) == 1:
        started = (warpgroup_mma(a, b, accs[0], is_async=True),)
    else:
        REST: gl.constexpr = accs[1].shape[1]
        LEFT: gl.constexpr = gl.DotOperandLayout(0, accs[0].type.layout, 2)
        RIGHT: gl.constexpr = gl.DotOperandLayout(0, accs[1].type.layout, 2)
        a_left = gl.convert_layout(a, LEFT, assert_trivial=True)
        a_right = gl.convert_layout(a, RIGHT, assert_trivial=True)
        started = (  # type: ignore[assignment]
            warpgroup_mma(a_left, b.slice(0, FIRST, dim=1), accs[0], is_async=True),
            warpgroup_mma(a_right, b.slice(FIRST, REST, dim=1), accs[1], is_async=True),
        )
    return started


@gluon.jit
def wait_for_columns(accs, PENDING: gl.constexpr):
    """Accumulators whose products are complete, when at most PENDING later ones are in flight."""
    if len(accs) == 1:
        done = (warpgroup_mma_wait(PENDING, deps=(accs[0],)),)
    else:
        left, right = warpgroup_mma_wait(PENDING, deps=(accs[0], accs[1]))
        done = (left, right)  # type: ignore[assignment]
    return done


@gluon.jit
def wait_for_all(acc, accs):
    """``acc`` and ``accs`` when all products are complete."""
    if len(accs) == 1:
        acc, left = warpgroup_mma_wait(0, deps=(acc, accs[0]))
        done = (left,)
    else:
        acc, left, right = warpgroup_mma_wait(0, deps=(acc, accs[0], accs[1]))
        done = (left, right)  # type: ignore[assignment]
    return acc, done


@gluon.jit
def scaled(accs, factor):
    """Accumulators times one factor."""
    products = (accs[0] * factor,)
    if len(accs) == 2:
        products = (accs[0] * factor, accs[1] * factor)  # type: ignore[assignment]
    return products


@gluon.jit
def scale_rows(accs, factors):
    """Accumulators times one factor for each row."""
    LEFT: gl.constexpr = gl.SliceLayout(1, accs[0].type.layout)
    left = accs[0] * gl.expand_dims(gl.convert_layout(factors, LEFT), 1)
    if len(accs) == 1:
        scaled = (left,)
    else:
        RIGHT: gl.constexpr = gl.SliceLayout(1, accs[1].type.layout)
        right = accs[1] * gl.expand_dims(gl.convert_layout(factors, RIGHT), 1)
        scaled = (left, right)  # type: ignore[assignment]
    return scaled


@gluon.jit
def scale_risen_rows(accs, factors, rises):
    """:func:`scale_rows`, skipped by warps that have no row whose maximum ``rises``."""
    LEFT: gl.constexpr = gl.SliceLayout(1, accs[0].type.layout)
    by_left = gl.expand_dims(gl.convert_layout(factors, LEFT), 1)
    left = multiply_if(accs[0], by_left, gl.expand_dims(gl.convert_layout(rises, LEFT), 1))
    if len(accs) == 1:
        scaled = (left,)
    else:
        RIGHT: gl.constexpr = gl.SliceLayout(1, accs[1].type.layout)
        by_right = gl.expand_dims(gl.convert_layout(factors, RIGHT), 1)
        rises_right = gl.expand_dims(gl.convert_layout(rises, RIGHT), 1)
        scaled = (left, multiply_if(accs[1], by_right, rises_right))  # type: ignore[assignment]
    return scaled


@gluon.jit
def write_columns(rows, n_rows, stride, width_div8, accs, ADDS: gl.constexpr):
    """Writes accumulators to fp32 rows in memory, or adds them; nobody else changes these.

    ``rows``: pointer to the first one. ``n_rows``: how many there are; may be less than 1.
    ``stride``: from row to row, and ``width_div8`` the columns of a row, both in units of 8.
    """
    _write_range(rows, n_rows, stride, width_div8, accs[0], ADDS)
    if len(accs) == 2:
        _write_range(rows + FIRST, n_rows, stride, width_div8 - FIRST // 8, accs[1], ADDS)


@gluon.jit
def _write_range(rows, n_rows, stride, width_div8, acc, ADDS: gl.constexpr):
    LAYOUT: gl.constexpr = acc.type.layout
    row = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, LAYOUT)), 1)
    column = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT)), 0)
    pointers = rows + row * (gl.cast(stride, gl.int64) * 8) + column
    present = (row < n_rows) & (column // 8 < width_div8)
    if ADDS:
        acc += gl.load(pointers, mask=present, other=0.0)
    gl.store(pointers, acc, mask=present)


@gluon.jit
def store_columns(tile, accs):
    """Rounds accumulators and stores them as the first columns of a tile in shared memory."""
    if len(accs) == 1:
        tile.store(accs[0].to(tile.dtype))
    else:
        tile.slice(0, FIRST, dim=1).store(accs[0].to(tile.dtype))
        tile.slice(FIRST, accs[1].shape[1], dim=1).store(accs[1].to(tile.dtype))
