"""The effect of mixed precision on numbers: four ways to accumulate, and the dtype of every tensor.

``python -m tools.course precision FILE.jsonl`` measures the rows of two pages; nothing is timed.
"""

from __future__ import annotations

import torch
from torch import nn

from bench_harness.core import Case, Row

ADDITIONS = 1000
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def case(device: str) -> Case:
    """What is added and cast on a device."""
    config: Row = {"additions": ADDITIONS, "autocast": list(DTYPES), "device": device}
    return Case(experiment="precision", config=config | {"label": f"precision {device}"})


def run(case: Case) -> list[Row]:
    """Adds 0.01 in four ways; runs a small model under each autocast dtype."""
    device = torch.device(str(case.config["device"]))
    sums = accumulate(ADDITIONS).items()
    rows: list[Row] = [{"variant": n, "kind": "accumulation", "value": value} for n, value in sums]
    for name, dtype in DTYPES.items():
        rows.append({"variant": name, "kind": "dtypes", **dtypes_under_autocast(dtype, device)})
    return rows


def accumulate(additions: int) -> dict[str, float]:
    """Sums of 0.01 by dtype of accumulator and term."""
    half, single = torch.tensor(0.01, dtype=torch.float16), torch.tensor(0.01)
    ways = {
        "fp32 += fp32": (torch.float32, single),
        "fp16 += fp16": (torch.float16, half),
        "fp32 += fp16": (torch.float32, half),
        "fp32 += fp32(fp16)": (torch.float32, half.float()),
    }
    sums = {}
    for name, (dtype, term) in ways.items():
        total = torch.tensor(0.0, dtype=dtype)
        for _ in range(additions):
            total += term
        sums[name] = float(total)
    return sums


def dtypes_under_autocast(dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """The dtype of every tensor of one training step of a small model under autocast."""
    layers = nn.ModuleDict(
        {"fc1": nn.Linear(8, 10, bias=False), "ln": nn.LayerNorm(10), "fc2": nn.Linear(10, 4)}
    ).to(device)
    inputs = torch.randn(16, 8, device=device)
    targets = torch.randint(4, (16,), device=device)
    with torch.autocast(device.type, dtype=dtype):
        parameters = list(layers.parameters())
        hidden = layers["fc1"](inputs)
        normalised = layers["ln"](torch.relu(hidden))
        logits = layers["fc2"](normalised)
        loss = nn.functional.cross_entropy(logits, targets)
    loss.backward()
    found = {"parameters": parameters, "fc1": [hidden], "ln": [normalised], "logits": [logits]}
    found |= {"loss": [loss], "gradients": [p.grad for p in parameters if p.grad is not None]}
    return {
        name: ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors}))
        for name, tensors in found.items()
    }
