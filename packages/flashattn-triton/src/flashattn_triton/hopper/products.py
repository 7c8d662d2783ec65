# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined,assignment"
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
        accs = (zero_accumulator(ROWS, WIDTH),)
    else:
        REST: gl.constexpr = COLUMNS - FIRST
        accs = (zero_accumulator(ROWS, FIRST), zero_accumulator(ROWS, REST))
    return accs


@gluon.jit
def zero_accumulator(ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """One accumulator of four warps."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    return gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)


@gluon.jit
def _range_of(tile, accs, i: gl.constexpr):
    """The columns of a tile in shared memory that belong to accumulator ``i``."""
    return tile if len(accs) == 1 else tile.slice(i * FIRST, accs[i].shape[1], dim=1)


@gluon.jit
def issue_columns(a, b, accs):
    """Starts ``accs + a b``. ``a`` is an operand in registers, ``b`` a tile in shared memory."""
    started = ()
    for i in gl.static_range(len(accs)):
        operand = a if len(accs) == 1 else _operand_of(a, accs[i])
        started += (warpgroup_mma(operand, _range_of(b, accs, i), accs[i], is_async=True),)
    return started


@gluon.jit
def _operand_of(a, acc):
    """``a`` for a product that is added to ``acc``; nothing moves between threads."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    return gl.convert_layout(a, OPERAND, assert_trivial=True)


@gluon.jit
def wait_for_columns(accs, PENDING: gl.constexpr):
    """Accumulators whose products are complete, when at most PENDING later ones are in flight."""
    done = warpgroup_mma_wait(PENDING, deps=accs)
    return (done,) if len(accs) == 1 else done


@gluon.jit
def wait_for_all(acc, accs):
    """``acc`` and ``accs`` when all products are complete."""
    pending = (acc,)
    pending += accs
    done = warpgroup_mma_wait(0, deps=pending)
    return done[0], done[1:]


@gluon.jit
def scaled(accs, factor):
    """Accumulators times one factor."""
    products = ()
    for i in gl.static_range(len(accs)):
        products += (accs[i] * factor,)
    return products


@gluon.jit
def scale_rows(accs, factors):
    """Accumulators times one factor for each row."""
    scaled = ()
    for i in gl.static_range(len(accs)):
        scaled += (accs[i] * _of_rows(factors, accs[i]),)
    return scaled


@gluon.jit
def _of_rows(x, acc):
    """A number for each row, in the layout of an accumulator."""
    LAYOUT: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return gl.expand_dims(gl.convert_layout(x, LAYOUT), 1)


@gluon.jit
def write_columns(rows, n_rows, stride, width_div8, accs, ADDS: gl.constexpr):
    """Writes accumulators to fp32 rows in memory, or adds them; nobody else changes these.

    ``rows``: pointer to the first one. ``n_rows``: how many there are; may be less than 1.
    ``stride``: from row to row, and ``width_div8`` the columns of a row, both in units of 8.
    """
    for i in gl.static_range(len(accs)):
        present_div8 = width_div8 - i * (FIRST // 8)
        _write_range(rows + i * FIRST, n_rows, stride, present_div8, accs[i], ADDS)


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
    for i in gl.static_range(len(accs)):
        _range_of(tile, accs, i).store(accs[i].to(tile.dtype))
