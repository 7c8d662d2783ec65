"""Exact attention of sequences that are spread over ranks: long contexts on several GPUs.

``flashattn_triton`` does not import this, and so not ``torch.distributed``.
"""

from flashattn_triton.context_parallel.attention import (
    all_gather_attention,
    context_parallel_attention,
    explain,
    largest_scores,
    ring_attention,
)
from flashattn_triton.context_parallel.communication import RankLostError
from flashattn_triton.context_parallel.tokens import shard_tokens, token_positions, unshard_tokens

__all__ = [
    "RankLostError",
    "all_gather_attention",
    "context_parallel_attention",
    "explain",
    "largest_scores",
    "ring_attention",
    "shard_tokens",
    "token_positions",
    "unshard_tokens",
]
