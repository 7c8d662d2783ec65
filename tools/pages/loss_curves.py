"""Losses of ways to train on real text, against a reference, over several seeds.

What makes a step faster may not make it train worse. Every variant trains from the same initial
weights on the same windows of text as the reference, once per seed, and its mean curve must stay
within what the seeds of the reference differ by. After the last step all ranks must hold the same
weights. ``python -m tools.pages curves TARGET.jsonl`` measures the rows of the page.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from bench_harness.core import Case, Row
from bench_harness.display.bars import COLOURS
from bench_harness.display.plots import new_figure
from bench_harness.distributed import run_on_ranks
from bench_harness.training import settings

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure

TITLE, FIGURE = "Loss curves", "loss_curves"
#: Curves are compared as means over this many windows of equal length.
WINDOWS = 10
_FAST = (
    "fully-sharded(compute_dtype=bf16, reduce_dtype=bf16), precision=bf16, attention=flash, "
    "loss=chunked, compile=blocks"
)
#: The reference, the numerics of the fastest step, and products in float8 beside them.
VARIANTS = (
    "naive, precision=fp32",
    _FAST,
    f"{_FAST}, products=float8",
    f"{_FAST}, products=float8-rows",
)


def case(variants: Sequence[Mapping[str, Any] | str], device: str, **different: Any) -> Case:
    """All variants, the reference first, from every seed.

    Args:
        variants: as for train-step; :data:`VARIANTS` if empty.
        different: entries of the configuration in place of the page's own.
    """
    defaults = {"optimizer": {"name": "adamw", "lr": 3e-4}}
    chosen = [settings.read(each, defaults) for each in variants or VARIANTS]
    config: Row = {
        "size": "small",
        "vocab_size": 256,  # values of a byte: the text's UTF-8 bytes are its tokens
        "batch": 8,
        "sequence": 256,
        "steps": 200,
        "seeds": [0, 1, 2],
        "text": "python",
        "variants": [variant.table() for variant in chosen],
        "world_size": 2,
        "nnodes": 1,  # as in published rows, whose keys stay
        "device": device,
        **different,
    }
    config["label"] = (
        "loss-curves {size} b{batch} s{sequence} {steps} steps {world_size} ranks".format(**config)
    )
    return Case(experiment="loss-curves", config=config, timeout_s=900)


def run(case: Case) -> list[Row]:
    """Trains every variant with every seed: a row each, with the losses of all steps."""
    rows: list[Row] = run_on_ranks(case, print, train_rank, corpus())[0]
    return rows


def corpus() -> np.ndarray[Any, Any]:
    """The bytes of the language reference that every Python holds."""
    from pydoc_data.topics import topics

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
    import torch
    import torch.distributed as dist

    from bench_harness.training import proof
    from bench_harness.training.build import training

    variants = [settings.stored(table) for table in config["variants"]]
    named = list(zip(settings.labels(variants), variants, strict=True))
    texts = np.lib.stride_tricks.sliding_window_view(tokens, config["sequence"] + 1)
    rows: list[Row] = []
    for seed, (label, variant) in itertools.product(config["seeds"], named):
        progress(f"seed {seed}: {label}")
        random, losses = np.random.default_rng(seed), []
        with training(variant, {**config, "seed": seed}, device) as steps:
            assert steps.workload.tokens is not None
            for _ in range(config["steps"]):
                # Every rank draws the windows of all ranks, and takes its own.
                starts = random.integers(len(texts) - 1, size=(world_size, config["batch"]))[rank]
                drawn = torch.from_numpy(texts[starts].astype(np.int64))
                steps.workload.tokens.copy_(drawn)
                losses.append(steps.step().float())
            dist.all_reduce(total := torch.stack(losses))
            apart = proof.apart(steps.parameters())
        means = [round(float(loss), 6) for loss in total / world_size]
        rows.append(
            {"variant": f"{label}, seed {seed}", "way": label, "settings": variant.table()}
            | {"seed": seed, "losses": means, "ranks_agree": apart is None}
        )
    return rows


def _curves(rows: pd.DataFrame) -> dict[str, np.ndarray[Any, Any]]:
    """By variant, the reference first: means over windows, an array (seeds, windows)."""
    found = {}
    for name, own in rows.groupby("way", sort=False):
        losses = np.array(own["losses"].to_list())
        size = losses.shape[1] // WINDOWS
        found[str(name)] = losses[:, -WINDOWS * size :].reshape(len(losses), WINDOWS, size).mean(2)
    return found


def table(rows: pd.DataFrame) -> pd.DataFrame:
    """Each variant against the reference, in nats per byte.

    The largest difference is that of the window in which it is largest relative to the spread: the
    highest minus the lowest seed of the reference.
    """
    (reference, base), *others = _curves(rows).items()
    usual, spread = base.mean(axis=0), base.max(axis=0) - base.min(axis=0)
    lines = []
    for name, curve in others:
        apart = abs(curve.mean(axis=0) - usual)
        worst = int((apart / spread).argmax())
        agree = rows.loc[rows["way"].isin([name, reference]), "ranks_agree"]
        lines.append(
            {
                "variant": name,
                "reference": reference,
                "seeds (count)": len(curve),
                "last loss (nats)": round(float(curve.mean(axis=0)[-1]), 4),
                "of the reference (nats)": round(float(usual[-1]), 4),
                "largest difference (nats)": round(float(apart[worst]), 5),
                "spread of seeds there (nats)": round(float(spread[worst]), 5),
                "within the spread": bool((apart <= spread).all()),
                "ranks end alike": bool(agree.all()),
            }
        )
    return pd.DataFrame(lines)


def figure(rows: pd.DataFrame) -> Figure:
    """The mean curve of every variant, and its difference beside the spread of seeds."""
    curves = _curves(rows)
    base = next(iter(curves.values()))
    x = (np.arange(WINDOWS) + 0.5) * len(rows["losses"].iloc[0]) / WINDOWS
    drawn, axes = new_figure(height=4.8, rows=2, sharex=True)
    (losses,), (apart,) = axes
    for index, (name, curve) in enumerate(curves.items()):
        line = {"color": COLOURS[index % len(COLOURS)]}
        losses.plot(x, curve.mean(axis=0), "o-", label=textwrap.fill(name, 70), **line)
        if index:
            apart.plot(x, curve.mean(axis=0) - base.mean(axis=0), "o-", **line)
    band = {"color": COLOURS[0], "alpha": 0.2}
    half = (base.max(axis=0) - base.min(axis=0)) / 2
    losses.fill_between(x, base.min(axis=0), base.max(axis=0), **band)
    apart.fill_between(x, -half, half, label="spread of the reference's seeds", **band)
    losses.set_ylabel("loss (nats per byte)")
    apart.set_ylabel("minus the reference (nats)")
    apart.set_xlabel("step")
    drawn.legend(loc="outside upper center", fontsize="small")
    return drawn
