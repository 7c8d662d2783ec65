"""Measures flashattn-triton next to PyTorch's own attention kernels, and draws what was measured.

    python scripts/bench_attention.py run rows.json --set leaderboard lengths
    python scripts/bench_attention.py report rows.json --table table.md --plot plot.png

``run`` first proves each implementation against fp32 tiles on one head of the very problem that is
timed, then times forward, backward, and both with ``out.sum().backward()``, implementations
interleaved over several rounds. Every row carries its statistics, GPU, versions and commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashattn_triton import FlashAttention2Triton, Tiling, flash_attention
from flashattn_triton.options import resolve_options
from flashattn_triton.tiled import tiled_backward, tiled_forward

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# Relative to the largest element of the oracle: one rounding to the type, of values and of P.
TOLERANCE = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 1e-4}
PASSES = ("forward", "backward", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem."""

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool
    dtype: str = "bf16"

    def flops(self, which: str) -> float:
        """Two matrix products forward, five backward, half of each under a causal mask."""
        products = {"forward": 2, "backward": 5, "both": 7}[which]
        work = 2 * products * self.batch * self.heads * self.length**2 * self.head_dim
        return work / 2 if self.causal else work

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        shape = f"{self.batch} x {self.heads} x {self.length}"
        return f"{self.dtype}, {shape}, head_dim {self.head_dim}, {mask}"


def leaderboard_cases() -> Iterator[Case]:
    """16 heads of 64, 16,384 tokens, bf16, causal."""
    yield Case(batch=1, heads=16, length=16384, head_dim=64, causal=True)


def length_cases() -> Iterator[Case]:
    """512 to 16,384 tokens at a constant number of tokens in all, as in the paper's figures."""
    for head_dim in (64, 128):
        for causal in (True, False):
            for length in (512, 1024, 2048, 4096, 8192, 16384):
                batch, heads = 16384 // length, 2048 // head_dim
                yield Case(
                    batch=batch, heads=heads, length=length, head_dim=head_dim, causal=causal
                )


def long_cases() -> Iterator[Case]:
    """65,536 tokens, few heads."""
    for head_dim in (64, 128):
        for causal in (True, False):
            yield Case(batch=1, heads=4, length=65536, head_dim=head_dim, causal=causal)


def single_cases() -> Iterator[Case]:
    """The anchors at 16 heads of 16,384 tokens, and many small problems."""
    for batch, length in ((1, 16384), (16, 1024)):
        for head_dim in (64, 128):
            for causal in (True, False):
                yield Case(batch=batch, heads=16, length=length, head_dim=head_dim, causal=causal)


def half_cases() -> Iterator[Case]:
    """The other half type."""
    for head_dim in (64, 128):
        yield Case(batch=2, heads=16, length=4096, head_dim=head_dim, causal=True, dtype="fp16")


def full_precision_cases() -> Iterator[Case]:
    """float32, at true float32 accuracy."""
    for head_dim in (64, 128):
        yield Case(batch=2, heads=8, length=4096, head_dim=head_dim, causal=True, dtype="fp32")


SETS: dict[str, Callable[[], Iterator[Case]]] = {
    "leaderboard": leaderboard_cases,
    "single": single_cases,
    "lengths": length_cases,
    "long": long_cases,
    "half": half_cases,
    "fp32": full_precision_cases,
}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def sdpa(backend: SDPBackend, causal: bool) -> Attention:
    """PyTorch's attention, by one of its kernels."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return attend


def flex(case: Case) -> Attention:
    """FlexAttention, compiled for the case's shape, with its block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = None
    if case.causal:
        mask = create_block_mask(
            lambda b, h, i, j: i >= j, None, None, case.length, case.length, device="cuda"
        )
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def assignment(case: Case) -> Attention:
    """The leaderboard's form: the compiled autograd function on (heads, length, head_dim)."""
    apply = torch.compile(FlashAttention2Triton.apply)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return apply(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), case.causal).view(q.shape)

    return attend


def tuned(case: Case, table: list[dict[str, Any]]) -> Tiling | None:
    """The entry of a table that ``flashattn_triton.tune`` wrote, or None for the shipped one's."""
    for entry in table:
        if all(entry[field] == getattr(case, field) for field in ("head_dim", "dtype", "causal")):
            return Tiling.unpack(entry["tiling"])
    return None


def implementations(case: Case, table: list[dict[str, Any]]) -> dict[str, Attention]:
    """Ours and its peers, for one case."""
    tiling = tuned(case, table)
    ours = {
        "flashattn-triton": functools.partial(flash_attention, causal=case.causal, tiling=tiling),
        "FlashAttention2Triton.apply, compiled": assignment(case),
    }
    if case.dtype == "fp32":
        peers = {"SDPA memory-efficient": sdpa(SDPBackend.EFFICIENT_ATTENTION, case.causal)}
    else:
        peers = {
            "SDPA flash": sdpa(SDPBackend.FLASH_ATTENTION, case.causal),
            "SDPA cuDNN": sdpa(SDPBackend.CUDNN_ATTENTION, case.causal),
        }
    return ours | peers | {"FlexAttention, compiled": flex(case)}


def relative_errors(case: Case, attend: Attention, leaves: list[Tensor]) -> dict[str, float]:
    """Largest error of the last head's output and gradients over their largest element."""
    out = attend(*leaves)
    grad_out = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, grad_out)
    options = resolve_options(head_dim=case.head_dim, causal=case.causal)
    head = (slice(-1, None), slice(-1, None))
    q, k, v, do = (x.detach()[head].float() for x in (*leaves, grad_out))
    tiles = {"query_tile": 2048, "key_tile": 2048}
    exact, lse = tiled_forward(q, k, v, options, **tiles)
    expected = (exact, *tiled_backward(q, k, v, exact, lse, do, None, options, **tiles))
    names = ("out", "dq", "dk", "dv")
    return {
        name: ((a.detach()[head].float() - e).abs().max() / e.abs().max()).item()
        for name, a, e in zip(names, (out, *gradients), expected, strict=True)
    }


def timed(which: str, attend: Attention, leaves: list[Tensor]) -> Callable[[], Any]:
    """The pass as a function without arguments."""
    if which == "forward":
        return torch.no_grad()(lambda: attend(*leaves))
    if which == "both":
        return lambda: attend(*leaves).sum().backward()
    out = attend(*leaves)
    grad_out = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def environment() -> dict[str, Any]:
    """What the figures hold for."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "commit": commit or None,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def measure(
    case: Case, rounds: int, rep: int, only: list[str] | None, table: list[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The rows of one case."""
    shape = (case.batch, case.heads, case.length, case.head_dim)
    leaves = [
        torch.randn(shape, device="cuda", dtype=DTYPES[case.dtype], requires_grad=True)
        for _ in range(3)
    ]
    chosen = {
        name: attend
        for name, attend in implementations(case, table).items()
        if only is None or any(part in name for part in only)
    }
    errors = {}
    for name, attend in chosen.items():
        try:
            errors[name] = relative_errors(case, attend, leaves)
        except RuntimeError as error:
            yield {**dataclasses.asdict(case), "implementation": name, "note": str(error)[:200]}
            continue
        worst = max(errors[name].values())
        if not worst <= TOLERANCE[case.dtype]:
            yield {
                **dataclasses.asdict(case),
                "implementation": name,
                "note": f"wrong: {errors[name]}",
            }
            del errors[name]
    for which in PASSES:
        calls = {name: timed(which, chosen[name], leaves) for name in errors}
        samples: dict[str, list[float]] = {name: [] for name in errors}
        for _ in range(rounds):
            for name, call in calls.items():
                samples[name] += triton.testing.do_bench(
                    call, warmup=5, rep=rep, grad_to_none=leaves, return_mode="all"
                )
        for name, ms in samples.items():
            median = statistics.median(ms)
            p20, *_, p80 = statistics.quantiles(ms, n=5)
            yield {
                **dataclasses.asdict(case),
                "implementation": name,
                "pass": which,
                "ms": median,
                "ms_p20": p20,
                "ms_p80": p80,
                "samples": len(ms),
                "tflops": case.flops(which) / median / 1e9,
                "errors": errors[name],
            }


def run(arguments: argparse.Namespace) -> int:
    """Measures, and writes the rows after each case."""
    rows: list[dict[str, Any]] = []
    where = environment()
    table = json.loads(arguments.tilings.read_text())["entries"] if arguments.tilings else []
    # Backward is timed alone, over one graph that is kept; compiled functions then may not reuse
    # the memory of what they saved.
    torch._functorch.config.donated_buffer = False
    for name in arguments.set:
        for case in SETS[name]():
            started = time.monotonic()
            for row in measure(case, arguments.rounds, arguments.rep, arguments.only, table):
                rows.append({"set": name, **row, **where})
                if row.get("note"):
                    print(f"{case} | {row['implementation']}: {row['note']}", flush=True)
            arguments.rows.write_text(json.dumps(rows, indent=1))
            summary: dict[str, list[str]] = {}
            for row in rows:
                if "ms" in row and all(row[k] == v for k, v in dataclasses.asdict(case).items()):
                    summary.setdefault(row["implementation"], []).append(f"{row['ms']:.3f}")
            print(f"{case} ({time.monotonic() - started:.0f} s)", flush=True)
            for implementation, figures in summary.items():
                print(f"    {implementation:40s} {' / '.join(figures)}", flush=True)
            torch.compiler.reset()
    return 0


def report(arguments: argparse.Namespace) -> int:
    """Table and plot from saved rows."""
    import pandas as pd

    rows = [row for path in arguments.rows for row in json.loads(path.read_text()) if "ms" in row]
    frame = pd.DataFrame(rows)
    frame["mask"] = frame["causal"].map({True: "causal", False: "full"})
    frame["problem"] = (
        frame["batch"].astype(str) + " × " + frame["heads"].astype(str) + " × "
        + frame["length"].astype(str)
    )  # fmt: skip
    keys = ["dtype", "head_dim", "mask", "length", "problem", "implementation"]
    wide = frame.pivot_table(index=keys, columns="pass", values="ms", aggfunc="median")
    wide = wide[list(PASSES)].map(lambda ms: f"{ms:.3f}")
    cells = wide.agg(" / ".join, axis=1).unstack("implementation").fillna("–")
    cells = cells.reset_index().drop(columns="length")
    if arguments.table:
        arguments.table.write_text(cells.to_markdown(index=False) + "\n")
    if arguments.plot:
        draw(frame, arguments.plot)
    return 0


def draw(frame: Any, path: Path) -> None:
    """TFLOP/s of forward + backward over the length, one panel for head_dim and mask."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    frame = frame[(frame["pass"] == "both") & (frame["set"] == "lengths")]
    panels = sorted({(d, m) for d, m in zip(frame["head_dim"], frame["mask"], strict=True)})
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4 * len(panels), 3.6), sharey=True, squeeze=False
    )
    for axis, (head_dim, mask) in zip(axes[0], panels, strict=True):
        panel = frame[(frame["head_dim"] == head_dim) & (frame["mask"] == mask)]
        for name, line in panel.groupby("implementation"):
            line = line.sort_values("length")
            axis.plot(line["length"], line["tflops"], marker="o", markersize=3, label=name)
        axis.set(xscale="log", xlabel="sequence length", title=f"head_dim {head_dim}, {mask}")
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylim(bottom=0)  # shared
    axes[0][0].set_ylabel("forward + backward, TFLOP/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.suptitle(f"{frame['gpu'].iloc[0]}, bf16, 16,384 tokens in all", fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run", help="measure")
    runner.add_argument("rows", type=Path, help="JSON file to write")
    runner.add_argument("--set", nargs="+", choices=SETS, default=["leaderboard"])
    runner.add_argument("--only", nargs="+", help="parts of implementation names")
    runner.add_argument("--rounds", type=int, default=4)
    runner.add_argument("--tilings", type=Path, help="table written by flashattn_triton.tune")
    runner.add_argument("--rep", type=int, default=50, help="milliseconds per round and pass")
    runner.set_defaults(command=run)
    reporter = commands.add_parser("report", help="table and plot from saved rows")
    reporter.add_argument("rows", type=Path, nargs="+")
    reporter.add_argument("--table", type=Path)
    reporter.add_argument("--plot", type=Path)
    reporter.set_defaults(command=report)
    arguments = parser.parse_args()
    return int(arguments.command(arguments))


if __name__ == "__main__":
    sys.exit(main())
