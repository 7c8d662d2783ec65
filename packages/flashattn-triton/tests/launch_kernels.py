"""Launches the passes of one tier by itself, on (B, H, N, D) tensors, whatever it is chosen for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flashattn_triton.configs import Tiles
from flashattn_triton.hopper.backward import HopperBackwardCall
from flashattn_triton.hopper.forward import HopperForwardCall
from flashattn_triton.launch import unit_last_stride
from flashattn_triton.mask_and_bias import NOTHING, Given
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
    given: Given = NOTHING,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp by the portable kernel."""
    query, key, value = map(unit_last_stride, (query, key, value))
    call = ForwardCall(query, key, value, problem, tiles, given)
    return call((query, key, value), given)


def triton_backward(*arguments: Any, given: Given = NOTHING) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the portable kernels.

    ``arguments``: query, key, value, out, logsumexp, grad_out, grad_logsumexp, problem and tiling.
    """
    *tensors, problem, tiling = arguments
    rows = readable(tensors)
    return BackwardCall(rows, problem, tiling, given)(rows, given)


def triton_bias_backward(*arguments: Any, given: Given) -> Tensor:
    """The gradient of the bias; ``arguments`` as of :func:`triton_backward`."""
    *tensors, problem, tiling = arguments
    rows = readable(tensors)
    return BiasCall(rows, problem, tiling, given)(rows, given)


def triton_sinks_backward(
    sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """The gradient of sinks."""
    rows = readable((out, out, out, out, lse, grad_out, grad_lse))
    return SinksCall(rows, sinks)(rows, Given(sinks=sinks))


def hopper_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    problem: Problem,
    given: Given = NOTHING,
) -> tuple[Tensor, Tensor]:
    """Output and logsumexp by the Hopper tier."""
    return HopperForwardCall(query, key, value, problem, given)((query, key, value), given)


def hopper_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor,
    grad_logsumexp: Tensor | None,
    problem: Problem,
    given: Given = NOTHING,
    into: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by the Hopper tier."""
    tensors = (query, key, value, out, logsumexp, grad_out, grad_logsumexp)
    return HopperBackwardCall(tensors, problem, given, into)(tensors, given, into)
