"""DTensors: batch and heads shard without communication, in one process and over two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from flashattn_triton import flash_attention, flash_attention_varlen
from ranks import run_ranks


def body(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    torch.manual_seed(0)
    shapes = {"bhsd": ((2, 4, 9, 8), (2, 2, 9, 8)), "bshd": ((2, 9, 4, 8), (2, 9, 2, 8))}
    sinks, pairs = torch.randn(4), torch.randn(1, 4, 9, 9)
    for layout, batch, heads in (("bhsd", 0, 1), ("bshd", 0, 2)):
        query, key, value = (torch.randn(shapes[layout][i > 0]) for i in range(3))
        plain = [x.requires_grad_() for x in (query, key, value, sinks.clone(), pairs.clone())]
        expected = attend(plain, layout)
        wanted = torch.autograd.grad(expected.square().sum(), plain)
        for rows, of_sinks, of_bias in (
            (Shard(batch), Replicate(), Replicate()),
            (Shard(heads), Shard(0), Shard(1)),
            (Replicate(), Replicate(), Replicate()),
        ):
            placements = (rows, rows, rows, of_sinks, of_bias)
            sharded = [
                distribute_tensor(x.detach(), mesh, [p]).requires_grad_()
                for x, p in zip(plain, placements, strict=True)
            ]
            with CommDebugMode() as communication:
                out = attend(sharded, layout)
                gradients = torch.autograd.grad(out, sharded, 2 * out.detach())
            assert communication.get_total_counts() == 0
            assert isinstance(out, DTensor)
            assert out.placements == (rows,)
            assert out.to_local().numel() == expected.numel() // (1 if rows == Replicate() else 2)
            torch.testing.assert_close(out.full_tensor(), expected)
            for gradient, x in zip(gradients, wanted, strict=True):
                assert isinstance(gradient, DTensor)
                torch.testing.assert_close(gradient.full_tensor(), x)
    packed(mesh)
    dist.barrier()


def attend(tensors: list[torch.Tensor], layout: Any) -> torch.Tensor:
    query, key, value, sinks, bias = tensors
    return flash_attention(query, key, value, sinks=sinks, bias=bias, causal=True, layout=layout)


def packed(mesh: Any) -> None:
    """Packed sequences, and heads that the mesh does not divide, which are gathered."""
    starts = torch.tensor([0, 4, 9], dtype=torch.int32)
    query, key, value = tensors = [torch.randn(9, heads, 8) for heads in (4, 2, 2)]
    expected = flash_attention_varlen(query, key, value, starts, starts, causal=True)
    query, key, value = (distribute_tensor(x, mesh, [Shard(1)]) for x in tensors)
    everywhere = distribute_tensor(starts, mesh, [Replicate()])
    out: Any = flash_attention_varlen(query, key, value, everywhere, everywhere, causal=True)
    assert out.placements == (Shard(1),)
    torch.testing.assert_close(out.full_tensor(), expected)
    odd = [torch.randn(2, heads, 9, 8) for heads in (3, 1, 1)]
    gathered: Any = flash_attention(*(distribute_tensor(x, mesh, [Shard(1)]) for x in odd))
    torch.testing.assert_close(gathered.full_tensor(), flash_attention(*odd))


def test_batch_and_heads_shard_without_communication() -> None:
    run_ranks(body, 2)
