# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The kernel that reads O and dO row by row: delta for the backward passes, the sinks' gradient.

    delta = rowsum(O ∘ dO) - dL

With the logsumexp L of a row, a sink s has the share exp(s - L) of its softmax and the value 0, so
its gradient is ds = Σ exp(s - L) · (0 - delta), over the rows of a head. Each program sums the rows
of a tile, and PyTorch sums the tiles, so that every sum has a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn_triton.launch import BackwardTensors, Launch, padded, stride_numbers
from flashattn_triton.mask_and_bias import Given
from flashattn_triton.primitives import LOG2_E, load_rows, store_rows

ROWS = 64  # of one program


@triton.jit(do_not_specialize=["stride_dlb", "stride_dlh", "N_QUERIES", "N_HEADS"])
def preprocess_kernel(
    O_ptr,
    dO_ptr,
    dL_ptr,  # (B, H, N_q) fp32, or None
    L_ptr,  # (B, H, N_q) fp32, contiguous
    statistics_ptr,  # (B · H, 2, N_PADDED) fp32, or None
    dQ_ptr,  # (B · H, N_q, D_PADDED) fp32 to be zeroed, or None
    sinks_ptr,  # (H,), or None
    sums_ptr,  # (B, H, tiles) fp32, or None as the sinks
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
):
    """L · log2(e), and delta, for ROWS queries of one head; the sum of these rows' parts of ds.

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
    if dL_ptr is not None:
        dl_tile = dL_ptr + b * stride_dlb + h * stride_dlh + query_start * stride_dlq
        delta -= tl.load(dl_tile + rows * stride_dlq, mask=inside, other=0.0)
    row = batch_head.to(tl.int64) * N_QUERIES + query_start
    logsumexp = tl.load(L_ptr + row + rows, mask=inside, other=float("inf"))
    # A constant logsumexp has no derivative, whatever its gradient claims (0 · NaN is NaN).
    delta = tl.where(logsumexp == float("-inf"), 0.0, delta)
    if statistics_ptr is not None:
        target = statistics_ptr + batch_head.to(tl.int64) * 2 * N_PADDED + query_start + rows
        stored = rows < N_PADDED - query_start
        tl.store(target, logsumexp * LOG2_E, mask=stored)
        tl.store(target + N_PADDED, delta, mask=stored)
    if dQ_ptr is not None:
        dq_rows = tl.zeros([ROWS, D_PADDED], tl.float32)
        all_columns = tl.arange(0, D_PADDED)
        store_rows(dQ_ptr + row * D_PADDED, dq_rows, rows, all_columns, D_PADDED, n_rows, D_PADDED)
    if sums_ptr is not None:
        sink = tl.load(sinks_ptr + h).to(tl.float32)
        # A sink of -inf takes no part, also not in a row that sees no key.
        sees_nothing = tl.abs(logsumexp) == float("inf")
        share = tl.exp2((sink - tl.where(sees_nothing, float("inf"), logsumexp)) * LOG2_E)
        tl.store(
            sums_ptr + tl.program_id(0), -tl.sum(share * tl.where(sees_nothing, 0.0, delta), 0)
        )


def preprocess_launch(
    out: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    *,
    n_padded: int | None = None,
    zeroed: int | None = None,
    sinks: Tensor | None = None,
) -> Launch:
    """The launch of the kernel on one kind of input.

    Args:
        out: (B, H, N_q, E), or (1, H, T_q, E) of a packed batch.
        grad_out: dO, the shape of ``out``.
        grad_logsumexp: dL, (B, H, N_q), or None.
        n_padded: queries that have statistics, a multiple of every tile that reads them; None for
            no statistics.
        zeroed: D, where dQ is set to 0.
        sinks: (H,), where their gradient is wanted.
    """
    batch, heads, n_queries, value_dim = out.shape
    dl_stride = (0, 0, 0) if grad_logsumexp is None else grad_logsumexp.stride()
    n_rows = n_queries if n_padded is None else n_padded
    fp32 = torch.float32
    return Launch(
        preprocess_kernel,
        out.device,
        -(-n_rows // ROWS) * batch * heads,
        {
            "O_ptr": out.dtype,
            "dO_ptr": grad_out.dtype,
            "dL_ptr": None if grad_logsumexp is None else grad_logsumexp.dtype,
            "L_ptr": fp32,
            "statistics_ptr": None if n_padded is None else fp32,
            "dQ_ptr": None if zeroed is None else fp32,
            "sinks_ptr": None if sinks is None else sinks.dtype,
            "sums_ptr": None if sinks is None else fp32,
        },
        {
            **stride_numbers(o=out.stride()[:3], do=grad_out.stride()[:3], dl=dl_stride),
            "N_QUERIES": n_queries,
            "N_PADDED": n_rows,
            "N_HEADS": heads,
        },
        {
            "E": value_dim,
            "E_PADDED": padded(value_dim, out.dtype),
            "D_PADDED": padded(zeroed or 1, out.dtype),
            "ROWS": ROWS,
        },
        warps=4 if value_dim <= 256 else 8,  # wider rows of four spill on sm_120
    )


def backward_addresses(
    tensors: BackwardTensors, statistics: Tensor | None = None
) -> dict[str, int]:
    """Addresses of what the kernels of a backward pass read, by the names of their parameters.

    ``statistics``: (B · H, 2, n_padded) fp32, which the preprocess kernel writes first.
    """
    names = ("Q_ptr", "K_ptr", "V_ptr", "O_ptr", "L_ptr", "dO_ptr", "dL_ptr", "statistics_ptr")
    given = zip(names, (*tensors, statistics), strict=True)
    return {name: x.data_ptr() for name, x in given if x is not None}


class SinksCall:
    """The kernel for the gradient of sinks, of both tiers, on one kind of input."""

    def __init__(self, tensors: BackwardTensors, sinks: Tensor) -> None:
        _, _, _, out, _, grad_out, grad_logsumexp = tensors
        batch, heads, n_queries, _ = out.shape
        self.launch = preprocess_launch(out, grad_out, grad_logsumexp, sinks=sinks)
        self.sums = (batch, heads, -(-n_queries // ROWS))

    def __call__(self, tensors: BackwardTensors, given: Given) -> Tensor:
        """The gradient of sinks, summed in fp32."""
        sinks = given.sinks
        assert sinks is not None
        sums = sinks.new_empty(self.sums, dtype=torch.float32)
        addresses = {"sinks_ptr": sinks.data_ptr(), "sums_ptr": sums.data_ptr()}
        self.launch({**backward_addresses(tensors), **addresses})
        return sums.sum((0, 2)).to(sinks.dtype)
