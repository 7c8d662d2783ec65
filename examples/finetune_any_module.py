"""Data-parallel training of any module: what ``ddp_lite`` adds to an ordinary loop.

    torchrun --nproc-per-node 2 examples/finetune_any_module.py

A torch encoder with a frozen embedding learns which half of a sequence holds the larger sum. The
three lines that make it data-parallel are marked.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

from ddp_lite import OverlapDDP


def main() -> None:
    """Trains on as many ranks as torchrun started; every rank has its own data."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, batch_first=True)
    model = nn.Sequential(nn.Embedding(10, 32), encoder, nn.Flatten(), nn.Linear(16 * 32, 2))
    model[0].requires_grad_(False)
    wrapped = OverlapDDP(model)  # (1) the same weights on every rank
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(1, 201):
        tokens = torch.randint(10, (32, 16), generator=generator)
        targets = (tokens[:, :8].sum(1) < tokens[:, 8:].sum(1)).long()
        logits = wrapped(tokens)  # (2) in place of model(tokens)
        loss = nn.functional.cross_entropy(logits, targets)
        optimizer.zero_grad()
        loss.backward()
        wrapped.finish_gradient_synchronization()  # (3) gradients are now averages over the ranks
        optimizer.step()
        if step % 40 == 0 and dist.get_rank() == 0:
            accuracy = (logits.argmax(1) == targets).float().mean()
            print(f"step {step}: loss {loss.item():.3f}, accuracy {accuracy.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started without torchrun, or for --help
        sys.exit(__doc__)
    main()
