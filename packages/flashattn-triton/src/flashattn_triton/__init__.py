"""FlashAttention-2, forward and backward, in Triton: exact attention without the S x S matrix."""

from flashattn_triton.attention import (
    FlashAttention2Triton,
    FlashAttention2TritonCompiledBackward,
    flash_attention,
    flash_attention_varlen,
)
from flashattn_triton.configs import Tiles, Tiling
from flashattn_triton.dispatch import Plan, choose, explain
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
    "explain",
    "flash_attention",
    "flash_attention_varlen",
    "merge",
]
