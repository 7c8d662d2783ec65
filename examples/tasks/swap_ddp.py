"""Task: exchange torch's DistributedDataParallel for ddp-lite's BucketedDDP.

    torchrun --nproc-per-node 2 examples/tasks/swap_ddp.py

One import and one line change. The program trains with both and compares the weights, and a
checkpoint of the old wrapper loads into the new one.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_lite import BucketedDDP


def train(wrapper: type[nn.Module]) -> dict[str, Tensor]:
    """The weights after ten steps under a wrapper, each rank with its own data."""
    torch.manual_seed(0)
    wrapped = wrapper(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        x = torch.randn(16, 8, generator=generator)
        optimizer.zero_grad()
        (wrapped(x).squeeze(-1) - x.sum(-1)).square().mean().backward()
        optimizer.step()
    return {name: value.clone() for name, value in wrapped.state_dict().items()}


def main() -> None:
    """Trains before and after the change."""
    dist.init_process_group("gloo")
    before, after = train(DistributedDataParallel), train(BucketedDDP)
    for name, value in after.items():  # without the prefix "module."
        torch.testing.assert_close(value, before[f"module.{name}"], atol=1e-5, rtol=1e-5)
    model = BucketedDDP(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    model.load_state_dict(before)  # names with the prefix load too
    print(f"rank {dist.get_rank()}: DDP swapped, the weights agree within 1e-5")
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" not in os.environ:  # started without torchrun, or for --help
        sys.exit(__doc__)
    main()
