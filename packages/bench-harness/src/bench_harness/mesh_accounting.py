"""Memory and communication of a very large feed-forward stack on a device mesh, as arithmetic.

The assignment's calculations of both editions; every figure comes with its derivation as text.

Two models of transfers. :meth:`MeshProblem.compute_bound` follows J. Austin et al., *How to Scale
Your Model* (2025), where W is an axis of a torus with both directions and a factor (n - 1)/n is
left out. :meth:`MeshProblem.step` and :meth:`MeshProblem.limits` count rings of devices that each
send W bytes/s: (n - 1)/n · S/W for an all-gather or reduce-scatter of S bytes, and twice that for
an all-reduce.

P is the number of parameters, 2 bytes a value where it is sent or multiplied; GB is 10^9 bytes, as
on accelerator data sheets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from bench_harness.core import Row
from shard_optim.accounting import GB, rank_memory


class Derived(NamedTuple):
    """A number and how it came about."""

    variant: str
    value: float
    unit: str
    derivation: str


@dataclass(frozen=True, kw_only=True)
class MeshProblem:
    """Blocks of linear layers, D -> F -> D, on a mesh; the defaults: XXL on 16 × 4 TPU v5p.

    Attributes:
        d_model, d_ff, num_blocks: D, F and L.
        matrices: m of a block, 2 for D -> F -> D, 3 for a gated layer, which has two D -> F.
        data: Z, replicas of the sharded group.
        fsdp: X, ranks over which weights are sharded.
        tensor: Y, ranks over which matrices are split.
        fsdp_axes, tensor_axes: M_X and M_Y, physical axes that either traffic uses at once.
        bandwidth: W, bytes/s of one axis, both directions together.
        flops: C, FLOP/s of one device.
        tokens: B, of the whole batch.
    """

    d_model: int = 16384
    d_ff: int = 53248
    num_blocks: int = 126
    matrices: int = 2
    data: int = 1
    fsdp: int = 16
    tensor: int = 4
    fsdp_axes: int = 2
    tensor_axes: int = 1
    bandwidth: float = 2 * 9e10
    flops: float = 4.6e14
    tokens: int = 65_536

    def __post_init__(self) -> None:
        for each in fields(self):
            value, whole = getattr(self, each.name), each.type == "int"
            allowed = (int,) if whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, allowed) or value <= 0:
                raise ValueError(
                    f"{each.name} of mesh must be a positive {'whole ' * whole}number, but got "
                    f"{value!r}. Correct it."
                )

    @property
    def numel(self) -> int:
        """P = m·D·F·L parameters."""
        return self.matrices * self.d_model * self.d_ff * self.num_blocks

    @property
    def saved_widths(self) -> int:
        """Values kept for backward per token and block: D + F, the inputs of both matrices.

        A gated block keeps D + 3·F: both factors of the product, and the product.
        """
        return self.d_model + (2 * self.matrices - 3) * self.d_ff

    def saved_gb(self, tokens: int) -> float:
        """A: the activations in bf16 that so many tokens keep for backward."""
        return 2 * self.saved_widths * self.num_blocks * tokens / GB

    def sharded_gb(self, ranks: int, tokens: int = 0) -> float:
        """On each of N ranks: 16 bytes a parameter over N, and A, of which every second is too."""
        fixed = rank_memory(self.numel, world_size=ranks, stage=3).total / GB
        return fixed + self.saved_gb(tokens) * (0.5 / ranks + 0.5)

    def fewest_ranks(self, device_gb: float, tokens: int = 0) -> tuple[int, str]:
        """The least N for which :meth:`sharded_gb` is below a device's memory, and why.

        Raises:
            ValueError: the half of the activations that is not sharded fills a device.
        """
        half = self.saved_gb(tokens) / 2
        if half >= device_gb:
            raise ValueError(
                f"half of the activations must fit one device of {device_gb:g} GB, but got "
                f"{half:.1f} GB. Use fewer than {tokens} tokens per device."
            )
        weights = self.sharded_gb(1)
        needed = (weights + half) / (device_gb - half)
        above, below = f"({weights:.1f} + {half:.2f}) GB", f"({device_gb:g} - {half:.2f}) GB"
        return int(needed) + 1, f"N > {above} / {below} = {needed:.2f}"

    def memory(self, device_gb: float, shard_device_gb: float) -> list[Derived]:
        """fp32 master weights, gradients and Adam's state on one device, and under FSDP.

        Args:
            device_gb: memory of a device; 80 for an H100.
            shard_device_gb: memory of a device of the mesh.
        """
        factors = f"{self.matrices}·{self.d_model}·{self.d_ff}·{self.num_blocks}"
        count = f"{factors} = {self.numel:,} parameters"
        held = rank_memory(self.numel, world_size=1, stage=0)
        parts = {
            "master weights": (held.parameters, "4 B"),
            "gradients": (held.gradients, "4 B"),
            "optimizer state": (held.optimizer_state, "8 B (two fp32 moments)"),
            "total": (held.total, "16 B"),
        }
        found = [
            Derived(name, value / GB, "GB", f"{count} × {each}")
            for name, (value, each) in parts.items()
        ]
        total, ends = held.total / GB, f"fewest devices of {shard_device_gb:g} GB"
        widths = f"{self.d_model} + {self.saved_widths - self.d_model}"
        why = f"bf16 inputs of the layers: 2 B × ({widths}) × {self.num_blocks} blocks"
        found.append(Derived("saved for backward per token", 1e3 * self.saved_gb(1), "MB", why))
        why = f"{total:.1f} GB / {device_gb:g} GB, activations excluded"
        found.append(Derived("devices", total / device_gb, f"devices of {device_gb:g} GB", why))
        ranks, why = self.fewest_ranks(shard_device_gb)
        found.append(Derived(f"{ends}, weights only", float(ranks), "devices", why))
        why = f"16 B × {self.numel:,} / {ranks} + 0.00 GB of activations × (0.5/{ranks} + 0.5)"
        found.append(Derived("memory per device then", self.sharded_gb(ranks), "GB", why))
        ranks, why = self.fewest_ranks(shard_device_gb, tokens=1024)
        return [*found, Derived(f"{ends}, 1024 tokens each", float(ranks), "devices", why)]

    def compute_bound(self) -> list[Derived]:
        """Smallest batch at which forward under FSDP × tensor parallelism is compute bound.

        Per block: T_math = 4·B·D·F / (X·Y·C); T_fsdp = 4·D·F / (Y·W·M_X), gathering both weight
        matrices; T_tensor = 4·B·D / (X·W·M_Y), moving activations in and out. With α = C/W,
        T_math ≥ T_fsdp + T_tensor holds from B = X·F·(α/M_X) / (F - α·Y/M_Y) on. If both transfers
        run at once, T_math ≥ T_fsdp alone decides, provided F ≥ α·Y/M_Y. The longer transfer is
        least where both are equal, at X = sqrt(B·M_X·N / (F·M_Y)) with N = X·Y devices; there
        T_math ≥ T_fsdp holds from B/N = α² / (M_X·M_Y·F) on.

        Raises:
            ValueError: splitting matrices is communication bound at any batch size.
        """
        alpha, devices = self.flops / self.bandwidth, self.fsdp * self.tensor
        narrow = alpha * self.tensor / self.tensor_axes
        if narrow >= self.d_ff:
            raise ValueError(
                f"d_ff must exceed α·Y/M_Y = {narrow:.0f} for any batch to be compute bound, but "
                f"got {self.d_ff}. Split matrices over fewer ranks."
            )
        weights = self.fsdp * alpha / self.fsdp_axes
        both = f"{weights:.0f} × {self.d_ff} / ({self.d_ff} - {narrow:.0f})"
        found = []
        for how, overall, why in (
            (
                "in turn",
                weights * self.d_ff / (self.d_ff - narrow),
                f"X·(α/M_X)·F / (F - α·Y/M_Y) = {both}",
            ),
            ("at once", weights, f"X·α/M_X = {weights:.0f}"),
        ):
            name, tail = "compute-bound batch,", f"transfers {how}"
            why = f"α = C/W = {alpha:.1f}; B = {why}"
            found.append(Derived(f"{name} overall, {tail}", overall, "tokens", why))
            each = overall / devices
            found.append(
                Derived(f"{name} per device, {tail}", each, "tokens", f"B / {devices} devices")
            )
        least = alpha**2 / (self.fsdp_axes * self.tensor_axes * self.d_ff)
        best = devices * alpha / (self.tensor_axes * self.d_ff)
        how = f"X = sqrt(B·M_X·N / (F·M_Y)) = N·α/(M_Y·F), N = {devices} devices"
        most, limit = self.d_ff * self.tensor_axes / alpha, "most ranks of tensor parallelism"
        return [
            *found,
            Derived(
                "least batch per device, best split",
                least,
                "tokens",
                f"α² / (M_X·M_Y·F), α = {alpha:.1f}",
            ),
            Derived("FSDP ranks of the best split", best, "ranks", how),
            Derived(limit, most, "ranks", f"Y < F·M_Y/α = {self.d_ff} / {alpha:.1f}"),
        ]

    def step(self) -> list[Derived]:
        """Times of one block's forward and backward, computing and on each axis of rings.

        The batch is split over data × fsdp ranks, the matrices over tensor ranks, and each tensor
        slice is stored on fsdp ranks. Forward gathers weights and all-reduces outputs; backward
        gathers weights and reduce-scatters gradients, all-reduces gradients of inputs, and those
        of replicas.
        """
        z, x, y = self.data, self.fsdp, self.tensor
        weights = 2 * self.matrices * self.d_model * self.d_ff / y
        outputs = 2 * self.tokens * self.d_model / (z * x)
        computing = self.tokens * weights / (z * x) / self.flops
        found = []
        for phase, twice in (("forward", 1), ("backward", 2)):
            transfers = {
                "FSDP": (x, twice * weights, f"{twice}·(X-1)/X·2·m·D·F/(Y·W)"),
                "tensor": (y, 2 * outputs, "2·(Y-1)/Y·2·B·D/(Z·X·W)"),
            }
            if phase == "backward":
                transfers["data"] = (z, 2 * weights / x, "2·(Z-1)/Z·2·m·D·F/(X·Y·W)")
            how, name = f"{2 * twice}·m·B·D·F/(Z·X·Y·C)", f"{phase}, computing"
            found.append(Derived(name, 1e3 * twice * computing, "ms", how))
            times = []
            for axis, (ranks, size, formula) in transfers.items():
                times.append((ranks - 1) / ranks * size / self.bandwidth)
                found.append(Derived(f"{phase}, {axis} axis", 1e3 * times[-1], "ms", formula))
            if any(times):
                why = "from 1 on, computing hides the transfers"
                found += [
                    Derived(f"{name} over transfers {how}", twice * computing / total, "1", why)
                    for how, total in (("at once", max(times)), ("in turn", sum(times)))
                ]
        return found

    def limits(self) -> list[Derived]:
        """Most devices of each kind that computing hides, from :meth:`step` with one axis each.

        With a = B·W/C and b = m·F·W/(2·C). For both axes in turn (X - 1)/a + (Y - 1)/b ≤ 1 with
        X, Y ≥ 1: the product is largest at X = a·l/2, Y = b·l/2, l = 1 + 1/a + 1/b, or with one
        axis alone where that has less than one rank of an axis.
        """
        a = self.tokens * self.bandwidth / self.flops
        b = self.matrices * self.d_ff * self.bandwidth / (2 * self.flops)
        slack = 1 + 1 / a + 1 / b
        inside = a * slack / 2 >= 1 and b * slack / 2 >= 1
        in_turn = a * b * slack**2 / 4 if inside else 1 + max(a, b)
        alone = "(a·b + a + b)² / (4·a·b)" if inside else "1 + max(a, b)"
        tensor, both = "most ranks of tensor parallelism", "most devices of both, transfers"
        limits = {
            "most replicas (data parallel)": (1 + a, "Z ≤ 1 + B·W/C"),
            "most ranks of FSDP": (1 + a, "X ≤ 1 + B·W/C"),
            f"{tensor}, forward": (1 + b, "Y ≤ 1 + m·F·W/(2·C)"),
            f"{tensor}, backward": (1 + 2 * b, "Y ≤ 1 + m·F·W/C"),
            f"{both} at once": (
                (1 + a) * (1 + b),
                "X·Y ≤ (1 + a)·(1 + b), a = B·W/C, b = m·F·W/(2·C)",
            ),
            f"{both} in turn": (in_turn, f"X·Y ≤ {alone}"),
        }
        return [Derived(name, value, "devices", how) for name, (value, how) in limits.items()]


def described(given: Mapping[str, Any]) -> MeshProblem:
    """A problem from its names; what is left out is the XXL problem's.

    Raises:
        ValueError: an unknown name, or a value that is not a positive number.
    """
    known = {each.name for each in fields(MeshProblem)}
    for name in given:
        if name not in known:
            raise ValueError(
                f"mesh must have names of {', '.join(sorted(known))}, but got {name!r}. Correct it."
            )
    return MeshProblem(**given)


def mesh_rows(given: Mapping[str, Any], device_gb: float, shard_device_gb: float) -> list[Row]:
    """Memory of devices, compute-bound batch, times and limits of a :class:`MeshProblem`."""
    problem = described(given)
    derived = [*problem.memory(device_gb, shard_device_gb), *problem.compute_bound()]
    derived += [*problem.step(), *problem.limits()]
    return [{"kind": "mesh", **each._asdict()} for each in derived]
