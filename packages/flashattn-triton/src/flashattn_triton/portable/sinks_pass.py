"""The gradient of attention sinks, on every GPU tier: one pass over the output and its gradient.

The kernel is that of :mod:`flashattn_triton.portable.preprocess`. Each program sums the rows of a
tile, and PyTorch sums the tiles, so that every sum has a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flashattn_triton.launch import Launch
from flashattn_triton.portable.preprocess import ROWS, preprocess_launch


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
    batch, heads, n_queries, _ = out.shape
    launch = preprocess_launch(out, grad_out, grad_lse, sinks=sinks)
    return SinksCall(launch=launch, sums=(batch, heads, -(-n_queries // ROWS)))
