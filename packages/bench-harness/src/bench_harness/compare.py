"""Compares two runs, row by row: faster, slower, the same, or "cannot tell", with an interval.

The ratio of the two medians is judged by its 95 % bootstrap interval against a tolerance: two runs
of the same code differ by more than the samples within one of them show (placement of memory,
clocks, neighbours), so an interval that merely excludes 1 is not yet a difference.

The bootstrap of a few samples is too sure of itself. So a row whose samples scatter or drift too
much to quote decides nothing, and "faster" and "slower" also need samples that Mann–Whitney's test
tells apart at 1 %. Where nothing can be told, the number of samples that probably would tell is
estimated from the width of the interval, which shrinks as one over the root of that number.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from bench_harness.case import Case, Row
from bench_harness.store import PARTIAL, RESERVED, Store

Verdict: TypeAlias = Literal["faster", "slower", "same", "cannot tell"]

#: The fewest samples of each run that can tell two runs apart.
FEWEST = 5
#: More samples than this are not worth asking for: something else is wrong.
MOST = 10_000

#: Relative difference below which two times count as the same.
TOLERANCE = 0.05


class ComparisonError(Exception):
    """The runs cannot be compared; the text says why, in one line."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row measured in both runs.

    Attributes:
        variant: what tells the row from others of its case, as far as the label does not say it.
        median_a, median_b: milliseconds.
        ratio: ``median_b / median_a``; below 1 means that B is faster.
        low, high: 95 % bootstrap interval of the ratio; None below three samples in either run.
        conclusive: whether "faster" or "slower" may be said at all: the samples of both runs are
            steady, and tell the runs apart.
        samples_needed: of each run, so that there probably is a verdict; None if there is one, or
            if more samples would not help, as where they drift.
        same_hardware: whether both rows come from the same environment.
    """

    experiment: str
    label: str
    variant: str
    median_a: float
    median_b: float
    ratio: float
    low: float | None
    high: float | None
    verdict: Verdict
    conclusive: bool
    samples_needed: int | None
    same_hardware: bool


def verdict(low: float | None, high: float | None, tolerance: float) -> Verdict:
    """What an interval of B's time over A's says, allowing for ``tolerance`` around 1."""
    if low is None or high is None:
        return "cannot tell"
    if high < 1 - tolerance:
        return "faster"
    if low > 1 + tolerance:
        return "slower"
    if low >= 1 - tolerance and high <= 1 + tolerance:
        return "same"
    return "cannot tell"


def samples_needed(
    ratio: float, low: float | None, high: float | None, count: int, tolerance: float
) -> int | None:
    """How many samples probably give a verdict, from how wide the interval of ``count`` is.

    Args:
        ratio: of the medians; the interval around it must come to lie on one side of each end of
            the tolerance.
        count: samples of the run that has fewer.

    Returns:
        The number; None where it is larger than :data:`MOST`.
    """
    from bench_harness.stats import UNSTABLE_WIDTH

    if low is None or high is None:
        return FEWEST
    margin = min(abs(ratio - (1 - tolerance)), abs(ratio - (1 + tolerance)))
    allowed = min(margin, ratio * UNSTABLE_WIDTH / 2)
    if not allowed:
        return None
    needed = count * (max(high - ratio, ratio - low) / allowed) ** 2
    return max(FEWEST, count + 1, math.ceil(needed)) if needed <= MOST else None


def compare(
    run_a: Store, run_b: Store, *, tolerance: float = TOLERANCE, across_hardware: bool = False
) -> list[Comparison]:
    """Every row with samples that both runs hold.

    Args:
        tolerance: relative difference that still counts as the same.
        across_hardware: compare rows of different environments too; each is marked.

    Raises:
        ComparisonError: the runs share no row, or only rows of different environments.
        StoreError: a run cannot be read.
    """
    for run in (run_a, run_b):
        run.check_is_run()
    rows_a, rows_b = _measured(run_a), _measured(run_b)
    shared = [identity for identity in rows_a if identity in rows_b]
    if not shared:
        loaded = [run.load() for run in (run_a, run_b)]
        damaged = sum(len(each.damaged) for each in loaded)
        partial = sum(row["status"] == PARTIAL for each in loaded for row in each.rows)
        raise ComparisonError(
            f"{run_a.folder} and {run_b.folder} must have a case in common, but got none"
            f"{f' ({damaged} damaged lines were left out)' * (damaged > 0)}"
            f"{f' ({partial} rows of stopped cases were left out)' * (partial > 0)}. Run both with "
            "the same options."
        )
    different = [i for i in shared if rows_a[i]["environment"] != rows_b[i]["environment"]]
    if different and not across_hardware:
        raise ComparisonError(
            "rows must come from the same hardware and libraries, but got different ones for "
            f"{len(different)} of {len(shared)}. Add --across-hardware to compare and mark them."
        )
    return [
        _comparison(rows_a[identity], rows_b[identity], identity[1], tolerance)
        for identity in shared
    ]


def _comparison(a: Row, b: Row, texts: tuple[str, ...], tolerance: float) -> Comparison:
    from bench_harness.stats import ratio_interval, separated, summarize

    old, new = a["samples_ms"], b["samples_ms"]
    ratio, low, high = ratio_interval(new, old)
    summaries = summarize(old), summarize(new)
    steady = not any(summary["unstable"] for summary in summaries)
    conclusive = steady and separated(old, new)
    found = verdict(low, high, tolerance)
    if not (steady if found == "same" else conclusive):
        found = "cannot tell"
    drifting = any(summary["drift"] for summary in summaries)
    needed = None
    if found == "cannot tell" and not drifting:
        needed = samples_needed(ratio, low, high, min(len(old), len(new)), tolerance)
    return Comparison(
        experiment=a["experiment"],
        label=a["label"],
        variant=_described(texts, a["label"]),
        median_a=summaries[0]["median"],
        median_b=summaries[1]["median"],
        ratio=ratio,
        low=low,
        high=high,
        verdict=found,
        conclusive=conclusive,
        samples_needed=needed,
        same_hardware=a["environment"] == b["environment"],
    )


def limit(text: str) -> float:
    """The relative slow-down that ``--fail-on`` names: ``slower`` or ``slower:PERCENT``.

    Raises:
        ValueError: it names something else.
    """
    name, _, percent = text.partition(":")
    try:
        value = float(percent) / 100 if percent else TOLERANCE
    except ValueError:
        value = -1.0
    if name != "slower" or not value >= 0:
        raise ValueError(
            f"--fail-on must be slower or slower:PERCENT with a percentage of at least 0, but got "
            f"{text!r}. Write slower:5."
        )
    return value


def slower(found: Sequence[Comparison], beyond: float) -> list[Comparison]:
    """The rows of which B is surely slower than A by more than ``beyond``, a share of A's time."""
    return [
        each
        for each in found
        if each.conclusive and verdict(each.low, each.high, beyond) == "slower"
    ]


def markdown(found: Sequence[Comparison]) -> str:
    """A summary to paste into a pull request: counts, and every row that is not the same."""
    counts = Counter(each.verdict for each in found)
    lines = [
        ", ".join(f"{count} {name}" for name, count in sorted(counts.items())),
        "",
        "| case | A (ms) | B (ms) | B / A | 95 % interval | verdict | needs (samples) |",
        "| --- | ---: | ---: | ---: | --- | --- | ---: |",
    ]
    for each in found:
        if each.verdict != "same":
            name = f"{each.label}: {each.variant}" if each.variant else each.label
            name = name.replace("|", "\\|")
            interval = "" if each.low is None else f"{each.low:.3f}–{each.high:.3f}"
            lines.append(
                f"| {name} | {each.median_a:.4g} | {each.median_b:.4g} | {each.ratio:.3f} | "
                f"{interval} | {each.verdict} | {each.samples_needed or ''} |"
            )
    return "\n".join(lines if any(each.verdict != "same" for each in found) else lines[:1])


def _measured(run: Store) -> dict[tuple[str, tuple[str, ...]], Row]:
    """Rows with samples, by case and by what tells them from the other rows of the case: their
    own text values, as ``("compiled bf16", "forward")``."""
    return {
        (_case(row), _texts(row)): row
        for row in run.load().rows
        if row["status"] == "ok" and row.get("samples_ms")
    }


def _case(row: Row) -> str:
    """The key of the row's case, whatever the user's code was then: an edited model is compared
    with what it was before."""
    config = {name: value for name, value in row["config"].items() if name != "user_code"}
    if config == row["config"]:
        return str(row["case_key"])
    return Case(experiment=row["experiment"], config=config).key


def _texts(row: Row) -> tuple[str, ...]:
    return tuple(v for n, v in row.items() if n not in RESERVED and isinstance(v, str))


def _described(texts: tuple[str, ...], label: str) -> str:
    """The words of the values, each once, without those of the case's label."""
    words = dict.fromkeys(" ".join(texts).split())
    return " ".join(word for word in words if word not in label.split())
