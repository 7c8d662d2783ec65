"""Integrations that there were. Importing one says where it is."""

raise ImportError(
    "shard_optim.integrations.lightning is examples/sharded_lightning_strategies.py of the "
    "repository now, and shard_optim.integrations.transformers, with ShardedCheckpoints, is "
    "examples/sharded_transformers_trainer.py, to copy and change"
)
