"""Memory and communication of a very large feed-forward stack on a device mesh, as arithmetic.

The assignment's calculations of both editions. Every figure comes with its derivation as text.

Dimensions: D d_model, F d_ff, L blocks, m matrices of a block, B tokens of the whole batch, Z
replicas (data parallel), X ranks that shard weights (FSDP), Y ranks that split matrices (tensor
parallel), C FLOP/s, W bytes/s. GB is 10^9 bytes, as on accelerator data sheets.

Functions take a ``model``, the stack of feed-forward blocks, and a ``mesh``, None for 16 × 4 TPU
v5p.

Two models of transfers: :func:`compute_bound_batch` follows J. Austin et al., *How to Scale Your
Model* (2025), where W is an axis of a torus with both directions and a factor (n - 1)/n is left
out. :func:`ring_step` counts rings of devices that each send W bytes/s, with that factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from shard_optim.accounting import GB, rank_memory


@dataclass(frozen=True, kw_only=True)
class FeedForwardStack:
    """Blocks of linear layers, D -> F -> D, and nothing else: the XXL model of the assignment.

    Attributes:
        d_model: D.
        d_ff: F.
        num_blocks: L.
        matrices: m, 2 for D -> F -> D, 3 for a gated layer, which has two matrices D -> F.
    """

    d_model: int = 16384
    d_ff: int = 53248
    num_blocks: int = 126
    matrices: int = 2

    @property
    def numel(self) -> int:
        """m·D·F parameters per block."""
        return self.matrices * self.d_model * self.d_ff * self.num_blocks

    @property
    def saved_per_token(self) -> int:
        """Elements kept for backward per token and block: D + F for the inputs of both matrices.

        A gated block keeps D + 3·F: both factors of the product, and the product.
        """
        return (self.d_model + (2 * self.matrices - 3) * self.d_ff) * self.num_blocks


XXL = FeedForwardStack()


class Derived(NamedTuple):
    """A number and how it came about."""

    value: float
    unit: str
    derivation: str


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A device mesh for sharding weights and splitting matrices; defaults: 16 × 4 TPU v5p.

    Attributes:
        data: Z, replicas of the sharded group.
        fsdp: X, ranks over which weights are sharded.
        tensor: Y, ranks over which matrices are split.
        fsdp_axes: physical mesh axes that FSDP traffic uses at once.
        tensor_axes: the same for tensor-parallel traffic.
        bandwidth: W, bytes/s of one axis, both directions together.
        flops: C, FLOP/s of one device.
    """

    data: int = 1
    fsdp: int = 16
    tensor: int = 4
    fsdp_axes: int = 2
    tensor_axes: int = 1
    bandwidth: float = 2 * 9e10
    flops: float = 4.6e14


def training_memory(model: FeedForwardStack = XXL, *, device_gb: float = 80) -> dict[str, Derived]:
    """fp32 master weights, gradients and Adam state on one device; devices that this fills.

    Args:
        device_gb: memory of one device; 80 for an H100.
    """
    factors = f"{model.matrices}·{model.d_model}·{model.d_ff}·{model.num_blocks}"
    count = f"{factors} = {model.numel:,} parameters"
    memory = rank_memory(model.numel, world_size=1, stage=0)
    parts = {
        "master_weights": (memory.parameters, "4 B"),
        "gradients": (memory.gradients, "4 B"),
        "optimizer_state": (memory.optimizer_state, "8 B (two fp32 moments)"),
        "total": (memory.total, "16 B"),
    }
    result = {
        name: Derived(value / GB, "GB", f"{count} × {each}")
        for name, (value, each) in parts.items()
    }
    result["saved_for_backward_per_token"] = Derived(
        2 * model.saved_per_token / 1e6,
        "MB",
        f"bf16 inputs of the layers: 2 B × ({model.d_model} + "
        f"{(2 * model.matrices - 3) * model.d_ff}) × {model.num_blocks} blocks",
    )
    result["devices"] = Derived(
        memory.total / (device_gb * GB),
        f"devices of {device_gb:g} GB",
        f"{memory.total / GB:.1f} GB / {device_gb:g} GB, activations excluded",
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
        ranks: N, devices to shard over.
        tokens: tokens whose bf16 activations are kept for backward.
        sharded_activations: share of them that is sharded too (every second layer: 0.5).
    """
    fixed = rank_memory(model.numel, world_size=ranks, stage=3).total
    saved = 2 * model.saved_per_token * tokens
    value = fixed + saved * (sharded_activations / ranks + 1 - sharded_activations)
    return Derived(
        value / GB,
        "GB",
        f"16 B × {model.numel:,} / {ranks} + {saved / GB:.2f} GB of activations × "
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
        float(int(needed) + 1),
        "devices",
        f"N > ({weights:.1f} + {saved / 2:.2f}) GB / ({device_gb:g} - {saved / 2:.2f}) "
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
        "overall": Derived(overall, "tokens", how),
        "per_device": Derived(overall / devices, "tokens", f"B / {devices} devices"),
    }


def fewest_tokens(model: FeedForwardStack = XXL, *, mesh: Mesh | None = None) -> dict[str, Derived]:
    """The best split of a mesh's devices between FSDP and tensor parallelism, transfers at once.

    Moving weights takes T_fsdp = 4·D·F / (Y·W·M_X) and moving activations T_tensor = 4·B·D /
    (X·W·M_Y). The longer of the two is least where they are equal, at X = sqrt(B·M_X·N / (F·M_Y))
    with N = X·Y devices. There T_math ≥ T_fsdp holds from B/N = α² / (M_X·M_Y·F) tokens per device
    on. Splitting further than Y = F·M_Y/α is bound by communication at any batch.
    """
    mesh = mesh or Mesh()
    alpha = mesh.flops / mesh.bandwidth
    devices = mesh.fsdp * mesh.tensor
    per_device = alpha**2 / (mesh.fsdp_axes * mesh.tensor_axes * model.d_ff)
    limit = model.d_ff * mesh.tensor_axes / alpha
    best = devices * alpha / (mesh.tensor_axes * model.d_ff)
    return {
        "least batch per device, best split": Derived(
            per_device, "tokens", f"α² / (M_X·M_Y·F), α = {alpha:.1f}"
        ),
        "FSDP ranks of the best split": Derived(
            best,
            "ranks",
            f"X = sqrt(B·M_X·N / (F·M_Y)) = N·α/(M_Y·F), N = {devices} devices",
        ),
        "most ranks of tensor parallelism": Derived(
            limit, "ranks", f"Y < F·M_Y/α = {model.d_ff} / {alpha:.1f}"
        ),
    }


def ring_step(
    model: FeedForwardStack = XXL, *, mesh: Mesh | None = None, tokens: int
) -> dict[str, Derived]:
    """Times of one block's forward and backward, computing and on each axis of rings.

    The batch is split over data × fsdp ranks, the matrices over tensor ranks, and each tensor
    slice is stored on fsdp ranks; 2 bytes a value. A ring of n devices that each send W bytes/s
    needs (n - 1)/n · S/W for an all-gather or reduce-scatter of S bytes, and twice that for an
    all-reduce. Forward gathers weights (FSDP) and all-reduces outputs (tensor); backward gathers
    weights and reduce-scatters gradients, all-reduces gradients of inputs, and all-reduces the
    gradients of replicas.

    Args:
        mesh: ``fsdp_axes`` and ``tensor_axes`` are not used.
        tokens: B, of the whole batch.
    """
    mesh = mesh or Mesh()
    z, x, y = mesh.data, mesh.fsdp, mesh.tensor
    weights = 2 * model.matrices * model.d_model * model.d_ff / y
    outputs = 2 * tokens * model.d_model / (z * x)
    operations = 2 * model.matrices * tokens * model.d_model * model.d_ff / (z * x * y)
    found = {}
    for phase, twice in (("forward", 1), ("backward", 2)):
        compute = twice * operations / mesh.flops
        transfers = {
            "FSDP": (x, twice * weights, f"{twice}·(X-1)/X·2·m·D·F/(Y·W)"),
            "tensor": (y, 2 * outputs, "2·(Y-1)/Y·2·B·D/(Z·X·W)"),
        }
        if phase == "backward":
            transfers["data"] = (z, 2 * weights / x, "2·(Z-1)/Z·2·m·D·F/(X·Y·W)")
        found[f"{phase}, computing"] = Derived(
            1e3 * compute, "ms", f"{2 * twice}·m·B·D·F/(Z·X·Y·C)"
        )
        times = {}
        for axis, (ranks, size, formula) in transfers.items():
            times[axis] = (ranks - 1) / ranks * size / mesh.bandwidth
            found[f"{phase}, {axis} axis"] = Derived(1e3 * times[axis], "ms", formula)
        if any(times.values()):
            for how, total in (("at once", max(times.values())), ("in turn", sum(times.values()))):
                found[f"{phase}, computing over transfers {how}"] = Derived(
                    compute / total,
                    "1",
                    "from 1 on, computing hides the transfers",
                )
    return found


def ring_limits(
    model: FeedForwardStack = XXL, *, mesh: Mesh | None = None, tokens: int
) -> dict[str, Derived]:
    """Most devices of each kind that computing hides, from :func:`ring_step` with one axis each.

    With a = B·W/C and b = m·F·W/(2·C): data parallelism and FSDP Z, X ≤ 1 + a in both passes;
    tensor parallelism Y ≤ 1 + b in forward and 1 + 2·b in backward; FSDP and tensor parallelism
    together, in forward, X·Y ≤ (1 + a)(1 + b) if their transfers overlap, and, if they take turns,
    (a·b + a + b)² / (4·a·b), or one axis alone where the split has less than one rank of an axis.

    Args:
        mesh: only its bandwidth and FLOP/s are used.
        tokens: B, of the whole batch.
    """
    mesh = mesh or Mesh()
    a = tokens * mesh.bandwidth / mesh.flops
    b = model.matrices * model.d_ff * mesh.bandwidth / (2 * mesh.flops)
    # (X - 1)/a + (Y - 1)/b ≤ 1 with X, Y ≥ 1: the product is largest at X = a·l/2, Y = b·l/2.
    slack = 1 + 1 / a + 1 / b
    inside = a * slack / 2 >= 1 and b * slack / 2 >= 1
    in_turn = a * b * slack**2 / 4 if inside else 1 + max(a, b)
    limits = {
        "most replicas (data parallel)": (1 + a, "Z ≤ 1 + B·W/C"),
        "most ranks of FSDP": (1 + a, "X ≤ 1 + B·W/C"),
        "most ranks of tensor parallelism, forward": (1 + b, "Y ≤ 1 + m·F·W/(2·C)"),
        "most ranks of tensor parallelism, backward": (1 + 2 * b, "Y ≤ 1 + m·F·W/C"),
        "most devices of both, transfers at once": (
            (1 + a) * (1 + b),
            "X·Y ≤ (1 + a)·(1 + b), a = B·W/C, b = m·F·W/(2·C)",
        ),
        "most devices of both, transfers in turn": (
            in_turn,
            "X·Y ≤ (a·b + a + b)² / (4·a·b)" if inside else "X·Y ≤ 1 + max(a, b)",
        ),
    }
    return {name: Derived(value, "devices", how) for name, (value, how) in limits.items()}


def described(given: Mapping[str, Any]) -> tuple[FeedForwardStack, Mesh, int]:
    """A stack, a mesh and the tokens of a batch from one set of names.

    Args:
        given: fields of :class:`FeedForwardStack` and :class:`Mesh`, and ``tokens``; what is left
            out is the XXL problem's, with 65,536 tokens.

    Raises:
        ValueError: an unknown name, or a value that is not a positive number.
    """
    stack = {field.name for field in fields(FeedForwardStack)}
    mesh = {field.name for field in fields(Mesh)}
    for name, value in given.items():
        if name not in {*stack, *mesh, "tokens"}:
            raise ValueError(
                f"mesh must have names of {', '.join(sorted({*stack, *mesh, 'tokens'}))}, but got "
                f"{name!r}. Correct it."
            )
        whole = name not in ("bandwidth", "flops")
        allowed = (int,) if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
            raise ValueError(
                f"{name} of mesh must be a positive {'whole ' * whole}number, but got {value!r}. "
                "Correct it."
            )
    return (
        FeedForwardStack(**{k: v for k, v in given.items() if k in stack}),
        Mesh(**{k: v for k, v in given.items() if k in mesh}),
        given.get("tokens", 65_536),
    )
