# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def,attr-defined"
"""The gradient of attention sinks, on every GPU tier: one pass over the output and its gradient.

With the logsumexp L of a row, a sink s has the share exp(s - L) of its softmax and the value 0, so

    ds = Σ exp(s - L) · (0 - delta),   delta = rowsum(O ∘ dO) - dL

over the rows of a head. Each program sums the rows of a tile, and PyTorch sums the tiles, so that
every sum has a fixed order. Legend: B batch, H query heads, N_q queries, E head_dim of value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.launch import Launch, padded, stride_numbers
from flashattn_triton.primitives import LOG2_E, load_rows

_TILES = Tiles(64, 1, 4, 1)


@triton.jit(do_not_specialize=["N_QUERIES", "N_HEADS"])
def sinks_pass_kernel(
    sinks_ptr,  # (H,)
    O_ptr,
    dO_ptr,
    L_ptr,  # (B, H, N_q) fp32, contiguous
    dL_ptr,  # (B, H, N_q) fp32, or None
    sums_ptr,  # (B, H, tiles) fp32
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
    N_HEADS,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_DL: tl.constexpr,
):
    """The sum over ROWS queries of one head. Grid: tiles · B · H."""
    n_tiles = tl.cdiv(N_QUERIES, ROWS)
    batch_head = (tl.program_id(0) // n_tiles).to(tl.int64)
    h = batch_head % N_HEADS
    b = batch_head // N_HEADS
    query_start = ((tl.program_id(0) % n_tiles) * ROWS).to(tl.int64)
    rows = tl.arange(0, ROWS).to(tl.int64)
    columns = tl.arange(0, E_PADDED)
    n_rows = N_QUERIES - query_start
    inside = rows < n_rows
    o_tile = O_ptr + b * stride_ob + h * stride_oh + query_start * stride_oq
    do_tile = dO_ptr + b * stride_dob + h * stride_doh + query_start * stride_doq
    o = load_rows(o_tile, rows, columns, stride_oq, n_rows, E, True).to(tl.float32)
    do = load_rows(do_tile, rows, columns, stride_doq, n_rows, E, True).to(tl.float32)
    delta = tl.sum(o * do, 1)
    if HAS_DL:
        dl_tile = dL_ptr + b * stride_dlb + h * stride_dlh + query_start * stride_dlq
        delta -= tl.load(dl_tile + rows * stride_dlq, mask=inside, other=0.0)
    lse_tile = L_ptr + batch_head * N_QUERIES + query_start
    logsumexp = tl.load(lse_tile + rows, mask=inside, other=float("inf"))
    # A sink of -inf takes no part, also not in a row that sees no key.
    sees_nothing = tl.abs(logsumexp) == float("inf")
    logsumexp = tl.where(sees_nothing, float("inf"), logsumexp)
    delta = tl.where(sees_nothing, 0.0, delta)
    sink = tl.load(sinks_ptr + h).to(tl.float32)
    share = tl.exp2((sink - logsumexp) * LOG2_E)
    tl.store(sums_ptr + tl.program_id(0), -tl.sum(share * delta, 0))


@dataclass(frozen=True, kw_only=True)
class SinksCall:
    """The kernel on one kind of input: what its launch needs, found out once."""

    launch: Launch
    sums: Sequence[int]

    def __call__(
        self, sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
    ) -> Tensor:
        """The gradient of ``sinks``, summed in fp32; last strides of the others are 1."""
        sums = out.new_empty(self.sums, dtype=torch.float32)
        self.launch(
            {
                "sinks_ptr": sinks.data_ptr(),
                "O_ptr": out.data_ptr(),
                "dO_ptr": grad_out.data_ptr(),
                "L_ptr": lse.data_ptr(),
                "sums_ptr": sums.data_ptr(),
                **({} if grad_lse is None else {"dL_ptr": grad_lse.data_ptr()}),
            }
        )
        return sums.sum((0, 2)).to(sinks.dtype)


def sinks_call(sinks: Tensor, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> SinksCall:
    """The call for tensors of these shapes, strides and types; their last stride is 1."""
    batch, heads, n_queries, value_dim = out.shape
    tiles = -(-n_queries // _TILES.queries)
    dl_stride = (0, 0, 0) if grad_lse is None else grad_lse.stride()
    launch = Launch(
        sinks_pass_kernel,
        out.device,
        tiles * batch * heads,
        {
            "sinks_ptr": sinks.dtype,
            "O_ptr": out.dtype,
            "dO_ptr": grad_out.dtype,
            "L_ptr": torch.float32,
            "dL_ptr": None if grad_lse is None else grad_lse.dtype,
            "sums_ptr": torch.float32,
        },
        {
            **stride_numbers(o=out.stride()[:3], do=grad_out.stride()[:3], dl=dl_stride),
            "N_QUERIES": n_queries,
            "N_HEADS": heads,
        },
        {
            "E": value_dim,
            "E_PADDED": padded(value_dim, out.dtype),
            "ROWS": _TILES.queries,
            "HAS_DL": grad_lse is not None,
        },
        warps=_TILES.warps,
        stages=_TILES.stages,
    )
    return SinksCall(launch=launch, sums=(batch, heads, tiles))
