"""The sentences that stand first in a report: what did not finish, who is fastest, what to doubt.

The fastest variant of an experiment's last timed case is compared with the fastest one of PyTorch's
own, or else with the second, by the rule of :mod:`bench_harness.verdict`. So a sentence says
whether it is sure. What scatters or drifts too much to quote is counted, never quoted.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping

from bench_harness.core import Row, plural
from bench_harness.display.cells import quantity
from bench_harness.display.row_tables import steady
from bench_harness.environment import throttled
from bench_harness.report.frame import to_frame
from bench_harness.stats import summarize, with_summary
from bench_harness.verdict import judge

#: Statuses of cases that did not finish.
_STOPPED = ("error", "timeout", "oom")
#: How names of variants begin that are PyTorch's own; and those that only bound the others.
_PYTORCH = ("torch", "sdpa", "FSDP2")
_BOUND = "no communication"


def headlines(rows: Iterable[Row]) -> list[str]:
    """The sentences, the most important first.

    Timings of later experiments stand before others, and those that are sure before those that are
    not: the first sentence can be quoted if there is one that can.
    """
    by_name: dict[str, list[Row]] = {}
    every = list(rows)
    for row in every:
        by_name.setdefault(row["experiment"], []).append(row)
    latest = list(reversed(by_name.values()))
    timings = [timing for own in latest if (timing := _fastest(own)) is not None]
    timings.sort(key=lambda timing: not timing[0])
    found = [_unfinished(every), *(text for _, text in timings), *map(_peak, latest)]
    return [text for text in [*found, _unstable(every)] if text is not None]


def tiles(rows: Iterable[Row]) -> list[tuple[str, str, str]]:
    """What a page shows largest, each with its name and a remark: the time of a step, throughput,
    peak memory, and what costs most. Only what the rows hold."""
    done = [row for row in rows if row["status"] == "ok"]
    steps = [row for row in done if row.get("samples_ms") and row.get("phase", "step") == "step"]
    steps = [row for row in steps if row["experiment"] in ("train-step", "model")]
    steps = [row for row in steps if row["experiment"] == steps[-1]["experiment"]]
    found: list[tuple[str, str, str]] = []
    step = min(
        (row for row in steps if not str(row.get("variant")).startswith(_BOUND)),
        key=lambda row: statistics.median(row["samples_ms"]),
        default=None,
    )
    if step is not None:
        name = str(step.get("variant", ""))
        found.append(("step", _ms(step), f"{name}{_interval(step)}"))
        if step.get("tokens"):
            tokens = step["tokens"] * step["config"].get("world_size", 1)  # of all ranks
            seconds = statistics.median(step["samples_ms"]) / 1e3
            found.append(("throughput", f"{tokens / seconds:,.0f} tokens/s", name))
    peaks = [(float(row["peak_bytes"]), str(row["phase"])) for row in done if "peak_bytes" in row]
    peaks += [(row["peak_gib"] * 2**30, row["variant"]) for row in steps if row.get("peak_gib")]
    if peaks:
        most, where = max(peaks)
        found.append(("peak memory", quantity(most, "B"), where))
    kernels = [row for row in done if row.get("kind") == "kernel" and "total_ms" in row]
    if kernels:
        top = max(kernels, key=lambda each: float(each["total_ms"]))
        share = f"{top['share']:.0f} % of {top['phase']}"
        found.append(("largest cost", share, top["kernel"][:60]))
    return found


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


def _fastest(rows: list[Row]) -> tuple[bool, str] | None:
    """The fastest variant of the last case and phase that are timed, beside another.

    Returns:
        Whether that is sure, and the sentence.
    """
    timed = [
        row
        for row in rows
        if row["status"] == "ok" and row.get("samples_ms") and isinstance(row.get("variant"), str)
    ]
    if not timed:
        return None
    last = timed[-1]
    about = ("case_key", "phase", "sequence", "feature", "size_bytes")
    what = {name: last.get(name) for name in about}
    cell = [row for row in timed if all(row.get(name) == value for name, value in what.items())]
    cell = [row for row in cell if not row["variant"].startswith(_BOUND)] or cell
    first, *others = sorted(cell, key=lambda row: statistics.median(row["samples_ms"]))
    done = f" for {last['phase']}" if isinstance(last.get("phase"), str) else ""
    where = f" ({last['label']})."
    unstable = summarize(first["samples_ms"])["unstable"]
    takes = f"{first['variant']} takes {_ms(first)}{done}"
    pytorch = [row for row in others if row["variant"].startswith(_PYTORCH)]
    if not others:
        how = f"{_interval(first)}, unsteady{_cause(rows)}" if unstable else ""
        return not unstable, takes + how + where
    other: Mapping[str, object] = (pytorch or others)[0]
    verdict = judge(other["samples_ms"], first["samples_ms"])  # type: ignore[arg-type]
    if unstable:  # a figure that scatters is not quoted, but the verdict stands
        names = {"A": str(other["variant"]), "B": str(first["variant"])}
        why = "".join(f", {reason}" for reason in verdict.reasons[:1])
        why = re.sub(r"\b[AB]\b", lambda match: names[match[0]], why)
        sentence = f"{first['variant']}{done} beside {other['variant']}: {verdict}{why}"
        return False, sentence + _cause(rows) + where
    beside = f", {verdict.ratio:.2f} of {other['variant']}"
    is_known = verdict.direction != "cannot tell"
    how = str(verdict) if is_known else "cannot tell them apart"
    return is_known and verdict.sure, takes + beside + f": {how}" + where


def _interval(row: Row) -> str:
    """The 95 % interval of a row's median."""
    found = summarize(row["samples_ms"])
    low, high = found["ci_low"], found["ci_high"]
    if low is None or high is None:
        return ""
    return f" [{quantity(low, 'ms')}, {quantity(high, 'ms')}]"


def _cause(rows: list[Row]) -> str:
    """What probably made samples scatter, where a case says so, and the cure."""
    both = [(row.get("machine_before") or {}, row.get("machine_after") or {}) for row in rows]
    if reasons := {reason for states in both for reason in throttled(*states)}:
        return f"; the GPU was slowed down ({', '.join(sorted(reasons))}), so run again later"
    states = [
        row.get("machine_after") or {} for row in rows if row["config"].get("device") == "cpu"
    ]
    loads = [(each["load_1min"], each["cpus"]) for each in states if each.get("cpus")]
    load, cpus = max(loads, default=(0.0, 1))
    if load <= 1.5 * cpus:
        return ""
    return f"; load {load:.1f} on {plural(cpus, 'core')}, so run again when it is idle"


def _ms(row: Row) -> str:
    return quantity(statistics.median(row["samples_ms"]), "ms")


def _peak(rows: list[Row]) -> str | None:
    """The phase in which memory peaks, of rows that weigh phases."""
    phases = [
        row
        for row in rows
        if row["status"] == "ok" and row.get("kind") == "phase" and "peak_bytes" in row
    ]
    if not phases:
        return None
    top = max(phases, key=lambda row: float(row["peak_bytes"]))
    return (
        f"Memory peaks at {quantity(top['peak_bytes'], 'B')}, in the phase {top['phase']} "
        f"({top['label']})."
    )


def _unstable(rows: list[Row]) -> str | None:
    timed = [row for row in rows if row["status"] == "ok" and row.get("samples_ms")]
    if not timed:
        return None
    shaky = int((~steady(with_summary(to_frame(timed)))).sum())
    if not shaky:
        return None
    return (
        f"{shaky} of {plural(len(timed), 'timed figure')} scatter or drift too much to quote, or "
        f"are too short for the timer, and take part in no ratio{_cause(timed)}."
    )
