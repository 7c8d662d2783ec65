"""Where the strategies for Lightning's Trainer are: importing this module says it."""

raise ImportError(
    "shard_optim.integrations.lightning is examples/sharded_lightning_strategies.py of the "
    "repository now, to copy and change: ShardedOptimizerStrategy and FullyShardedStrategy"
)
