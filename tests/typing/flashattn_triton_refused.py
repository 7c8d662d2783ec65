"""Mistakes in calls of flashattn-triton: type checkers refuse the marked lines and no others."""

from torch import Tensor

from flashattn_triton import explain, flash_attention, flash_attention_varlen


def mistakes(query: Tensor, starts: Tensor) -> None:
    flash_attention(query, query, query, layout="bsdh")  # refused
    flash_attention(query, query, query, causal="bottomright")  # refused
    flash_attention(query, query, query, implementation="cuda")  # refused
    flash_attention(query, query, query, softmax_scale=0.1)  # refused
    flash_attention(query, query, query, True)  # refused
    flash_attention(query, query, query, window=128)  # refused
    flash_attention(query, query, query, return_lse=True).sum()  # refused
    explain(query, query, query, casual=True)  # refused
    explain(query, query, query, layout="bsdh")  # refused
    flash_attention_varlen(query, query, query, starts, starts, 1, 1, layout="bshd")  # refused
