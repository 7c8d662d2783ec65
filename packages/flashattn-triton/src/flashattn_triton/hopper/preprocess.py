# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The small kernels that run before and after the backward kernel on sm_90, in plain Triton.

Rows are padded to whole tiles (N_PADDED of a head), so that the main kernel's loads need no mask.
Rows past the end have an L that makes P zero. Of packed sequences, each is padded to whole tiles of
QUERIES rows; N_QUERIES then counts the tokens of all. Legend as in ``backward_kernel``; WIDTH is
that of tiles. The sum of dQ has SUM_PARTS of columns; only of wide heads is that more than one.

Programs take the last rows first: the L2 cache still holds what the kernel before wrote last, and
what the one after reads first.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = 64  # of one program
# Stands for an infinite L / scale, which cannot be a sum of parts: the exponent of P is below -150
# for every scale that this tier takes.
FAR = tl.constexpr(2.0**120)


@triton.jit
def _store_parts(pointers, x):
    """Stores fp32 ``x`` as rows of eight bf16: three that add up to it, to 24 bits, and zeros."""
    first = x.to(tl.bfloat16)
    rest = x - first.to(tl.float32)
    second = rest.to(tl.bfloat16)
    third = (rest - second.to(tl.float32)).to(tl.bfloat16)
    column = tl.arange(0, 8)[None, :]
    parts = tl.where(column == 2, third[:, None], 0.0)
    parts = tl.where(column == 1, second[:, None], parts)
    parts = tl.where(column == 0, first[:, None], parts)
    tl.store(pointers[:, None] + column, parts)


@triton.jit
def _index():
    """This program's number in the order of rows."""
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit
def _rows_of_program(
    tiles_ptr, N_QUERIES, N_PADDED, N_HEADS, PACKED: tl.constexpr, FIELDS: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(batch element, head, head of all, first row, rows, tokens before, first padded row).

    Rows are those of one head of a batch element or sequence, before which a packed batch has
    ``tokens before``. ``first padded row``: of the head, among the rows of all heads, padded to
    whole tiles, where ``backward_common.work_of_program`` finds it too. In a packed batch, programs
    of one head's tile are neighbours.
    """
    if PACKED:
        programs_of_tile = QUERIES // ROWS
        index = _index() // programs_of_tile
        entry = tiles_ptr + (1 + index // N_HEADS) * FIELDS
        n_rows = tl.load(entry + 2)
        first_token = tl.load(entry + 1) - n_rows
        head = index % N_HEADS
        n_tiles = tl.maximum(tl.cdiv(n_rows, QUERIES), 1)
        first_tile = (first_token // QUERIES + tl.load(entry + 7)) * N_HEADS + head * n_tiles
        first_row = (index // N_HEADS - tl.load(entry)) * QUERIES
        first_row += (_index() % programs_of_tile) * ROWS
        head = head.to(tl.int64)
        rows = (0, head, head, first_row, n_rows, first_token, first_tile.to(tl.int64) * QUERIES)
    else:
        n_tiles = N_PADDED // ROWS
        first_row = (_index() % n_tiles) * ROWS
        head = (_index() // n_tiles).to(tl.int64)
        b, h = head // N_HEADS, head % N_HEADS
        rows = (b, h, head, first_row, N_QUERIES, 0, head * N_PADDED)
    return rows


@triton.jit(
    do_not_specialize=[  # lengths decide whether strides are multiples of 16, which helps nothing
        *("stride_ob", "stride_oh", "stride_oq", "stride_dob", "stride_doh", "stride_doq"),
        *("stride_dlb", "stride_dlh", "N_QUERIES", "N_PADDED", "N_HEADS", "N_KEYS", "offset"),
        *("band", "D_DIV8", "factor"),
    ],
    do_not_specialize_on_alignment=["L_ptr", "dL_ptr"],
)
def preprocess_kernel(
    O_ptr,
    dO_ptr,
    L_ptr,  # (B, H, N_q) fp32, contiguous
    dL_ptr,  # (B, H, N_q) fp32, or None
    statistics_ptr,  # (B, H, N_PADDED, 2, 8) bf16: parts of -L / scale, and of -delta
    dq_ptr,  # (B, H, N_PADDED, SUM_PARTS · SUM_WIDTH) fp32; None without parts
    counters_ptr,  # int32 that become 0: one, and if ORDERED one for each QUERIES padded rows
    tiles_ptr,  # the table of schedule.packed_tiles_kernel, of queries, if PACKED, else None
    stride_ob,  # of O, dO and dQ in units of 8 elements, so that rows are known to be aligned
    stride_oh,
    stride_oq,
    stride_dob,
    stride_doh,
    stride_doq,
    stride_dlb,
    stride_dlh,
    stride_dlq,
    N_QUERIES,
    N_PADDED,
    N_HEADS,
    N_KEYS,
    offset,  # as of the main kernel, and band
    band,
    D_DIV8,  # D / 8
    factor,  # -1 / scale
    WIDTH: tl.constexpr,
    NARROW: tl.constexpr,  # D < WIDTH
    SUM_PARTS: tl.constexpr,
    SUM_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DL: tl.constexpr,
    ORDERED: tl.constexpr,  # programs of the main kernel add in a fixed order
    STORES: tl.constexpr,  # they store the tiles to which they come first, or alone unless ORDERED
    KEYS: tl.constexpr,  # of a tile of the main kernel; this and what follows counts if STORES
    IS_CAUSAL: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr,  # offset is without the difference of a packed sequence's lengths
    PACKED: tl.constexpr,
    FIELDS: tl.constexpr,
    QUERIES: tl.constexpr,
    EARLY: tl.constexpr,  # the next kernel may begin, and waits: support.launch_dependents
):
    """What the main kernel reads of L, O and dL, and zeros where it adds and counts.

    If STORES, the sum becomes zero only in tiles of QUERIES rows that no program stores.
    Grid: tiles · B · H.
    """
    if EARLY:
        PTX: tl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, 0;"
        zero = tl.zeros([1], tl.int32)
        tl.inline_asm_elementwise(PTX, "=r,r", [zero], dtype=tl.int32, is_pure=False, pack=1)
    if tl.program_id(0) == 0:
        tl.store(counters_ptr, 0)
    if PACKED and _index() >= tl.load(tiles_ptr) * N_HEADS * (QUERIES // ROWS):
        return
    b, h, head, first_row, n_rows, first_token, first_padded = _rows_of_program(
        tiles_ptr, N_QUERIES, N_PADDED, N_HEADS, PACKED, FIELDS, QUERIES, ROWS
    )
    if PACKED:
        O_ptr += first_token.to(tl.int64) * stride_oq * 8
        dO_ptr += first_token.to(tl.int64) * stride_doq * 8
        L_ptr += first_token
        if HAS_DL:
            dL_ptr += first_token.to(tl.int64) * stride_dlq
    rows = first_row + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDTH)
    inside = rows < n_rows
    present = inside[:, None]
    if NARROW:
        present = present & (columns // 8 < D_DIV8)[None, :]
    wide = rows.to(tl.int64)
    o_rows = O_ptr + (b * stride_ob + h * stride_oh + wide * stride_oq) * 8
    do_rows = dO_ptr + (b * stride_dob + h * stride_doh + wide * stride_doq) * 8
    o = tl.load(o_rows[:, None] + columns[None, :], mask=present, other=0.0)
    do = tl.load(do_rows[:, None] + columns[None, :], mask=present, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DL:
        dl_rows = dL_ptr + b * stride_dlb + h * stride_dlh + wide * stride_dlq
        delta -= tl.load(dl_rows, mask=inside, other=0.0)
    logsumexp = tl.load(L_ptr + head * N_QUERIES + rows, mask=inside, other=float("inf"))
    # A row that sees no key has L = -inf, a constant: P and whatever dL claims count for nothing.
    is_infinite = tl.abs(logsumexp) == float("inf")
    far = tl.where(factor > 0.0, FAR, -FAR)  # times the scale always negative
    row = first_padded + rows
    parts = statistics_ptr + row * 16
    _store_parts(parts, tl.where(is_infinite, far, logsumexp * factor))
    _store_parts(parts + 8, tl.where(is_infinite, 0.0, -delta))
    tile = first_row // QUERIES
    if ORDERED and first_row % QUERIES == 0:
        tl.store(counters_ptr + 1 + first_padded // QUERIES + tile, 0)
    zeroed = not STORES
    if STORES:
        if PACKED:
            tile_of_all = _index() // (QUERIES // ROWS) // N_HEADS
            N_KEYS = tl.load(tiles_ptr + (1 + tile_of_all) * FIELDS + 4)
            if BOTTOM_RIGHT:
                offset += N_KEYS - n_rows
        zeroed = N_KEYS == 0
        if IS_CAUSAL:  # programs come to the last tile in any case
            last_tile = tl.cdiv(n_rows, QUERIES) - 1
            last_seen = (tile + 1) * QUERIES + offset  # the key after it
            zeroed = zeroed | ((last_seen <= 0) & (tile < last_tile))
            if not ORDERED:
                zeroed = zeroed | ((N_KEYS > KEYS) & ((last_seen > KEYS) | (tile == last_tile)))
        if HAS_LEFT:  # and to the first one
            first_seen = tile * QUERIES + offset - band
            zeroed = zeroed | ((first_seen >= tl.cdiv(N_KEYS, KEYS) * KEYS) & (tile > 0))
    if zeroed:
        for part in tl.static_range(SUM_PARTS):
            sum_rows = dq_ptr + row[:, None] * (SUM_PARTS * SUM_WIDTH)
            sum_columns = part * SUM_WIDTH + tl.arange(0, SUM_WIDTH)[None, :]
            tl.store(sum_rows + sum_columns, tl.zeros([ROWS, SUM_WIDTH], tl.float32))


@triton.jit(
    do_not_specialize=[
        *("stride_qb", "stride_qh", "stride_qq", "N_QUERIES", "N_PADDED", "N_HEADS", "D_DIV8")
    ]
)
def postprocess_kernel(
    dq_ptr,  # (B, H, N_PADDED, SUM_PARTS · WIDTH) fp32, each 64 rows in the order said below
    dq_out,
    tiles_ptr,  # as of preprocess_kernel
    stride_qb,
    stride_qh,
    stride_qq,
    N_QUERIES,
    N_PADDED,
    N_HEADS,
    D_DIV8,  # D / 8
    scale,
    WIDTH: tl.constexpr,
    NARROW: tl.constexpr,  # D < SUM_PARTS · WIDTH
    ADDS: tl.constexpr,  # to what dq_out holds in fp32
    SUM_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    FIELDS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """dQ = scale · sum, in the inputs' dtype, or added to it in fp32. Grid: tiles · B · H.

    Each (64, 64) block of the sum lies as wgmma leaves it in registers, in the order of
    ``backward_common.fragment_offsets``, and after it the block of the next 64 columns.
    """
    if PACKED and _index() >= tl.load(tiles_ptr) * N_HEADS * (QUERIES // ROWS):
        return
    b, h, _, first_row, n_rows, first_token, first_padded = _rows_of_program(
        tiles_ptr, N_QUERIES, N_PADDED, N_HEADS, PACKED, FIELDS, QUERIES, ROWS
    )
    rows = tl.arange(0, ROWS)[:, None]
    for part in tl.static_range(SUM_PARTS):
        columns = part * WIDTH + tl.arange(0, WIDTH)[None, :]
        block = dq_ptr + (first_padded + first_row) * (SUM_PARTS * WIDTH) + part * (ROWS * WIDTH)
        total = tl.load(block + tl.arange(0, ROWS * WIDTH))
        # c // 8, r // 16, r % 8, c % 8 // 2, r % 16 // 8 and c % 2, for row r and column c.
        total = tl.permute(tl.reshape(total, (WIDTH // 8, 4, 8, 4, 2, 2)), (1, 4, 2, 0, 3, 5))
        total = tl.reshape(total, (ROWS, WIDTH))
        present = first_row + rows < n_rows
        if NARROW:
            present = present & (columns // 8 < D_DIV8)
        wide = (first_row + rows).to(tl.int64)
        if PACKED:
            wide += first_token
        dq_rows = dq_out + (b * stride_qb + h * stride_qh + wide * stride_qq) * 8
        dq = total * scale
        if ADDS:
            dq += tl.load(dq_rows + columns, mask=present, other=0.0)
        tl.store(dq_rows + columns, dq.to(dq_out.dtype.element_ty), mask=present)
