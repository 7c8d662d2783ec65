# Kernels are typed by Triton's compiler, not by annotations.
# mypy: disable-error-code="no-untyped-def"
"""The kernel that joins attention to two sets of keys, in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashattn_triton import triton_versions
from flashattn_triton.primitives import load_rows, store_rows

_ROWS, _WARPS = 16, 4


def join_on_gpu(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """See :func:`~.schedules.join`."""
    n, heads, value_dim = out.shape
    attention_join_kernel[(triton.cdiv(n, _ROWS), heads)](
        out, lse, part, part_lse, *out.stride()[:2], *part.stride()[:2], lse.stride(0),
        part_lse.stride(0), n, value_dim, triton.next_power_of_2(value_dim), _ROWS,
        num_warps=_WARPS, **triton_versions.COMPILE_OPTIONS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["N"])
def attention_join_kernel(
    O_ptr,  # (N, H, E) fp32
    L_ptr,  # (H, N) fp32
    part_ptr,  # as O_ptr
    part_L_ptr,  # as L_ptr
    stride_on,
    stride_oh,
    stride_pn,
    stride_ph,
    stride_lh,
    stride_plh,
    N,
    E: tl.constexpr,
    E_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """O += (part - O) · sigmoid(part_L - L), and L = logaddexp(L, part_L).

    Grid: tiles of ROWS queries, H.
    """
    h = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * ROWS
    rows, columns = tl.arange(0, ROWS).to(tl.int64), tl.arange(0, E_PADDED)
    n_rows = N - start
    inside = rows < n_rows
    l_rows = L_ptr + h * stride_lh + start + rows
    logsumexp = tl.load(l_rows, inside, other=0.0)
    of_part = tl.load(part_L_ptr + h * stride_plh + start + rows, inside, other=0.0)
    nothing = of_part == float("-inf")
    of_part = tl.where(nothing, 0.0, of_part)  # -inf - -inf would be NaN
    weight = tl.where(nothing, 0.0, tl.sigmoid(of_part - logsumexp))
    larger = tl.maximum(logsumexp, of_part)
    total = larger + tl.log(tl.exp(logsumexp - larger) + tl.exp(of_part - larger))
    tl.store(l_rows, tl.where(nothing, logsumexp, total), inside)
    o_tile = O_ptr + h * stride_oh + start * stride_on
    o = load_rows(o_tile, rows, columns, stride_on, n_rows, E, True)
    part_tile = part_ptr + h * stride_ph + start * stride_pn
    part = load_rows(part_tile, rows, columns, stride_pn, n_rows, E, True)
    o += (part - o) * weight[:, None]
    store_rows(o_tile, o, rows, columns, stride_on, n_rows, E)
