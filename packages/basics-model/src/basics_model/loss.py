"""Cross-entropy of next-token predictions, from logits or straight from the last hidden state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function

from basics_model.sizes import require_integer


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(logits)[target] over all positions, in nats.

    The logarithm of the sum of exponentials is taken relative to each row's maximum and in fp32
    (fp64 for fp64 logits), so it is finite for any finite logits.

    Args:
        logits: (..., vocab_size), floating point.
        targets: (...) int64, each from 0 to ``vocab_size - 1``.

    Returns:
        A scalar, fp32 or fp64. In a profile, the range ``loss`` holds what computes it.

    Raises:
        ValueError: shapes do not match, or targets are none, not int64, or, on CPUs, out of range.
    """
    _check_targets("logits", logits, targets)
    with record_function("loss"):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (wide.logsumexp(dim=-1) - _gather(wide, targets).squeeze(-1)).mean()


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk_tokens: int = 2048
) -> Tensor:
    """``cross_entropy(hidden @ weight.T, targets)`` without all logits in memory at once.

    Logits are computed for ``chunk_tokens`` positions at a time. Where a gradient will be wanted,
    the chunk's part of it is computed at once, while its logits are still there, so the backward
    pass only scales what the forward pass has left. The technique is that of the fused linear
    cross-entropy of Liger Kernel (Hsu et al., arXiv:2410.10989, section 3.2).

    Products are computed in autocast's dtype where autocast is on, else in the inputs'. Softmax and
    loss are computed, and the weight's gradient is summed over chunks, in fp32 or wider.

    Args:
        hidden: (..., d_model), floating point.
        weight: (vocab_size, d_model), the LM head's.
        targets: (...) int64, each from 0 to ``vocab_size - 1``.
        chunk_tokens: positions per chunk, at least 1. The logits of one chunk take about
            ``chunk_tokens · vocab_size · 10`` bytes under bf16 autocast.

    Returns:
        The mean loss over all positions in nats, a scalar, fp32 or fp64. It can be differentiated
        once, with respect to ``hidden`` and ``weight``.

    Raises:
        ValueError: as :func:`cross_entropy`, of integer inputs, or of ``chunk_tokens`` below 1.
    """
    _check_targets("hidden", hidden, targets)
    if not (hidden.is_floating_point() and weight.is_floating_point()):
        raise ValueError(
            f"hidden and weight must be floating point, but got {hidden.dtype} and {weight.dtype}."
        )
    if weight.ndim != 2 or weight.shape[1] != hidden.shape[-1]:
        raise ValueError(
            f"weight must be (vocab_size, d_model) with the d_model of hidden, but got weight "
            f"{tuple(weight.shape)} and hidden {tuple(hidden.shape)}."
        )
    require_integer("chunk_tokens", chunk_tokens, least=1)
    kind = hidden.device.type
    autocast = torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64
    dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype
    wanted = tuple(torch.is_grad_enabled() and x.requires_grad for x in (hidden, weight))
    rows = hidden.flatten(0, -2) if hidden.ndim > 1 else hidden.unsqueeze(0)
    apply: Callable[..., Tensor] = _LinearCrossEntropy.apply
    with record_function("loss"):
        return apply(rows, weight, targets.flatten(), dtype, chunk_tokens, wanted)


class _LinearCrossEntropy(torch.autograd.Function):
    """Chunks of :func:`linear_cross_entropy`, whose arguments are checked.

    With N positions, p = softmax(h Wᵀ) and loss = mean over n of -log p[n, t_n]:
    N · d loss / d logits = p - onehot(t),  d h = d logits · W,  d W = d logitsᵀ · h.
    Backward multiplies by 1 / N, together with a gradient scaler's factor: alone, it would make
    small fp16 gradients 0.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # (N, M)
        weight: Tensor,  # (V, M)
        targets: Tensor,  # (N,)
        dtype: torch.dtype,
        chunk_tokens: int,
        wanted: tuple[bool, bool],
    ) -> Tensor:
        accumulated = torch.promote_types(dtype, torch.float32)
        narrow = weight.to(dtype)
        total = torch.zeros((), dtype=accumulated, device=hidden.device)
        grad_hidden = torch.empty_like(hidden, dtype=dtype) if wanted[0] else None
        grad_weight: Tensor | None = None
        for start in range(0, len(targets), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            rows = hidden[part].to(dtype)
            chosen = targets[part].unsqueeze(1)
            logits = rows @ narrow.T  # (chunk, V)
            log_p = logits.to(accumulated).log_softmax(1)
            log_p_chosen = _gather(log_p, targets[part])
            total -= log_p_chosen.sum()
            if any(wanted):
                # Each pass over the logits counts: exp takes their place in the narrow dtype, and
                # p - 1 is computed for the targets alone, in the wide one, where p may be near 1.
                grad = torch.exp(log_p, out=logits)
                grad.scatter_(1, chosen, (log_p_chosen.exp() - 1).to(dtype))
                if grad_hidden is not None:
                    grad_hidden[part] = grad @ narrow
                if wanted[1]:
                    grad_chunk = grad.T @ rows
                    if grad_weight is None:
                        grad_weight = grad_chunk.to(accumulated)
                    else:
                        grad_weight += grad_chunk
                del grad
            del logits, log_p  # before the next chunk's are computed
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.n_targets = len(targets)
        ctx.dtypes = hidden.dtype, weight.dtype
        return total / len(targets)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        factor = grad_loss / ctx.n_targets
        with record_function("loss"):
            hidden, weight = (
                None if grad is None else (grad * factor).to(dtype)
                for grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            )
        return hidden, weight, None, None, None, None


def _check_targets(name: str, x: Tensor, targets: Tensor) -> None:
    if x.shape[:-1] != targets.shape or not targets.numel():
        raise ValueError(
            f"targets must be at least one value, in the shape of {name} without its last "
            f"dimension, but got {name} {tuple(x.shape)} and targets {tuple(targets.shape)}."
        )
    if targets.dtype != torch.int64:
        raise ValueError(
            f"targets must be int64, but got {targets.dtype}. Convert them with .long()."
        )


def _gather(values: Tensor, targets: Tensor) -> Tensor:
    """The values (..., vocab_size) at the targets (...), (..., 1)."""
    try:
        return values.gather(-1, targets.unsqueeze(-1))
    except RuntimeError as error:
        if "out of bounds" not in str(error):
            raise
        raise ValueError(
            f"targets must be from 0 to vocab_size - 1, but got: {error}. Leave out those of -100."
        ) from None
