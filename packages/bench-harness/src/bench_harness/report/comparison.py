"""The page of two runs, and the summary for a pull request: what is given to their templates."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence

from bench_harness.compare import Comparison, Comparisons, cells_of, percent
from bench_harness.core import Bar, Bars, Row
from bench_harness.display.timelines import timelines
from bench_harness.report.write import rendered


def page(found: Comparisons, failures: Sequence[str] | None) -> str:
    """The verdict, why the gate closes (None without one), every row, what changed, timelines."""
    lead = max(found.rows, key=_importance)
    largest = max(abs(100 * (each.verdict.ratio - 1)) for each in found.rows)
    first = [_name(lead), lead.variant]
    lines, problem = dict[str, Row](), ""
    for name in sorted(found.timelines, key=lambda name: name[3:] not in first):
        try:
            lines |= timelines({name: found.timelines[name]})
        except ValueError as error:
            problem = str(error)
    return rendered(
        "compare.html.jinja",
        found=found,
        failures=failures,
        lead=lead,
        counts=Counter(str(each.verdict) for each in found.rows),
        moved=max(lead.parts, key=lambda part: abs(operator.sub(*lead.parts[part])), default=None),
        end=max(5, math.ceil(min(largest, 1e6))),  # per cent on both sides of the axis of changes
        bars={_name(each): _bars(each) for each in [lead, *found.rows] if each.parts},
        lines=lines,
        problem=problem,
        cells_of=cells_of,
        percent=percent,
    )


def markdown(found: Comparisons) -> str:
    """A summary to paste into a pull request: counts, and every row that is not the same."""
    counts = Counter(str(each.verdict) for each in found.rows)
    return rendered("compare.md.jinja", found=found, counts=counts, name_of=_name).strip()


def _importance(each: Comparison) -> tuple[bool, bool, float]:
    """The row with the largest difference that is sure stands first."""
    verdict = each.verdict
    told = verdict.direction in ("faster", "slower")
    return told, verdict.sure, abs(math.log(max(verdict.ratio, 1e-9)))


def _name(each: Comparison) -> str:
    return f"{each.label}: {each.variant}" if each.variant else each.label


def _bars(each: Comparison) -> Bars:
    """A bar for each run, of the parts of its profiled step."""
    times = ({part: pair[side] for part, pair in each.parts.items()} for side in (0, 1))
    return Bars("ms", {"": [Bar(run, own) for run, own in zip("AB", times, strict=True)]})
