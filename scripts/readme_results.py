"""Writes the measured results of the README from the committed rows.

    python scripts/readme_results.py           # rewrite the section
    python scripts/readme_results.py --check   # exit 1 if it differs from the rows

It reads the leaderboard rows of docs/results/flash, the data-parallel rows of docs/results/ddp and
the sharding rows of docs/results/assignment-h200 and docs/results/optimizer.
"""

import argparse
import json
import sys
from pathlib import Path
from statistics import median

import pandas as pd

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN = "<!-- results: scripts/readme_results.py writes what is between these marks -->\n"
END = "<!-- end of results -->"
ATTENTION_ROWS = "docs/results/flash/h200_attention.jsonl"
ATTENTION_PICTURE = "docs/results/flash/h200_attention.png"
DDP_ROWS = "docs/results/ddp/h200x2_xl_device/rows.jsonl"
DDP_CELL = "bf16,8,512"
SHARDING_ROWS = "docs/results/assignment-h200/results.jsonl"
WRAPPERS = {
    "no-communication": "no communication (a bound, not training)",
    "naive": "ddp-lite, naive",
    "flat": "ddp-lite, flat",
    "overlap": "ddp-lite, overlapped",
    "default": "ddp-lite, bucketed (default)",
    "default-peer-copy": "ddp-lite, bucketed, copies between peers",
    "torch-25-views": "torch DDP, 25 MB, views",
    "torch-100-views": "torch DDP, 100 MB, views",
    "torch-100-views-static": "torch DDP, 100 MB, views, static graph",
}
STEP_ROWS = "docs/results/optimizer/h200x2_xl_bf16_compiled_batch8.jsonl"
STEPS = {
    "torch-ddp": "torch DDP, AdamW on every rank",
    "torch-ddp+zero": "torch DDP, ZeroRedundancyOptimizer",
    "ddp-lite-auto": "ddp-lite, AdamW on every rank",
    "reduce-overlap": "shard-optim on ddp-lite's buckets, reduced in backward",
}
OPTIMIZERS = {
    "unsharded": "AdamW on every rank",
    "sharded-flat": "shard-optim, equal slices (default)",
    "sharded-whole": "shard-optim, whole tensors",
    "zero-redundancy": "ZeroRedundancyOptimizer",
}


def attention_table(path: Path) -> str:
    """One line per implementation, fastest first; milliseconds."""
    rows = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    rows = rows[rows["set"] == "leaderboard"]
    table = rows.pivot_table(index="implementation", columns="pass", values="ms")
    table = table.sort_values("both")[["forward", "backward", "both"]]
    table.columns = ["forward (ms)", "backward (ms)", "forward + backward (ms)"]
    return str(table.reset_index().to_markdown(index=False, floatfmt=".2f"))


def ddp_table(path: Path) -> str:
    """One line per wrapper, fastest first; milliseconds and GiB."""
    rows = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    rows = rows[rows["cell"] == DDP_CELL].set_index("variant")
    table = rows.loc[list(WRAPPERS), ["median_ms", "min_ms", "peak_gib"]].sort_values("median_ms")
    table.index = table.index.map(WRAPPERS)
    table.columns = ["step, median (ms)", "fastest block (ms)", "peak memory (GiB)"]
    return str(table.rename_axis("wrapper").reset_index().to_markdown(index=False, floatfmt=".1f"))


def sharding_table(path: Path) -> str:
    """One line per optimizer; GiB per rank and milliseconds."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = []
    for variant, name in OPTIMIZERS.items():
        own = [r for r in rows if r["experiment"] == "optimizer" and r["variant"] == variant]
        after = next(r for r in own if r["moment"] == "after the optimizer step")
        times = {r["phase"]: median(r["samples_ms"]) for r in own if r["phase"]}
        lines.append(
            {
                "optimizer": name,
                "its state (GiB)": after["state_bytes"] / 2**30,
                "allocated after the step (GiB)": after["allocated_bytes"] / 2**30,
                "the optimizer alone (ms)": times["optimizer"],
                "training step (ms)": times["step"],
            }
        )
    return str(pd.DataFrame(lines).to_markdown(index=False, floatfmt=".1f"))


def step_table(path: Path) -> str:
    """One line per pair of wrapper and optimizer, fastest first; milliseconds."""
    rows = pd.DataFrame(map(json.loads, path.read_text().splitlines()))
    table = rows.groupby("variant")[["step_ms", "optimizer_ms"]].median().loc[list(STEPS)]
    table = table.sort_values("step_ms")
    table.index = table.index.map(STEPS)
    table.columns = ["step, median (ms)", "the optimizer alone (ms)"]
    named = table.rename_axis("wrapper and optimizer").reset_index()
    return str(named.to_markdown(index=False, floatfmt=".1f"))


def section(root: Path = ROOT) -> str:
    """The README's text between the marks."""
    return f"""
**Attention.** One NVIDIA H200, 16 heads × 64, 16,384 tokens, bf16, causal; backward of
`out.sum()`; medians of interleaved rounds.

{attention_table(root / ATTENTION_ROWS)}

Throughput over the sequence length, with cuDNN:

![Throughput over sequence length, against PyTorch's kernels]({ATTENTION_PICTURE})

**Data parallelism.** Two NVIDIA H200s, the 2.0-billion-parameter model, batch 8 × 512 per GPU, bf16
autocast, compiled blocks, fused AdamW; interleaved blocks of three steps, six rounds (two for
naive, flat, overlapped and 25 MB). [ddp-lite's page](packages/ddp-lite/README.md#measured) has the
other cells, eager steps and timelines.

{ddp_table(root / DDP_ROWS)}

**Sharding.** Two NVIDIA H200s of another machine, the same model. Memory per rank and time behind
the same bucketed wrapper, batch 2 × 128 per GPU, fp32; medians of ten steps in two turns:

{sharding_table(root / SHARDING_ROWS)}

Whole steps where the GPU is the limit: blocks compiled, batch 8 × 512 per GPU, bf16, rounds of four
steps in turn:

{step_table(root / STEP_ROWS)}

"""


def rendered(text: str, root: Path = ROOT) -> str:
    """``text`` with the section renewed.

    Raises:
        ValueError: a mark is missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"README.md must hold the marks {BEGIN.strip()!r} and {END!r}")
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + section(root) + END + after


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    arguments = parser.parse_args()
    current = README.read_text()
    new = rendered(current)
    if arguments.check:
        sys.exit(0 if new == current else "README.md is outdated: run scripts/readme_results.py")
    README.write_text(new)


if __name__ == "__main__":
    main()
