"""Optimizer state, gradients and parameters sharded over the data-parallel ranks."""

from typing import Never

from shard_optim.bucket_plan import Partition
from shard_optim.communication import CollectiveError
from shard_optim.fully_sharded import FullyShardedDataParallel
from shard_optim.gradient_norm import ShardedGradScaler
from shard_optim.optimizer import ShardedOptimizer
from shard_optim.state import full_state, load, load_full_state, save

__version__ = "0.1.0"

__all__ = [
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

# Names that there were, and the calls in their place.
_BUCKETS = "ShardedOptimizer(params, optimizer_cls, bucket_size_mb=...), which plans its buckets"
_REPLACED = {
    **dict.fromkeys(("BucketPlan", "Span", "plan_buckets"), _BUCKETS),
    "OffloadedOptimizer": "ShardedOptimizer(params, optimizer_cls, offload_state=True)",
    "WholeMatrixOptimizer": 'ShardedOptimizer(matrices, optimizer_cls, partition="whole")',
    "full_optimizer_state": 'full_state(model, optimizer), whose "optimizer" it is',
    "load_checkpoint": "load(folder, optimizer=optimizer)",
    "load_full_optimizer_state": "load_full_state(state, model, optimizer)",
    "load_fully_sharded": "load(folder, model, optimizer)",
    "save_checkpoint": "save(folder, optimizer=optimizer)",
    "save_fully_sharded": "save(folder, model, optimizer)",
}


def __getattr__(name: str) -> Never:
    if name in _REPLACED:  # an AttributeError would lose its text in "from shard_optim import ..."
        raise ImportError(f"{name} has been replaced. Call shard_optim.{_REPLACED[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
