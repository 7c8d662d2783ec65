"""Parameters, gradients and optimizer state in shards: ZeRO stage 3."""

from shard_optim.fully_sharded.wrapper import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
