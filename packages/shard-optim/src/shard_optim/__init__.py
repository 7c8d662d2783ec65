"""Optimizer state, gradients and parameters sharded over the data-parallel ranks."""

from shard_optim.adamw import AdamW
from shard_optim.bucket_plan import Partition
from shard_optim.communication import CollectiveError
from shard_optim.fully_sharded import FullyShardedDataParallel
from shard_optim.gradient_norm import ShardedGradScaler
from shard_optim.optimizer import ShardedOptimizer
from shard_optim.state import full_state, load, load_full_state, save

__version__ = "0.1.0"

__all__ = [
    "AdamW",
    "CollectiveError",
    "FullyShardedDataParallel",
    "Partition",
    "ShardedGradScaler",
    "ShardedOptimizer",
    "full_state",
    "load",
    "load_full_state",
    "save",
]
