"""Kernels of inference and of a training step by phase, by torch.profiler or Nsight Systems."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness import workload
from bench_harness.core import Bar, Bars, Case, Column, Config, Figure, Progress, Row, Table, option
from bench_harness.display import row_tables
from bench_harness.display.timelines import timelines
from bench_harness.experiments.base import Experiment, SubjectOptions, subject_label
from bench_harness.traces import kineto, nsight
from bench_harness.traces.timeline import timeline
from bench_harness.traces.trace import kernel_totals, short_name, time_inside

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from bench_harness.traces.trace import Trace

_COLUMNS = row_tables.Columns(
    Column("tool", "recorded by"),
    Column("window_ms", "wall clock", "ms"),
    Column("busy_ms", "kernels", "ms"),
    Column("matmul_share", "matmul", "%"),
    Column("fused_share", "fused attention", "%"),
    Column("range", "part"),
    Column("gflop", "operations", "GFLOP"),
    Column("gflop_s", "achieved", "GFLOP/s"),
    Column("share", "of the phase", "%"),
)
PHASES = ("inference", "forward", "backward", "optimizer")
_TRACE = "trace.json"
_TRIMMED = "trace.trimmed.json.gz"
_SHOWN_KERNELS = 12


@dataclass(frozen=True, kw_only=True)
class Options(SubjectOptions):
    """Options of :class:`Profile`."""

    sizes: tuple[str, ...] = option(("small",), "Model sizes.", choices=workload.SIZES)
    batch: int = option(4, "Sequences per batch.")
    sequences: tuple[int, ...] = option((128, 256, 512, 1024), "Context lengths.")
    precision: str = option("fp32", "Precision.", choices=workload.PRECISIONS)
    warmup: int = option(3, "Steps before the profiled ones.")
    nsight: bool = option(False, "Use Nsight Systems; the case is skipped where nsys is missing.")


class Profile(Experiment):
    """Which kernels take the time."""

    name: ClassVar[str] = "profile"
    summary: ClassVar[str] = "Kernels per phase, matmul share, softmax against matmul"
    guide: ClassVar[str] = (
        "Records inference and a training step and says where the time goes: matrix products or "
        "not, the longest kernels of every phase, and softmax against matrix products in "
        "attention. Phases are synchronised, so backward's kernels count as backward."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "profile --sizes small --sequences 128,256",
        "profile --sizes small --sequences 256 --nsight",
        "profile --model my_package.model:build --input float32[8x512]",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case per size and context length."""
        chosen = Options(**options)
        configs: list[Row] = [
            {
                **subject,
                **chosen.stored("precision warmup"),
                "attention": "naive",  # the only one with separate softmax and products
                "optimizer": "adamw",
                "tool": "nsight" if chosen.nsight else "torch.profiler",
                "label": f"profile {subject_label(subject, batch=False)} {chosen.precision}"
                + " Nsight Systems" * chosen.nsight,
            }
            for subject in chosen.subjects(chosen.sizes, [chosen.batch], chosen.sequences)
        ]
        return [Case(experiment=self.name, config=config, timeout_s=600) for config in configs]

    def run(self, case: Case, progress: Progress) -> list[Row]:
        """Profiles inference and a training step, and reads the trace."""
        config = dict(case.config)
        device = workload.device_of(config["device"])
        progress(f"recording with {config['tool']}")
        if config["tool"] == "nsight":
            export, _ = nsight.run_and_record(
                f"{__name__}:under_nsight", config, Path("nsight"), timeout_s=case.timeout_s / 3
            )
            trace = nsight.load(export)
            export.unlink()  # the report itself stays
        else:
            path = Path(_TRACE)
            profiled(config, device, kineto.recording(path, device))
            trace = kineto.load(path)
            windows = [window for phase in PHASES for window in trace.phases(phase)]
            kineto.trimmed(path, Path(_TRIMMED), windows)
            path.unlink()
        progress("reading the trace")
        shape = None if "model" in config else workload.language_model_config(config)
        facts: Row = {} if shape is None else dict(workload.shape_row(shape))
        host = "host operators, nested ones left out (CPU)"
        return rows_of(trace, facts | {"spans": "GPU kernels" if trace.on_device else host}, config)

    def work_s(self, case: Case) -> float:
        """By the model's blocks and operations; Nsight Systems starts and exports."""
        config = case.config
        tokens = float(config.get("batch", 0) * config.get("sequence", 0))
        nsight = 10.0 if config["tool"] == "nsight" else 0.0
        if config["device"] == "cpu":  # where the scores of attention take as long as products
            passes = 4 * (1 + config["warmup"]) * (1 + config.get("sequence", 0) / 512)
            return 1.5 + 9 * workload.billions(config) + workload.cpu_seconds(config, passes)
        size = workload.billions(config)
        return 1.1 + 0.14 * workload.blocks(config) + size * tokens / 1400 + nsight

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Phases with their matmul share; inference against a whole step; attention; kernels."""
        import pandas as pd

        cell = "model size sequence precision tool"
        if "kind" not in rows:
            return [_COLUMNS.table("Phases", rows, f"{cell} status")]
        done = row_tables.finished(rows)
        spans = done["spans"].iloc[0] if len(done) else ""
        done = done.assign(kernel=done["kernel"].map(short_name, na_action="ignore"))
        phases = done[done["kind"] == "phase"]
        kernels = done[done["kind"] == "kernel"]
        longest = {"kernel": "longest kernel", "count": "its runs (count)"}
        named = f"{cell} phase kernel work count total_ms share"
        without = kernels[kernels["work"] == "other"]
        return [
            _COLUMNS.table(
                "Phases",
                pd.concat([phases, rows[rows["status"] != "ok"]]),
                f"{cell} phase window_ms busy_ms matmul_share fused_share kernel count status",
                f"Spans: {spans}. A phase is a window with the device synchronised at both ends, "
                "so backward's kernels count as backward whichever thread launched them.",
                longest,
            ),
            _COLUMNS.table(
                "Inference against a training step",
                _sums(phases, kernels),
                f"{cell} what busy_ms matmul_share kernel count total_ms",
                "Sums over phases. A training step is forward, backward and AdamW.",
                longest | {"total_ms": "its total (ms)"},
            ),
            _COLUMNS.table(
                "Softmax against matrix products in attention",
                done[done["kind"] == "range"],
                f"{cell} phase range total_ms gflop gflop_s",
                "Only what naive attention's forward launched inside each part, masking and "
                "scaling included. Softmax counts five operations per score: maximum, "
                "subtraction, exponential, sum, division.",
                {"total_ms": "kernels (ms)"},
            ),
            _COLUMNS.table(
                "Longest kernels", kernels[kernels["rank"] <= _SHOWN_KERNELS], named, _NAMES
            ),
            _COLUMNS.table(
                "Longest kernels without matrix products",
                without.groupby(["case_key", "phase"], sort=False).head(5),
                named,
                _NAMES,
            ),
        ]

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Kernel time by kind of work, a bar per case and phase, and the timelines of all cases."""
        done = row_tables.finished(rows)
        if "kind" not in done or done.empty:
            return []
        phases = done[done["kind"] == "phase"]
        panels = {
            phase: [
                Bar(
                    row["label"].removeprefix("profile "),
                    {kind: float(row[_column(kind)]) for kind in _KINDS if row[_column(kind)] > 0},
                )
                for _, row in phases[phases["phase"] == phase].iterrows()
            ]
            for phase in PHASES
        }
        shown = {phase: bars for phase, bars in panels.items() if bars}
        title = "Kernel time of one step by kind of work"
        made = [Figure("profile_phases", title, Bars("ms", shown))] if shown else []
        lines = {}
        if "timeline" in done:
            recorded = done[done["timeline"].notna()]
            labels = recorded["label"].str.removeprefix("profile ")
            lines = dict(zip(labels, recorded["timeline"], strict=True))
        if lines:
            title = "Every kernel of one step"
            note = f"{done['spans'].dropna().iloc[0]}; phases are synchronised."
            made.append(Figure("profile_timeline", title, timelines(lines), note))
        return made


def _column(kind: str) -> str:
    return f"{kind} ms".replace(" ", "_")


_NAMES = "Names without namespaces, types and arguments; the rows hold them whole."


def _sums(phases: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """Inference, forward and backward together, and the whole training step of every case."""
    import pandas as pd

    lines = []
    for key, case in phases.groupby("case_key", sort=False):
        for what, names in _WHOLE.items():
            own = case[case["phase"].isin(names)]
            listed = kernels[(kernels["case_key"] == key) & kernels["phase"].isin(names)]
            totals = listed.groupby("kernel")[["total_ms", "count"]].sum()
            longest = str(totals["total_ms"].idxmax()) if len(totals) else None
            busy = own["busy_ms"].sum()
            lines.append(
                {
                    **case.iloc[0].reindex(["model", "size", "sequence", "precision", "tool"]),
                    "what": what,
                    "busy_ms": busy,
                    "matmul_share": 100 * own["matmul_ms"].sum() / busy if busy else 0.0,
                    "kernel": longest,
                    **(totals.loc[longest] if longest is not None else {}),
                }
            )
    return pd.DataFrame(lines)


_WHOLE = {
    "inference": ("inference",),
    "forward + backward": ("forward", "backward"),
    "training step": ("forward", "backward", "optimizer"),
}
_KINDS = ("matmul", "fused attention", "other", "communication")


def profiled(config: Config, device: torch.device, recorder: AbstractContextManager[Any]) -> None:
    """Builds the model, warms it up, and runs the phases under a recorder."""
    import torch

    from bench_harness.traces.trace import phase
    from bench_harness.training.build import plain, training

    with training(plain(config), config, device) as steps:
        with phase("warm-up", device):
            for _ in range(config["warmup"]):
                with torch.no_grad():
                    steps.workload.loss()
                steps.step()
        with recorder:
            with phase("inference", device), torch.no_grad():
                steps.workload.loss()
            steps.in_phases(lambda name: phase(name, device))


def rows_of(trace: Trace, facts: Row, config: Config) -> list[Row]:
    """Rows per phase, per kernel in a phase, and per part of attention."""
    rows: list[Row] = []
    for phase in PHASES:
        windows = trace.phases(phase)
        totals = kernel_totals(trace, windows)
        if not totals:
            continue
        by_kind = {
            kind: sum(total["total_ms"] for total in totals if total["work"] == kind)
            for kind in _KINDS
        }
        busy = sum(by_kind.values())
        rows.append(
            {
                "variant": phase,
                "kind": "phase",
                "phase": phase,
                **facts,
                "window_ms": sum(end - start for start, end in windows) / 1e6,
                "busy_ms": busy,
                **{_column(kind): time for kind, time in by_kind.items()},
                "matmul_share": 100 * by_kind["matmul"] / busy if busy else 0.0,
                "fused_share": 100 * by_kind["fused attention"] / busy if busy else 0.0,
                "kernel": totals[0]["kernel"],
                "count": totals[0]["count"],
            }
        )
        shown = (
            totals[:_SHOWN_KERNELS]
            + [total for total in totals[_SHOWN_KERNELS:] if total["work"] == "other"][:5]
        )
        rows += [
            {"variant": f"{phase} kernel {number}", "kind": "kernel", "phase": phase}
            | {"rank": number, **total}
            for number, total in enumerate(shown, start=1)
        ]
    windows = [window for phase in PHASES for window in trace.phases(phase)]
    if windows:
        whole = min(start for start, _ in windows), max(end for _, end in windows)
        own = {"drawn": 0, "ranks": [{**timeline(trace, whole), "offset_ns": 0}]}
        rows.append({"variant": "timeline", "kind": "timeline", "timeline": own})
    if "model" in config:  # the ranges are those of the built-in naive attention
        return rows
    scores = int(config["batch"]) * int(config["sequence"]) ** 2 * facts["num_layers"]
    # By the ranges that naive attention records around its steps.
    operations = {
        "attention.scores": 2 * scores * facts["d_model"],
        "attention.softmax": 5 * scores * facts["num_heads"],
        "attention.output": 2 * scores * facts["d_model"],
    }
    for name, count in operations.items():
        for phase in ("inference", "forward"):
            spent = sum(time_inside(trace, name, trace.phases(phase)).values())
            if spent:
                rows.append(
                    {"variant": f"{phase} {name}", "kind": "range", "phase": phase, "range": name}
                    | {"total_ms": spent / 1e6, "gflop": count / 1e9, "gflop_s": count / spent}
                )
    return rows


def under_nsight(config: Row) -> None:
    """What Nsight Systems records: the same phases, with every range as NVTX."""
    import torch

    profiled(config, workload.device_of(config["device"]), torch.autograd.profiler.emit_nvtx())
