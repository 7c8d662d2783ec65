"""``python -m shard_optim``: memory and traffic of sharded training, on the command line.

python -m shard_optim memory --parameters 2e9 --ranks 2 4
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence

from shard_optim.accounting import FP32, GB, MIXED_BF16, STAGES, rank_memory, step_traffic

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


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m shard_optim",
        description="Memory and traffic of sharded training, as arithmetic.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    memory = commands.add_parser("memory", help="bytes per rank under ZeRO stages 0 to 3")
    memory.add_argument("--parameters", type=float, required=True, help="trainable ones")
    memory.add_argument("--ranks", type=int, nargs="+", default=[2])
    memory.add_argument("--policy", choices=POLICIES, default="fp32")
    memory.add_argument("--in-flight-gb", type=float, default=0.0, help="bound on buffers")
    args = parser.parse_args(arguments)
    if not 1 <= args.parameters < math.inf:
        sys.exit(
            f"--parameters must be at least 1, but got {args.parameters}. Pass the number of "
            "trainable parameters, such as 2e9."
        )
    try:
        print(memory_lines(int(args.parameters), args.ranks, args.policy, args.in_flight_gb))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
