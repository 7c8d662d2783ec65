"""Parameters, gradients and optimizer state in shards: ZeRO stage 3."""

from shard_optim.fully_sharded.checkpoint import load_fully_sharded, save_fully_sharded
from shard_optim.fully_sharded.full_state import (
    full_optimizer_state,
    load_full_optimizer_state,
)
from shard_optim.fully_sharded.whole import WholeMatrixOptimizer
from shard_optim.fully_sharded.wrapper import FullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "WholeMatrixOptimizer",
    "full_optimizer_state",
    "load_full_optimizer_state",
    "load_fully_sharded",
    "save_fully_sharded",
]
