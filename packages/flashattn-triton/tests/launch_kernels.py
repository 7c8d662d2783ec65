"""Launches the passes of one tier by itself, on (B, H, N, D) tensors, whatever it is chosen for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.hopper.backward import HopperBackwardCall
from flashattn_triton.hopper.forward import HopperForwardCall
from flashattn_triton.launch import Packing, unit_last_stride
from flashattn_triton.mask_and_bias import NO_MASK_OR_BIAS, MaskAndBias
from flashattn_triton.portable.backward import BackwardCall
from flashattn_triton.portable.bias_pass import BiasCall
from flashattn_triton.portable.forward import ForwardCall
from flashattn_triton.portable.preprocess import SinksCall
from flashattn_triton.problem import Problem
from flashattn_triton.tiers import readable


def triton_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    problem: Problem,
    tiles: Tiles,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp by the portable kernel."""
    query, key, value = map(unit_last_stride, (query, key, value))
    call = ForwardCall(query, key, value, problem, tiles, packing, mask_and_bias)
    return call((query, key, value), packing, mask_and_bias)


def triton_backward(
    *given: Any,
    packing: Packing | None = None,
    mask_and_bias: MaskAndBias = NO_MASK_OR_BIAS,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the portable kernels.

    ``given``: query, key, value, out, logsumexp, grad_out, grad_logsumexp, problem and tiling.
    """
    *tensors, problem, tiling = given
    rows = readable(tensors)
    return BackwardCall(rows, problem, tiling, packing, mask_and_bias)(rows, packing, mask_and_bias)


def triton_bias_backward(*given: Any, mask_and_bias: MaskAndBias) -> Tensor:
    """The gradient of the bias; ``given`` as of :func:`triton_backward`."""
    *tensors, problem, tiling = given
    rows = readable(tensors)
    return BiasCall(rows, problem, tiling, mask_and_bias)(rows, mask_and_bias)


def triton_sinks_backward(
    sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """The gradient of sinks."""
    rows = readable((out, out, out, out, lse, grad_out, grad_lse))
    return SinksCall(rows, sinks)(rows, MaskAndBias(sinks=sinks))


def hopper_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    problem: Problem,
    packing: Packing | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp by the Hopper tier."""
    call = HopperForwardCall(query, key, value, problem, packing, sinks)
    return call((query, key, value), packing, MaskAndBias(sinks=sinks))


def hopper_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    problem: Problem,
    packing: Packing | None = None,
    into: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the Hopper tier."""
    tensors = (query, key, value, out, logsumexp, grad_out, grad_logsumexp)
    call = HopperBackwardCall(tensors, problem, packing, into)
    return call(tensors, packing, NO_MASK_OR_BIAS, into)
