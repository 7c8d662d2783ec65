# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""Shared by the portable tier's kernels: products, loads and stores of tiles, scores, masks, tanh.

Products of fp32 operands are sums of bf16 products (:func:`dot_fp32`), and Triton's interpreter,
which has no bf16 arithmetic and no loops over its own scalars, is served by :func:`dot` and
:func:`loop_bound`. The algorithms are in :mod:`flashattn_triton.portable.forward`, ``key_pass`` and
``query_pass``.

The Hopper tier's kernels do not use this module. They are written in Gluon, where each tensor that
a function creates, such as ``arange`` or ``zeros``, must name its layout in registers, and where
products are wgmma instructions on tiles in shared memory; functions of ``tl`` express neither. So
each tier has its own ``scores_tile``, the Hopper tier in :mod:`flashattn_triton.hopper.scores`.
What both could share, tanh, differs on purpose: there the special function unit computes it alone.

Kernels take one parameter for their compile-time options (``portable.launch``). Functions also
take what belongs together as tuples:

    mask     (offset, queries, keys, window left, window right, prefix) of a sequence
    added    (ALiBi's slope in units of log2, bias, its row stride, its column stride, the mask of
             keys); the bias is a pointer to this head's, or if ``bias_tma`` a descriptor of (1 or
             B, 1 or H, N_q, N_k)
    factors  (scale, soft-cap)
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashattn_triton import mask_and_bias
from flashattn_triton.triton_versions import integer_of_interpreter

integer_of = integer_of_interpreter()
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# HAS_ALIBI where no query sees a key behind its diagonal: all distances have one sign.
CAUSAL_ALIBI = tl.constexpr(2)
HIDDEN_BIAS = tl.constexpr(mask_and_bias.HIDDEN_BIAS)


def _hide(kind: str, minus_one: str, minus_limit: str, minus_huge: str) -> tl.constexpr:
    """PTX for two numbers of a half type: -inf where they are HIDDEN_BIAS or less.

    It is ``x - huge * max(-x - limit, 0)``. ``-limit`` is the next number after HIDDEN_BIAS, and
    ``huge`` makes the product overflow. A comparison and a choice for each number would take so
    many registers that a multiprocessor runs one program less.
    """
    two = [x + x[2:] for x in (minus_one, minus_limit, minus_huge)]
    return tl.constexpr(f"""{{
        .reg .b32 minus_one, minus_limit, minus_huge, below;
        mov.b32 minus_one, {two[0]};
        mov.b32 minus_limit, {two[1]};
        mov.b32 minus_huge, {two[2]};
        fma.rn.relu.{kind} below, $1, minus_one, minus_limit;
        fma.rn.{kind} $0, below, minus_huge, $1;
    }}""")


HIDE_BF16 = _hide("bf16x2", "0xBF80", "0xC5FF", "0xFF00")  # -1, -8160, -2^127
HIDE_FP16 = _hide("f16x2", "0xBC00", "0xEFFF", "0xFBFF")  # -1, -8188, -65504


@triton.jit
def upper_half(bits):
    """The bf16 number that the first 16 of 32 bits are."""
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def split(x):
    """Three bf16 numbers whose sum is x: its 24 bits, eight at a time.

    The first is cut off a number somewhat larger than x, which leaves rests of either sign. Of one
    sign, as bits cut off x have it, the products that ``dot_fp32`` leaves out would add up.
    """
    first = (x * 1.0027).to(tl.int32, bitcast=True)
    x -= (first & -65536).to(tl.float32, bitcast=True)
    second = x.to(tl.int32, bitcast=True)
    x -= (second & -65536).to(tl.float32, bitcast=True)
    return upper_half(first), upper_half(second), upper_half(x.to(tl.int32, bitcast=True))


@triton.jit
def dot_fp32(a, b, INFINITIES: tl.constexpr):
    """``a @ b`` in fp32: the six products of parts that matter, of nine.

    Matrix units cut bits off whenever they add, so a sum starts at zero and with its small terms.
    Three of these sums run side by side: one would take as long as its instructions do in a row.
    Rests of infinities are NaN. The product of first parts is what infinities' product must be;
    without INFINITIES it stays NaN.
    """
    a_0, a_1, a_2 = split(a)
    b_0, b_1, b_2 = split(b)
    small = tl.dot(a_1, b_1, tl.dot(a_2, b_0)) + tl.dot(a_1, b_0, tl.dot(a_0, b_2))
    small += tl.dot(a_0, b_1)
    if INFINITIES:
        small = tl.where(small == small, small, 0.0)
    return tl.dot(a_0, b_0, small)


@triton.jit
def dot(a, b, acc, OPTIONS: tl.constexpr, INFINITIES: tl.constexpr = True):
    """``acc + a @ b`` in fp32. The interpreter multiplies bf16 as if its bits were integers."""
    PRECISION: tl.constexpr = OPTIONS.precision
    if OPTIONS.interpreted:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    if PRECISION == "bf16x6":
        product = dot_fp32(a, b, INFINITIES)
        if acc is not None:
            product += acc
    else:
        product = tl.dot(a, b, acc, input_precision=PRECISION)
    return product


@triton.jit
def loop_bound(x, OPTIONS: tl.constexpr):
    """``x``. The interpreter's scalars are arrays of one element, which ``range`` does not take."""
    if OPTIONS.interpreted:
        return integer_of(x)
    return x


@triton.jit
def tile_of_program(
    starts_ptr, other_starts_ptr, n_rows, n_other, n_heads, TILE: tl.constexpr,
    LAST_FIRST: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """This program's tile of TILE rows, and where its batch element or sequence lies.

    In a dense batch, tiles of one head are neighbours, so that what they share stays in L2. The
    batch may share a bias: its elements then follow one another, to find it there.

    Packed sequence s has the tiles from ``starts[s] // TILE + s`` on, which are at least as many as
    it needs: so a search in ``starts`` finds the sequence of a tile, and the grid is the same
    whatever the lengths are (``launch.tiles_of_head``). The tokens that no sequence owns, from
    ``starts[B]`` on, are one more sequence, which sees nothing.

    Returns:
        (first row, batch element with slopes and a prefix, head, whether a sequence owns the rows),
        and (first token, tokens) of the tile's rows, and of what they see or are seen by.
    """
    if OPTIONS.packed:
        n_tiles = tl.num_programs(0) // n_heads
        n_sequences = n_tiles - n_rows // TILE - 1
        head = tl.program_id(0) // n_tiles
        tile = tl.program_id(0) % n_tiles
    else:
        n_tiles = tl.cdiv(n_rows, TILE)
        if OPTIONS.has_bias:
            n_batch = tl.num_programs(0) // (n_tiles * n_heads)
            batch = tl.program_id(0) % n_batch
            head = tl.program_id(0) // n_batch // n_tiles
            tile = tl.program_id(0) // n_batch % n_tiles
        else:
            head = (tl.program_id(0) // n_tiles) % n_heads
            batch = tl.program_id(0) // n_tiles // n_heads
            tile = tl.program_id(0) % n_tiles
    if LAST_FIRST:
        tile = n_tiles - 1 - tile
    if OPTIONS.packed:
        sequence = tile * 0
        beyond = n_sequences + 1
        while beyond - sequence > 1:
            middle = (sequence + beyond) // 2
            begins = tl.load(starts_ptr + middle) // TILE + middle <= tile
            sequence = tl.where(begins, middle, sequence)
            beyond = tl.where(begins, beyond, middle)
        is_owned = sequence < n_sequences
        first = tl.load(starts_ptr + sequence)
        end = tl.load(starts_ptr + sequence + 1, mask=is_owned, other=n_rows)
        other_first = tl.load(other_starts_ptr + sequence)
        other_end = tl.load(other_starts_ptr + sequence + 1, mask=is_owned, other=0)
        first_row = (tile - first // TILE - sequence) * TILE
        batch = tl.minimum(sequence, n_sequences - 1)
        own, other = (first, end - first), (other_first, tl.maximum(other_end - other_first, 0))
    else:
        first_row, is_owned = tile * TILE, True
        own, other = (0, n_rows), (0, n_other)
    return (first_row, batch, head, is_owned), own, other


@triton.jit
def rows_of_head(ptr, b, h, first, strides, OPTIONS: tl.constexpr):
    """A pointer to the rows of a head, of a packed batch to row ``first``.

    ``b``, ``h``: batch element and head in 64 bits. ``strides``: of batch, head and row.
    """
    ptr += b * strides[0] + h * strides[1]
    if OPTIONS.packed:
        ptr += first.to(tl.int64) * strides[2]
    return ptr


@triton.jit
def mask_of(batch, n_queries, n_keys, window_left, window_right, prefix_ptr, OPTIONS: tl.constexpr):
    """``mask``, as the module's docstring describes it, of a batch element or sequence."""
    offset = 0
    if OPTIONS.bottom_right:
        offset = n_keys - n_queries
    prefix = 0
    if OPTIONS.has_prefix:
        prefix = tl.load(prefix_ptr + batch)
    return offset, n_queries, n_keys, window_left, window_right, prefix


@triton.jit
def added_of(
    slopes_ptr, bias_ptr, mask_ptr, bias_strides, batch, n_heads, head, n_keys,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """``added``, as the module's docstring describes it, of a head of a batch element.

    ``bias_strides``: of batch, head, query and key; None without a bias.
    """
    slope = 0.0
    if OPTIONS.alibi:
        slope = tl.load(slopes_ptr + batch * n_heads + head) * LOG2_E
    b = batch.to(tl.int64)
    bias, stride_bq, stride_bk, shown = 0, 0, 0, 0  # because Triton 3.6 returns no None
    if OPTIONS.has_bias:
        bias, stride_bq, stride_bk = bias_ptr, bias_strides[2], bias_strides[3]
        if not OPTIONS.bias_tma:
            bias += b * bias_strides[0] + head.to(tl.int64) * bias_strides[1]
    if OPTIONS.has_mask:
        shown = mask_ptr + b * n_keys
    return slope, bias, stride_bq, stride_bk, shown


@triton.jit
def load_rows(ptr, rows, columns, stride_row, n_rows, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """(len(rows), len(columns)) tile; columns past WIDTH and, if MASKED, rows past n_rows are 0."""
    pointers = ptr + rows[:, None] * stride_row + columns[None, :]
    if columns.shape[0] == WIDTH:
        if MASKED:
            return tl.load(pointers, mask=(rows < n_rows)[:, None], other=0.0)
        return tl.load(pointers)
    inside = (columns < WIDTH)[None, :]
    if MASKED:
        inside = inside & (rows < n_rows)[:, None]
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def tma_load(descriptor, batch, head, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``load_rows`` by the TMA, from a descriptor of (B, H, N, D): 0 outside it."""
    return descriptor.load([batch, head, start, 0]).reshape(ROWS, COLUMNS)


@triton.jit
def load_tile(
    source, position, start, n_rows, rows, columns, WIDTH: tl.constexpr, MASKED: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """The rows from ``start`` on of a head that has ``n_rows``, as ``use_tma`` says how.

    ``source``: a pointer to the head, or a descriptor of (B, H, N, D); and the stride of a row.
    ``position``: batch element and head in the descriptor, whose loads are always MASKED.
    """
    tensor, stride_row = source
    if OPTIONS.use_tma:
        tile = tma_load(tensor, position[0], position[1], start, rows.shape[0], columns.shape[0])
    else:
        tile_ptr = tensor + start.to(tl.int64) * stride_row
        tile = load_rows(tile_ptr, rows, columns, stride_row, n_rows - start, WIDTH, MASKED)
    return tile


@triton.jit
def tma_reload(source, position, start, n_rows, rows, columns):
    """``load_tile`` for the second product of a wide fp32 tile, the sum of a gradient.

    Kept from the first product, its parts (see ``dot_fp32``) would fill the registers. The second
    address equals the first one, in a form that the compiler cannot know to be equal: otherwise it
    would keep the tile instead of loading it again.
    """
    batch, head = position
    start += n_rows >> 31
    return tma_load(source[0], batch, head, start, rows.shape[0], columns.shape[0])


@triton.jit
def store_rows(
    ptr, tile, rows, columns, stride_row, n_rows, WIDTH: tl.constexpr, ADDS: tl.constexpr = False
):
    """The inverse of ``load_rows``, casting to the pointer's type. ADDS: to what is there."""
    inside = (rows < n_rows)[:, None] & (columns < WIDTH)[None, :]
    pointers = ptr + rows[:, None] * stride_row + columns[None, :]
    if ADDS:
        tile += tl.load(pointers, mask=inside, other=0.0)
    tl.store(pointers, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x):
    """By one exp2; near 0, where that cancels, by its series. From 10 on it is 1 in fp32."""
    far = 1.0 - 2.0 / (1.0 + tl.exp2(tl.minimum(x, 10.0) * (2.0 * LOG2_E)))
    y = x * x
    near = x + x * y * (-1.0 / 3.0 + y * (2.0 / 15.0 + y * (-17.0 / 315.0 + y * (62.0 / 2835.0))))
    return tl.where(y < 0.0625, near, far)


@triton.jit
def tile_indices(N: tl.constexpr, WIDE: tl.constexpr):
    """0..N-1; in 64 bits where N rows of the largest stride overflow 32."""
    indices = tl.arange(0, N)
    if WIDE:
        indices = indices.to(tl.int64)
    return indices


@triton.jit
def visible(queries, keys, mask, is_causal: tl.constexpr, OPTIONS: tl.constexpr):
    """Which of ``keys`` each of ``queries`` sees, as a tile; the diagonal is query + offset."""
    offset, _, n_keys, window_left, window_right, prefix = mask
    seen = keys < n_keys
    if is_causal:
        reached = keys <= queries + (offset + window_right)
        if OPTIONS.has_prefix:
            reached = reached | (keys < prefix)
        seen = seen & reached
    if OPTIONS.has_left:
        seen = seen & (keys >= queries + (offset - window_left))
    return seen


@triton.jit
def key_positions(first, slope, N: tl.constexpr):
    """(N,) ALiBi's term of neighbouring keys, the first of them ``first`` positions from the base.

    Each is the sum of one term for the key's group of eight and one for its position in the group:
    that is one multiply-add for each key, where integer positions would have to be converted.
    """
    within_eight = slope * (tl.arange(0, 8) + first).to(tl.float32)
    eights = tl.arange(0, N // 8).to(tl.float32) * 8.0
    return (slope * eights[:, None] + within_eight[None, :]).reshape(N)


@triton.jit
def of_queries(x, TRANSPOSED: tl.constexpr):
    """(queries,) as a factor of a tile of scores, (queries, keys) or transposed."""
    return x[None, :] if TRANSPOSED else x[:, None]


@triton.jit
def of_keys(x, TRANSPOSED: tl.constexpr):
    """(keys,) as a factor of a tile of scores, (queries, keys) or transposed."""
    return x[:, None] if TRANSPOSED else x[None, :]


@triton.jit
def minus_infinity_below(bias, INTERPRETED: tl.constexpr):
    """``bias`` in fp32, -inf where it is HIDDEN_BIAS or less."""
    if INTERPRETED or bias.dtype == tl.float32:
        x = bias.to(tl.float32)
        return tl.where(x <= HIDDEN_BIAS, float("-inf"), x)
    PTX: tl.constexpr = HIDE_BF16 if bias.dtype == tl.bfloat16 else HIDE_FP16
    pairs = tl.inline_asm_elementwise(PTX, "=r,r", [bias], dtype=bias.dtype, is_pure=True, pack=2)
    return pairs.to(tl.float32)


@triton.jit
def scores_tile(
    s,  # Q Kᵀ of one tile (queries, keys), or TRANSPOSED (keys, queries)
    queries,
    key_start,  # of the tile, whose keys are counted from it
    keys,
    base,  # a key near those that count, from which positions are measured
    first_position,  # of the tile's first key
    mask,
    added,
    bias_position,  # batch element, head and first query in the descriptor
    factors,
    is_causal: tl.constexpr,
    OPTIONS: tl.constexpr,
    MASKED: tl.constexpr,  # some keys may lie past the end
    HIDES: tl.constexpr,  # scores of keys that are not visible become -inf
    TRANSPOSED: tl.constexpr,
):
    """Scaled, soft-capped, biased and hidden scores: (z, unit, s), z · unit in units of log2.

    With a soft-cap the last is its tanh, whose derivative is 1 - s². If ``alibi`` is
    :data:`CAUSAL_ALIBI`, what :func:`alibi_of_rows` returns is left out of each row.

    The caller computes the product, because a backward kernel issues another one beside it. A
    backward kernel also takes no maximum, so it hides P instead (:func:`probabilities`), which
    leaves the scale in one multiply-add.
    """
    offset, n_queries, n_keys, _, _, _ = mask
    slope, bias, stride_bq, stride_bk, shown = added
    scale, softcap = factors
    if OPTIONS.has_softcap:
        s = tanh(s * (scale / softcap))
        factor = softcap * LOG2_E
    else:
        factor = scale * LOG2_E
    if not (HIDES or OPTIONS.alibi or OPTIONS.has_bias or OPTIONS.has_mask):
        return s, factor, s
    tile_queries = of_queries(queries, TRANSPOSED)
    tile_keys = of_keys(key_start + keys, TRANSPOSED)
    if HIDES:
        seen = visible(tile_queries, tile_keys, mask, is_causal, OPTIONS)
    # Scores have the bias's own units where there is one, so that adding it is one multiply-add.
    unit: tl.constexpr = LOG2_E if OPTIONS.has_bias else 1.0
    in_unit: tl.constexpr = LN_2 if OPTIONS.has_bias else 1.0
    z = s * (factor * in_unit)
    if OPTIONS.alibi == CAUSAL_ALIBI:
        positions = key_positions(first_position, slope * in_unit, keys.shape[0])
        z += of_keys(positions, TRANSPOSED)
    elif OPTIONS.alibi:
        diagonal = (tile_queries + (offset - base)).to(tl.float32)
        z -= slope * in_unit * tl.abs(diagonal - (tile_keys - base).to(tl.float32))
    if OPTIONS.has_bias:
        if OPTIONS.bias_tma:
            batch, head, first_query = bias_position
            tile = bias.load([batch, head, first_query, key_start])
            tile = tile.reshape(queries.shape[0], keys.shape[0])
        else:  # queries may lie past the end; keys only in a MASKED tile
            inside = tile_queries < n_queries
            if MASKED:
                inside = inside & (tile_keys < n_keys)
            pointers = bias + tile_queries.to(tl.int64) * stride_bq
            pointers += tile_keys.to(tl.int64) * stride_bk
            tile = tl.load(pointers, mask=inside, other=float("-inf"))
        z += minus_infinity_below(tile, OPTIONS.interpreted)
    if OPTIONS.has_mask:
        is_shown = tl.load(shown + key_start + keys, mask=key_start + keys < n_keys, other=0)
        z = tl.where(of_keys(is_shown, TRANSPOSED) != 0, z, float("-inf"))
    if HIDES:
        z = tl.where(seen, z, float("-inf"))
    return z, unit, s


@triton.jit
def alibi_of_rows(queries, offset, base, slope):
    """What :func:`scores_tile` leaves out of each row, where no key follows the diagonal."""
    return slope * (queries + (offset - base)).to(tl.float32)


@triton.jit
def probabilities(
    s,  # Q Kᵀ of one tile (queries, keys), or TRANSPOSED (keys, queries)
    logsumexp,  # (queries,), times log2(e)
    queries,
    key_start,  # of the tile, whose keys are counted from it
    keys,
    base,  # the tile's first key
    mask,
    added,
    factors,
    is_causal: tl.constexpr,
    OPTIONS: tl.constexpr,
    MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    """P of one tile, and the third result of :func:`scores_tile`."""
    z, unit, s = scores_tile(
        s, queries, key_start, keys, base, 0, mask, added, None, factors, is_causal, OPTIONS,
        MASKED, False, TRANSPOSED,
    )  # fmt: skip
    if OPTIONS.has_bias or OPTIONS.has_mask:  # a query may see no key: -inf - -inf is NaN
        logsumexp = tl.where(logsumexp == float("-inf"), float("inf"), logsumexp)
    if OPTIONS.alibi == CAUSAL_ALIBI:
        logsumexp += alibi_of_rows(queries, mask[0], base, added[0])
    p = tl.exp2(z * unit - of_queries(logsumexp, TRANSPOSED))
    if MASKED:
        tile_queries = of_queries(queries, TRANSPOSED)
        tile_keys = of_keys(key_start + keys, TRANSPOSED)
        seen = visible(tile_queries, tile_keys, mask, is_causal, OPTIONS)
        p = tl.where(seen, p, 0.0)
    return p, s


@triton.jit
def key_range(
    query_start, mask, Q_TILE_SIZE: tl.constexpr, K_TILE_SIZE: tl.constexpr,
    is_causal: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """(starts, stops) of the three parts of the walk over keys for one query tile.

    The parts are a window's left edge, whole tiles, and the right edge. Some query of the tile sees
    some key of the walk; in the second part every query sees every key. All but the last stop are
    multiples of the key tile.
    """
    offset, _, n_keys, window_left, window_right, prefix = mask
    stop = n_keys
    full_stop = n_keys // K_TILE_SIZE * K_TILE_SIZE
    if is_causal:
        first_hidden = query_start + offset + window_right + 1
        stop = tl.minimum(stop, tl.maximum(first_hidden + Q_TILE_SIZE - 1, 0))
        full_stop = tl.minimum(full_stop, tl.maximum(first_hidden, 0) // K_TILE_SIZE * K_TILE_SIZE)
    if OPTIONS.has_prefix:
        seen_by_all = tl.minimum(prefix, n_keys)
        stop = tl.maximum(stop, seen_by_all)
        full_stop = tl.maximum(full_stop, seen_by_all // K_TILE_SIZE * K_TILE_SIZE)
    start = 0
    full_start = 0
    if OPTIONS.has_left:
        first_seen = query_start + offset - window_left
        start = tl.maximum(first_seen, 0) // K_TILE_SIZE * K_TILE_SIZE
        full_start = tl.cdiv(tl.maximum(first_seen + Q_TILE_SIZE - 1, 0), K_TILE_SIZE) * K_TILE_SIZE
    starts = (start, full_start, tl.maximum(full_start, full_stop))
    return starts, (tl.minimum(full_start, stop), full_stop, stop)


@triton.jit
def load_statistic(ptr, queries, n_queries, other, PACKED: tl.constexpr):
    """One statistic of ``queries``: padded, or followed by those of the next sequence."""
    if PACKED:
        return tl.load(ptr + queries, mask=queries < n_queries, other=other)
    return tl.load(ptr + queries)
