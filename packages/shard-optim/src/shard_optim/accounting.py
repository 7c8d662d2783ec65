"""Memory and communication of data-parallel training, as arithmetic.

Stages are ZeRO's (Rajbhandari et al. 2020): 0 replicates everything, 1 shards optimizer state,
2 also gradients, 3 also parameters. GB is 10^9 bytes, as on accelerator data sheets.

Dimensions: D d_model, F d_ff, L blocks, B tokens of the whole batch, X ranks that shard weights
(FSDP), Y ranks that split matrices (tensor parallel), C FLOP/s, W bytes/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stage = Literal[0, 1, 2, 3]

STAGES: tuple[Stage, ...] = (0, 1, 2, 3)

GB = 10**9


@dataclass(frozen=True, kw_only=True)
class DtypePolicy:
    """Bytes per element of everything a rank may hold.

    Attributes:
        parameter: the parameters that the model computes with.
        gradient: accumulated gradients.
        master: higher-precision copies of the parameters (0 if the parameters are updated).
        state: optimizer state; 8 is two fp32 moments (Adam).
    """

    parameter: float = 4
    gradient: float = 4
    master: float = 0
    state: float = 8

    def __post_init__(self) -> None:
        if min(self.parameter, self.gradient, self.master, self.state) < 0:
            raise ValueError(f"bytes per element cannot be negative, got {self}")


FP32 = DtypePolicy()
MIXED_BF16 = DtypePolicy(parameter=2, gradient=2, master=4, state=8)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Predicted bytes on one rank, activations excluded.

    Attributes:
        parameters: the parameters that the model computes with.
        gradients: accumulated gradients.
        master_copies: higher-precision copies of the parameters.
        optimizer_state: what the optimizer keeps.
        buffers: at most this much more while collectives are under way.
    """

    parameters: float
    gradients: float
    master_copies: float
    optimizer_state: float
    buffers: float

    @property
    def total(self) -> float:
        """Their sum, in bytes."""
        kept = self.parameters + self.gradients + self.master_copies + self.optimizer_state
        return kept + self.buffers


def rank_memory(
    numel: int,
    *,
    world_size: int,
    stage: Stage,
    policy: DtypePolicy = FP32,
    in_flight: float = 0,
) -> RankMemory:
    """Bytes per rank after the first optimizer step, with gradients present.

    Args:
        numel: trainable parameters of the whole model.
        world_size: data-parallel ranks.
        stage: 0, 1, 2 or 3.
        policy: bytes per element.
        in_flight: bytes of whole gradients on their way into shards (stages 2 and 3) and of
            parameters gathered for use (stage 3) that a rank holds at once. ``ShardedOptimizer``
            with ``reduce_gradients=True`` keeps at most 1 GiB, or two buckets.

    Raises:
        ValueError: for an unknown stage or a world size below 1.
    """
    if stage not in STAGES:
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {stage}")
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    share = numel / world_size
    return RankMemory(
        parameters=policy.parameter * (share if stage >= 3 else numel),
        gradients=policy.gradient * (share if stage >= 2 else numel),
        master_copies=policy.master * (share if stage >= 1 else numel),
        optimizer_state=policy.state * (share if stage >= 1 else numel),
        buffers=(
            0.0
            if stage < 2 or world_size == 1
            else min(in_flight, numel * (policy.gradient + (policy.parameter if stage == 3 else 0)))
        ),
    )


def fully_sharded_buffers(
    repeated: Sequence[int],
    others: Sequence[int],
    *,
    world_size: int,
    gathered: float = 2,
    reduced: float = 2,
    cast: bool = True,
    prefetch: int = 1,
    reshard_after_forward: bool = True,
) -> float:
    """Bytes that ``FullyShardedDataParallel`` holds besides shards, at most: ``in_flight``.

    Repeated units take turns in ``prefetch + 1`` buffers, or have one each; the others have one
    each. While the gradients of one unit are made, those of two more may be on their way.

    Args:
        repeated: parameters of each repeated unit.
        others: parameters of each other unit.
        world_size: data-parallel ranks.
        gathered: bytes of a gathered element.
        reduced: bytes of a whole gradient's element.
        cast: whether shards are cast before they are gathered.
        prefetch: as given to the wrapper.
        reshard_after_forward: as given to the wrapper.
    """
    largest = max(repeated, default=0)
    turns = min(prefetch + 1, len(repeated)) * largest
    held = (turns if reshard_after_forward else sum(repeated)) + sum(others)
    shards = (turns + sum(others)) / world_size if cast else 0
    gradients = 3 * max(largest, *others, 0) if others else 3 * largest
    return gathered * (held + shards) + reduced * gradients


def step_traffic(
    numel: int,
    *,
    world_size: int,
    stage: Stage,
    policy: DtypePolicy = FP32,
    gathered_once: float = 0,
) -> float:
    """Bytes that one rank sends in one step, with ring collectives.

    An all-reduce sends 2 (N-1)/N of the buffer, a reduce-scatter or an all-gather (N-1)/N. Stage 0
    all-reduces gradients. Stage 1 all-reduces gradients and gathers parameters. Stage 2
    reduce-scatters gradients and gathers parameters: as much as stage 0. Stage 3 gathers
    parameters twice, for forward and for backward, except those that stay gathered in between.

    Args:
        numel: trainable parameters of the whole model.
        world_size: data-parallel ranks.
        stage: 0, 1, 2 or 3.
        policy: bytes per element.
        gathered_once: of them, how many stay gathered between forward and backward (stage 3):
            all with ``reshard_after_forward=False``, else the last ``prefetch + 1`` repeated units
            and all that are not repeated.

    Raises:
        ValueError: for an unknown stage or a world size below 1.
    """
    rank_memory(numel, world_size=world_size, stage=stage, policy=policy)
    ring = (world_size - 1) / world_size * numel
    reductions = {0: 2, 1: 2, 2: 1, 3: 1}[stage]
    gathers = {0: 0, 1: 1, 2: 1, 3: 2}[stage]
    saved = gathered_once / numel if stage == 3 else 0
    return ring * (reductions * policy.gradient + (gathers - saved) * policy.parameter)


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
            f"half of the activations must fit one device, but they take {saved / 2:.1f} GB of "
            f"{device_gb:g} GB; use fewer than {tokens} tokens per device"
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
            f"d_ff must exceed α·Y/M_Y = {tensor_width:.0f} for any batch to be compute bound, got "
            f"{model.d_ff}; split matrices over fewer ranks"
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
