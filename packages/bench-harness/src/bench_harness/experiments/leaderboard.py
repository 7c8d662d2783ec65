"""The leaderboard: causal attention, forward and backward, 16 heads of 64 at 16,384 tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.case import Case, Row
from bench_harness.environment import resolve_device
from bench_harness.experiments import present
from bench_harness.experiments.base import CaseSkipped, Experiment, Figure, Table, option

if TYPE_CHECKING:
    import pandas as pd

#: Milliseconds on the public board (H100): the record, and the course's baseline.
PUBLIC_RECORD_MS = 5.364
BASELINE_MS = 80.0
OURS = "FlashAttention2Triton"
PEERS = ("sdpa-flash", "sdpa-cudnn", "flex")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of :class:`Leaderboard`: the board's rules; it is skipped without a GPU."""

    sequence: int = option(16_384, "Sequence length.")
    heads: int = option(16, "Heads.")
    head_dim: int = option(64, "Head dimension.")
    rep_ms: int = option(10_000, "Milliseconds of measurement.")
    warmup_ms: int = option(1_000, "Milliseconds of warm-up.")
    peers: tuple[str, ...] = option(PEERS, "Attentions measured beside ours.", choices=PEERS)
    device: str = option("auto", "Where to run.", choices=("auto", "cpu", "cuda"))


class Leaderboard(Experiment):
    """Our Triton attention under the leaderboard's rules, with peers under the same."""

    name: ClassVar[str] = "leaderboard"
    summary: ClassVar[str] = "The attention leaderboard's measurement, with peers beside it"
    guide: ClassVar[str] = (
        "The assignment's contest: forward and backward of causal bf16 attention, 16 heads of "
        "64, 16,384 tokens, by the board's own rules, beside PyTorch's attentions. It needs a "
        "GPU."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "leaderboard",
        "leaderboard --rep-ms 1000 --warmup-ms 200",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case; ours and the peers in it."""
        chosen = Options(**options)
        return [
            Case(
                experiment=self.name,
                config={
                    "sequence": chosen.sequence,
                    "heads": chosen.heads,
                    "head_dim": chosen.head_dim,
                    "rep_ms": chosen.rep_ms,
                    "warmup_ms": chosen.warmup_ms,
                    "peers": list(chosen.peers),
                    "device": resolve_device(chosen.device),
                    "label": f"leaderboard s{chosen.sequence} {chosen.heads}×{chosen.head_dim}",
                },
                timeout_s=600,
            )
        ]

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        """Checks every variant, then times forward and ``o.sum().backward()`` by do_bench."""
        import torch

        from bench_harness.experiments.flash import (
            check,
            implementation,
            kernel_timer_overhead_ms,
            time_kernel,
        )
        from bench_harness.workload import device_of
        from flashattn_triton import FlashAttention2Triton

        config = case.config
        if config["device"] != "cuda":
            raise CaseSkipped("the leaderboard is defined on a GPU; this case would run on a CPU")
        device = device_of("cuda")
        apply: Callable[..., Any] = torch.compile(FlashAttention2Triton.apply)
        functions: dict[str, Callable[..., Any]] = {
            OURS: lambda q, k, v: apply(q, k, v, True),
            **{name: implementation(name, causal=True, device=device) for name in config["peers"]},
        }
        progress("checking results")
        cell = {
            "batch": 1,
            "heads": config["heads"],
            "head_dim": config["head_dim"],
            "dtype": "bf16",
            "causal": True,
            "sequence": config["sequence"],
        }
        errors = check(functions, cell, device)
        # The check used another length, after which the compiler would give up static shapes.
        torch.compiler.reset()
        shape = (1, config["heads"], config["sequence"], config["head_dim"])
        query, key, value = (
            torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        rows = []
        overhead = kernel_timer_overhead_ms()
        for name, function in functions.items():
            progress(f"timing {name}")

            def call(function: Callable[..., Any] = function) -> None:
                function(query, key, value).sum().backward()

            taken = time_kernel(
                call, device, config["warmup_ms"], config["rep_ms"], (query, key, value)
            )
            rows.append(
                {
                    "variant": name,
                    "timer_overhead_ms": overhead,
                    **errors[name],
                    **taken.row(),
                }
            )
        return rows

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Milliseconds, beside the public record."""
        from bench_harness.flops import attention_flops
        from bench_harness.stats import with_summary

        frame = with_summary(rows)
        work = [
            attention_flops(1, int(heads), int(sequence), int(head_dim), causal=True)
            + attention_flops(
                1, int(heads), int(sequence), int(head_dim), causal=True, backward=True
            )
            for heads, sequence, head_dim in zip(
                frame["heads"], frame["sequence"], frame["head_dim"], strict=True
            )
        ]
        frame["tflop_s"] = work / frame["median_ms"] / 1e9
        frame["record"] = PUBLIC_RECORD_MS / frame["median_ms"]
        return [
            Table(
                "Leaderboard",
                present.columns(
                    frame,
                    {
                        "variant": "attention",
                        "sequence": "sequence (tokens)",
                        "heads": "heads",
                        "head_dim": "head_dim",
                    }
                    | present.STATISTICS
                    | {
                        "tflop_s": "TFLOP/s",
                        "record": "public record / median (ratio)",
                        "error_out": "error of output (share of max)",
                        "error_grad": "error of gradients (share of max)",
                        "status": "status",
                    },
                ),
                f"bf16, causal, forward and o.sum().backward(). The public board's record is "
                f"{PUBLIC_RECORD_MS} ms and its baseline {BASELINE_MS:g} ms, both on an H100: "
                "another machine, so the ratio is orientation, not a comparison.",
            )
        ]

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Milliseconds of every attention with their interval, beside the public record."""
        from bench_harness.report.plots import COLOURS, new_figure
        from bench_harness.stats import with_summary

        done = with_summary(present.finished(rows))
        if "variant" not in done or done["median_ms"].isna().all():
            return []
        cells = present.by(done, ["sequence", "heads", "head_dim"])
        figure, axes = new_figure(rows=len(cells), height=0.9 + 2.1 * len(cells))
        for plot, (title, cell) in zip(axes[:, 0], cells, strict=True):
            around = [
                (cell["median_ms"] - cell["ci_low_ms"]).fillna(0).clip(lower=0),
                (cell["ci_high_ms"] - cell["median_ms"]).fillna(0).clip(lower=0),
            ]
            colours = [COLOURS[name != OURS] for name in cell["variant"]]
            bars = plot.barh(
                cell["variant"], cell["median_ms"], xerr=around, color=colours, capsize=3
            )
            plot.bar_label(bars, [f"{value:.3g}" for value in cell["median_ms"]], padding=4)
            plot.axvline(PUBLIC_RECORD_MS, color="black", linestyle="--", linewidth=1)
            plot.invert_yaxis()
            plot.set_title(title)
            plot.set_xlabel("forward and backward, median time (ms)")
        return [
            Figure(
                "leaderboard",
                "The leaderboard's measurement",
                figure,
                "Bars: median; whiskers: 95 % interval. Dashed: the public board's record, "
                "measured on an H100.",
            )
        ]
