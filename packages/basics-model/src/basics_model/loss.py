"""Cross-entropy of next-token predictions."""

from __future__ import annotations

import torch
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log softmax(logits)[target] over all positions, in nats.

    The logarithm of the sum of exponentials is taken relative to each row's maximum and in fp32
    (fp64 for fp64 logits), so it is finite for any finite logits.

    Args:
        logits: (..., vocab_size), floating point.
        targets: (...) int64, each from 0 to ``vocab_size - 1``.

    Returns:
        A scalar, fp32 or fp64.

    Raises:
        ValueError: shapes do not match, there are no targets, or targets are not int64.
    """
    if logits.shape[:-1] != targets.shape or not targets.numel():
        raise ValueError(
            "targets must be at least one value, in the logits' shape without its last dimension, "
            f"got logits {tuple(logits.shape)} and targets {tuple(targets.shape)}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64, got {targets.dtype}; convert with .long()")
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (wide.logsumexp(dim=-1) - chosen).mean()
