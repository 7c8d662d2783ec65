"""FlashAttention-2, forward and backward, in Triton: exact attention without the S x S matrix."""

from flashattn_triton.attention import (
    FlashAttention2Triton,
    FlashAttention2TritonCompiledBackward,
    flash_attention,
    flash_attention_varlen,
)
from flashattn_triton.configs import Tiles, Tiling
from flashattn_triton.dispatch import Plan, choose, explain
from flashattn_triton.documents import cu_seqlens_of
from flashattn_triton.logsumexp import merge
from flashattn_triton.options import AttentionOptions
from flashattn_triton.tiled import FlashAttention2PyTorch

__all__ = [
    "AttentionOptions",
    "FlashAttention2PyTorch",
    "FlashAttention2Triton",
    "FlashAttention2TritonCompiledBackward",
    "Plan",
    "Tiles",
    "Tiling",
    "choose",
    "cu_seqlens_of",
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "merge",
]
