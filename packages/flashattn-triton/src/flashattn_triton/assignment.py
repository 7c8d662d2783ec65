"""The assignment's classes: FlashAttention-2 as ``torch.autograd.Function``.

They differ in who computes: tiles of PyTorch, or kernels with either backward pass. All save L, Q,
K, V, O; L is the natural-log logsumexp, shaped ``Q.shape[:-1]``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashattn_triton.compiled_backward import compiled_flash_backward
from flashattn_triton.mistakes import check_tensors
from flashattn_triton.op import BACKWARD, FORWARD, operator_arguments
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

    The step between autograd and the Triton kernels: N_q x N_k elements exist during backward.
    """

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dO: Tensor) -> tuple[Tensor | None, ...]:
        """dQ, dK, dV by :func:`flashattn_triton.compiled_backward.compiled_flash_backward`."""
        # Detached, because a compiler looks at the history of what it is given, and O has one.
        L, Q, K, V, O = (x.detach() for x in ctx.saved_tensors)  # noqa: E741 - the paper's name
        scale = 1.0 / math.sqrt(Q.shape[-1])
        return *compiled_flash_backward(Q, K, V, O, dO, L, ctx.is_causal, scale), None


def _forward(
    ctx: Any, Q: Tensor, K: Tensor, V: Tensor, is_causal: bool, implementation: Implementation
) -> Tensor:
    _check(Q, K, V)
    query, key, value = (_as_heads(x) for x in (Q, K, V))
    ctx.arguments = operator_arguments(
        new_problem(head_dim=Q.shape[-1], causal=bool(is_causal), implementation=implementation)
    )
    out, lse = FORWARD(query, key, value, *ctx.arguments)
    O: Tensor = out.view(*Q.shape[:-1], V.shape[-1])  # noqa: E741 - the paper's name
    ctx.save_for_backward(lse.view(Q.shape[:-1]), Q, K, V, O)
    ctx.is_causal = is_causal
    return O


def _as_heads(x: Tensor) -> Tensor:
    """(..., N, D) to (B, H, N, D): the last leading dimension becomes heads."""
    return x.unsqueeze(1) if x.dim() == 3 else x.flatten(0, -4)


def _check(Q: Tensor, K: Tensor, V: Tensor) -> None:
    """Raises a ValueError unless Q, K, V are what the module documents."""
    check_tensors(Q=Q, K=K, V=V)
    for name, x in (("Q", Q), ("K", K), ("V", V)):
        if x.dim() < 3:
            raise ValueError(
                f"{name} must have at least three dimensions (..., sequence, head_dim), but got "
                f"shape {tuple(x.shape)}. Add a batch dimension with {name}[None]."
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, but got {x.dtype}. Convert it first.")
        if x.dtype != Q.dtype:
            raise ValueError(
                f"Q, K, V must share one dtype, but got {Q.dtype} for Q and {x.dtype} for {name}. "
                "Convert one of them."
            )
        if x.device != Q.device:
            raise ValueError(
                f"Q, K, V must be on one device, but got {Q.device} for Q and {x.device} for "
                f"{name}. Move one of them."
            )
        if x.shape[:-2] != Q.shape[:-2]:
            raise ValueError(
                f"Q, K, V must have the same leading dimensions, but got {tuple(Q.shape)} for Q "
                f"and {tuple(x.shape)} for {name}. Expand {name} first."
            )
    if K.shape[-1] != Q.shape[-1]:
        raise ValueError(
            f"K must have Q's head_dim {Q.shape[-1]}, but got shape {tuple(K.shape)}. Project K."
        )
    if V.shape[-2] != K.shape[-2]:
        raise ValueError(
            f"V must have K's sequence length {K.shape[-2]}, but got shape {tuple(V.shape)}. Pass "
            "one value for each key."
        )
