"""What mixed precision does to numbers: four ways to accumulate, and the dtype of every tensor.

``python -m tools.course precision FILE.jsonl`` measures the rows of two pages; nothing is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.core import Case, Column, Row, Table
from bench_harness.display import row_tables
from bench_harness.environment import resolve_device
from bench_harness.experiments.base import DeviceOptions, Experiment

if TYPE_CHECKING:
    import pandas as pd
    import torch

_COLUMNS = row_tables.Columns(
    Column("variant", "accumulator += term"),
    Column("additions", "additions", "count"),
    Column("value", "sum", "1", 7),
    Column("exact", "exact", "1", 7),
    Column("error", "error", "%", 7),
)
_TERM = 0.01

_EXPLANATIONS = {
    "fp32 += fp32": "0.01 is rounded once to fp32; the 1000 additions lose little.",
    "fp16 += fp16": (
        "every sum is rounded to a multiple of 2⁻⁹ from 2 on, 2⁻⁸ from 4 on and 2⁻⁷ from 8 on: "
        "down, then up, then down again. These errors nearly cancel."
    ),
    "fp32 += fp16": "the term is rounded once to fp16 (0.0100021); the sum itself is accurate.",
    "fp32 += fp32(fp16)": "the same: converting up first cannot restore the term's lost digits.",
}


class Precision(Experiment):
    """Accumulation loops and the dtypes that autocast produces."""

    name: ClassVar[str] = "precision"
    summary: ClassVar[str] = "Accumulation in fp16 and fp32; dtypes under autocast"
    Options: ClassVar[type[Any]] = DeviceOptions

    def cases(self, **options: Any) -> list[Case]:
        """One case."""
        chosen = DeviceOptions(**options)
        device = resolve_device(chosen.device)
        return [
            Case(
                experiment=self.name,
                config={
                    "additions": 1000,
                    "autocast": ["fp16", "bf16"],
                    "device": device,
                    "label": f"precision {device}",
                },
            )
        ]

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        """Adds 0.01 in four ways; runs a small model under each autocast dtype."""
        import torch

        from bench_harness.workload import device_of

        device = device_of(case.config["device"])
        progress("accumulating")
        rows: list[Row] = [
            {"variant": name, "kind": "accumulation", "value": value}
            for name, value in accumulate(case.config["additions"]).items()
        ]
        for name in case.config["autocast"]:
            progress(f"autocast {name}")
            dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
            rows.append({"variant": name, "kind": "dtypes", **dtype_report(dtype, device)})
        return rows

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Values with their error and its reason; one line per tensor of the dtype report."""
        import pandas as pd

        if "kind" not in rows:
            return []
        done = row_tables.finished(rows)
        sums = done[done["kind"] == "accumulation"].copy()
        sums["exact"] = sums["additions"] * _TERM
        sums["error"] = 100 * (sums["value"] / sums["exact"] - 1)
        sums["why"] = sums["variant"].map(_EXPLANATIONS)
        reports = done[done["kind"] == "dtypes"].set_index("variant")
        tensors = [name for name in _TENSORS if name in reports]
        return [
            _COLUMNS.table(
                "Accumulating 0.01",
                sums,
                "variant additions value exact error why",
                "Accumulate in fp32 even where the terms are fp16: a term's rounding stays the "
                "size of the term, an accumulator's grows with the sum.",
            ),
            Table(
                "Dtypes under autocast",
                pd.DataFrame(
                    {"tensor": [_TENSORS[name] for name in tensors]}
                    | {name: reports.loc[name, tensors].to_list() for name in reports.index}
                ),
                "Autocast casts the inputs of matrix products and keeps parameters, and so "
                "gradients, in fp32. On CUDA it runs layer normalisation in fp32: its sums of "
                "squares overflow fp16, and lose digits in bf16, which has fp32's range. On a CPU "
                "layer normalisation keeps its input's dtype.",
            ),
        ]


_TENSORS = {
    "parameters": "model parameters",
    "fc1": "output of fc1",
    "ln": "output of layer norm",
    "logits": "logits",
    "loss": "loss",
    "gradients": "gradients",
}


def accumulate(additions: int) -> dict[str, float]:
    """Sums of 0.01 by dtype of accumulator and term."""
    import torch

    half, single = torch.float16, torch.float32
    sums = {name: torch.tensor(0.0, dtype=single) for name in _EXPLANATIONS}
    sums["fp16 += fp16"] = torch.tensor(0.0, dtype=half)
    for _ in range(additions):
        sums["fp32 += fp32"] += torch.tensor(_TERM, dtype=single)
        sums["fp16 += fp16"] += torch.tensor(_TERM, dtype=half)
        sums["fp32 += fp16"] += torch.tensor(_TERM, dtype=half)
        sums["fp32 += fp32(fp16)"] += torch.tensor(_TERM, dtype=half).to(single)
    return {name: float(value) for name, value in sums.items()}


def dtype_report(dtype: torch.dtype, device: torch.device) -> Row:
    """The dtype of every tensor of one training step of a small model under autocast."""
    import torch
    from torch import nn

    layers = nn.ModuleDict(
        {"fc1": nn.Linear(8, 10, bias=False), "ln": nn.LayerNorm(10), "fc2": nn.Linear(10, 4)}
    ).to(device)
    inputs = torch.randn(16, 8, device=device)
    targets = torch.randint(4, (16,), device=device)
    with torch.autocast(device.type, dtype=dtype):
        parameters = {p.dtype for p in layers.parameters()}
        hidden = layers["fc1"](inputs)
        normalised = layers["ln"](torch.relu(hidden))
        logits = layers["fc2"](normalised)
        loss = nn.functional.cross_entropy(logits, targets)
    loss.backward()
    gradients = {p.grad.dtype for p in layers.parameters() if p.grad is not None}
    return {
        "parameters": _names(parameters),
        "fc1": _names({hidden.dtype}),
        "ln": _names({normalised.dtype}),
        "logits": _names({logits.dtype}),
        "loss": _names({loss.dtype}),
        "gradients": _names(gradients),
    }


def _names(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
