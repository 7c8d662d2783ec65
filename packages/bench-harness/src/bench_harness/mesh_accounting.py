"""Memory and communication of a very large feed-forward stack on a device mesh, as arithmetic.

The assignment's XXL problem. Every figure comes with its derivation as text.

Dimensions: D d_model, F d_ff, L blocks, B tokens of the whole batch, X ranks that shard weights
(FSDP), Y ranks that split matrices (tensor parallel), C FLOP/s, W bytes/s. GB is 10^9 bytes, as on
accelerator data sheets.
"""

from __future__ import annotations

from dataclasses import dataclass

from shard_optim.accounting import GB, rank_memory


@dataclass(frozen=True, kw_only=True)
class FeedForwardStack:
    """Blocks of two linear layers, D -> F -> D, and nothing else: the XXL model of the assignment.

    Attributes:
        d_model: D.
        d_ff: F.
        num_blocks: L.
    """

    d_model: int = 16384
    d_ff: int = 53248
    num_blocks: int = 126

    @property
    def numel(self) -> int:
        """2·D·F parameters per block."""
        return 2 * self.d_model * self.d_ff * self.num_blocks

    @property
    def saved_per_token(self) -> int:
        """Elements kept for backward per token: the inputs of both layers, D + F per block."""
        return (self.d_model + self.d_ff) * self.num_blocks


XXL = FeedForwardStack()


@dataclass(frozen=True, kw_only=True)
class Derived:
    """A number and how it came about."""

    value: float
    unit: str
    derivation: str


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A device mesh for sharding weights and splitting matrices; defaults: 16 × 4 TPU v5p.

    Attributes:
        fsdp: X, ranks over which weights are sharded.
        tensor: Y, ranks over which matrices are split.
        fsdp_axes: physical mesh axes that FSDP traffic uses at once.
        tensor_axes: the same for tensor-parallel traffic.
        bandwidth: W, bytes/s of one axis, both directions together.
        flops: C, FLOP/s of one device.
    """

    fsdp: int = 16
    tensor: int = 4
    fsdp_axes: int = 2
    tensor_axes: int = 1
    bandwidth: float = 2 * 9e10
    flops: float = 4.6e14


def training_memory(model: FeedForwardStack = XXL, *, device_gb: float = 80) -> dict[str, Derived]:
    """fp32 master weights, gradients and Adam state on one device; devices that this fills.

    Args:
        model: the stack of feed-forward blocks.
        device_gb: memory of one device; 80 for an H100.
    """
    count = f"2·{model.d_model}·{model.d_ff}·{model.num_blocks} = {model.numel:,} parameters"
    memory = rank_memory(model.numel, world_size=1, stage=0)
    parts = {
        "master_weights": (memory.parameters, "4 B"),
        "gradients": (memory.gradients, "4 B"),
        "optimizer_state": (memory.optimizer_state, "8 B (two fp32 moments)"),
        "total": (memory.total, "16 B"),
    }
    result = {
        name: Derived(value=value / GB, unit="GB", derivation=f"{count} × {each}")
        for name, (value, each) in parts.items()
    }
    result["saved_for_backward_per_token"] = Derived(
        value=2 * model.saved_per_token / 1e6,
        unit="MB",
        derivation=f"bf16 inputs of both layers: 2 B × ({model.d_model} + {model.d_ff}) × "
        f"{model.num_blocks} blocks",
    )
    result["devices"] = Derived(
        value=memory.total / (device_gb * GB),
        unit=f"devices of {device_gb:g} GB",
        derivation=f"{memory.total / GB:.1f} GB / {device_gb:g} GB, activations excluded",
    )
    return result


def fsdp_memory(
    model: FeedForwardStack = XXL,
    *,
    ranks: int,
    tokens: int = 0,
    sharded_activations: float = 0.5,
) -> Derived:
    """Bytes per device when weights, gradients, state and part of the activations are sharded.

    Args:
        model: the stack of feed-forward blocks.
        ranks: N, devices to shard over.
        tokens: tokens whose bf16 activations are kept for backward.
        sharded_activations: share of them that is sharded too (every second layer: 0.5).
    """
    fixed = rank_memory(model.numel, world_size=ranks, stage=3).total
    saved = 2 * model.saved_per_token * tokens
    value = fixed + saved * (sharded_activations / ranks + 1 - sharded_activations)
    return Derived(
        value=value / GB,
        unit="GB",
        derivation=f"16 B × {model.numel:,} / {ranks} + {saved / GB:.2f} GB of activations × "
        f"({sharded_activations:g}/{ranks} + {1 - sharded_activations:g})",
    )


def fsdp_ranks(model: FeedForwardStack = XXL, *, device_gb: float, tokens: int = 0) -> Derived:
    """Fewest devices for which ``fsdp_memory`` is under ``device_gb``.

    From 16 P / N + A (1/2N + 1/2) < M follows N > (16 P + A/2) / (M - A/2).

    Raises:
        ValueError: if the activations that are not sharded alone fill a device.
    """
    saved = 2 * model.saved_per_token * tokens / GB
    room = device_gb - saved / 2
    if room <= 0:
        raise ValueError(
            f"half of the activations must fit one device of {device_gb:g} GB, but got "
            f"{saved / 2:.1f} GB. Use fewer than {tokens} tokens per device."
        )
    weights = rank_memory(model.numel, world_size=1, stage=3).total / GB
    needed = (weights + saved / 2) / room
    return Derived(
        value=float(int(needed) + 1),
        unit="devices",
        derivation=f"N > ({weights:.1f} + {saved / 2:.2f}) GB / ({device_gb:g} - {saved / 2:.2f}) "
        f"GB = {needed:.2f}",
    )


def compute_bound_batch(
    model: FeedForwardStack = XXL, *, mesh: Mesh | None = None, concurrent: bool = False
) -> dict[str, Derived]:
    """Smallest batch at which a forward pass under FSDP × tensor parallelism is compute bound.

    Per block, bf16 (2 B): T_math = 4·B·D·F / (X·Y·C); T_fsdp = 4·D·F / (Y·W·M_X), gathering both
    weight matrices; T_tensor = 4·B·D / (X·W·M_Y), moving activations in and out. With
    α = C/W, T_math ≥ T_fsdp + T_tensor holds from B = X·F·(α/M_X) / (F - α·Y/M_Y) on. If both
    transfers run at once (``concurrent``), T_math ≥ T_fsdp alone decides: B = X·α/M_X, provided
    F ≥ α·Y/M_Y.

    Args:
        model: the stack of feed-forward blocks.
        mesh: None for 16 × 4 TPU v5p.
        concurrent: whether the two kinds of transfer overlap each other.

    Returns:
        ``overall`` and ``per_device`` batch in tokens.

    Raises:
        ValueError: if splitting matrices is communication bound at any batch size.
    """
    mesh = mesh or Mesh()
    alpha = mesh.flops / mesh.bandwidth
    tensor_width = alpha * mesh.tensor / mesh.tensor_axes
    if tensor_width >= model.d_ff:
        raise ValueError(
            f"d_ff must exceed α·Y/M_Y = {tensor_width:.0f} for any batch to be compute bound, but "
            f"got {model.d_ff}. Split matrices over fewer ranks."
        )
    weight_tokens = mesh.fsdp * alpha / mesh.fsdp_axes
    overall = weight_tokens * (1 if concurrent else model.d_ff / (model.d_ff - tensor_width))
    how = (
        f"α = C/W = {alpha:.1f}; B = X·α/M_X = {weight_tokens:.0f}"
        if concurrent
        else f"α = C/W = {alpha:.1f}; B = X·(α/M_X)·F / (F - α·Y/M_Y) = {weight_tokens:.0f} × "
        f"{model.d_ff} / ({model.d_ff} - {tensor_width:.0f})"
    )
    devices = mesh.fsdp * mesh.tensor
    return {
        "overall": Derived(value=overall, unit="tokens", derivation=how),
        "per_device": Derived(
            value=overall / devices, unit="tokens", derivation=f"B / {devices} devices"
        ),
    }
