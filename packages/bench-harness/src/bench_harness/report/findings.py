"""The findings that stand first in a report: sentences made from rows by rule.

A finding names figures that may be quoted. What scatters or drifts too much is counted, never
quoted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from bench_harness.core import Row, plural
from bench_harness.display import marks, row_tables
from bench_harness.display.units import quantity
from bench_harness.report.frame import to_frame
from bench_harness.stats import with_summary
from bench_harness.store import PARTIAL

if TYPE_CHECKING:
    import pandas as pd

#: How many a report shows.
MOST = 5
#: Statuses of cases that did not finish.
_STOPPED = ("error", "timeout", "oom", PARTIAL)


def findings(rows: Iterable[Row]) -> list[str]:
    """At most :data:`MOST` sentences, the most important first.

    A rule that fails on rows of another version says nothing; the tables show those rows.
    """
    by_name: dict[str, list[Row]] = {}
    every = list(rows)
    for row in every:
        by_name.setdefault(row["experiment"], []).append(row)
    found = [_unfinished(every)]
    for name, rule in _RULES:
        if name in by_name:
            try:
                found.append(rule(row_tables.finished(to_frame(by_name[name]))))
            except (KeyError, TypeError, ValueError, IndexError, AttributeError):
                continue
    shaky = _unstable(every)
    kept = [text for text in found if text is not None][: MOST - (shaky is not None)]
    return [*kept, shaky] if shaky is not None else kept


def on_cpu(rows: Iterable[Row]) -> bool:
    """Whether any of the timed figures is from a CPU."""
    return any(row.get("samples_ms") and row["config"].get("device") == "cpu" for row in rows)


def _unfinished(rows: list[Row]) -> str | None:
    ended = {row["case_key"] for row in rows if row["status"] in _STOPPED}
    cases = {row["case_key"] for row in rows}
    if not ended:
        return None
    which = [row["label"] for row in rows if row["case_key"] in ended]
    return f"{len(ended)} of {plural(len(cases), 'case')} did not finish, the first: {which[0]}."


def _unstable(rows: list[Row]) -> str | None:
    timed = [row for row in rows if row["status"] == "ok" and row.get("samples_ms")]
    if not timed:
        return None
    shaky = int((~marks.steady(with_summary(to_frame(timed)))).sum())
    if not shaky:
        return None
    return (
        f"{shaky} of {plural(len(timed), 'timed figure')} scatter or drift too much to quote, or "
        "are too short for the timer; they are drawn hollow and take part in no ratio."
    )


def _exposed(rows: pd.DataFrame) -> str | None:
    """The variants that hide most and least of their communication."""
    from bench_harness.experiments.train_step_tables import compared

    frame = compared(with_summary(rows))
    talking = frame["settings"].map(_communicates)
    known = frame[frame["exposed_quotable"] & frame["share"].notna() & talking]
    if known.empty:
        return None
    best = known.sort_values("exposed_step_ms").iloc[0]
    worst = known.sort_values("exposed_step_ms").iloc[-1]
    text = (
        f"{best['variant']} exposes {_ms(best['exposed_step_ms'])} of communication, "
        f"{max(best['share'], 0.0):.0f} % of its {_ms(best['median_ms'])} step"
    )
    if worst["variant"] != best["variant"]:
        text += f"; {worst['variant']} exposes {_ms(worst['exposed_step_ms'])}"
    return f"{text} ({best['label']})."


def _communicates(table: Any) -> bool:
    """Whether a row's settings say that ranks exchange gradients."""
    from bench_harness.training import settings

    return isinstance(table, Mapping) and settings.read(table, {}).communicates


def _memory(rows: pd.DataFrame) -> str | None:
    phases = rows[rows["kind"] == "phase"]
    if phases.empty:
        return None
    top = phases.sort_values("peak_bytes").iloc[-1]
    return (
        f"Memory peaks at {quantity(top['peak_bytes'], 'B')}, in the phase {top['phase']} "
        f"({top['label']})."
    )


def _slowest(rows: pd.DataFrame) -> str | None:
    if "stragglers" not in rows:
        return None
    entries = [
        {**entry, "label": row["label"], "variant": row["variant"]}
        for _, row in rows[rows["stragglers"].notna()].iterrows()
        for entry in row["stragglers"]
    ]
    if not entries:
        return None
    late = max(entries, key=lambda entry: float(entry["waited_for_ms"]))
    return (
        f"Rank {late['rank']} arrived last at {plural(late['last'], 'collective')} of "
        f"{late['variant']}; the others waited {_ms(late['waited_for_ms'])} for it "
        f"({late['label']})."
    )


def _products(rows: pd.DataFrame) -> str | None:
    phases = rows[(rows["kind"] == "phase") & (rows["phase"] != "inference")]
    cases = phases.groupby("label", sort=False)[["busy_ms", "matmul_ms"]].sum()
    if cases.empty:
        return None
    longest_case = cases.sort_values("busy_ms").iloc[-1]
    label = str(longest_case.name)
    share = 100 * longest_case["matmul_ms"] / longest_case["busy_ms"]
    kernels = rows[(rows["kind"] == "kernel") & (rows["label"] == label)]
    others = kernels[(kernels["work"] != "matmul") & (kernels["phase"] != "inference")]
    text = f"Matrix products take {share:.0f} % of the kernel time of a training step"
    if len(others):
        from bench_harness.traces.trace import short_name

        longest = others.sort_values("total_ms").iloc[-1]
        text += (
            f"; the longest other kernel is {short_name(longest['kernel'])} in "
            f"{longest['phase']}, {_ms(longest['total_ms'])}"
        )
    return f"{text} ({label})."


def _attention(rows: pd.DataFrame) -> str | None:
    """The fastest implementation at the longest length, over the next one."""
    frame = with_summary(rows)
    frame = frame[marks.steady(frame) & frame["median_ms"].notna()]
    frame = frame[frame["sequence"] == frame["sequence"].max()]
    cell = frame[frame["phase"] == frame["phase"].iloc[-1]]
    cell = cell[cell["case_key"] == cell["case_key"].iloc[0]].sort_values("median_ms")
    if len(cell) < 2:
        return None
    first, second = cell.iloc[0], cell.iloc[1]
    return (
        f"{first['variant']} is the fastest attention at {int(first['sequence'])} tokens: "
        f"{_ms(first['median_ms'])} for {first['phase']}, "
        f"{second['median_ms'] / first['median_ms']:.2f} times as fast as {second['variant']}."
    )


def _step(rows: pd.DataFrame) -> str | None:
    frame = with_summary(rows)
    steps = frame[(frame["phase"] == "step") & marks.steady(frame)]
    if steps.empty:
        return None
    row = steps.sort_values("median_ms").iloc[0]
    text = f"A training step takes {_ms(row['median_ms'])}"
    if row.get("flops") == row.get("flops"):
        rate = row["flops"] / row["median_ms"] / 1e9
        text += f" at {quantity(rate, 'TFLOP/s')}"
    return f"{text} ({row['label']}, {row['variant']})."


_RULES: tuple[tuple[str, Callable[[pd.DataFrame], str | None]], ...] = (
    ("train-step", _exposed),
    ("memory", _memory),
    ("profile", _products),
    ("train-step", _slowest),
    ("attention", _attention),
    ("model", _step),
)


def _ms(value: float) -> str:
    return quantity(value, "ms")
