"""The way of one step of ``ShardedOptimizer`` at stage 2 with overlap, as files and calls.

::

    uv run python packages/shard-optim/tools/walk.py            files, calls and changes of file
    uv run python packages/shard-optim/tools/walk.py --walk     every call of the way
    uv run python packages/shard-optim/tools/walk.py --source OTHER/packages/shard-optim/src

The way is traced in the third step of a small model on the fake process group of two ranks: the
backward that reduces gradients, the update, and the forward that waits for updated parameters.
Every entry into a function of shard_optim counts as a call; ddp_lite's are counted apart.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections import Counter
from pathlib import Path

_PROGRAM = """
import sys, torch, torch.distributed as dist
sys.path.insert(0, SOURCE)
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from shard_optim import ShardedOptimizer
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
optimizer = ShardedOptimizer(
    model.parameters(), torch.optim.SGD, lr=0.1, reduce_gradients=True, overlap="next-forward"
)
optimizer.attach(model)
calls = []
def seen(frame, event, argument):
    code = frame.f_code
    for package in ("shard_optim", "ddp_lite"):
        if event == "call" and f"/{package}/" in code.co_filename:
            if not code.co_name.startswith("<"):
                file = code.co_filename.rsplit(f"/{package}/")[-1]
                calls.append((package, file, code.co_qualname))
for _ in range(3):
    loss = model(torch.ones(1, 2)).sum()
    calls.clear()
    sys.setprofile(seen)
    loss.backward()
    optimizer.step()
    model(torch.ones(1, 2))
    sys.setprofile(None)
    optimizer.zero_grad()
for call in calls:
    print(*call)
"""


def walk(source: Path) -> list[tuple[str, str, str]]:
    """The calls of one step, in order.

    Args:
        source: the folder that holds the package.

    Returns:
        Package, file inside it, and function of every call.
    """
    program = _PROGRAM.replace("SOURCE", repr(str(source)))
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    calls = (line.split(" ", 2) for line in done.stdout.splitlines())
    return [(package, file, name) for package, file, name in calls]


def main() -> None:
    """Prints the counts, or the way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--walk", action="store_true", help="print every call instead")
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1] / "src")
    arguments = parser.parse_args()
    calls = walk(arguments.source.resolve())
    if arguments.walk:
        print("\n".join(f"{package}/{file} {name}" for package, file, name in calls))
        return
    files = [f"{package}/{file}" for package, file, _ in calls]
    changes = sum(one != other for one, other in itertools.pairwise(files))
    for package in ("shard_optim", "ddp_lite"):
        found = Counter(file for file in files if file.startswith(package))
        print(f"files of {package}: {len(found)}")
        for file, count in found.items():
            print(f"    {file}: {count} calls")
    print(f"calls: {len(calls)}, changes of file: {changes}")


if __name__ == "__main__":
    main()
