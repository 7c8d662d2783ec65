"""Optimizer state, gradients and parameters sharded over the data-parallel ranks."""

from shard_optim.bucket_layout import BucketPlan, Span, plan_buckets
from shard_optim.communication import CollectiveError
from shard_optim.fully_sharded import FullyShardedDataParallel
from shard_optim.gradient_norm import ShardedGradScaler
from shard_optim.optimizer import ShardedOptimizer
from shard_optim.optimizer_class import Partition
from shard_optim.state import full_state, load, load_full_state, save

__version__ = "0.1.0"

__all__ = [
    "BucketPlan",
    "CollectiveError",
    "FullyShardedDataParallel",
    "Partition",
    "ShardedGradScaler",
    "ShardedOptimizer",
    "Span",
    "full_state",
    "load",
    "load_full_state",
    "plan_buckets",
    "save",
]

# Names of version 0.1, and the calls in their place.
_REPLACED = {
    "save_checkpoint": "save(folder, optimizer=optimizer)",
    "load_checkpoint": "load(folder, optimizer=optimizer)",
    "save_fully_sharded": "save(folder, model, optimizer)",
    "load_fully_sharded": "load(folder, model, optimizer)",
    "full_optimizer_state": 'full_state(model, optimizer), whose "optimizer" it is',
    "load_full_optimizer_state": "load_full_state(state, model, optimizer)",
}

# Classes that are options of one class now.
_MERGED = {
    "OffloadedOptimizer": "ShardedOptimizer(params, optimizer_cls, offload_state=True)",
    "WholeMatrixOptimizer": 'ShardedOptimizer(matrices, optimizer_cls, partition="whole")',
}


def __getattr__(name: str) -> object:
    if name in _MERGED:  # an AttributeError would lose its text in "from shard_optim import ..."
        raise ImportError(f"shard_optim.{name} has been replaced. Call {_MERGED[name]}.")
    if name in _REPLACED:
        raise AttributeError(
            f"shard_optim.{name} has been replaced. Call shard_optim.{_REPLACED[name]}."
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
