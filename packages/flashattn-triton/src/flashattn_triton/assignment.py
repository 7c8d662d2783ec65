"""The assignment's classes: FlashAttention-2 as ``torch.autograd.Function``.

They differ in who computes: tiles of PyTorch, or kernels with either backward pass, of which one is
the assignment's equations in PyTorch, compiled. All save L, Q, K, V, O; L is the natural-log
logsumexp, shaped ``Q.shape[:-1]``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashattn_triton.inputs import check_dense, check_tensors
from flashattn_triton.mask_and_bias import NOTHING
from flashattn_triton.op import BACKWARD, FORWARD
from flashattn_triton.problem import Implementation, new_problem


class FlashAttention2PyTorch(torch.autograd.Function):
    """``FlashAttention2PyTorch.apply(Q, K, V, is_causal=False)``, tile by tile in PyTorch.

    Algorithms 1 and 2 of :mod:`flashattn_triton.tiled`, on any device. Q is (..., N_q, D), K
    (..., N_k, D), V (..., N_k, E), with the same leading dimensions (at least one); the output is
    (..., N_q, E). The scale is 1/sqrt(D); ``is_causal`` lets query i see the keys j <= i.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        TypeError: not a tensor.
    """

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        """O, with what the backward pass needs saved on ``ctx``."""
        return _forward(ctx, Q, K, V, is_causal, "tiled")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        """dQ, dK, dV by who computed the output."""
        L, Q, K, V, O = ctx.saved_tensors  # noqa: E741 - the paper's name
        query, key, value, out, grad_out = (_as_heads(x) for x in (Q, K, V, O, dO))
        lse = L.view(query.shape[:-1])
        tensors = (query, key, value, out, lse, grad_out, None)
        gradients = BACKWARD(*tensors, *ctx.arguments, [True, False, False])[:3]
        dQ, dK, dV = (g.view(x.shape) for g, x in zip(gradients, (Q, K, V), strict=True))
        return dQ, dK, dV, None


class FlashAttention2Triton(FlashAttention2PyTorch):
    """:class:`FlashAttention2PyTorch` by Triton kernels, with the same arguments and result.

    CUDA tensors take the tier that ``flash_attention`` chooses, the portable one or Hopper's. CPU
    tensors run in Triton's interpreter if it is active, and are refused if not.
    :class:`FlashAttention2TritonCompiledBackward` is the same with the backward pass in PyTorch.

    Raises:
        ValueError: shapes, dtypes or devices don't fit, or Triton cannot run on the device.
    """

    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool = False) -> Tensor:
        """O, with what the backward pass needs saved on ``ctx``."""
        return _forward(ctx, Q, K, V, is_causal, "auto" if Q.is_cuda else "triton")


class FlashAttention2TritonCompiledBackward(FlashAttention2Triton):
    """:class:`FlashAttention2Triton` with Eq. 13-19 in compiled PyTorch as its backward pass.

    N_q x N_k elements exist during backward, as :func:`flash_backward` says.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        """dQ, dK, dV by :func:`compiled_flash_backward`."""
        # Detached, because a compiler looks at the history of what it is given, and O has one.
        L, Q, K, V, O = (x.detach() for x in ctx.saved_tensors)  # noqa: E741 - the paper's name
        scale = 1.0 / math.sqrt(Q.shape[-1])
        return *compiled_flash_backward(Q, K, V, O, dO, L, ctx.is_causal, scale), None


def _forward(
    ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool, implementation: Implementation
) -> Tensor:
    check_tensors(Q=Q, K=K, V=V)
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        if x.dim() < 3 or x.shape[:-2] != Q.shape[:-2]:
            raise ValueError(
                f"{name} must have at least three dimensions (..., sequence, head_dim), the same "
                f"leading dimensions as Q, but got shape {tuple(x.shape)} beside Q's "
                f"{tuple(Q.shape)}. Expand it, or add a batch dimension with {name}[None]."
            )
    query, key, value = (_as_heads(x) for x in (Q, K, V))
    check_dense(query, key, value)
    problem = new_problem(
        head_dim=Q.shape[-1], causal=bool(is_causal), implementation=implementation
    )
    ctx.arguments = (*NOTHING, *problem.pack())
    out, lse = FORWARD(query, key, value, *ctx.arguments)
    O: Tensor = out.view(*Q.shape[:-1], V.shape[-1])  # noqa: E741 - the paper's name
    ctx.save_for_backward(lse.view(Q.shape[:-1]), Q, K, V, O)
    ctx.is_causal = is_causal
    return O


def _as_heads(x: Tensor) -> Tensor:
    """(..., N, D) to (B, H, N, D): the last leading dimension becomes heads."""
    return x.unsqueeze(1) if x.dim() == 3 else x.flatten(0, -4)


# ---- the backward pass in PyTorch ---------------------------------------------------------------


def flash_backward(
    Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, L: Tensor,  # noqa: E741 - the paper's
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Eq. 13-19 of the assignment on whole matrices, in fp32 whatever the dtype of the inputs.

    Recomputing P from the saved logsumexp needs no softmax and no online trick, so this is the
    whole backward pass (FlashAttention-2, Dao 2023, section 3.1.2). It is the step between autograd
    of the definition and the tiled kernels: it stores nothing but what the forward pass saved, but
    S, P, dP and dS exist in full, N_q x N_k elements in fp32 each, fewer where the compiler fuses
    them.

    Args:
        Q: (..., N_q, D); all tensors share the leading dimensions.
        K: (..., N_k, D).
        V: (..., N_k, E).
        O: (..., N_q, E), the output of the forward pass.
        dO: (..., N_q, E), its gradient.
        L: (..., N_q), natural-log logsumexp of the scaled scores, fp32.
        is_causal: query i sees the keys j <= i.
        scale: what Q Kᵀ was multiplied by.

    Returns:
        dQ, dK, dV in the dtypes of Q, K, V.
    """
    q, k, v, do = Q.float(), K.float(), V.float(), dO.float()
    D = (O.float() * do).sum(dim=-1)
    S = q @ k.transpose(-2, -1) * scale  # Eq. 13
    P = torch.exp(S - L[..., None])  # Eq. 14
    if is_causal:
        # Masking P, not S, spares the -inf: P is an exact zero wherever the key is hidden.
        visible = torch.ones(S.shape[-2:], dtype=torch.bool, device=S.device).tril()
        P = torch.where(visible, P, 0.0)
    dV = P.transpose(-2, -1) @ do  # Eq. 15
    dP = do @ v.transpose(-2, -1)  # Eq. 16
    dS = P * (dP - D[..., None])  # Eq. 17
    dQ = dS @ k * scale  # Eq. 18
    dK = dS.transpose(-2, -1) @ q * scale  # Eq. 19
    return dQ.to(Q.dtype), dK.to(K.dtype), dV.to(V.dtype)


def compiled_flash_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`flash_backward` through ``torch.compile``, with the same arguments and results.

    The first call of a process compiles (on a CPU that needs a C++ compiler); later calls with
    other shapes may compile again.
    """
    return _compiled()(*arguments)


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return torch.compile(flash_backward, fullgraph=True)
