"""Where a measurement stands against the measured limits of its device (Williams et al., 2009).

The roofline is the least time in which the work can be done: its operations at the rate of a large
matrix product, or its least memory traffic at the rate of a large copy, whichever takes longer.

Operations are counted from shapes. One multiply–add counts as two. Only matrix products are
counted, the usual convention for utilisation (Chowdhery et al., 2022, appendix B); a backward pass
costs twice its forward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench_harness.core import Row
from bench_harness.environment import gpu_now
from bench_harness.timing import measure

if TYPE_CHECKING:
    import pandas as pd
    import torch

    from basics_model import ModelConfig


def forward_flops(
    shape: ModelConfig, batch: int, sequence: int, *, causal: bool = False
) -> dict[str, int]:
    """Operations of one forward pass by component.

    Args:
        causal: count only the scores on and below the diagonal (about half), as a kernel that
            skips masked tiles computes them. The default counts the full S×S products, as an
            implementation with a mask does.
    """
    tokens, width = batch * sequence, shape.d_model
    scores = sequence * (sequence + 1) // 2 if causal else sequence * sequence
    layers = shape.num_layers
    return {
        "attention projections": layers * tokens * 4 * 2 * width * width,
        "attention scores": layers * batch * 2 * scores * width,
        "attention values": layers * batch * 2 * scores * width,
        "feed-forward": layers * tokens * 3 * 2 * width * shape.d_ff,
        "language-model head": tokens * 2 * width * shape.vocab_size,
    }


def training_flops(shape: ModelConfig, batch: int, sequence: int, *, causal: bool = False) -> int:
    """Operations of forward and backward; the optimizer's element-wise work is not counted."""
    return 3 * sum(forward_flops(shape, batch, sequence, causal=causal).values())


def step_work(
    shape: ModelConfig,
    batch: int,
    sequence: int,
    *,
    recomputed: bool = False,
    keep_attention: bool = False,
) -> dict[str, int]:
    """Operations of one training step with causal attention: matrix products, and attention.

    Args:
        recomputed: blocks run their forward pass twice (activation checkpointing).
        keep_attention: attention does not, because its output is kept.
    """
    forward = forward_flops(shape, batch, sequence, causal=True)
    head = forward["language-model head"]
    blocks = forward["attention projections"] + forward["feed-forward"]
    attention = forward["attention scores"] + forward["attention values"]
    # The backward pass of attention computes the scores again: five products for two.
    return {
        "matrix products": 3 * head + (4 if recomputed else 3) * blocks,
        "attention": attention * 7 // 2 + (attention if recomputed and not keep_attention else 0),
    }


def attention_flops(
    batch: int,
    heads: int,
    sequence: int,
    head_dim: int,
    *,
    causal: bool,
    backward: bool = False,
    value_head_dim: int | None = None,
    window: tuple[int | None, int | None] | None = None,
) -> int:
    """Operations of attention alone: two products forward, five backward (Dao, 2023, section 4.1).

    Causal attention counts half of the S×S scores; with a window only visible scores count.

    Args:
        value_head_dim: of the value, if it is other than that of query and key.
        window: (left, right) visible keys beside the diagonal; None means no limit.
    """
    scores = sequence * sequence / (2 if causal else 1)
    if window is not None:
        left = sequence if window[0] is None else window[0]
        right = 0 if causal else sequence if window[1] is None else window[1]
        scores = sum(min(i, left) + 1 + min(sequence - 1 - i, right) for i in range(sequence))
    value = value_head_dim or head_dim
    widths = 3 * head_dim + 2 * value if backward else head_dim + value
    return int(2 * batch * heads * scores * widths)


def bus_bandwidth_factor(operation: str, world_size: int) -> float:
    """Bus bandwidth over algorithm bandwidth, so that a perfect ring shows the link's own rate.

    The factors are those of nccl-tests: every byte of an all-reduce crosses a link 2(N-1)/N
    times, of a reduce-scatter or all-gather (N-1)/N times, of a broadcast once.

    Raises:
        ValueError: unknown operation.
    """
    factors = {
        "all_reduce": 2 * (world_size - 1) / world_size,
        "reduce_scatter": (world_size - 1) / world_size,
        "all_gather": (world_size - 1) / world_size,
        "broadcast": 1.0,
    }
    if operation not in factors:
        raise ValueError(f"operation must be one of {', '.join(factors)}, but got {operation!r}")
    return factors[operation]


NOTE = (
    "Roofline: the longer of the operations at the rate of a matrix product and the least memory "
    "traffic at the rate of a copy, both measured in the same process; the product's at the clock "
    "of the samples, where the driver tells it."
)


def ceilings(device: torch.device, dtype: torch.dtype) -> Row:
    """The measured rates of a device: ``ceiling_tflop_s`` and ``bandwidth_gb_s``.

    Beside them stands the clock at which the first was reached, where the driver tells it.
    """
    rate = matmul_ceiling(device, dtype)
    clock = gpu_now(device).get("sm_clock_mhz")
    known = {} if clock is None else {"ceiling_clock_mhz": clock}
    return {"ceiling_tflop_s": rate, **known, "bandwidth_gb_s": memory_bandwidth(device)}


def matmul_ceiling(device: torch.device, dtype: torch.dtype, size: int | None = None) -> float:
    """TFLOP/s that a square matrix product reaches here: the ceiling that utilisation refers to.

    It is that of the fastest of five samples.

    Args:
        size: rows and columns; by default 8192 on CUDA and 512 on a CPU.
    """
    # A CPU takes milliseconds for one product, and many times as long in a dtype that it emulates.
    warmup, calls = (3, 3) if device.type == "cuda" else (1, 1)
    # What delays the others is no ceiling.
    return max(_product_rates(device, dtype, size, warmup=warmup, samples=5, calls=calls))


def sustained_rate(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of the same product after a second of it: what power and cooling allow for long.

    A GPU that has just begun clocks higher, but a training step goes on for hours.
    """
    calls = 400 if device.type == "cuda" else 5
    return _product_rates(device, dtype, None, warmup=1, samples=3, calls=calls)[-1]


def _product_rates(
    device: torch.device, dtype: torch.dtype, size: int | None, **counts: int
) -> list[float]:
    """TFLOP/s of each sample of a square matrix product."""
    import torch

    n = size or (8192 if device.type == "cuda" else 512)
    left, right, out = torch.randn(3, n, n, device=device, dtype=dtype)
    samples = measure(lambda: torch.mm(left, right, out=out), device=device, **counts)
    return [2 * n**3 / (ms * 1e-3) / 1e12 for ms in samples.device_ms or samples.wall_ms]


def memory_bandwidth(device: torch.device, size: int | None = None) -> float:
    """GB/s that a copy within a device's memory reads and writes, at its fastest of five.

    Args:
        size: bytes to copy; by default 1 GiB on CUDA and 64 MiB on a CPU, more than its caches.
    """
    import torch

    count = size or (2**30 if device.type == "cuda" else 2**26)
    source = torch.zeros(count, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    samples = measure(lambda: target.copy_(source), device=device, warmup=2, samples=5)
    fastest = min(samples.device_ms or samples.wall_ms)
    return float(2 * count / (fastest * 1e-3) / 1e9)


def with_roofline(frame: pd.DataFrame) -> pd.DataFrame:
    """Adds intensity, roofline and limit to rows with a median, their work and measured rates.

    Args:
        frame: with ``median_ms``, ``flops``, ``least_bytes``, ``ceiling_tflop_s`` and
            ``bandwidth_gb_s``; without one of them nothing is added. Where rows say at which clock
            their samples and the matrix product ran, the rate is that of their own clock, which
            is added as ``clock_mhz``.
    """
    needed = ("flops", "least_bytes", "ceiling_tflop_s", "bandwidth_gb_s", "median_ms")
    if any(name not in frame for name in needed):
        return frame
    work = frame["flops"].astype("float64").fillna(0.0)
    compute = work / (frame["ceiling_tflop_s"] * at_clock(frame)) / 1e9
    memory = frame["least_bytes"].astype("float64") / frame["bandwidth_gb_s"] / 1e6
    frame["intensity"] = work / frame["least_bytes"].astype("float64")
    frame["roof_ms"] = compute.where(compute > memory, memory)
    frame["roof_share"] = 100 * frame["roof_ms"] / frame["median_ms"]
    limits = (compute > memory).map({True: "compute", False: "memory"})
    frame["bound"] = limits.where(frame["roof_ms"].notna())
    return frame


def at_clock(frame: pd.DataFrame) -> pd.Series[Any]:
    """The median clock of each row's samples over that of the matrix product; 1 where unknown."""
    import pandas as pd

    if "samples_sm_clock_mhz" not in frame or "ceiling_clock_mhz" not in frame:
        return pd.Series(1.0, index=frame.index)
    frame["clock_mhz"] = frame["samples_sm_clock_mhz"].map(
        lambda clocks: float(pd.Series(clocks).median()) if isinstance(clocks, list) else None
    )
    return (frame["clock_mhz"] / frame["ceiling_clock_mhz"]).astype("float64").fillna(1.0)


def step_bytes(parameters: int) -> dict[str, int]:
    """Least memory traffic of a training step in fp32, by part.

    Forward reads the parameters; backward reads them and writes gradients; AdamW reads parameters,
    gradients and two moments and writes all but the gradients. Activations may stay in caches.
    """
    return {"forward": 4 * parameters, "backward": 8 * parameters, "optimizer": 28 * parameters}
