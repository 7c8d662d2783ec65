"""Results that follow from an output and its logsumexp, without another pass over the keys.

Softmax over a row of scores S with the logsumexp L = log Σ_j exp(S_j) has the output
O = Σ_j exp(S_j - L) V_j. If further terms join the sum, every weight shrinks by the same factor:
of attention to several sets of keys, the output of a set with the logsumexp L_p has the weight
exp(L_p - L), where L is the logsumexp of all L_p. Computed in fp32, or in fp64 if a tensor is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashattn_triton.inputs import check_tensors
from flashattn_triton.problem import Layout, accumulated, check_layout


def merge(
    outputs: Sequence[Tensor], logsumexps: Sequence[Tensor], *, layout: Layout = "bhsd"
) -> tuple[Tensor, Tensor]:
    """Attention to all keys, from attention of the same queries to disjoint sets of keys.

    A query that no set shows a key has output 0 and logsumexp -inf. Differentiable in all inputs.

    Args:
        outputs: one for each set of keys, of equal shape, dtype and device: (..., H, N, E) for
            layout "bhsd", (..., N, H, E) for "bshd", which packed sequences are too.
        logsumexps: (..., H, N), as ``flash_attention`` returns them with ``return_lse=True``.
        layout: of the outputs.

    Returns:
        The output, in the dtype and layout of ``outputs``, and its logsumexp.

    Raises:
        ValueError: the sequences are empty, or not equally long, or their tensors do not fit.
        TypeError: not all are tensors.
    """
    check_layout(layout)
    for name, parts in (("outputs", outputs), ("logsumexps", logsumexps)):
        if not isinstance(parts, list | tuple):
            raise TypeError(
                f"{name} must be a list or tuple of tensors, one for each set of keys, but got "
                f"{type(parts).__name__}. Pass list({name})."
            )
    if not outputs or len(outputs) != len(logsumexps):
        raise ValueError(
            f"outputs and logsumexps must have equally many tensors, at least one each, but got "
            f"{len(outputs)} outputs and {len(logsumexps)} logsumexps. Pass one of each per set of "
            f"keys."
        )
    for i, (out, lse) in enumerate(zip(outputs, logsumexps, strict=True)):
        check_tensors(**{f"outputs[{i}]": out, f"logsumexps[{i}]": lse})
        if out.dim() < 3 or not out.is_floating_point():
            raise ValueError(
                f"outputs[{i}] must be a floating tensor of at least 3 dimensions, but got "
                f"{out.dtype} of shape {tuple(out.shape)}. Pass what flash_attention returns."
            )
        first = outputs[0]
        if (out.shape, out.dtype, out.device) != (first.shape, first.dtype, first.device):
            raise ValueError(
                f"outputs[{i}] must be like outputs[0], {first.dtype} of shape "
                f"{tuple(first.shape)} on {first.device}, but got {out.dtype} of shape "
                f"{tuple(out.shape)} on {out.device}. All parts have the same queries."
            )
        rows = (out if layout == "bhsd" else out.transpose(-3, -2)).shape[:-1]
        if lse.shape != rows or lse.device != out.device or not lse.is_floating_point():
            raise ValueError(
                f"logsumexps[{i}] must be a floating tensor of shape {tuple(rows)} on "
                f"{out.device}, but got {lse.dtype} of shape {tuple(lse.shape)} on {lse.device}. "
                f"Pass what flash_attention returns with return_lse=True, and the layout of "
                f"outputs."
            )
    lses = torch.stack([accumulated(lse) for lse in logsumexps])
    # Rows without any key: their maximum is taken as 0, because -inf - -inf is NaN.
    highest = lses.detach().amax(0)
    highest = highest.masked_fill(highest == float("-inf"), 0.0)
    weights = torch.exp(lses - highest)
    total = weights.sum(0)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    merged = torch.zeros_like(outputs[0], dtype=accumulated(outputs[0]).dtype)
    for out, weight in zip(outputs, weights, strict=True):
        share = weight / total
        merged = merged + out * (share if layout == "bhsd" else share.mT).unsqueeze(-1)
    lse = (highest + torch.log(total)).masked_fill(empty, float("-inf"))
    return merged.to(outputs[0].dtype), lse


def sinks_gradient(
    sinks: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """The gradient of sinks: -Σ exp(s - L) · (rowsum(O ∘ dO) - dL) over the rows of each head.

    Args:
        sinks: (H,).
        out: (B, H, N, E), with the sinks; ``grad_out`` is its gradient.
        lse: (B, H, N), with the sinks; ``grad_lse`` is its gradient, or None for zero.
    """
    delta = (accumulated(out) * accumulated(grad_out)).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    empty = lse == float("-inf")  # of which no gradient is needed, whatever is given
    share = torch.exp(accumulated(sinks)[:, None] - lse).masked_fill(empty, 0.0)
    return -(share * delta.masked_fill(empty, 0.0)).sum((0, 2)).to(sinks.dtype)
