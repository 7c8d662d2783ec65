"""Optimizer state, gradients and parameters sharded over the data-parallel ranks."""

from shard_optim.checkpoint import load_checkpoint, save_checkpoint
from shard_optim.collectives import CollectiveError
from shard_optim.fully_sharded import (
    FullyShardedDataParallel,
    WholeMatrixOptimizer,
    load_fully_sharded,
    save_fully_sharded,
)
from shard_optim.handoff import FlatBucket, ReduceScatterHook
from shard_optim.optimizer import ShardedOptimizer
from shard_optim.partition import BucketPlan, Partition, Span, plan_buckets
from shard_optim.scaler import ShardedGradScaler

__all__ = [
    "BucketPlan",
    "CollectiveError",
    "FlatBucket",
    "FullyShardedDataParallel",
    "Partition",
    "ReduceScatterHook",
    "ShardedGradScaler",
    "ShardedOptimizer",
    "Span",
    "WholeMatrixOptimizer",
    "load_checkpoint",
    "load_fully_sharded",
    "plan_buckets",
    "save_checkpoint",
    "save_fully_sharded",
]
