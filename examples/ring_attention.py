"""Causal attention over a sequence that is spread over ranks: ring attention in a page of code.

Every rank keeps its own queries. Keys and values travel around the ring, one rank further at each
step (arXiv:2310.01889). What a rank computes at each step is joined by ``merge``, from outputs and
logsumexps alone, so no rank ever holds more than two parts of the keys. In the backward pass keys
and values travel once more, and their gradients with them, in fp32: each rank adds its queries'
part from the joined output (``flash_attention_backward``).

Under a causal mask the last rank would have all the work if parts were contiguous. Each of W ranks
therefore has two of 2·W chunks, its own from the front and from the back (``zigzag``), and has the
same amount of work at every step.

    torchrun --standalone --nproc-per-node 2 examples/ring_attention.py

compares ranks with attention on the whole sequence, and says whether they agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashattn_triton import flash_attention, flash_attention_backward, merge

#: Largest difference of fp32 outputs and gradients, whose sums the ring adds in another order.
TOLERANCE = 1e-5


def zigzag(x: Tensor, rank: int, world_size: int) -> Tensor:
    """The two chunks of (B, H, N, D) that belong to ``rank``; 2 · world_size must divide N."""
    chunks = x.chunk(2 * world_size, dim=2)
    return torch.cat([chunks[rank], chunks[2 * world_size - 1 - rank]], dim=2)


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Causal attention of this rank's queries to the keys of all ranks.

    Args:
        query: (B, H, N, D), what :func:`zigzag` gives this rank.
        key: (B, G, N, D), likewise.
        value: (B, G, N, D), likewise.
        group: the ranks of the ring, all by default.

    Returns:
        (B, H, N, D), this rank's part of the output.
    """
    out: Tensor = _Ring.apply(query, key, value, group)
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup | None
    ) -> Tensor:
        ctx.group = group
        travelling = torch.stack([key, value])
        out = torch.zeros(query.shape, device=query.device)
        lse = out.new_full(query.shape[:-1], float("-inf"))
        for causal, rows, keys, is_last in steps(query.shape[2], group):
            k, v = travelling[:, :, :, keys]
            part = flash_attention(
                query[:, :, rows], k, v, causal=causal, return_lse=True, out_dtype=torch.float32
            )
            joined = merge([out[:, :, rows], part[0]], [lse[:, :, rows], part[1]])
            out[:, :, rows], lse[:, :, rows] = joined
            if not is_last:
                travelling = exchange(travelling, +1, group)
        ctx.save_for_backward(query, key, value, out, lse)
        return out.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        travelling = torch.stack([key, value])
        of_query = torch.zeros(query.shape, device=query.device)
        of_keys = torch.zeros(travelling.shape, device=query.device)
        for causal, rows, keys, is_last in steps(query.shape[2], ctx.group):
            k, v = travelling[:, :, :, keys]
            flash_attention_backward(
                *(query[:, :, rows], k, v),
                *(out[:, :, rows], lse[:, :, rows], grad_out[:, :, rows]),
                into=(of_query[:, :, rows], *of_keys[:, :, :, keys]),
                causal=causal,
            )
            if not is_last:
                travelling = exchange(travelling, +1, ctx.group)
            of_keys = exchange(of_keys, +1, ctx.group)  # the last time to their own rank
        return of_query.to(query.dtype), *of_keys.to(key.dtype), None


def steps(
    n: int, group: dist.ProcessGroup | None
) -> Iterator[tuple[Literal["top-left", False], slice, slice, bool]]:
    """The mask, this rank's queries, the keys that they see, and whether it is the last step."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    everything, first, second = slice(None), slice(n // 2), slice(n // 2, None)
    for step in range(world_size):
        source, is_last = (rank - step) % world_size, step == world_size - 1
        if source == rank:
            yield "top-left", everything, everything, is_last
        elif source < rank:  # all queries see the source's first chunk, and none its second
            yield False, everything, first, is_last
        else:  # only the queries of the second chunk see the source's keys, and all of them
            yield False, second, everything, is_last


def exchange(x: Tensor, step: int, group: dist.ProcessGroup | None) -> Tensor:
    """Sends ``x`` to the rank ``step`` further, and returns what the rank ``step`` back sent."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    peers = [(rank + step) % world_size, (rank - step) % world_size]
    to, source = peers if group is None else [dist.get_global_rank(group, p) for p in peers]
    transfers = [
        dist.P2POp(dist.isend, x, to, group),
        dist.P2POp(dist.irecv, received, source, group),
    ]
    for transfer in dist.batch_isend_irecv(transfers):
        transfer.wait()
    return received


def largest_differences(n: int = 48) -> dict[str, float]:
    """The ring against attention on the whole sequence, on this rank: output and gradients."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, n, 16, device=device, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(1, 4, n, 16, device=device)
    expected = flash_attention(*whole, causal="top-left")
    gradients = torch.autograd.grad(expected, whole, weight)
    query, key, value = own = [zigzag(x.detach(), rank, world_size).requires_grad_() for x in whole]
    out = ring_attention(query, key, value)
    own_gradients = torch.autograd.grad(out, own, zigzag(weight, rank, world_size))
    names = ("out", "grad_query", "grad_key", "grad_value")
    return {
        name: (a - zigzag(e.detach(), rank, world_size)).abs().max().item()
        for name, a, e in zip(names, (out, *own_gradients), (expected, *gradients), strict=True)
    }


def verdict(differences: dict[str, float]) -> str:
    """One sentence: whether the ring gives what one process gives, and how far it is off."""
    name, largest = max(differences.items(), key=lambda item: item[1])
    says = "agrees with" if largest <= TOLERANCE else "DIFFERS from"
    return (
        f"ring attention {says} attention on the whole sequence, forward and backward: the largest "
        f"difference is {largest:.1e} in {name}, {TOLERANCE:.0e} is allowed"
    )


def main() -> None:
    """Compares the ring with one process, on as many ranks as torchrun starts."""
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    try:
        found = largest_differences()
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {verdict(found)}", flush=True)
        if max(found.values()) > TOLERANCE:
            raise SystemExit(1)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
