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
from ddp_pictures import draw_timelines, trim

ROOT = Path(__file__).parents[1]
README = ROOT / "packages/ddp-lite/README.md"
RESULTS = ROOT / "docs/results/ddp"
RUN = RESULTS / "h200x2_xl"
AGAIN = RESULTS / "h200x2_xl_again"
PROBE = RESULTS / "h200x2_xl_probe"
COMPILED = RESULTS / "h200x2_xl_compiled"
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


def markdown(table: pd.DataFrame, digits: str) -> str:
    """A table without its index."""
    return str(table.to_markdown(index=False, floatfmt=digits))


# -- what the README says of speed ---------------------------------------------------------------


def speed_section() -> str:
    """All variants of the first cell, and the default against torch's best in every cell."""
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
    lines = []
    for cell, own in rows.groupby("cell", sort=False):
        by_name = own.set_index("variant")
        theirs = by_name[by_name.index.str.startswith("torch-")].min_ms
        lines.append(
            {
                "precision, batch, sequence": str(cell).replace(",", ", "),
                "no communication (ms)": by_name.min_ms["no-communication"],
                "`BucketedDDP`, 476 MB (ms)": by_name.min_ms["default"],
                "torch DDP's best (ms)": theirs.min(),
                "which": VARIANTS[str(theirs.idxmin())].removeprefix("torch DDP, "),
                "ratio of fastest blocks": by_name.fastest_ratio_to_best_torch["default"],
                "ratio of medians": by_name.ratio_to_best_torch["default"],
            }
        )
    repeated = rows_in(AGAIN / "rows.jsonl")
    names = VARIANTS | {"default": "`BucketedDDP` (the default, tapered)"}
    again = pd.DataFrame(
        {
            "precision, batch, sequence": repeated.cell.str.replace(",", ", "),
            "wrapper": repeated.variant.map(names),
            "fastest block (ms)": repeated.min_ms,
            "median (ms)": repeated.median_ms,
            "peak (GiB)": repeated.peak_gib,
        }
    )
    fact = rows.iloc[0]
    alone = ", ".join(f"{ms:.0f}" for ms in first.set_index("variant").block_ms["no-communication"])
    return f"""
Two {fact.hardware} GPUs, the 2.0-billion-parameter Transformer (8.0 GB of float32 gradients),
fused AdamW, torch {fact.torch}, NCCL {fact.nccl} without multicast; interleaved blocks of
{fact.steps_per_block} steps, milliseconds a step of the slower rank. *Exposed* is the step minus
the step without communication, and its ratio to that of torch DDP's best setting in the same run,
both by fastest blocks: this machine's host became slow during the run (the step without
communication took {alone} ms in the blocks of the first cell). Batch 4 × 512, bf16 autocast:

{markdown(table, ".2f")}

Peaks are what torch allocated; `PeerCopyAverage` keeps 7.4 GiB of symmetric memory besides.

In each cell against the best setting of torch DDP (25 MB, and 100 MB with views, without and with
static graph; in the first cell also 25 MB with both):

{markdown(pd.DataFrame(lines), ".3f")}

The two bf16 cells again, on another machine of this kind, with the default as it ships; shorter
blocks (of {repeated.iloc[0].steps_per_block} steps), five rounds at most:

{markdown(again, ".1f")}

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
        trim(given.folder, COMPILED / "traces")
    for run, labels in ((COMPILED, STEPS), (RUN, STEPS), (PROBE, PROBED)):
        paths = {label: run / "traces" / f"{name}.json.gz" for name, label in labels.items()}
        present = {label: path for label, path in paths.items() if path.exists()}
        if present:
            (run / "timelines.png").write_bytes(draw_timelines(present))
    sections = {"faults": faults_section(), "speed": speed_section()}
    README.write_text(renewed(README.read_text(), sections))


if __name__ == "__main__":
    main()
