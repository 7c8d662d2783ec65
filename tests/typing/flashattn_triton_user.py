"""A user's program on every public name of flashattn-triton, for type checkers."""

import torch
from torch import Tensor

from flashattn_triton import (
    FlashAttention2PyTorch,
    FlashAttention2Triton,
    FlashAttention2TritonCompiledBackward,
    Plan,
    Problem,
    Tiles,
    Tiling,
    choose,
    cu_seqlens_of,
    explain,
    flash_attention,
    flash_attention_backward,
    flash_attention_varlen,
    largest_scores,
    merge,
)
from flashattn_triton.integrations import transformers
from flashattn_triton.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from flashattn_triton.integrations.sdpa import Routing, route_sdpa


def dense(query: Tensor, key: Tensor, value: Tensor, with_lse: bool) -> Tensor:
    out: Tensor = flash_attention(query, key, value)
    out = flash_attention(
        query, key, value, causal="bottom-right", window=(128, None), softcap=20.0
    )
    out = flash_attention(query, key, value, layout="bshd", implementation="triton", scale=0.1)
    out, lse = flash_attention(
        query, key, value, causal=True, return_lse=True, deterministic=True, implementation="hopper"
    )
    either: Tensor | tuple[Tensor, Tensor] = flash_attention(query, key, value, return_lse=with_lse)
    print(lse, either)
    return out


def parts(query: Tensor, sinks: Tensor) -> Tensor:
    first = flash_attention(query, query, query, sinks=sinks, return_lse=True)
    second = flash_attention(
        query, query, query, causal="bottom-right-window", window=(8, 8), return_lse=True
    )
    out, lse = merge([first[0], second[0]], [first[1], second[1]], layout="bhsd")
    return out + lse.unsqueeze(-1)


def gradients_of_parts(query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor) -> Tensor:
    out, lse = flash_attention(query, key, value, return_lse=True, out_dtype=torch.float32)
    into = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    flash_attention_backward(query, key, value, out, lse, grad_out, into, causal=False)
    return largest_scores(query, key, softcap=2.0) + into[0].sum()


def documents(query: Tensor, ids: Tensor) -> Tensor:
    starts, longest = cu_seqlens_of(ids)
    print(starts.shape, longest + 1)
    return flash_attention(query, query, query, document_ids=ids, causal=True)


def as_flash_attn(query: Tensor, starts: Tensor) -> None:
    print(flash_attn_func(query, query, query, 0.0, 0.125, True, (128, 0)))
    print(flash_attn_varlen_func(query, query, query, starts, starts, 16, 16, causal=True))


def packed(query: Tensor, starts: Tensor) -> Tensor:
    out: Tensor = flash_attention_varlen(query, query, query, starts, starts, 128, 128, causal=True)
    out, lse = flash_attention_varlen(
        query, query, query, starts, starts, 128, 128, return_lse=True, implementation="tiled"
    )
    out = flash_attention_varlen(query, query, query, starts, starts, causal=True)
    return out + lse


def plans(query: Tensor) -> str:
    tiles = Tiles(queries=64, keys=64, warps=4, stages=2)
    tiling = Tiling(forward=tiles, key_pass=tiles, query_pass=tiles)
    options = Problem(causal="top-left", scale=0.125, window=(None, None), tiling=tiling)
    plan: Plan = choose(query, query, query, options)
    print(plan.tier, plan.reason)
    return explain(query, query, query, layout="bshd", causal=True, window=(10, 0), softcap=2.0)


def integrations(query: Tensor) -> Routing:
    transformers.register()
    with route_sdpa(strict=True) as routing:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    print(FlashAttention2PyTorch, FlashAttention2Triton, FlashAttention2TritonCompiledBackward)
    return routing
