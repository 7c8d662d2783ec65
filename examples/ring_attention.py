"""Causal attention over a sequence that is spread over ranks, in a page of code.

Every rank keeps its own tokens in zigzag order: one chunk from the front and one from the back, so
that all have the same work under a causal mask. ``context_parallel_attention`` gives each rank its
part of the output; gradients of keys and values are summed over the ranks in fp32.

    torchrun --standalone --nproc-per-node 2 examples/ring_attention.py

compares ranks with attention on the whole sequence, both ways, and says whether they agree.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from flashattn_triton import flash_attention
from flashattn_triton.context_parallel import (
    all_gather_attention,
    explain,
    ring_attention,
    shard_tokens,
)

#: Largest difference of fp32 outputs and gradients, whose sums the ranks add in another order.
TOLERANCE = 1e-5


def largest_differences(n: int = 48) -> dict[str, float]:
    """The ranks against attention on the whole sequence: output and gradients of this rank."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, n, 16, device=device, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(1, 4, n, 16, device=device)
    out = flash_attention(*whole, causal=True)
    expected = [out, *torch.autograd.grad(out, whole, weight)]

    own = [shard_tokens(x.detach(), dim=2).requires_grad_() for x in whole]
    found: dict[str, float] = {}
    for attend in (ring_attention, all_gather_attention):
        out = attend(*own, causal=True)
        results = [out, *torch.autograd.grad(out, own, shard_tokens(weight, dim=2))]
        names = ("out", "grad_query", "grad_key", "grad_value")
        for name, x, y in zip(names, results, expected, strict=True):
            difference = (x - shard_tokens(y.detach(), dim=2)).abs().max().item()
            found[name] = max(found.get(name, 0.0), difference)
    return found


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
        found = largest_differences(n=24 * dist.get_world_size())
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {verdict(found)}", flush=True)
        if dist.get_rank() == 0:  # of a long one, which need not exist
            long = torch.empty(1, 2**16, 32, 128, dtype=torch.bfloat16, device="meta")
            print(
                f"of {2**16} tokens a rank: {explain(long, long, long, causal=True, layout='bshd')}"
            )
        if max(found.values()) > TOLERANCE:
            raise SystemExit(1)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started without torchrun, or for --help
        sys.exit(__doc__)
    main()
