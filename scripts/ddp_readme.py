"""Writes what is measured into ddp-lite's README: tables, fault tests, timelines.

    python scripts/ddp_readme.py faults            # runs the fault tests
    python scripts/ddp_readme.py                   # renews the README from the results folder
    python scripts/ddp_readme.py --check           # exit 1 if the README differs from the results

The results are ``rows.jsonl`` (``bench_ddp.py``) and ``faults.jsonl`` under ``docs/results/ddp``;
pictures are drawn beside them.
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
from ddp_pictures import draw_speed

ROOT = Path(__file__).parents[1]
README = ROOT / "packages/ddp-lite/README.md"
RESULTS = ROOT / "docs/results/ddp"
SHORT = RESULTS / "h200x2_xl_short"
ROUNDS = RESULTS / "h200x2_xl_rounds"
FP32 = RESULTS / "h200x2_xl_fp32"
DEVICE = RESULTS / "h200x2_xl_device"
WIRE = RESULTS / "h200x2_xl_wire"
IN_TURN = (
    "h200x2_xl_bf16_rounds_17.jsonl",
    "h200x2_xl_bf16_rounds.jsonl",
    "h200x2_xl_bf16_compiled.jsonl",
    "h200x2_xl_bf16_compiled_batch8.jsonl",
    "h200x4_xl_bf16.jsonl",
    "h200x4_xl_bf16_compiled.jsonl",
)
LINK = "https://raw.githubusercontent.com/training-systems/training-systems/main/docs/results/ddp"
VARIANTS = {
    "no-communication": "no communication (a bound, not training)",
    "naive": "`NaiveDDP`",
    "flat": "`FlatDDP`",
    "overlap": "`OverlapDDP`",
    "default": "**`BucketedDDP`** (the default)",
    "default-peer-copy": '`BucketedDDP`, `PeerCopyAverage`, `missing_gradients="zeros"`',
    "inplace-250": "`BucketedDDP`, 250 MB, last bucket 25 MB",
    "inplace-250-last-10": "`BucketedDDP`, 250 MB, last bucket 10 MB",
    "inplace-250-last-250": "`BucketedDDP`, 250 MB, last bucket no smaller",
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
    return pd.concat([rows_in(run / "rows.jsonl") for run in (SHORT, ROUNDS, FP32)])


def against_torch() -> str:
    """The default and torch's best settings, cell by cell."""
    rows = cells_against_torch().sort_values(["cell", "median_ms"], kind="stable")
    shares = rows[["exposed_ratio", "fastest_exposed_ratio"]].map("{:.2f}".format)
    exposed = shares.exposed_ratio + " (" + shares.fastest_exposed_ratio + ")"
    table = pd.DataFrame(
        {
            "precision, batch, sequence": rows.cell.str.replace(",", ", "),
            "wrapper": rows.variant.map(VARIANTS),
            "blocks": rows.block_ms.map(len).map(str),
            "median (ms)": rows.median_ms.map("{:.1f}".format),
            "fastest (ms)": rows.min_ms.map("{:.1f}".format),
            "ratio of medians": rows.ratio_to_best_torch.map("{:.3f}".format),
            "exposed, of torch's best": exposed.where(rows.exposed_ratio.notna(), "–"),
            "peak (GiB)": rows.peak_gib.map("{:.1f}".format),
        }
    )
    return markdown(table)


def device_rows() -> pd.DataFrame:
    """The run in which the device decides, without what has changed since and is in ``WIRE``."""
    rows = rows_in(DEVICE / "rows.jsonl")
    return rows[rows.variant != "default-bf16-wire"]


def on_the_wire() -> str:
    """Half of the bytes against all of them, in a sentence."""
    rows = rows_in(WIRE / "rows.jsonl").set_index("variant")
    ms, blocks = rows.median_ms.map("{:.1f}".format), rows.block_ms.map(len)
    return f"""\
`wire_dtype=torch.bfloat16` in a run of its own, otherwise the same:
{ms["default-bf16-wire"]} ms, the default {ms["default"]} (medians of {blocks["default"]} blocks
each), torch DDP with 100 MB and views {ms["torch-100-views"]}, no communication
{ms["no-communication"]}."""


def all_wrappers() -> str:
    """Every wrapper in the run in which the device decides."""
    rows = device_rows().sort_values("median_ms")
    table = pd.DataFrame(
        {
            "wrapper": rows.variant.map(VARIANTS),
            "blocks": rows.block_ms.map(len).map(str),
            "median (ms)": rows.median_ms.map("{:.1f}".format),
            "fastest (ms)": rows.min_ms.map("{:.1f}".format),
            "ratio of medians": rows.ratio_to_best_torch.map("{:.3f}".format),
            "exposed (ms)": rows.exposed_ms.map("{:.1f}".format),
            "of torch's best": rows.exposed_ratio.map("{:.2f}".format),
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
    """The default against torch's best in every cell, and all wrappers where the device decides."""
    fact = device_rows().iloc[0]
    return f"""
Two {fact.hardware} GPUs, the 2.0-billion-parameter Transformer (8.0 GB of float32 gradients),
fused AdamW, torch {fact.torch}, NCCL {fact.nccl} without multicast; milliseconds a step of the
slower rank, in blocks of a few steps that are timed without synchronising inside, the wrappers in
turn, so that the uneven hosts of these machines hit all alike. Ratios are to the best setting of
torch DDP in the same run. *Exposed* is the step minus the step without communication, by medians
(by fastest blocks in brackets).

The default against the settings that were torch DDP's best, each cell from the run with the most
blocks of it. The host binds the bf16 cells, the device the fp32 cells:

{against_torch()}

![Median steps]({LINK}/speed.png)

Peaks are the largest of all blocks. Some blocks without communication still held buckets of torch's
wrapper, measured just before; in the others, the default's peak equals theirs.

All wrappers where the device decides, bf16 autocast, batch 8 × 512, compiled blocks:

{all_wrappers()}

![Median steps where the device decides]({LINK}/{DEVICE.name}/speed.png)

`PeerCopyAverage` keeps 7.4 GiB of symmetric memory besides, which torch does not count. The
embedding, 61 MB, arrives last and is a bucket of its own under a limit of 25 MB as of 10: these two
rows have the same buckets, and differ by the noise of two blocks each.

{on_the_wire()}

![One training step with each wrapper]({LINK}/{DEVICE.name}/timelines.png)

Where the device of rank 0 was in one step of that run, from profiler traces: single steps, not
medians, and the profiler slows the host, most where copies are many. White is an idle device. With
the default, little communication runs alone; the step is longer than without communication because
matrix products are slower while NCCL's thread blocks hold SMs. Where a reduction lasts much longer
than the transfer needs (`OverlapDDP`, torch DDP), it waits for the other rank.

The default and torch DDP in turn with other ways to train (the runs of shard-optim's benchmark),
bf16 autocast, sequence 512. At batch 4 the hosts of these machines decide; at batch 8, with
compiled blocks, the device does:

{beside_sharding()}
"""


def peer_section() -> str:
    """What copies between two GPUs gain where the device decides."""
    rows = device_rows().set_index("variant")
    ms = rows.median_ms.map("{:.1f}".format)
    best = rows[rows.index.str.startswith("torch")].median_ms.idxmin()
    return f"""
Two {rows.hardware.iloc[0]} GPUs, where the device limits the step: {ms["default-peer-copy"]} ms a
step against {ms["default"]} with the default, {ms[best]} with torch DDP's best setting and
{ms["no-communication"]} without communication (medians; [Measured](#measured)).
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
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if outdated")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("faults", help="run the fault tests first")
    given: Any = parser.parse_args(arguments)
    if given.command == "faults":
        run_faults()
    current = README.read_text()
    new = renewed(
        current,
        {"faults": faults_section(), "speed": speed_section(), "peer": peer_section()},
    )
    if given.check:
        sys.exit(0 if new == current else f"{README} is outdated: run scripts/ddp_readme.py")
    README.write_text(new)
    for folder, rows in (
        (RESULTS, cells_against_torch()),
        (DEVICE, device_rows()),
    ):
        (folder / "speed.png").write_bytes(draw_speed(rows, VARIANTS))


if __name__ == "__main__":
    main()
