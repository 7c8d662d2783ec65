"""The command that there was. Running it says what to call."""

raise SystemExit(
    "python -m shard_optim memory has been replaced. Call shard_optim.accounting.rank_memory("
    "parameters, world_size=ranks, stage=stage).total, in bytes, and step_traffic() alike."
)
