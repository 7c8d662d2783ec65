"""Writes shard-optim's measured results from the committed rows of scripts/bench_optimizer.py.

python scripts/optimizer_results.py           # rewrite the README's section and the picture
python scripts/optimizer_results.py --check   # exit 1 if the section differs from the rows
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROWS = ROOT / "docs/results/optimizer"
FILES = (
    "h200x2_xl_bf16_rounds.jsonl",
    "h200x2_xl_bf16_compiled.jsonl",
    "h200x2_xl_bf16_compiled_batch8.jsonl",
    "h200x4_xl_bf16.jsonl",
    "h200x4_xl_bf16_compiled.jsonl",
    "h200x2_xl_bf16.jsonl",
    "h200_xl_bf16_rank_of_4.jsonl",
    "h200_xl_bf16_rank_of_64.jsonl",
)
LINK = "https://raw.githubusercontent.com/training-systems/training-systems/main/docs/results/optimizer"
PICTURE = "memory.png"
README = ROOT / "packages/shard-optim/README.md"
BEGIN = "<!-- results: scripts/optimizer_results.py writes what is between these marks -->\n"
END = "<!-- end of results -->"

LABELS = {
    "no-communication": "no communication (a bound, not training)",
    "torch-ddp": "torch DDP, 100 MB, views; unsharded",
    "torch-ddp+zero": "torch DDP + ZeroRedundancyOptimizer",
    "ddp-lite-auto": "ddp-lite, its default buckets; unsharded",
    "ddp-lite": "ddp-lite, 250 MB; unsharded",
    "ddp-lite-500": "ddp-lite, 500 MB; unsharded",
    "torch-ddp+sharded": "torch DDP + `ShardedOptimizer`",
    "ddp-lite+sharded": "ddp-lite + `ShardedOptimizer`",
    "ddp-lite+handoff": "ddp-lite with `ReduceScatterHook` + `ShardedOptimizer`",
    "reduce-overlap": '`reduce_gradients`, `overlap="next-forward"`',
    "reduce-250-overlap": "`reduce_gradients`, overlap, 250 MB",
    "reduce-500-overlap": "`reduce_gradients`, overlap, 500 MB",
    "reduce-1000-overlap": "`reduce_gradients`, overlap, 1000 MB",
    "reduce-even-overlap": "`reduce_gradients`, overlap, 476 MB",
}
UNSHARDED = ("ddp-lite", "ddp-lite-500", "ddp-lite-auto")
WEIGHED = {
    "torch-ddp": "torch DDP, unsharded",
    "torch-ddp+zero": "DDP + ZeroRedundancyOptimizer",
    "ddp-lite+sharded": "ddp-lite + ShardedOptimizer",
    "reduce-overlap": "ShardedOptimizer, reduce_gradients",
}
MOMENTS = {
    "forward_2": "end of forward",
    "before_step_2": "before step",
    "after_step_2": "after step",
}
PARTS = {
    "parameters": "#4c72b0",
    "gradients": "#dd8452",
    "optimizer_state": "#55a868",
    "activations and buffers": "#b0b0b0",
}
GIB = 2**30

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The rows of one file.

    Attributes:
        facts: any row, for what all have in common.
        times: rows with a time, by variant and round.
        memory: one row with memory per variant, of the block that began with the least memory
            left over from another variant.
    """

    facts: Row
    times: dict[str, dict[int, Row]]
    memory: dict[str, Row]

    def step_ms(self, name: str) -> float:
        """Median over the blocks of a variant."""
        return statistics.median(row["step_ms"] for row in self.times[name].values())

    def ratio(self, name: str, base: str) -> str:
        """The ratio of two variants' medians, and the median of their ratios within a round."""
        mine, theirs = self.times[name], self.times[base]
        both = sorted(mine.keys() & theirs.keys())
        within = statistics.median(mine[n]["step_ms"] / theirs[n]["step_ms"] for n in both)
        return f"{self.step_ms(name) / self.step_ms(base):.3f} ({within:.3f})"

    @property
    def weighed(self) -> list[str]:
        """The variants that the memory table and the picture show, if they were weighed."""
        found = [name for name in WEIGHED if name in self.memory]
        return found if "no-communication" in self.memory else []


def read(path: Path) -> Run:
    """A file's rows, sorted out."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    times: dict[str, dict[int, Row]] = {}
    memory: dict[str, Row] = {}
    for row in rows:
        name = row["variant"]
        if "step_ms" in row:
            times.setdefault(name, {})[row["round"]] = row
        if "memory" in row:
            known = memory.setdefault(name, row)
            memory[name] = min(known, row, key=lambda r: r["held_before"])
    return Run(rows[0], times, memory)


def peak(row: Row) -> float:
    """GiB, over everything that was measured."""
    return max(moment["peak"] for moment in row["memory"].values()) / GIB


def measured(row: Row, moment: str) -> dict[str, float]:
    """GiB by part at a moment."""
    found = row["memory"][moment]
    known = {part: found.get(part, 0) / GIB for part in list(PARTS)[:3]}
    return known | {"activations and buffers": found["allocated"] / GIB - sum(known.values())}


def predicted(row: Row, moment: str, activations: float) -> dict[str, float]:
    """GiB by part: the accounting, and the activations of training without communication."""
    expected = row["predicted_bytes"]
    reduced = row["variant"].startswith("reduce")
    present = moment == "before_step_2" or (moment == "after_step_2" and not reduced)
    return {
        "parameters": expected["parameters"] / GIB,
        "gradients": expected["gradients"] / GIB if present else 0.0,
        "optimizer_state": expected["optimizer_state"] / GIB,
        "activations and buffers": activations if moment == "forward_2" else 0.0,
    }


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def speed_table(run: Run) -> str:
    """One line per variant, fastest first."""
    unsharded = sorted((name for name in UNSHARDED if name in run.times), key=run.step_ms)
    candidates = [("unsharded ddp-lite", name) for name in unsharded[:1]]
    candidates += [("torch DDP", "torch-ddp"), ("DDP + ZeRO", "torch-ddp+zero")]
    base = {title: name for title, name in candidates if name in run.times}
    rows = []
    for name in sorted(run.times, key=run.step_ms):
        times = [row["step_ms"] for row in run.times[name].values()]
        alone = statistics.median(row["optimizer_ms"] for row in run.times[name].values())
        buckets = run.times[name][min(run.times[name])].get("buckets")
        rows.append(
            [
                LABELS[name] + (f" ({buckets} buckets)" if buckets else ""),
                f"{run.step_ms(name):.1f}",
                f"{min(times):.1f}–{max(times):.1f}",
                f"{alone:.1f}",
                *(run.ratio(name, other) for other in base.values()),
            ]
        )
    header = ["variant", "step (ms)", "blocks (ms)", "optimizer step (ms)"]
    return table([*header, *(f"of {name}" for name in base)], rows)


def activations_of(run: Run) -> float:
    """GiB that forward leaves for backward, measured where nothing is communicated."""
    return measured(run.memory["no-communication"], "forward_2")["activations and buffers"]


def memory_table(run: Run) -> str:
    """Measured and predicted GiB by variant and moment."""
    rows = []
    for name in run.weighed:
        row = run.memory[name]
        expected = row["predicted_bytes"]
        init = row["memory"]["after_init"]["allocated"] / GIB
        cells = [f"{init:.2f} ({expected['parameters'] / GIB:.2f})"]
        for moment in MOMENTS:
            real = sum(measured(row, moment).values())
            total = sum(predicted(row, moment, activations_of(run)).values())
            cells.append(f"{real:.2f} ({total:.2f})")
        state = row["memory"]["after_step_2"]["optimizer_state"] / GIB
        cells += [f"{peak(row):.2f}", f"{state:.2f} ({expected['optimizer_state'] / GIB:.2f})"]
        rows.append([LABELS[name], *cells])
    header = ["GiB per rank: measured (predicted)", "after initialisation", *MOMENTS.values()]
    return table([*header, "peak", "optimizer state"], rows)


def draw(runs: list[Run], path: Path) -> None:
    """Stacked bars: measured, and predicted beside it, by moment, variant and number of ranks."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, grid = plt.subplots(
        len(runs), len(WEIGHED), figsize=(13, 3.4 * len(runs)), sharey=True, squeeze=False
    )
    for line, run in zip(grid, runs, strict=True):
        alone = "1 of " if run.facts.get("backend") == "fake" else ""
        for axes, name in zip(line, WEIGHED, strict=True):
            for place, moment in enumerate(MOMENTS):
                stack(axes, place - 0.2, measured(run.memory[name], moment), "")
                expected = predicted(run.memory[name], moment, activations_of(run))
                stack(axes, place + 0.2, expected, "//")
            axes.set_xticks(range(len(MOMENTS)), list(MOMENTS.values()), fontsize=8)
            axes.set_title(f"{WEIGHED[name]}, {alone}{run.facts['world_size']} ranks", fontsize=8)
        line[0].set_ylabel("GiB per rank")
    patches = [Patch(color=color, label=part.replace("_", " ")) for part, color in PARTS.items()]
    patches.append(Patch(facecolor="white", edgecolor="grey", hatch="//", label="predicted"))
    figure.legend(handles=patches, loc="lower center", ncol=len(patches), fontsize=9)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def stack(axes: Any, place: float, parts: dict[str, float], hatch: str) -> None:
    """One bar."""
    bottom = 0.0
    for part, color in PARTS.items():
        height = max(parts[part], 0.0)
        axes.bar(place, height, 0.36, bottom=bottom, color=color, hatch=hatch, edgecolor="white")
        bottom += height


def section(runs: list[Run]) -> str:
    """The README's text between the marks."""
    parts = []
    for run in runs:
        row = run.facts
        compiled = ", every Transformer block compiled" if row.get("compiled_blocks") else ""
        machine = f"{row['world_size']} × {row['hardware']}"
        if row.get("backend") == "fake":
            machine = f"Rank 0 of {row['world_size']}, alone on one {row['hardware']}"
        setting = (
            f"""**{machine}**, the 2.0-billion-parameter model, """
            f"""{row["precision"]} autocast, batch {row["batch"]} × {row["sequence"]} per rank, """
            f"""fused AdamW, torch {row["torch"]}{compiled}"""
        )
        if run.times:
            blocks = min(len(found) for found in run.times.values())
            order = (
                "built and measured one after the other"
                if "memory" in next(iter(next(iter(run.times.values())).values()))
                else "all in memory, measured in turn"
            )
            parts.append(
                f"""{setting}; {blocks} blocks of {row["steps_per_block"]} steps, the variants """
                f"{order}. Medians; ratios of medians (medians of the ratios within rounds).\n\n"
                f"{speed_table(run)}\n"
            )
        if run.weighed:
            how = "each variant alone in memory"
            if row.get("backend") == "fake":
                how += ", collectives that move nothing"
            parts.append(f"{setting}; {how}.\n\n{memory_table(run)}\n")
    text = "\n".join(parts)
    return f"\n{text}\n![Memory by moment]({LINK}/{PICTURE})\n\n"


def rendered(text: str, runs: list[Run]) -> str:
    """``text`` with the section renewed.

    Raises:
        ValueError: a mark is missing.
    """
    if BEGIN not in text or END not in text:
        raise ValueError(f"{README} must hold the marks {BEGIN.strip()!r} and {END!r}")
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + section(runs) + END + rest.partition(END)[2]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    arguments = parser.parse_args()
    runs = [read(ROWS / name) for name in FILES if (ROWS / name).exists()]
    current = README.read_text()
    new = rendered(current, runs)
    if arguments.check:
        sys.exit(0 if new == current else f"{README} is outdated: run scripts/optimizer_results.py")
    README.write_text(new)
    draw([run for run in runs if len(run.weighed) == len(WEIGHED)], ROWS / PICTURE)


if __name__ == "__main__":
    main()
