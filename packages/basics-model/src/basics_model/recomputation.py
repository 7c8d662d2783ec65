"""Activation checkpointing that keeps the outputs of attention.

A checkpointed block keeps its input and runs its forward pass again during backward (Chen et al.,
arXiv:1604.06174). On long sequences most of that is attention, whose time grows with the square of
the length while its output does not. Keeping the output of every block's attention doubles what is
kept and saves its second run (selective recomputation, Korthikanti et al., arXiv:2205.05198, §5).
"""

from __future__ import annotations

from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

#: Operators whose outputs are kept: fused attention, with PyTorch's and flashattn-triton's names.
ATTENTION_OPERATORS = frozenset(
    {
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "flashattn_triton::context_forward",
        "flashattn_triton::forward",
    }
)


def attention_kept() -> Any:
    """The ``context_fn`` of ``torch.utils.checkpoint`` that keeps the outputs of attention."""
    return create_selective_checkpoint_contexts(_policy)


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Keeps the outputs of ``operator``, the one about to run, if it is fused attention."""
    name = getattr(operator, "_schema", None)
    if name is not None and name.name in ATTENTION_OPERATORS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
