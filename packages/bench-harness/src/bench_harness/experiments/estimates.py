"""How long a case will take, roughly: where a dry run and the remaining time start from.

Before anything has run in a folder, only the operations and bytes of a case are known. The rates
are those of one H200 and of a small CPU, so a plan says minutes or hours, not seconds. As soon as
a case has run once, its own time takes the estimate's place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench_harness.workload import DIMENSIONS

#: Parameters of the named sizes without embedding and head, and their width.
_BLOCKS = {
    "small": (113_246_208, 768),
    "medium": (402_653_184, 1024),
    "large": (943_718_400, 1280),
    "xl": (1_966_080_000, 1600),
    "2.7B": (3_355_443_200, 2560),
}

#: Operations per second that a training step reaches.
_OPERATIONS = {
    ("cpu", "fp32"): 3e10,
    ("cpu", "bf16"): 1e10,
    ("cuda", "fp32"): 4e13,
    ("cuda", "tf32"): 1.5e14,
    ("cuda", "bf16"): 2.5e14,
}
#: Bytes per second of memory.
_MEMORY = {"cpu": 1e10, "cuda": 3e12}
#: A step's shortest time: what launching its kernels takes.
_LAUNCHES_S = {"cpu": 0.005, "cuda": 0.04}

#: Seconds before a case's own work begins: its process, the device, the ranks.
START_S = {"cpu": 0.5, "cuda": 1.5}
RANKS_S = {"cpu": 4.0, "cuda": 8.0}
#: Seconds to compile one graph of a model, forward and backward.
COMPILE_S = 30.0
#: Bytes per second of an all-reduce.
_COLLECTIVE = {"cpu": 5e8, "cuda": 1.5e11}


def parameters(config: Mapping[str, Any]) -> float:
    """Parameters of a case's language model, norms left out."""
    given = {name: config[name] for name in DIMENSIONS if config.get(name) is not None}
    blocks, width = _BLOCKS.get(config["size"], (0, 0))
    if len(given) == len(DIMENSIONS):
        width = given["d_model"]
        blocks = given["num_layers"] * width * (4 * width + 3 * given["d_ff"])
    return float(blocks + 2 * config.get("vocab_size", 10_000) * width)


def build_s(config: Mapping[str, Any]) -> float:
    """Seconds until a case's language model exists."""
    return float(40 * parameters(config) / _MEMORY[config["device"]])


def step_s(config: Mapping[str, Any], precision: str) -> float:
    """Seconds of one training step with AdamW."""
    device, count = config["device"], parameters(config)
    operations = 6 * count * config["batch"] * config["sequence"]
    rate = _OPERATIONS.get((device, precision), _OPERATIONS[device, "fp32"])
    return float(max(_LAUNCHES_S[device], operations / rate) + 28 * count / _MEMORY[device])


def attention_s(config: Mapping[str, Any], sequence: int, *, heads: int = 1) -> float:
    """Seconds of forward and backward of attention with the scores stored."""
    device = config["device"]
    scores = config["batch"] * heads * sequence**2
    operations = 14 * scores * config["head_dim"]
    return float(1e-3 + operations / _OPERATIONS[device, "fp32"] + 80 * scores / _MEMORY[device])


def all_reduce_s(config: Mapping[str, Any], nbytes: float) -> float:
    """Seconds of one all-reduce."""
    return float(1e-3 + nbytes / _COLLECTIVE[config["device"]])
