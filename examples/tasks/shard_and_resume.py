"""Task: shard the optimizer's state, stop, and resume.

    torchrun --nproc-per-node 2 examples/tasks/shard_and_resume.py FOLDER

The program trains ten steps in one go, and again with a stop after five. Both end with the same
weights. Every rank saves: a file that rank 0 writes alone would lose the other ranks' state.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shard_optim import ShardedOptimizer, load, save


def make() -> tuple[nn.Module, ShardedOptimizer]:
    """A model and its sharded optimizer, equal on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = ShardedOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=1e-2, reduce_gradients=True
    )
    return model, optimizer


def train(model: nn.Module, optimizer: ShardedOptimizer, steps: range) -> None:
    """Trains; the data of a step depend on the step and the rank alone."""
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        (model(x).squeeze(-1) - x.sum(-1)).square().mean().backward()
        optimizer.step()


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of the parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def main() -> None:
    """Trains with and without a stop."""
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    model, optimizer = make()
    train(model, optimizer, range(10))
    expected = weights(model)

    model, optimizer = make()
    train(model, optimizer, range(5))
    save(folder / "step-5", model, optimizer)

    model, optimizer = make()  # as a new process would
    load(folder / "step-5", model, optimizer)
    train(model, optimizer, range(5, 10))
    assert all(map(torch.equal, weights(model), expected))
    print(f"rank {dist.get_rank()}: resumed at step 5, the weights are equal to the bit")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ or len(sys.argv) != 2:
        sys.exit(__doc__)
    main()
