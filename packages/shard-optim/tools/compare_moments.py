"""Losses with moments in bf16, and in 8 bits by torchao, beside fp32 ones, at stage 3 on CPUs.

::

    PYTHONPATH=. uv run python packages/shard-optim/tools/compare_moments.py rows.jsonl

200 steps of a small model on two ranks, three seeds, as ``python -m tools.pages curves`` measures
other variants: equal initial weights and equal text. It prints each mean of the last 20 losses
relative to fp32's, and what the seeds of fp32 differ by. Eight minutes on two cores.
"""

import argparse
from pathlib import Path

from tools.pages import loss_curves
from tools.pages.rows import measure

STAGE_3 = {"wrapper": {"name": "fully-sharded"}, "precision": "fp32"}
CLASSES = ("shard_optim:AdamW", "torchao.optim:AdamW8bit", "torchao.optim:AdamWFp8")
MODEL = {"size": "custom", "d_model": 192, "num_layers": 3, "num_heads": 3, "d_ff": 512}


def main() -> None:
    """Measures, writes the rows, and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    given = parser.parse_args()
    optimizers = [{"name": name, "lr": 3e-4} for name in CLASSES]
    variants = [STAGE_3, *(STAGE_3 | {"optimizer": each} for each in optimizers)]
    case = loss_curves.case(variants, "cpu", **MODEL, batch=4, sequence=128)
    last: dict[str, list[float]] = {}

    def run(case):  # type: ignore[no-untyped-def]
        rows = loss_curves.run(case)
        for row in rows:
            last.setdefault(row["way"], []).append(sum(row["losses"][-20:]) / 20)
        return rows

    measure(case, run, given.target)
    (_, base), *others = last.items()
    usual = sum(base) / len(base)
    print(f"seeds of fp32 differ by {(max(base) - min(base)) / usual:.2%}")
    for name, found in others:
        print(f"{name}: {sum(found) / len(found) / usual - 1:+.2%}")


if __name__ == "__main__":
    main()
