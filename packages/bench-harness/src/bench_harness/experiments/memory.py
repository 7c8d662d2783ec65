"""Memory over a forward pass and a training step: timeline, peaks, and the largest allocations.

On a GPU the allocator's history is recorded and also dumped as ``memory_snapshot.pickle`` for
PyTorch's own viewer; on a CPU the profiler's memory events serve instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness import workload
from bench_harness.core import Case, Column, Config, Figure, Progress, Row, Table, option
from bench_harness.display import cells, row_tables
from bench_harness.display.bars import colours
from bench_harness.display.plots import new_figure
from bench_harness.experiments.base import Experiment, SubjectOptions, subject_label
from bench_harness.traces import allocations, kineto
from bench_harness.traces.allocations import FIRST, NO_PHASE, from_cuda_history, from_profile
from bench_harness.traces.trace import phase

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from matplotlib.figure import Figure as MatplotlibFigure

    from bench_harness.traces.allocations import MemoryEvent

MODES = ("forward", "step")
PHASES = ("model", FIRST, "forward", "backward", "optimizer")
SNAPSHOT = "memory_snapshot.pickle"
_LARGEST = 8
#: The parts of what is kept for backward by the column of their prediction.
_PARTS = {
    f"kept_{part.replace(' ', '_')}": part
    for part in (
        *("residual stream", "attention", "scores", "feed-forward"),
        *("head", "logits", "rotary tables", "weights in bf16"),
    )
}
_COLUMNS = row_tables.Columns(
    Column("case_peak_mib", "peak", "MiB"),
    Column("predicted_case_peak_mib", "predicted peak", "MiB"),
    Column("residual_mib", "residual stream", "MiB"),
    Column("peak_missed", "prediction missed"),
    Column("end_mib", "in use at its end", "MiB"),
    Column("predicted_kept_mib", "predicted", "MiB"),
    Column("kept_missed", "prediction missed"),
    *(Column(key, part, "MiB") for key, part in _PARTS.items()),
    Column("blocks", "blocks", "count"),
    Column("source", "allocated by"),
    Column("stack", "stack, innermost first"),
)
#: A prediction further off is marked, unless libraries' own memory explains it.
_TOLERANCE = 0.05
_LIBRARIES_BYTES = {"cuda": 96 * 2**20, "cpu": 2**20}
_MISSES = (
    f"Predictions off by more than {_TOLERANCE:.0%} are marked, unless it is less than the 96 MiB "
    "that libraries may keep on a GPU (cuBLAS: 32 MiB per thread), or 1 MiB on a CPU."
)


@dataclass(frozen=True, kw_only=True)
class Options(SubjectOptions):
    """Options of :class:`Memory`."""

    sizes: tuple[str, ...] = option(("2.7B",), "Model sizes.", choices=workload.SIZES)
    batch: int = option(4, "Sequences per batch.")
    sequences: tuple[int, ...] = option((128, 256, 512), "Context lengths.")
    precisions: tuple[str, ...] = option(
        ("fp32", "bf16"), "Precisions.", choices=workload.PRECISIONS
    )
    modes: tuple[str, ...] = option(MODES, "Inference, or a training step.", choices=MODES)
    attention: str = option("sdpa", "Attention.", choices=workload.ATTENTIONS)
    second_step: bool = option(
        False, "Record the second step of training, which begins with the optimizer's state."
    )

    def __post_init__(self) -> None:
        SubjectOptions.__post_init__(self)
        if self.second_step and "step" not in self.modes:
            raise ValueError(
                f"modes must hold step beside second_step, but got {self.modes}. Add it."
            )


class Memory(Experiment):
    """Where memory goes, phase by phase."""

    name: ClassVar[str] = "memory"
    summary: ClassVar[str] = "Memory timeline, peaks per phase, largest allocations"
    guide: ClassVar[str] = (
        "Records every allocation of one pass and shows the memory in use over time by the "
        "phase that allocated it, each phase's own peak, what forward keeps for backward, and the "
        "largest allocations with their stacks. Peaks and what is kept stand beside predictions "
        "from shapes. On a GPU it leaves memory_snapshot.pickle for PyTorch's viewer."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "memory --sizes small --sequences 256 --modes step",
        "memory --precisions bf16 --attention naive",
        "memory --model my_package.model:build --input float32[8x512]",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case per size, context length, precision and mode: any of them may not fit."""
        chosen = Options(**options)
        configs: list[Row] = [
            {
                **subject,
                **chosen.stored("attention"),
                "precision": precision,
                "mode": mode,
                "optimizer": "adamw",
                "second_step": chosen.second_step and mode == "step",
                "label": f"memory {subject_label(subject, batch=False)} {precision} "
                + ("second step" if chosen.second_step and mode == "step" else mode),
            }
            for subject in chosen.subjects(chosen.sizes, [chosen.batch], chosen.sequences)
            for precision in chosen.precisions
            for mode in chosen.modes
        ]
        return [Case(experiment=self.name, config=config, timeout_s=600) for config in configs]

    def run(self, case: Case, progress: Progress) -> list[Row]:
        """Records one pass, from the building of the model on."""
        config = case.config
        device = workload.device_of(config["device"])
        progress("recording")
        events = _of_cuda(config, device) if device.type == "cuda" else _of_cpu(config, device)
        facts = _facts(config)
        phases = [p for p in PHASES if any(event.phase == p for event in events)]
        by_phase = allocations.peaks(events, phases)
        # Of a second step the first is only its past.
        peak = max(most for phase, (most, _) in by_phase.items() if phase != FIRST)
        rows: list[Row] = [
            {"variant": phase, "kind": "phase", "phase": phase, **facts}
            | {"peak_bytes": most, "end_bytes": end, "case_peak_bytes": peak}
            for phase, (most, end) in by_phase.items()
        ]
        line = allocations.timeline(events, phases)
        rows.append({"variant": "timeline", "kind": "timeline", "phase": None, "timeline": line})
        rows += [
            {"variant": f"allocation {number}", "kind": "allocation", **row}
            for number, row in enumerate(allocations.largest(events, _LARGEST), start=1)
        ]
        return rows

    def work_s(self, case: Case) -> float:
        """By the size of the model, and what is run."""
        config, forward = case.config, case.config["mode"] == "forward"
        size = workload.billions(config)
        if config["device"] == "cpu":
            passes = 1 if forward else 3
            return 0.5 + (5 if forward else 9) * size + workload.cpu_seconds(config, passes)
        return 0.7 + (0.4 if forward else 0.69) * size

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Peaks beside predictions, what is kept for backward, the largest allocations."""
        frame = _with_predictions(rows)
        if "second_step" in frame:
            second = frame["second_step"].map(lambda asked: asked is True)
            frame["mode"] = frame["mode"].where(~second, "second step")
        cell, cases = "model size batch sequence precision mode", frame.drop_duplicates("case_key")
        tables = [
            _COLUMNS.table(
                "Peak memory",
                cases,
                f"{cell} case_peak_mib predicted_case_peak_mib residual_mib status",
                "The model included. The residual stream is one activation of batch × sequence × "
                "d_model values of 4 bytes.",
            )
        ]
        if "kind" not in frame:
            return tables
        done = row_tables.finished(frame)
        phases = done[done["kind"] == "phase"]
        tables.append(
            _COLUMNS.table(
                "Peak memory per phase",
                phases,
                f"{cell} phase peak_mib predicted_peak_mib peak_missed end_mib",
                "Each phase's own peak: counting starts anew with every phase. Predicted from "
                f"shapes alone. {_MISSES}",
            )
        )
        kept = phases[phases["kept_bytes"].notna()]
        if len(kept):
            tables.append(
                _COLUMNS.table(
                    "Kept for backward",
                    kept,
                    f"{cell} kept_mib predicted_kept_mib kept_missed {' '.join(_PARTS)}",
                    "What a training step's forward leaves allocated beyond the model, and its "
                    "prediction with its parts: every operand that a derivative needs, each tensor "
                    f"once. {_MISSES}",
                )
            )
        allocations = done[done["kind"] == "allocation"]
        block = f"{cell} block_mib blocks phase"
        tables.append(
            _COLUMNS.table(
                "Largest allocations",
                allocations,
                f"{block} source",
                "On a GPU the source line, on a CPU the operator.",
            )
        )
        if "stack" in allocations and allocations["stack"].map(bool, na_action="ignore").any():
            shown = allocations[allocations["stack"].map(lambda stack: stack not in (None, []))]
            shown = shown[shown["stack"].notna()].assign(stack=shown["stack"].map(" ‹ ".join))
            tables.append(
                _COLUMNS.table(
                    "Stacks of the largest allocations",
                    shown,
                    f"{block} stack",
                    "Python frames outside torch, on a CPU operators. The autograd engine calls "
                    "backward's kernels from a thread without a Python stack.",
                )
            )
        return tables

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Memory in use over time, stacked by the phase that allocated it."""
        if "timeline" not in rows:
            return []
        drawn = rows[rows["timeline"].notna()]
        return [
            Figure(
                f"memory_{number}",
                f"Memory over time: {label}",
                _draw(line),
                "Stacked by the phase that allocated. Dotted lines: phases begin.",
            )
            for number, (label, line) in enumerate(
                zip(drawn["label"], drawn["timeline"], strict=True)
            )
        ]


def _with_predictions(rows: pd.DataFrame) -> pd.DataFrame:
    """A copy with the prediction from each case's shapes, and whether the measurement misses it."""
    import pandas as pd

    frame = rows.copy()
    columns = ["predicted_peak_bytes", "predicted_case_peak_bytes", "kept_bytes"]
    columns += ["predicted_kept_bytes", *_PARTS]
    lines: list[Row] = []
    for _, row in frame.iterrows():
        lines.append({} if row.get("kind") != "phase" else _predicted(row))
    predicted = pd.DataFrame(lines, index=frame.index, columns=columns, dtype="float64")
    frame = frame.join(predicted)
    if "kind" not in frame:
        return frame
    # What is held when forward begins; the later of the two phases counts.
    before_forward = frame["phase"].isin(["model", FIRST])
    built = frame[(frame["kind"] == "phase") & before_forward]
    ends = built.groupby("case_key")["end_bytes"].last().to_dict()
    kept = frame["predicted_kept_bytes"].notna()
    before = frame.loc[kept, "case_key"].map(ends).astype("float64")
    frame.loc[kept, "kept_bytes"] = frame.loc[kept, "end_bytes"] - before
    for name in ("peak", "kept"):
        expected = frame[f"predicted_{name}_bytes"]
        off = (frame[f"{name}_bytes"] - expected).abs()
        missed = (off > _TOLERANCE * expected) & (off > frame["device"].map(_LIBRARIES_BYTES))
        frame[f"{name}_missed"] = missed.where(expected.notna())
    return frame


def _predicted(row: pd.Series[Any]) -> Row:
    """What the shapes of a phase's case predict for that phase."""
    from basics_model.sizes import ModelConfig
    from bench_harness.activations import peaks, saved_for_backward

    dimensions = ("vocab_size", "d_model", "d_ff", "num_layers", "num_heads")
    # Of a user's model no shapes are known; other optimizers keep another state.
    if row.get("d_model") != row.get("d_model") or row.get("d_model") is None:
        return {}
    if row["phase"] == FIRST or row.get("optimizer", "adamw") != "adamw":
        return {}
    shape = ModelConfig(
        context_length=int(row["sequence"]), **{name: int(row[name]) for name in dimensions}
    )
    given = {name: row[name] for name in ("precision", "attention", "device")}
    training = row["mode"] == "step"
    size = int(row["batch"]), int(row["sequence"])
    second = row.get("second_step") is True
    by_phase = peaks(shape, *size, training=training, second_step=second, **given)
    found: Row = {
        "predicted_peak_bytes": by_phase[row["phase"]],
        "predicted_case_peak_bytes": max(by_phase.values()),
    }
    if training and row["phase"] == "forward":
        parts = saved_for_backward(shape, *size, **given)
        found["predicted_kept_bytes"] = sum(parts.values())
        found |= {key: parts[part] / 2**20 for key, part in _PARTS.items() if parts[part]}
    return found


def _facts(config: Config) -> Row:
    """The language model's shape, and its residual stream; nothing of a user's model."""
    if "model" in config:
        return {}
    shape = workload.language_model_config(config)
    residual = config["batch"] * config["sequence"] * shape.d_model * 4
    return {**workload.shape_row(shape), "residual_bytes": residual}


def _of_cpu(config: Config, device: torch.device) -> list[MemoryEvent]:
    """The allocations of a pass, by the memory events of the profiler."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "memory.json"
        with kineto.recording(path, device, memory=True):
            _pass(config, device, lambda name: phase(name, device))
        return from_profile(path)


def _of_cuda(config: Config, device: torch.device) -> list[MemoryEvent]:
    """The allocations of a pass, by the caching allocator's own history, which is also dumped."""
    import torch

    # Boundaries are lengths of the history: they need no clock to agree with the allocator's.
    boundaries: list[tuple[str, int]] = []

    def entries() -> list[dict[str, Any]]:
        traces: list[list[dict[str, Any]]] = torch.cuda.memory._snapshot()["device_traces"]
        return traces[device.index or 0]

    @contextmanager
    def mark(name: str) -> Iterator[None]:
        boundaries.append((name, len(entries())))
        yield
        boundaries.append((NO_PHASE, len(entries())))

    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    try:
        _pass(config, device, mark)
        torch.cuda.synchronize(device)
        events = from_cuda_history(entries(), boundaries, outermost=_pass.__name__)
        torch.cuda.memory._dump_snapshot(SNAPSHOT)
        return events
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _pass(
    config: Config, device: torch.device, mark: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Builds the model and runs one pass; ``mark`` says to which phase allocations belong."""
    import torch

    from bench_harness.training.build import plain, training

    with ExitStack() as stack:
        with mark("model"):
            steps = stack.enter_context(training(plain(config), config, device))
        if config["mode"] == "forward":
            with mark("forward"), torch.no_grad():
                steps.workload.loss()
            return
        if config["second_step"]:
            with mark(FIRST):
                steps.step()
                steps.optimizer.zero_grad(set_to_none=True)
        with mark("forward"):
            loss = steps.workload.loss()
        with mark("backward"):
            steps.backward(loss)
        with mark("optimizer"):
            steps.update()


def _draw(line: Row) -> MatplotlibFigure:
    figure, axes = new_figure(height=3.4)
    plot = axes[0, 0]
    time = line["time_ms"]
    totals = [sum(values) for values in zip(*line["bytes"].values(), strict=True)]
    unit, size = cells.scale(totals, "B")
    held = {phase: [b / size for b in values] for phase, values in line["bytes"].items()}
    colour = colours(held)
    plot.stackplot(
        time,
        *held.values(),
        labels=list(held),
        colors=[colour[phase] for phase in held],
        step="post",
    )
    labels: list[tuple[float, str]] = []
    for name, start in line["phase_starts_ms"].items():
        plot.axvline(start, color="black", linestyle=":", linewidth=1)
        if labels and start - labels[-1][0] < 0.08 * (time[-1] - time[0]):  # they would overlap
            labels[-1] = labels[-1][0], f"{labels[-1][1]}, {name}"
        else:
            labels.append((start, name))
    for start, text in labels:
        plot.annotate(
            text, (start, 1.01), xycoords=("data", "axes fraction"), fontsize="small", rotation=20
        )
    peak = max(range(len(totals)), key=totals.__getitem__)
    plot.plot([time[peak]], [totals[peak] / size], "k.")
    late = time[peak] > (time[0] + time[-1]) / 2
    plot.annotate(  # beside the point: a phase often begins at the peak, with a line
        f"peak {cells.quantity(totals[peak], 'B')}",
        (time[peak], totals[peak] / size),
        (-5 if late else 5, 2),
        textcoords="offset points",
        ha="right" if late else "left",
        va="bottom",
        fontsize="small",
    )
    plot.set_ylim(top=1.12 * totals[peak] / size)
    plot.set_xlabel("time (ms)")
    plot.set_ylabel(f"memory in use ({unit})")
    figure.legend(loc="outside lower center", ncols=4, title="allocated in")
    return figure
