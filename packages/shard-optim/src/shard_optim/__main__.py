"""``python -m shard_optim``: memory and communication of sharded training, on the command line.

python -m shard_optim memory --parameters 2e9 --ranks 2 4
python -m shard_optim communication --device-gb 95 --ranks 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shard_optim.accounting import (
    FP32,
    GB,
    MIXED_BF16,
    STAGES,
    Derived,
    compute_bound_batch,
    fsdp_memory,
    fsdp_ranks,
    rank_memory,
    step_traffic,
    training_memory,
)

POLICIES = {"fp32": FP32, "mixed-bf16": MIXED_BF16}


def memory_lines(parameters: int, ranks: Sequence[int], policy: str, in_flight_gb: float) -> str:
    """A table: gigabytes per rank by stage and number of ranks."""
    columns = ("parameters", "gradients", "masters", "state", "buffers", "total", "sent per step")
    lines = [f"{'stage':>5} {'ranks':>5} " + " ".join(f"{name:>13}" for name in columns)]
    for world_size in ranks:
        for stage in STAGES:
            chosen = POLICIES[policy]
            memory = rank_memory(
                parameters,
                world_size=world_size,
                stage=stage,
                policy=chosen,
                in_flight=in_flight_gb * GB,
            )
            sent = step_traffic(parameters, world_size=world_size, stage=stage, policy=chosen)
            values = (
                memory.parameters,
                memory.gradients,
                memory.master_copies,
                memory.optimizer_state,
                memory.buffers,
                memory.total,
                sent,
            )
            cells = " ".join(f"{value / GB:13.3f}" for value in values)
            lines.append(f"{stage:5d} {world_size:5d} {cells}")
    return "\n".join([*lines, "GB (10^9 bytes) per rank; activations excluded"])


def communication_lines(device_gb: float, ranks: int, tokens: int) -> str:
    """The very large feed-forward stack: each number with its derivation."""
    found: dict[str, Derived] = dict(training_memory(device_gb=device_gb))
    found["fsdp_memory"] = fsdp_memory(ranks=ranks, tokens=tokens)
    found["fsdp_ranks"] = fsdp_ranks(device_gb=device_gb, tokens=tokens)
    found |= {f"compute_bound_batch.{name}": v for name, v in compute_bound_batch().items()}
    return "\n".join(
        f"{name}: {derived.value:,.3f} {derived.unit}\n    {derived.derivation}"
        for name, derived in found.items()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m shard_optim", description="Accounting.")
    commands = parser.add_subparsers(dest="command", required=True)
    memory = commands.add_parser("memory", help="bytes per rank under ZeRO stages 0 to 3")
    memory.add_argument("--parameters", type=float, required=True, help="trainable ones")
    memory.add_argument("--ranks", type=int, nargs="+", default=[2])
    memory.add_argument("--policy", choices=POLICIES, default="fp32")
    memory.add_argument("--in-flight-gb", type=float, default=0.0, help="bound on buffers")
    stack = commands.add_parser(
        "communication", help="FSDP and tensor parallelism of a 220-billion-parameter stack"
    )
    stack.add_argument("--device-gb", type=float, default=80.0)
    stack.add_argument("--ranks", type=int, default=64)
    stack.add_argument("--tokens", type=int, default=0, help="per device, kept for backward")
    args = parser.parse_args(arguments)
    try:
        if args.command == "memory":
            print(memory_lines(int(args.parameters), args.ranks, args.policy, args.in_flight_gb))
        else:
            print(communication_lines(args.device_gb, args.ranks, args.tokens))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
