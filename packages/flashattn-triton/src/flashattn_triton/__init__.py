"""FlashAttention-2, forward and backward, in Triton: exact attention without the S x S matrix."""

from flashattn_triton.assignment import (
    FlashAttention2PyTorch,
    FlashAttention2Triton,
    FlashAttention2TritonCompiledBackward,
)
from flashattn_triton.attention import flash_attention, flash_attention_varlen, largest_scores
from flashattn_triton.configs import Tiles, Tiling
from flashattn_triton.dispatch import Plan, choose, explain
from flashattn_triton.documents import cu_seqlens_of
from flashattn_triton.parts import flash_attention_backward, merge
from flashattn_triton.problem import Problem

__version__ = "0.1.0"

__all__ = [
    "FlashAttention2PyTorch",
    "FlashAttention2Triton",
    "FlashAttention2TritonCompiledBackward",
    "Plan",
    "Problem",
    "Tiles",
    "Tiling",
    "choose",
    "cu_seqlens_of",
    "explain",
    "flash_attention",
    "flash_attention_backward",
    "flash_attention_varlen",
    "largest_scores",
    "merge",
]
