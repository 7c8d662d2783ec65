"""Parameters, gradients and optimizer state in shards: ZeRO stage 3."""

from shard_optim.fully_sharded.checkpoint import load_fully_sharded, save_fully_sharded
from shard_optim.fully_sharded.whole import WholeMatrixOptimizer
from shard_optim.fully_sharded.wrapper import FullyShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "WholeMatrixOptimizer",
    "load_fully_sharded",
    "save_fully_sharded",
]
