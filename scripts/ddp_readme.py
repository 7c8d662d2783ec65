"""Writes what is measured into ddp-lite's README: tables, fault tests, timelines.

    python scripts/ddp_readme.py faults                 # runs the fault tests
    python scripts/ddp_readme.py traces RUN/traces      # trims traces of bench_ddp.py --traces
    python scripts/ddp_readme.py                        # renews the README from the results folder

The results are ``rows.jsonl`` (``bench_ddp.py``), ``faults.jsonl`` and the trimmed traces under
``docs/results/ddp``; pictures are drawn beside them.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from ddp_pictures import draw_speed, draw_timelines, trim

ROOT = Path(__file__).parents[1]
README = ROOT / "packages/ddp-lite/README.md"
RESULTS = ROOT / "docs/results/ddp"
RUN = RESULTS / "h200x2_xl"
AGAIN = RESULTS / "h200x2_xl_again"
SHORT = RESULTS / "h200x2_xl_short"
PROBE = RESULTS / "h200x2_xl_probe"
IN_TURN = (
    "h200x2_xl_bf16_rounds_17.jsonl",
    "h200x2_xl_bf16_rounds.jsonl",
    "h200x2_xl_bf16_compiled.jsonl",
    "h200x2_xl_bf16_compiled_batch8.jsonl",
    "h200x4_xl_bf16.jsonl",
    "h200x4_xl_bf16_compiled.jsonl",
)
LINK = "../../docs/results/ddp"
STEPS = {
    "no-communication": "no communication",
    "naive": "1. NaiveDDP",
    "flat": "2. FlatDDP",
    "overlap": "3. OverlapDDP",
    "default": "4. BucketedDDP",
    "default-peer-copy": "4. with PeerCopyAverage",
    "torch-100-views": "torch DDP, 100 MB, views",
}
PROBED = {
    "no-communication.rank0": "no communication",
    "inplace-100.rank0": "BucketedDDP, 100 MB",
    "inplace-250.rank0": "BucketedDDP, 250 MB",
    "inplace-500.rank0": "BucketedDDP, 500 MB",
    "peer-copy-250.rank0": "copies between peers, 250 MB",
    "torch-100-views.rank0": "torch DDP, 100 MB, views",
}
VARIANTS = {
    "no-communication": "no communication (a bound, not training)",
    "naive": "`NaiveDDP`",
    "flat": "`FlatDDP`",
    "overlap": "`OverlapDDP`",
    "default": "`BucketedDDP`, 476 MB",
    "inplace-100": "`BucketedDDP`, 100 MB",
    "inplace-250": "`BucketedDDP`, 250 MB",
    "inplace-500": "`BucketedDDP`, 500 MB",
    "default-copy": "`BucketedDDP`, 476 MB, `copy=True`",
    "default-bf16-wire": "`BucketedDDP`, 476 MB, `wire_dtype=torch.bfloat16`",
    "default-high-priority": "`BucketedDDP`, 476 MB, NCCL on a high-priority stream",
    "default-16-ctas": "`BucketedDDP`, 476 MB, NCCL with 16 thread blocks",
    "default-gated": "`BucketedDDP`, 476 MB, a tiny collective before each (dropped)",
    "default-tapered": "`BucketedDDP`, 476 MB, tapered (the default)",
    "default-peer-copy": "`BucketedDDP`, 476 MB, `PeerCopyAverage`",
    "torch-25": "torch DDP (25 MB, its default)",
    "torch-25-views": "torch DDP, 25 MB, views",
    "torch-25-views-static": "torch DDP, 25 MB, views, static graph",
    "torch-100-views": "torch DDP, 100 MB, views",
    "torch-100-views-static": "torch DDP, 100 MB, views, static graph",
}


def rows_in(path: Path) -> pd.DataFrame:
    """The rows of a JSON-lines file."""
    return pd.DataFrame(map(json.loads, path.read_text().splitlines()))


def markdown(table: pd.DataFrame, digits: str | None = None) -> str:
    """A table without its index; without ``digits``, its cells are text already."""
    if digits is None:
        return str(table.to_markdown(index=False, disable_numparse=True))
    return str(table.to_markdown(index=False, floatfmt=digits))


# -- what the README says of speed ---------------------------------------------------------------


def cells_against_torch() -> pd.DataFrame:
    """For each cell the rows of the run that measured it in the most rounds."""
    short, again, first = (rows_in(run / "rows.jsonl") for run in (SHORT, AGAIN, RUN))
    kept = [
        short,
        again[again.cell == "bf16,4,512"],
        first[first.cell.str.startswith("fp32")],
    ]
    return pd.concat(kept, ignore_index=True)


def against_torch() -> str:
    """The default and torch's best settings, cell by cell."""
    rows = cells_against_torch().sort_values(["cell", "median_ms"], kind="stable")
    names = VARIANTS | {"default": "**`BucketedDDP`** (the default)"}
    table = pd.DataFrame(
        {
            "precision, batch, sequence": rows.cell.str.replace(",", ", "),
            "wrapper": rows.variant.map(names),
            "blocks": rows.block_ms.map(len).map(str),
            "median (ms)": rows.median_ms.map("{:.1f}".format),
            "fastest (ms)": rows.min_ms.map("{:.1f}".format),
            "ratio of medians": rows.ratio_to_best_torch.map("{:.3f}".format),
            "peak (GiB)": rows.peak_gib.map("{:.1f}".format),
        }
    )
    return markdown(table)


def beside_sharding() -> str:
    """The default against torch DDP in the runs of bench_optimizer.py, variants in turn."""
    lines = []
    for name in IN_TURN:
        rows = rows_in(RESULTS.parent / "optimizer" / name)
        times = rows[rows.kind == "time"].groupby("variant").step_ms
        ours, theirs = times.get_group("ddp-lite-auto"), times.get_group("torch-ddp")
        compiled = bool(rows.get("compiled_blocks", pd.Series([None])).iloc[0])
        lines.append(
            {
                "GPUs": rows.world_size.iloc[0],
                "batch": rows.batch.iloc[0],
                "blocks of layers": "compiled" if compiled else "eager",
                "rounds": len(ours),
                "`BucketedDDP` (ms)": f"{ours.median():.1f}",
                "torch DDP, 100 MB, views (ms)": f"{theirs.median():.1f}",
                "ratio of medians": f"{ours.median() / theirs.median():.3f}",
            }
        )
    return markdown(pd.DataFrame(lines))


def speed_section() -> str:
    """The default against torch's best in every cell, and all variants of the first cell."""
    rows = rows_in(RUN / "rows.jsonl")
    first = rows[rows.cell == rows.cell.iloc[0]].sort_values("min_ms")
    table = pd.DataFrame(
        {
            "wrapper": first.variant.map(VARIANTS),
            "fastest block (ms)": first.min_ms,
            "median (ms)": first.median_ms,
            "exposed (ms)": first.fastest_exposed_ms,
            "of torch's best": first.fastest_exposed_ratio,
            "peak (GiB)": first.peak_gib,
        }
    )
    fact = rows.iloc[0]
    alone = ", ".join(f"{ms:.0f}" for ms in first.set_index("variant").block_ms["no-communication"])
    return f"""
Two {fact.hardware} GPUs, the 2.0-billion-parameter Transformer (8.0 GB of float32 gradients),
fused AdamW, torch {fact.torch}, NCCL {fact.nccl} without multicast; milliseconds a step of the
slower rank, in blocks of a few steps that are timed without synchronising inside, the wrappers in
turn, so that the uneven hosts of these machines hit all alike. Ratios are to the best setting of
torch DDP in the same run.

The default against the settings that were torch DDP's best, each cell from the run with the most
blocks of it (fp32: before the last buckets were tapered; fp32 is bound by the device and repeats):

{against_torch()}

![Median steps]({LINK}/speed.png)

The default and torch DDP in turn with other ways to train (the runs of shard-optim's benchmark),
bf16 autocast, sequence 512. At batch 4 the hosts of these machines decide; at batch 8, with
compiled blocks, the device does:

{beside_sharding()}

All wrappers, in a run whose host became slow (the step without communication took {alone} ms in the
blocks of this cell, so only fastest blocks compare), with the default before its buckets were
tapered. *Exposed* is the step minus the step without communication. Batch 4 × 512, bf16 autocast:

{markdown(table, ".2f")}

Peaks are what torch allocated; `PeerCopyAverage` keeps 7.4 GiB of symmetric memory besides.

![One training step with each wrapper, host-bound]({LINK}/{RUN.name}/timelines.png)

Where the device was in one step of rank 0 (batch 4 × 512, bf16), from profiler traces taken at the
end of that run, while the host could not keep the device busy (white gaps).

![One training step, device-bound]({LINK}/{PROBE.name}/timelines.png)

The same from an earlier run with a quick host. Nothing but communication shows white here, yet the
step is longer with than without it: while NCCL's thread blocks hold SMs, matrix products are
slower. Copies between the GPUs (an earlier `PeerCopyAverage`, which packed gradients first) leave
them alone.
"""


# -- what ends ranks -----------------------------------------------------------------------------


def run_faults() -> None:
    """Runs the fault tests and keeps one row of each."""
    tests = "packages/ddp-lite/tests/test_faults.py"
    words = [sys.executable, "-m", "pytest", tests, "-q", "-s", "-p", "no:cacheprovider"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"a fault test failed:\n{done.stdout[-4000:]}{done.stderr[-1000:]}")
    found = [part.partition("FAULT ")[2] for part in done.stdout.splitlines() if "FAULT " in part]
    (RESULTS / "faults.jsonl").write_text("\n".join(found) + "\n")


def faults_section() -> str:
    """One line per kind of fault."""
    rows = rows_in(RESULTS / "faults.jsonl")
    table = pd.DataFrame(
        [
            {
                "a rank …": fault,
                "tested with": ", ".join(
                    f"{w} ({n})" for w, n in zip(own.wrapper, own.ranks, strict=True)
                ),
                "the others end with": " / ".join(sorted({f"`{e}`" for e in own.error})),
                "detected": f"{len(own)} of {len(own)}",
                "slowest (s)": own.seconds.max(),
            }
            for fault, own in rows.groupby("fault", sort=False)
        ]
    )
    return f"""
Faults injected on gloo ranks whose process group has a timeout of 3 s (number of ranks in
brackets). Seconds are from the beginning of the faulty step to the error on the slowest surviving
rank; where only time tells (stopped, absent, changed alone) they are the timeout and at most 2 s of
roll call.

{markdown(table, ".2f")}
"""


# -- the README ----------------------------------------------------------------------------------


def renewed(text: str, sections: Mapping[str, str]) -> str:
    """``text`` with each section between its marks replaced.

    Raises:
        ValueError: a mark is missing.
    """
    for name, section in sections.items():
        begin, end = f"<!-- {name}: scripts/ddp_readme.py -->\n", f"<!-- end of {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"README.md must hold the marks {begin.strip()!r} and {end!r}")
        before, _, rest = text.partition(begin)
        text = before + begin + section + "\n" + end + rest.partition(end)[2]
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("faults", help="run the fault tests first")
    traces = commands.add_parser("traces", help="take the traces of a run first")
    traces.add_argument("folder", type=Path)
    given: Any = parser.parse_args(arguments)
    if given.command == "faults":
        run_faults()
    if given.command == "traces":
        trim(given.folder, RUN / "traces")
    for run, labels in ((RUN, STEPS), (PROBE, PROBED)):
        paths = {label: run / "traces" / f"{name}.json.gz" for name, label in labels.items()}
        present = {label: path for label, path in paths.items() if path.exists()}
        if present:
            (run / "timelines.png").write_bytes(draw_timelines(present))
    (RESULTS / "speed.png").write_bytes(draw_speed(cells_against_torch(), VARIANTS))
    sections = {"faults": faults_section(), "speed": speed_section()}
    README.write_text(renewed(README.read_text(), sections))


if __name__ == "__main__":
    main()
