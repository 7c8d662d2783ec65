"""Losses of ways to train on real text, against a reference, over several seeds.

What makes a step faster may not make it train worse. Every variant trains from the same initial
weights on the same windows of text as the reference, once per seed, and its mean curve must stay
within what the seeds of the reference differ by. After the last step all ranks must hold the same
weights. ``python -m tools.pages curves TARGET.jsonl`` measures the rows of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from bench_harness.core import Case, Figure, Row, Table, option
from bench_harness.display import row_tables
from bench_harness.distributed import default_world_size, run_on_ranks
from bench_harness.environment import resolve_device
from bench_harness.experiments.base import DimensionOptions, Experiment
from bench_harness.training import settings
from bench_harness.workload import SIZES

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import torch

    from bench_harness.training.build import Training

#: Values of a byte: the text's UTF-8 bytes are its tokens.
VOCABULARY = 256
#: Curves are compared as means over windows of this share of the steps.
WINDOWS = 10
REFERENCE: dict[str, Any] = {"wrapper": "naive", "precision": "fp32"}
FAST: dict[str, Any] = {
    "wrapper": {"name": "fully-sharded", "compute_dtype": "bf16", "reduce_dtype": "bf16"},
    "precision": "bf16",
    "attention": "flash",
    "loss": "chunked",
}


_FASTEST: dict[str, Any] = FAST | {
    "wrapper": FAST["wrapper"] | {"reshard_after_forward": False, "communication": "peer-copy"},
    "compile": "blocks",
}
#: What is measured for the page, on two GPUs.
PUBLISHED: dict[str, Any] = {"world_size": 2, "variants": (REFERENCE, _FASTEST)}
#: The same step with other products, against its own in bf16; float8 needs torchao.
PRODUCTS: dict[str, Any] = {
    "world_size": 2,
    "variants": (
        _FASTEST,
        *(_FASTEST | {"products": products} for products in ("joined", "float8", "float8-rows")),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options(DimensionOptions):
    """Options of :class:`LossCurves`."""

    size: str = option("small", "Model size.", choices=SIZES)
    batch: int = option(8, "Sequences per rank.")
    sequence: int = option(256, "Context length.")
    steps: int = option(200, "Training steps of each curve.")
    seeds: tuple[int, ...] = option((0, 1, 2), "Of the initial weights and of the windows.")
    lr: float = option(3e-4, "Learning rate of AdamW.")
    variants: tuple[dict[str, Any] | str, ...] = option(
        (),
        "Ways to train, as for train-step; the first is the reference. By default averaging in "
        "fp32, and the numerics of the fastest step.",
    )
    world_size: int | None = option(None, "Ranks; by default 2, or as many as there are GPUs.")

    def __post_init__(self) -> None:
        if self.steps < WINDOWS:
            raise ValueError(f"steps must be at least {WINDOWS}, but got {self.steps}. Raise it.")
        if len(self.seeds) < 2 or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"seeds must be at least two different numbers, but got {list(self.seeds)}. The "
                "differences between seeds are what a variant is compared with."
            )
        chosen = self.settings()
        settings.labels(chosen)
        if len(chosen) < 2:
            raise ValueError(
                "variants must be the reference and at least one other, but got "
                f"{len(chosen)}. Add one."
            )

    def settings(self) -> list[settings.Settings]:
        """The variants, complete, the reference first."""
        defaults = {"optimizer": {"name": "adamw", "lr": self.lr}}
        return [settings.read(each, defaults) for each in self.variants or (REFERENCE, FAST)]


class LossCurves(Experiment):
    """Compares the losses of faster ways to train with those of a reference."""

    name: ClassVar[str] = "loss-curves"
    summary: ClassVar[str] = "Losses on real text against a reference, over several seeds"
    guide: ClassVar[str] = (
        "Trains the language model on the bytes of a text, once per seed and variant, from the "
        "same weights and windows. The first variant is the reference. The mean curve of each "
        "other one must differ from it by less than the reference's seeds differ among "
        "themselves, and all ranks must end with the same weights."
    )
    Options: ClassVar[type[Any]] = Options

    def cases(self, **options: Any) -> list[Case]:
        """One case: all variants and seeds."""
        chosen = Options(**options)
        device = resolve_device(chosen.device)
        world_size = chosen.world_size or default_world_size(device)
        label = f"loss-curves {chosen.size} b{chosen.batch} s{chosen.sequence}"
        config: Row = {
            "size": chosen.size,
            **chosen.dimensions(),
            "vocab_size": VOCABULARY,
            "batch": chosen.batch,
            "sequence": chosen.sequence,
            "steps": chosen.steps,
            "seeds": list(chosen.seeds),
            "text": "python",
            "variants": [variant.table() for variant in chosen.settings()],
            "world_size": world_size,
            "nnodes": 1,  # as in published rows, whose keys stay
            "device": device,
            "label": f"{label} {chosen.steps} steps {world_size} ranks",
        }
        return [Case(experiment=self.name, config=config, timeout_s=900)]

    def run(self, case: Case, progress: Callable[[str], None]) -> list[Row]:
        """Trains every variant with every seed."""
        rows: list[Row] = run_on_ranks(case, progress, train_rank, corpus())[0]
        return rows

    def tables(self, rows: pd.DataFrame) -> list[Table]:
        """Each variant against the reference, and every curve's end."""
        import pandas as pd

        done = row_tables.finished(rows)
        if "losses" not in done or done.empty:
            return [Table("Loss curves", row_tables.columns(rows, {"status": "status"}))]
        lines = []
        for _, cell in done.groupby("case_key", sort=False):
            curves = _curves(cell)
            reference, *others = curves
            spread = curves[reference].max(axis=0) - curves[reference].min(axis=0)
            for name in others:
                apart = abs(curves[name].mean(axis=0) - curves[reference].mean(axis=0))
                worst = int((apart / spread).argmax())
                agree = cell.loc[cell["way"].isin([name, reference]), "ranks_agree"]
                lines.append(
                    {
                        "variant": name,
                        "reference": reference,
                        "seeds (count)": len(curves[name]),
                        "steps (count)": int(cell["steps"].iloc[0]),
                        "last loss (nats)": round(float(curves[name].mean(axis=0)[-1]), 4),
                        "of the reference (nats)": round(
                            float(curves[reference].mean(axis=0)[-1]), 4
                        ),
                        "largest difference (nats)": round(float(apart[worst]), 5),
                        "spread of seeds there (nats)": round(float(spread[worst]), 5),
                        "within the spread": bool((apart <= spread).all()),
                        "ranks end alike": bool(agree.all()),
                    }
                )
        ends = done.assign(
            first=[losses[0] for losses in done["losses"]],
            last=[_windows(losses)[-1] for losses in done["losses"]],
        )
        return [
            Table(
                "Loss curves",
                pd.DataFrame(lines),
                f"Nats per byte, means over windows of a {WINDOWS}th of the steps, then over "
                "seeds, on the same weights and text. The largest difference is that of the "
                "window in which it is largest relative to the spread: the highest minus the "
                "lowest seed of the reference.",
            ),
            Table(
                "Losses by seed",
                row_tables.columns(
                    ends,
                    {
                        "way": "variant",
                        "seed": "seed (number)",
                        "first": "first loss (nats)",
                        "last": "loss of the last window (nats)",
                        "ranks_agree": "ranks end alike",
                    },
                ),
            ),
        ]

    def figures(self, rows: pd.DataFrame) -> list[Figure]:
        """The mean curve of every variant, and its difference beside the spread of seeds."""
        import textwrap

        from bench_harness.display.bars import COLOURS
        from bench_harness.display.plots import new_figure

        done = row_tables.finished(rows)
        if "losses" not in done or done.empty:
            return []
        cell = done[done["case_key"] == done["case_key"].iloc[0]]
        curves = _curves(cell)
        reference, *others = curves
        width = int(cell["steps"].iloc[0]) / WINDOWS
        x = [(index + 0.5) * width for index in range(WINDOWS)]
        figure, axes = new_figure(height=4.8, rows=2, sharex=True)
        colours = dict(zip(curves, COLOURS * len(curves), strict=False))
        base = curves[reference]
        half = (base.max(axis=0) - base.min(axis=0)) / 2
        for name, found in curves.items():
            axes[0, 0].plot(
                x, found.mean(axis=0), "o-", color=colours[name], label=textwrap.fill(name, 70)
            )
        for name in others:
            apart = curves[name].mean(axis=0) - base.mean(axis=0)
            axes[1, 0].plot(x, apart, "o-", color=colours[name])
        band = {"color": colours[reference], "alpha": 0.2}
        axes[0, 0].fill_between(x, base.min(axis=0), base.max(axis=0), **band)
        axes[1, 0].fill_between(x, -half, half, label="spread of the reference's seeds", **band)
        axes[0, 0].set_ylabel("loss (nats per byte)")
        axes[1, 0].set_ylabel("minus the reference (nats)")
        axes[1, 0].set_xlabel("step")
        figure.legend(loc="outside upper center", fontsize="small")
        return [
            Figure(
                "loss_curves",
                "Losses against the reference",
                figure,
                "Means over seeds; the band reaches from the lowest to the highest seed of the "
                "reference.",
            )
        ]


def corpus() -> np.ndarray[Any, Any]:
    """The bytes of the language reference that every Python holds."""
    from pydoc_data.topics import topics

    import numpy as np

    content = "\n".join(topics[name] for name in sorted(topics)).encode()
    return np.frombuffer(content, dtype=np.uint8)


def train_rank(
    rank: int,
    world_size: int,
    device: torch.device,
    config: Mapping[str, Any],
    tokens: np.ndarray[Any, Any],
    progress: Callable[[str], None],
) -> list[Row]:
    """One row per variant and seed; the losses are means over ranks."""
    from bench_harness.training import proof
    from bench_harness.training.build import training

    variants = [settings.stored(table) for table in config["variants"]]
    rows: list[Row] = []
    for seed in config["seeds"]:
        for label, variant in zip(settings.labels(variants), variants, strict=True):
            progress(f"seed {seed}: {label}")
            with training(variant, {**config, "seed": seed}, device) as steps:
                losses = _train(steps, config, tokens, seed, rank, world_size)
                apart = proof.apart(steps.parameters())
            rows.append(
                {"variant": f"{label}, seed {seed}", "way": label, "settings": variant.table()}
                | {"seed": seed, "losses": losses, "ranks_agree": apart is None}
            )
    return rows


def _train(
    steps: Training,
    config: Mapping[str, Any],
    tokens: np.ndarray[Any, Any],
    seed: int,
    rank: int,
    world_size: int,
) -> list[float]:
    """The losses of all steps, averaged over ranks."""
    import numpy as np
    import torch
    import torch.distributed as dist

    batch, length = config["batch"], config["sequence"] + 1
    windows = np.random.default_rng(seed)
    held = steps.workload.tokens
    assert held is not None
    losses = []
    for _ in range(config["steps"]):
        # Every rank draws the windows of all ranks, and takes its own.
        starts = windows.integers(len(tokens) - length, size=(world_size, batch))[rank]
        drawn = np.stack([tokens[start : start + length] for start in starts])
        held.copy_(torch.from_numpy(drawn.astype(np.int64)))
        losses.append(steps.step().float())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return [round(float(loss), 6) for loss in total / world_size]


def _windows(losses: list[float]) -> list[float]:
    """Means over equal windows, the last of which ends with the last step."""
    size = len(losses) // WINDOWS
    kept = losses[len(losses) - WINDOWS * size :]
    return [sum(kept[at : at + size]) / size for at in range(0, len(kept), size)]


def _curves(cell: pd.DataFrame) -> dict[str, np.ndarray[Any, Any]]:
    """By variant, the reference first: an array (seeds, windows)."""
    import numpy as np

    return {
        str(name): np.array([_windows(losses) for losses in own["losses"]])
        for name, own in cell.groupby("way", sort=False)
    }
