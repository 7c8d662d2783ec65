"""Optimizer state, gradients and parameters sharded over the data-parallel ranks."""

from shard_optim.checkpoint.sharded import load_checkpoint, save_checkpoint
from shard_optim.communication import CollectiveError
from shard_optim.fully_sharded import (
    FullyShardedDataParallel,
    WholeMatrixOptimizer,
    full_optimizer_state,
    load_full_optimizer_state,
    load_fully_sharded,
    save_fully_sharded,
)
from shard_optim.gradients import ShardedGradScaler
from shard_optim.layout import BucketPlan, Partition, Span, plan_buckets
from shard_optim.offload import OffloadedOptimizer
from shard_optim.optimizer import ShardedOptimizer

__all__ = [
    "BucketPlan",
    "CollectiveError",
    "FullyShardedDataParallel",
    "OffloadedOptimizer",
    "Partition",
    "ShardedGradScaler",
    "ShardedOptimizer",
    "Span",
    "WholeMatrixOptimizer",
    "full_optimizer_state",
    "load_checkpoint",
    "load_full_optimizer_state",
    "load_fully_sharded",
    "plan_buckets",
    "save_checkpoint",
    "save_fully_sharded",
]
