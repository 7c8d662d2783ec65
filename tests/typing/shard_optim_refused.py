"""Mistakes in calls of shard-optim: type checkers refuse the marked lines and no others."""

import torch
from torch import nn

from shard_optim import ShardedOptimizer, save


def mistakes(module: nn.Module) -> None:
    optimizer = ShardedOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)
    ShardedOptimizer(module.parameters(), torch.optim.SGD, partition="equal")  # refused
    ShardedOptimizer(module.parameters(), torch.optim.SGD, overlap="forward")  # refused
    ShardedOptimizer(module.parameters(), torch.optim.SGD, master_dtype="float32")  # refused
    ShardedOptimizer(module.parameters(), optimizer)  # refused
    ShardedOptimizer(module.parameters())  # refused
    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)  # refused
    save(optimizer, "folder")  # refused
