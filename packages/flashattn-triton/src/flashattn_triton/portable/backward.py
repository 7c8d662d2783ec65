"""The backward pass as portable Triton kernels: FlashAttention-2, Algorithm 2.

This file decides which passes run, and allocates what they write. Each pass has a file with its
kernel and its launch: ``preprocess``, ``key_pass`` and ``query_pass``.

P is recomputed from the stored logsumexp, tile by tile (assignment, Eq. 13-19; S: scaled scores):

    P  = exp(S - L)                 dV = Pᵀ dO
    dP = dO Vᵀ                      dS = P ∘ (dP - delta),   delta = rowsum(O ∘ dO) - dL
    dQ = scale · dS K               dK = scale · dSᵀ Q

A gradient dL of the logsumexp adds P dL to dS, which is why it only enters through delta.

Two forms. *Two passes*: one kernel whose programs own keys (dK, dV; the query heads that share a
key head are summed inside), one whose programs own queries (dQ). P is computed twice, nothing is
shared between programs, every sum has a fixed order. *Fused*: the first kernel also adds its part
of dQ to an fp32 buffer atomically: five matrix products instead of seven, the sum in any order.

Legend: B batch, H query heads, G key/value heads, N_q queries, N_k keys, D head_dim of query and
key, E head_dim of value, T tokens of a packed batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashattn_triton.configs import Tiling
from flashattn_triton.launch import (
    BackwardTensors,
    Launch,
    given_addresses,
    in_layout,
    padded,
    planned_output,
)
from flashattn_triton.mask_and_bias import NOTHING, Given
from flashattn_triton.portable.key_pass import ATOMIC, NONE, TMA_REDUCE, key_pass_launch
from flashattn_triton.portable.launch import KernelInputs
from flashattn_triton.portable.preprocess import ROWS, backward_addresses, preprocess_launch
from flashattn_triton.portable.query_pass import query_pass_kernel
from flashattn_triton.problem import Problem, heads_first


class BackwardCall:
    """The backward kernels on one kind of input, planned for views whose last strides are 1.

    A call returns dQ, dK and dV in the inputs' shapes and dtype, or adds them to fp32 tensors with
    the strides of ``into``. The fused form is used if ``tiling`` has one, unless
    ``problem.deterministic`` asks for a fixed order of every sum.
    """

    def __init__(
        self,
        tensors: BackwardTensors,
        problem: Problem,
        tiling: Tiling,
        given: Given = NOTHING,
        into: Sequence[Tensor] = (),
    ) -> None:
        query, key, value, out, _, grad_out, grad_logsumexp = tensors
        batch, heads, n_queries, head_dim = query.shape
        gradients = [planned_output(x, x.shape[3]) for x in (query, key, value)]
        dq, dk, dv = (x.stride() for x in into or gradients)
        fused = None if problem.deterministic else tiling.fused
        width = padded(head_dim, query.dtype)
        if fused is not None:  # the fp32 sum, padded, so that a tile is one block of memory
            dq = (heads * n_queries * width, n_queries * width, width, 1)
        longest_tile = max(ROWS, tiling.key_pass.queries, tiling.query_pass.queries)
        multiple = max(longest_tile, 0 if fused is None else fused.queries)
        n_padded = -(-n_queries // multiple) * multiple
        results = {"dq": dq, "dk": dk, "dv": dv}
        inputs = KernelInputs(
            query, key, value, problem, given, grad_out, results, n_padded, adds=bool(into)
        )
        zeroed = None if fused is None else head_dim
        self.preprocess = preprocess_launch(
            out, grad_out, grad_logsumexp, n_padded=n_padded, zeroed=zeroed
        )
        self.query_pass: Launch | None = None
        self.dq_sum: Sequence[int] | None = None
        if fused is None:
            self.key_pass = key_pass_launch(inputs, tiling.key_pass, NONE)
            self.query_pass = inputs.launch(
                query_pass_kernel, tiling.query_pass, {}, walked=("K_ptr", "V_ptr")
            )
        else:
            mode = TMA_REDUCE if tiling.tma_reduce else ATOMIC
            self.key_pass = key_pass_launch(inputs, fused, mode)
            self.dq_sum = (batch, heads, n_queries, width)
        self.statistics = (batch * heads, 2, n_padded)
        self.gradients = [in_layout(x, problem.layout) for x in gradients]
        self.scale, self.layout = problem.scale, problem.layout

    def __call__(
        self,
        tensors: BackwardTensors,
        given: Given = NOTHING,
        into: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV of inputs whose last stride is 1, added to ``into`` if that is given."""
        query, fp32 = tensors[0], torch.float32
        dq, dk, dv = into or [
            query.new_empty_strided(shape, strides) for shape, strides, _ in self.gradients
        ]
        statistics = query.new_empty(self.statistics, dtype=fp32)
        dq_sum = None if self.dq_sum is None else query.new_empty(self.dq_sum, dtype=fp32)
        addresses = {
            **backward_addresses(tensors, statistics),
            "dQ_ptr": (dq if dq_sum is None else dq_sum).data_ptr(),
            "dK_ptr": dk.data_ptr(),
            "dV_ptr": dv.data_ptr(),
            **given_addresses(given),
        }
        self.preprocess(addresses)
        self.key_pass(addresses)
        if self.query_pass is not None:
            self.query_pass(addresses)
        if dq_sum is not None:
            # One elementwise kernel: scale and cast, or add.
            dq_view, dq_sum = heads_first(dq, self.layout), dq_sum[..., : query.shape[-1]]
            if into:
                dq_view.add_(dq_sum, alpha=self.scale)
            else:
                torch.mul(dq_sum, self.scale, out=dq_view)
        return dq, dk, dv
