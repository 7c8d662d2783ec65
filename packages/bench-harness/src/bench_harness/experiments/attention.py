"""Plain attention over head dimensions and sequence lengths: time, saved memory, where it ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.case import Case, Row
from bench_harness.environment import resolve_device
from bench_harness.experiments import present
from bench_harness.experiments.base import Experiment, Figure, Table, option

if TYPE_CHECKING:
    import pandas as pd
    import torch


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of :class:`Attention`.

    Small enough for a quick run on two cores: ``head_dims=[16, 64]``, ``sequences=[128]``,
    ``batch=2``, ``samples=10``, ``warmup=2``, ``executions=["eager"]``.
    """

    head_dims: tuple[int, ...] = option((16, 32, 64, 128), "Dimensions of the single head.")
    sequences: tuple[int, ...] = option((256, 1024, 4096, 8192, 16384), "Sequence lengths.")
    batch: int = option(8, "Sequences per batch.")
    dtype: str = option("fp32", "Element type.", choices=("fp32", "bf16"))
    executions: tuple[str, ...] = option(
        ("eager", "compiled"),
        "Plain or through torch.compile, compared.",
        choices=("eager", "compiled"),
    )
    warmup: int = option(5, "Warm-up passes.")
    samples: int = option(100, "Measured forward and backward passes.")
    isolate_gib: float = option(
        1.0,
        "Cells with larger scores (GiB) are measured one variant to a case, so that one without "
        "enough memory takes no other along.",
    )
    device: str = option("auto", "Where to run.", choices=("auto", "cpu", "cuda"))


class Attention(Experiment):
    """Single-head softmax attention, plain and compiled."""

    name: ClassVar[str] = "attention"
    summary: ClassVar[str] = "Plain attention: time, memory saved for backward, out-of-memory cells"
    guide: ClassVar[str] = (
        "Times forward and backward of attention that stores its scores, plain and compiled, "
        "and weighs what forward keeps for backward against its prediction. A cell without "
        "enough memory is a result; the smallest one is explained tensor by tensor."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "attention --sequences 1024,4096 --head-dims 64",
        "attention --executions eager --samples 20",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case per head dimension; cells with large scores have one per variant."""
        chosen = Options(**options)
        device = resolve_device(chosen.device)
        limit = chosen.isolate_gib * 2**30 / (4 * chosen.batch)
        together = [s for s in chosen.sequences if s**2 <= limit]
        groups = [(together, list(chosen.executions))] if together else []
        groups += [([s], [e]) for s in chosen.sequences if s**2 > limit for e in chosen.executions]
        return [
            _case(
                {
                    "batch": chosen.batch,
                    "sequences": sequences,
                    "head_dim": head_dim,
                    "dtype": chosen.dtype,
                    "executions": group,
                    "warmup": chosen.warmup,
                    "samples": chosen.samples,
                    "device": device,
                }
            )
            for head_dim in chosen.head_dims
            for sequences, group in groups
        ]

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        """Measures forward and backward of every variant, and what forward keeps for backward."""
        import torch

        from bench_harness.workload import device_of

        device = device_of(case.config["device"])
        rows: list[Row] = []
        for sequence in case.config["sequences"]:
            # Meeting a second length, the compiler would give up static shapes.
            torch.compiler.reset()
            rows += measure(case.config, sequence, device, progress)
        return rows

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """The grid with times, memory and cells without enough memory; the smallest such cell."""
        import pandas as pd

        from bench_harness.stats import with_summary

        frame = with_summary(rows)
        frame["execution"] = frame.get("variant", pd.Series(index=frame.index, dtype=object))
        missing = frame["execution"].isna()
        frame.loc[missing, "execution"] = frame.loc[missing, "executions"].map("+".join)
        frame = present.lengths(frame)
        if "saved_bytes" in frame:
            frame["saved_mib"] = frame["saved_bytes"] / 2**20
            frame["predicted_mib"] = frame["predicted_saved_bytes"] / 2**20
            miss = (frame["saved_bytes"] / frame["predicted_saved_bytes"] - 1).abs() > 0.1
            frame["prediction_missed"] = miss.where(frame["execution"] == "eager")
        cell = {
            "batch": "batch",
            "sequence": "sequence (tokens)",
            "head_dim": "head_dim",
            "execution": "execution",
            "phase": "phase",
        }
        tables = [
            Table(
                "Attention grid",
                present.columns(
                    frame,
                    cell
                    | present.STATISTICS
                    | {
                        "saved_mib": "held before backward (MiB)",
                        "predicted_mib": "predicted for eager (MiB)",
                        "prediction_missed": "prediction missed",
                        "status": "status",
                    },
                ),
                "Held before backward: what the forward pass leaves allocated, output included. It "
                "grows with the square of the sequence length: the softmax output alone is "
                "batch × sequence² × 4 bytes. Predictions off by more than 10 % are marked; the "
                "compiler chooses for itself what to keep.",
            )
        ]
        failed = frame[frame["status"] == "oom"] if "status" in frame else frame.iloc[:0]
        if len(failed):
            # A case of several lengths ends at the longest.
            smallest = failed.sort_values(["longest", "head_dim"]).iloc[0]
            size = {"fp32": 4, "bf16": 2}[smallest["dtype"]]
            batch, sequence, head_dim = (
                int(smallest[name]) for name in ("batch", "longest", "head_dim")
            )
            tables.append(
                Table(
                    "Memory of the smallest cell that ran out",
                    pd.DataFrame(accounting(batch, sequence, head_dim, size)),
                    f"Batch {batch}, sequence {sequence}, head_dim {head_dim}, "
                    f"{smallest['dtype']} elements.",
                )
            )
        return tables

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Time and held memory over sequence length."""
        from bench_harness.report.plots import COLOURS, new_figure
        from bench_harness.stats import with_summary

        done = with_summary(present.finished(rows))
        if "phase" not in done or done.empty:
            return []
        figure, axes = new_figure(columns=3, width=11, height=4)
        shades = dict(zip(sorted(done["head_dim"].unique()), COLOURS, strict=False))
        done = done.sort_values(["head_dim", "sequence"], kind="stable")
        for name, group in present.by(done, ["head_dim", "variant"]):
            first = group.iloc[0]
            look: Any = {
                "color": shades.get(first["head_dim"]),
                "marker": "o",
                "linestyle": "-" if first["variant"] == "eager" else "--",
            }
            for index, phase in enumerate(("forward", "backward")):
                part = group[group["phase"] == phase]
                axes[0, index].plot(part["sequence"], part["median_ms"], label=name, **look)
            part = group[group["phase"] == "forward"]
            axes[0, 2].plot(part["sequence"], part["saved_bytes"] / 2**20, **look)
        for plot, title, unit in zip(
            axes[0],
            ("forward", "backward", "held before backward"),
            ("median time (ms)", "median time (ms)", "memory (MiB)"),
            strict=True,
        ):
            plot.set_title(title)
            present.log_axes(plot, x="sequence length (tokens)", y=unit)
        if len(axes[0, 0].get_lines()) > 1:
            figure.legend(
                *axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4
            )
        return [Figure("attention_grid", "Attention over sequence length", figure)]


def _case(config: Row) -> Case:
    """The case of a configuration, with its label and how long it may take."""
    sequences, group = config["sequences"], config["executions"]
    length = f"s{sequences[0]}" + (f"–{sequences[-1]}" if len(sequences) > 1 else "")
    return Case(
        experiment=Attention.name,
        config={**config, "label": f"attention {length} d{config['head_dim']} {'+'.join(group)}"},
        timeout_s=1800,
    )


def measure(
    config: Mapping[str, Any],
    sequence: int,
    device: torch.device,
    progress: Callable[[str], None],
) -> list[Row]:
    """One row per variant and phase at one length; variants take turns."""
    import torch

    from basics_model import softmax_attention
    from bench_harness.timing import Samples, record_sample

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[config["dtype"]]
    shape = (config["batch"], sequence, config["head_dim"])
    query, key, value = (
        torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
    )
    grad_out = torch.randn(shape, device=device, dtype=dtype)
    table: dict[str, Callable[..., torch.Tensor]] = {"eager": softmax_attention}
    if "compiled" in config["executions"]:
        table["compiled"] = torch.compile(softmax_attention)
    phases = {
        (execution, phase): Samples()
        for execution in config["executions"]
        for phase in ("forward", "backward")
    }
    saved: dict[str, int] = {}
    rounds = config["warmup"] + config["samples"]
    for index in range(rounds):
        if index % 10 == 0:
            progress(f"length {sequence}, pass {index + 1} of {rounds}")
        for execution in config["executions"]:
            taken = {"forward": Samples(), "backward": Samples()}
            before = _allocated(device)
            with record_sample(taken["forward"], device):
                out = table[execution](query, key, value)
            saved[execution] = _allocated(device) - before
            with record_sample(taken["backward"], device):
                out.backward(grad_out)
            del out
            query.grad = key.grad = value.grad = None
            for phase, samples in taken.items():
                kept = phases[execution, phase]
                if index == 0:
                    kept.first_ms = samples.wall_ms[0]
                if index >= config["warmup"]:
                    kept.wall_ms += samples.wall_ms
                    kept.device_ms += samples.device_ms
    if device.type != "cuda":
        saved = {
            execution: _saved_bytes(
                partial(table[execution], query, key, value), (query, key, value)
            )
            for execution in config["executions"]
        }
    return [
        {
            "variant": execution,
            "phase": phase,
            "sequence": sequence,
            "length": f"s{sequence}",
            "saved_bytes": saved[execution],
            **predicted_bytes(*shape, dtype.itemsize),
            **samples.row(),
        }
        for (execution, phase), samples in phases.items()
    ]


def predicted_bytes(batch: int, sequence: int, head_dim: int, itemsize: int) -> Row:
    """What eager softmax attention keeps for backward, and what it needs at its peak.

    Saved: the softmax output (B·S²), which both the softmax and the second product need; the mask
    (S² booleans); the output (B·S·D). Query, key and value exist anyway. The peak of backward adds
    three more B·S² matrices: the gradient of the softmax output, its product with that output,
    which PyTorch's softmax computes first, and the gradient of the scores.
    """
    scores = batch * sequence**2 * itemsize
    saved = scores + sequence**2 + batch * sequence * head_dim * itemsize
    return {"predicted_saved_bytes": saved, "predicted_peak_bytes": saved + 3 * scores}


def accounting(batch: int, sequence: int, head_dim: int, itemsize: int) -> list[Row]:
    """Every tensor of one forward and backward pass, with its formula."""
    scores, rows = batch * sequence**2, batch * sequence * head_dim
    entries = [
        ("query, key, value", "3·B·S·D", 3 * rows * itemsize),
        ("their gradients", "3·B·S·D", 3 * rows * itemsize),
        ("scores, during forward", "B·S²", scores * itemsize),
        ("mask, saved", "S² (1 byte)", sequence**2),
        ("softmax output, saved", "B·S²", scores * itemsize),
        ("output and its gradient", "2·B·S·D", 2 * rows * itemsize),
        ("gradient of the softmax output", "B·S²", scores * itemsize),
        ("that gradient times the output", "B·S²", scores * itemsize),
        ("gradient of the scores", "B·S²", scores * itemsize),
    ]
    return [
        {"tensor": tensor, "elements": formula, "size (MiB)": round(size / 2**20, 1)}
        for tensor, formula, size in entries
    ]


def _allocated(device: torch.device) -> int:
    import torch

    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _saved_bytes(forward: Callable[[], torch.Tensor], inputs: tuple[torch.Tensor, ...]) -> int:
    """Bytes that forward leaves allocated: its output and what autograd keeps, inputs left out."""
    import torch

    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        pack(forward())
    for tensor in inputs:
        storages.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(storages.values())
