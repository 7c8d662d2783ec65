"""Arithmetic of training: parameters, operations, bytes, communication, with derivations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.core import Bar, Bars, Case, Column, Figure, Progress, Row, Table, option
from bench_harness.display import row_tables
from bench_harness.experiments.base import Experiment
from bench_harness.roofline import forward_flops

if TYPE_CHECKING:
    import pandas as pd

    from basics_model.sizes import SizeName

_COLUMNS = row_tables.Columns(
    Column("variant", "size"),
    Column("forward_gflop", "forward", "GFLOP", 6),
    Column("step_gflop", "training step", "GFLOP", 6),
    Column("parameter_gb", "parameters", "GB", 6),
    Column("gradient_gb", "gradients", "GB", 6),
    Column("state_gb", "optimizer state", "GB", 6),
    Column("sharded_state_gb", "sharded state per rank", "GB", 6),
    Column("residual_mib", "residual stream", "MiB", 6),
    Column("traffic_gb", "sent per rank and step", "GB", 6),
    Column("value", "value", "in unit", 6),
    Column("unit", "unit"),
)
_NAMES = ("small", "medium", "large", "xl", "2.7B")

_SEQUENCE = 256
#: Memory of one GPU, and of one sharding device, in the course's mesh problem (10⁹ bytes).
_DEVICE_GB, _SHARD_DEVICE_GB = 80.0, 95.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of :class:`Accounting`; the defaults take no time anywhere."""

    sizes: tuple[str, ...] = option(_NAMES, "Model sizes.", choices=_NAMES)
    batch: int = option(4, "Sequences per batch.")
    world_size: int = option(2, "Data-parallel ranks.")
    coursework: bool = option(False, "Also calculate the course's mesh problem.")
    mesh: dict[str, Any] | None = option(  # noqa: RUF009 - its default is None
        None,
        "Also calculate a mesh problem of your own: data, fsdp and tensor (ranks), tokens, "
        "bandwidth (bytes/s), flops, d_model, d_ff, num_blocks, matrices, fsdp_axes, tensor_axes.",
    )


class Accounting(Experiment):
    """What training costs by calculation alone."""

    name: ClassVar[str] = "accounting"
    summary: ClassVar[str] = "Parameters, FLOPs, bytes and communication, derived"
    guide: ClassVar[str] = (
        "Calculates, and measures nothing: parameters, operations, bytes and communication of "
        "the named sizes; with --coursework or --mesh also a mesh problem, derived step by step."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "accounting",
        "accounting --sizes xl --world-size 8",
        "accounting --mesh 'fsdp = 16, tensor = 4, tokens = 65536'",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case."""
        chosen = Options(**options)
        if chosen.mesh is not None:
            from bench_harness.mesh_accounting import described

            described(chosen.mesh)
        return [
            Case(
                experiment=self.name,
                config={
                    "sizes": list(chosen.sizes),
                    "batch": chosen.batch,
                    "sequence": _SEQUENCE,
                    "world_size": chosen.world_size,
                    "coursework": chosen.coursework,
                    **({} if chosen.mesh is None else {"mesh": chosen.mesh}),
                    "device_gb": _DEVICE_GB,
                    "shard_device_gb": _SHARD_DEVICE_GB,
                    "label": "accounting",
                },
            )
        ]

    def run(self, case: Case, progress: Progress) -> list[Row]:
        """Calculates; nothing is measured."""
        progress("calculating")
        config = case.config
        sizes = [size_row(name, config) for name in config["sizes"]]
        given = config.get("mesh", {} if config["coursework"] else None)
        if given is None:
            return sizes
        from bench_harness.mesh_accounting import mesh_rows

        return [*sizes, *mesh_rows(given, config["device_gb"], config["shard_device_gb"])]

    def work_s(self, case: Case) -> float:
        """A moment."""
        return 0.3

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Model sizes; the mesh problem with its derivations."""
        if "kind" not in rows:
            return []
        done = row_tables.finished(rows)
        tables = [
            _COLUMNS.table(
                "Model sizes by calculation",
                done[done["kind"] == "size"],
                "variant parameters forward_gflop step_gflop parameter_gb gradient_gb state_gb "
                "sharded_state_gb residual_mib traffic_gb",
                "fp32, AdamW. A step is three forward passes' operations. The residual stream is "
                "batch × sequence × d_model × 4 bytes. Sent: a ring all-reduce of all gradients, "
                "2·(n-1)/n of their bytes. GB is 10⁹ bytes.",
            )
        ]
        mesh = done[done["kind"] == "mesh"]
        if len(mesh):
            tables.append(
                _COLUMNS.table(
                    "The mesh problem",
                    mesh,
                    "variant value unit derivation",
                    "Feed-forward blocks of linear layers; bf16 activations and communication, "
                    "fp32 weights, gradients and moments. Times are of one block, over rings.",
                    {"variant": "quantity"},
                )
            )
        return tables

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Where the operations of a forward pass go, by size."""
        if "flops_by_part" not in rows:
            return []
        sizes = rows[rows["flops_by_part"].notna()]
        bars = [
            Bar(name, {part: 100 * flops / sum(parts.values()) for part, flops in parts.items()})
            for name, parts in zip(sizes["variant"], sizes["flops_by_part"], strict=True)
        ]
        title = "Operations of a forward pass by part"
        return [Figure("accounting_flops", title, Bars("%", {"": bars}))]


def size_row(name: SizeName, config: Any) -> Row:
    """One model size: parameters, operations, bytes, traffic."""
    import basics_model
    from shard_optim.accounting import GB, rank_memory, step_traffic

    batch, sequence, world_size = config["batch"], config["sequence"], config["world_size"]
    model = basics_model.model_config(name, context_length=sequence)
    numel = model.num_parameters
    parts = forward_flops(model, batch, sequence)
    memory = rank_memory(numel, world_size=world_size, stage=0)
    sharded = rank_memory(numel, world_size=world_size, stage=1)
    return {
        "variant": name,
        "kind": "size",
        "parameters": numel,
        "flops_by_part": parts,
        "forward_gflop": sum(parts.values()) / 1e9,
        "step_gflop": 3 * sum(parts.values()) / 1e9,
        "parameter_gb": memory.parameters / GB,
        "gradient_gb": memory.gradients / GB,
        "state_gb": memory.optimizer_state / GB,
        "sharded_state_gb": sharded.optimizer_state / GB,
        "residual_mib": batch * sequence * model.d_model * 4 / 2**20,
        "traffic_gb": step_traffic(numel, world_size=world_size, stage=0) / GB,
    }
