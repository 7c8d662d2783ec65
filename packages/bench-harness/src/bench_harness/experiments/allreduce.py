"""Collectives over payload sizes and ranks: algorithm and bus bandwidth, and what a call costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from bench_harness.core import Case, Column, Config, Figure, Progress, Row, Table, option
from bench_harness.display import row_tables
from bench_harness.display.lines import Panel, draw_lines, points
from bench_harness.distributed import default_world_size, on_rank_0, run_on_ranks, slowest_rank
from bench_harness.experiments.base import DeviceOptions, Experiment
from bench_harness.roofline import bus_bandwidth_factor
from bench_harness.timing import Samples, SamplingOptions, in_turns, record_sample

if TYPE_CHECKING:
    import pandas as pd
    import torch
    from torch import Tensor

#: A fit of :func:`fit` as columns.
COST = (
    Column("o", "overhead o", "µs"),
    Column("o_low", "o 95 % low", "µs"),
    Column("o_high", "o 95 % high", "µs"),
    Column("w", "bandwidth w", "GB/s"),
    Column("w_low", "w 95 % low", "GB/s"),
    Column("w_high", "w 95 % high", "GB/s"),
)
_COLUMNS = row_tables.Columns(
    Column("variant", "collective"),
    Column("size_mib", "payload", "MiB"),
    Column("algorithm_gb_s", "algorithm bandwidth", "GB/s"),
    Column("bus_gb_s", "bus bandwidth", "GB/s"),
    *COST,
)
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


@dataclass(frozen=True, kw_only=True)
class Options(SamplingOptions, DeviceOptions):
    """Options of :class:`AllReduce`."""

    sizes_mb: tuple[float, ...] = option(
        (1, 10, 100, 1024), "Payload per rank (MB of 1024² bytes)."
    )
    world_sizes: tuple[int, ...] = option(
        (), "Ranks; by default 2, or as many as there are GPUs if fewer."
    )
    operations: tuple[str, ...] = option(OPERATIONS, "Collectives.", choices=OPERATIONS)
    warmup: int = option(5, "Warm-up calls per size.")
    samples: int = option(20, "Measured calls per size.")


class AllReduce(Experiment):
    """Bandwidth of collectives."""

    name: ClassVar[str] = "allreduce"
    summary: ClassVar[str] = "Collectives: bandwidth over payload size, cost per call"
    guide: ClassVar[str] = (
        "Times collectives over sizes and numbers of ranks, checks their results, and fits the "
        "cost of a call, o, and the bandwidth, w, in t = o + S/w. Bus bandwidth is what every "
        "link carries, so it compares between numbers of ranks."
    )
    examples: ClassVar[tuple[str, ...]] = (
        "allreduce --device cpu --world-sizes 2 --sizes-mb 1,10",
        "allreduce --operations all_reduce --world-sizes 2,4",
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case per number of ranks; all collectives and sizes in each."""
        chosen = Options(**options)
        common = chosen.stored("sizes_mb operations warmup samples interval max_seconds")
        backend = "nccl" if common["device"] == "cuda" else "gloo"
        configs: list[Row] = [
            {
                **common,
                "backend": backend,
                "world_size": world_size,
                "nnodes": 1,  # as in published rows, whose keys stay
                "label": f"allreduce {backend} {world_size} ranks",
            }
            for world_size in chosen.world_sizes or (default_world_size(common["device"]),)
        ]
        return [Case(experiment=self.name, config=config, timeout_s=900) for config in configs]

    def run(self, case: Case, progress: Progress) -> list[Row]:
        """Checks the result of every collective at every size, then times it."""
        results = run_on_ranks(case, progress, measure_rank)
        return [slowest_rank(ranks) for ranks in zip(*results, strict=True)]

    def work_s(self, case: Case) -> float:
        """The ranks start, and NCCL connects them."""
        each = 1.0 if case.config["device"] == "cuda" else 0.5
        return 1.0 + each * float(case.config["world_size"])

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Time and bandwidth of every collective; overhead and bandwidth fitted."""
        from bench_harness.stats import with_summary

        frame = with_bandwidth(with_summary(rows))
        tables = [
            _COLUMNS.table(
                "Collectives",
                frame,
                f"backend world_size variant size_mib {row_tables.STATISTICS} algorithm_gb_s "
                "bus_gb_s status",
                "fp32; the slowest rank's time of each call, ranks aligned by a barrier. Payload "
                "is the whole vector: what each rank holds before an all-reduce or "
                "reduce-scatter, and after an all-gather or broadcast. Bus bandwidth multiplies "
                "by what a ring sends, so a perfect ring shows its links' own rate.",
            )
        ]
        return tables + fit_table(row_tables.finished(frame))

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """Time and bus bandwidth over payload."""
        from bench_harness.stats import with_summary

        done = row_tables.finished(rows)
        if "size_bytes" not in done or done.empty:
            return []
        done = with_bandwidth(with_summary(done))
        for end, other in (("low", "high"), ("high", "low")):
            time = done["median_ms"] / done[f"ci_{other}_ms"].astype("float64")
            done[f"bus_{end}"] = done["bus_gb_s"].astype("float64") * time
        groups = row_tables.by(done, ["backend", "world_size", "variant"])
        panels = [
            Panel(
                y=_COLUMNS[y].heading,
                lines={
                    name or "all_reduce": points(each, "size_mib", y, ends) for name, each in groups
                },
            )
            for y, ends in (
                ("median_ms", ("ci_low_ms", "ci_high_ms")),
                ("bus_gb_s", ("bus_low", "bus_high")),
            )
        ]
        figure = draw_lines(panels, x=_COLUMNS["size_mib"].heading, base=10)
        return [Figure("allreduce", "Collectives over payload size", figure)]


def measure_rank(
    rank: int, world_size: int, device: torch.device, config: Config, progress: Progress
) -> list[Row]:
    """One rank's part: a row per collective and size with this rank's samples."""
    import torch

    rows = []
    for size_mb in config["sizes_mb"]:
        progress(f"{size_mb:g} MB")
        # A multiple of the world size, so that every rank's share is equal.
        numel = max(1, round(size_mb * 2**20 / 4 / world_size)) * world_size
        samples = {operation: Samples() for operation in config["operations"]}
        for operation in config["operations"]:
            check(operation, rank, world_size, numel, device)
        # One vector for all: their results do not matter any more, and the largest fill a GiB.
        vector = torch.zeros(numel, device=device)
        share = vector.new_empty(numel // world_size)
        calls = {name: collective(name, vector, share) for name in config["operations"]}
        for _ in range(config["warmup"]):
            _once(calls, device, {})
        for _ in in_turns(
            tuple,
            config,
            lambda samples=samples: [each.wall_ms for each in samples.values()],  # type: ignore[misc]
            parts=len(config["sizes_mb"]),
            agreed=on_rank_0,
        ):
            for _ in range(config["samples"]):
                _once(calls, device, samples)
        rows += [
            {"variant": operation, "payload": f"{4 * numel / 2**20:.4g} MiB"}
            | {"size_bytes": 4 * numel, **timed.row()}
            for operation, timed in samples.items()
        ]
    return rows


def _once(
    calls: Mapping[str, Callable[[], object]], device: torch.device, samples: dict[str, Samples]
) -> None:
    """One call of every collective, ranks aligned; nothing is kept for those without samples."""
    import torch.distributed as dist

    for operation, call in calls.items():
        dist.barrier()
        with record_sample(samples.get(operation, Samples()), device):
            call()


def collective(operation: str, vector: Tensor, share: Tensor) -> Callable[[], object]:
    """The call that is timed.

    Args:
        vector: the whole payload.
        share: this rank's part of it: the result of a reduce-scatter, the input of an all-gather.

    Raises:
        ValueError: unknown operation.
    """
    import torch.distributed as dist

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(vector),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(share, vector),
        "all_gather": lambda: dist.all_gather_into_tensor(vector, share),
        "broadcast": lambda: dist.broadcast(vector, src=0),
    }
    if operation not in calls:
        raise ValueError(f"operation must be one of {', '.join(calls)}, but got {operation!r}")
    return calls[operation]


def check(operation: str, rank: int, world_size: int, numel: int, device: torch.device) -> None:
    """Runs the collective that is timed once on known values.

    Raises:
        ArithmeticError: an element of the result is wrong; nothing is timed then.
    """
    import torch

    # Small whole numbers, whose sums are exact in fp32.
    position = torch.arange(numel, device=device, dtype=torch.int32) % 251
    mine = slice(rank * (numel // world_size), (rank + 1) * (numel // world_size))
    vector, share = position.float().add_(rank), position[mine].float()
    collective(operation, vector, share)()
    total = position * world_size + world_size * (world_size - 1) // 2
    found, expected = {"all_reduce": (vector, total), "reduce_scatter": (share, total[mine])}.get(
        operation, (vector, position)
    )
    wrong = int((found != expected).sum())
    if wrong:
        raise ArithmeticError(
            f"{operation} of {numel} elements over {world_size} ranks must be exact, but got "
            f"{wrong} wrong elements on rank {rank}"
        )


def with_bandwidth(frame: pd.DataFrame) -> pd.DataFrame:
    """Adds algorithm and bus bandwidth in GB/s (10⁹ bytes per second)."""
    if "size_bytes" not in frame:
        return frame
    frame = frame.copy()
    frame["size_mib"] = frame["size_bytes"] / 2**20
    frame["algorithm_gb_s"] = frame["size_bytes"] / frame["median_ms"] / 1e6
    frame["bus_gb_s"] = [
        rate * bus_bandwidth_factor(operation, int(world_size)) if rate == rate else None
        for rate, operation, world_size in zip(
            frame["algorithm_gb_s"], frame["variant"], frame["world_size"], strict=True
        )
    ]
    return frame


def fit_table(done: pd.DataFrame) -> list[Table]:
    """o and w of t = o + S/w per collective and number of ranks, with at least three sizes."""
    import pandas as pd

    by = ["backend", "world_size", "variant"]
    lines = [
        dict(zip(by, which, strict=True))
        | shown(fit(list(group["size_bytes"]), list(group["samples_ms"])))
        for which, group in (done.groupby(by, sort=False) if "size_bytes" in done else ())
        if group["size_bytes"].nunique() >= 3
    ]
    note = (
        "t = o + S/w fitted by non-negative least squares with relative weights; intervals by "
        "bootstrap over the samples."
    )
    keys = " ".join([*by, *(column.key for column in COST)])
    made = [_COLUMNS.table("Cost of a collective", pd.DataFrame(lines), keys, note)]
    return made if lines else []


class Cost(NamedTuple):
    """What a collective costs: o seconds a call, and 1/w seconds a byte, 0 where none shows."""

    overhead_s: float
    per_byte_s: float


def fit(size_bytes: Sequence[float], samples_ms: Sequence[Sequence[float]]) -> tuple[Cost, ...]:
    """Fits o and w of t = o + S/w to the samples of each size, by :func:`with_interval`."""
    import numpy as np

    def once(draw: Callable[[Any], Any]) -> Cost:
        seconds = np.array([np.median(draw(samples)) for samples in samples_ms]) / 1e3
        # Dividing by the time makes every size count alike, from µs to seconds.
        return solved(1 / seconds, np.asarray(size_bytes) / seconds, np.ones_like(seconds))

    return with_interval(once, np.random.default_rng(0))


def solved(calls: Any, volumes: Any, seconds: Any) -> Cost:
    """o and 1/w of ``seconds`` = o·``calls`` + ``volumes``/w, both at least 0."""
    import numpy as np
    from scipy.optimize import nnls

    design = np.stack([calls, volumes], axis=1)
    scale = design.max(axis=0)  # columns of like size keep the solver well conditioned
    return Cost(*map(float, nnls(design / scale, np.maximum(seconds, 0.0))[0] / scale))


def with_interval(once: Callable[[Callable[[Any], Any]], Cost], rng: Any) -> tuple[Cost, ...]:
    """A fit, and the low and high ends of its 95 % intervals by bootstrap over the samples.

    Args:
        once: fits what the function that it gets draws of the samples of each quantity.
    """
    import numpy as np

    typical = once(np.asarray)
    draws = np.array([once(lambda samples: rng.choice(samples, len(samples))) for _ in range(400)])
    return typical, *(Cost(*map(float, end)) for end in np.percentile(draws, [2.5, 97.5], axis=0))


def shown(costs: Sequence[Cost]) -> Row:
    """A fit with its intervals as :data:`COST`; no bandwidth where bytes cost nothing."""
    (o, *o_ends), (slowness, *ends) = zip(*costs, strict=True)
    w, w_high, w_low = (1e-9 / each if each else None for each in (slowness, *ends))
    low, high = (1e6 * end for end in o_ends)
    return {"o": 1e6 * o, "o_low": low, "o_high": high, "w": w, "w_low": w_low, "w_high": w_high}
