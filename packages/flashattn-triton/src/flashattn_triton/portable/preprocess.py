# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The kernel that runs before the backward passes: delta, and the logsumexp in units of log2."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.launch import Launch, padded, stride_numbers
from flashattn_triton.primitives import LOG2_E, load_rows, store_rows

PREPROCESS_TILES = Tiles(64, 1, 4, 1)


@triton.jit(do_not_specialize=["stride_dlb", "stride_dlh", "N_QUERIES", "N_HEADS"])
def preprocess_kernel(
    O_ptr,
    dO_ptr,
    dL_ptr,  # (B, H, N_q) fp32, or None
    L_ptr,
    statistics_ptr,  # (B · H, 2, N_PADDED) fp32
    dQ_ptr,  # (B · H, N_q, D_PADDED) fp32 to be zeroed, or None
    stride_ob,
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
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DL: tl.constexpr,
    ZEROES: tl.constexpr,
):
    """L · log2(e), and delta = rowsum(O ∘ dO) - dL, for ROWS queries of one head.

    Grid: tiles · B · H. N_PADDED queries have statistics: those past the end have L = inf and
    delta = 0, so that their P and dS are exactly 0 and no other kernel needs to ask where the end
    is. A packed batch is one sequence here.
    """
    n_tiles = tl.cdiv(N_PADDED, ROWS)
    batch_head = tl.program_id(0) // n_tiles
    h = (batch_head % N_HEADS).to(tl.int64)
    b = (batch_head // N_HEADS).to(tl.int64)
    query_start = ((tl.program_id(0) % n_tiles) * ROWS).to(tl.int64)
    rows = tl.arange(0, ROWS).to(tl.int64)
    columns = tl.arange(0, E_PADDED)
    n_rows = N_QUERIES - query_start
    o_tile = O_ptr + b * stride_ob + h * stride_oh + query_start * stride_oq
    do_tile = dO_ptr + b * stride_dob + h * stride_doh + query_start * stride_doq
    o = load_rows(o_tile, rows, columns, stride_oq, n_rows, E, True).to(tl.float32)
    do = load_rows(do_tile, rows, columns, stride_doq, n_rows, E, True).to(tl.float32)
    delta = tl.sum(o * do, 1)
    inside = rows < n_rows
    if HAS_DL:
        dl_tile = dL_ptr + b * stride_dlb + h * stride_dlh + query_start * stride_dlq
        delta -= tl.load(dl_tile + rows * stride_dlq, mask=inside, other=0.0)
    row = batch_head.to(tl.int64) * N_QUERIES + query_start
    logsumexp = tl.load(L_ptr + row + rows, mask=inside, other=float("inf"))
    # A constant logsumexp has no derivative, whatever its gradient claims (0 · NaN is NaN).
    delta = tl.where(logsumexp == float("-inf"), 0.0, delta)
    target = statistics_ptr + batch_head.to(tl.int64) * 2 * N_PADDED + query_start + rows
    stored = rows < N_PADDED - query_start
    tl.store(target, logsumexp * LOG2_E, mask=stored)
    tl.store(target + N_PADDED, delta, mask=stored)
    if ZEROES:
        dq_rows = tl.zeros([ROWS, D_PADDED], tl.float32)
        all_columns = tl.arange(0, D_PADDED)
        store_rows(dQ_ptr + row * D_PADDED, dq_rows, rows, all_columns, D_PADDED, n_rows, D_PADDED)


def preprocess_launch(
    query: Tensor,
    out: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    n_padded: int,
    *,
    zeroes: bool,
) -> Launch:
    """The launch of the kernel on one kind of input.

    Args:
        query: (B, H, N_q, D), or (1, H, T_q, D) of a packed batch.
        out: (B, H, N_q, E).
        grad_out: dO, the shape of ``out``.
        grad_logsumexp: dL, (B, H, N_q), or None.
        n_padded: queries that have statistics, a multiple of every tile that reads them.
        zeroes: whether dQ is set to 0.
    """
    (batch, heads, n_queries, head_dim), value_dim = query.shape, out.shape[3]
    dl_stride = (0, 0, 0) if grad_logsumexp is None else grad_logsumexp.stride()
    return Launch(
        preprocess_kernel,
        query.device,
        -(-n_padded // PREPROCESS_TILES.queries) * batch * heads,
        {
            "O_ptr": out.dtype,
            "dO_ptr": grad_out.dtype,
            "dL_ptr": None if grad_logsumexp is None else grad_logsumexp.dtype,
            "L_ptr": torch.float32,
            "statistics_ptr": torch.float32,
            "dQ_ptr": torch.float32 if zeroes else None,
        },
        {
            **stride_numbers(o=out.stride()[:3], do=grad_out.stride()[:3], dl=dl_stride),
            "N_QUERIES": n_queries,
            "N_PADDED": n_padded,
            "N_HEADS": heads,
        },
        {
            "E": value_dim,
            "E_PADDED": padded(value_dim, query.dtype),
            "D_PADDED": padded(head_dim, query.dtype),
            "ROWS": PREPROCESS_TILES.queries,
            "HAS_DL": grad_logsumexp is not None,
            "ZEROES": zeroes,
        },
        warps=PREPROCESS_TILES.warps,
        stages=PREPROCESS_TILES.stages,
    )


def preprocess_addresses(
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    statistics: Tensor,
    dq_sum: Tensor | None = None,
) -> dict[str, int]:
    """The addresses of the kernel's tensors, by the names of its parameters.

    Args:
        out: (B, H, N_q, E).
        logsumexp: contiguous (B, H, N_q) fp32.
        grad_out: dO, the shape of ``out``.
        grad_logsumexp: dL, the shape of ``logsumexp``, or None.
        statistics: (B · H, 2, n_padded) fp32, which is written.
        dq_sum: (B, H, N_q, D padded) fp32, where the launch sets dQ to 0.
    """
    addresses = {
        "O_ptr": out.data_ptr(),
        "dO_ptr": grad_out.data_ptr(),
        "L_ptr": logsumexp.data_ptr(),
        "statistics_ptr": statistics.data_ptr(),
    }
    if grad_logsumexp is not None:
        addresses["dL_ptr"] = grad_logsumexp.data_ptr()
    if dq_sum is not None:
        addresses["dQ_ptr"] = dq_sum.data_ptr()
    return addresses
