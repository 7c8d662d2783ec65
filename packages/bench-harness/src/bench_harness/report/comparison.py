"""The page of two runs, and the summary for a pull request: what is given to their templates."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence

from bench_harness.compare import Comparison, Comparisons, cells_of, percent
from bench_harness.core import Bar, Bars
from bench_harness.display.timelines import timelines
from bench_harness.report.write import rendered

#: Ends of the axis of changes, in per cent on both sides; the least that holds every median.
_ENDS = (5, 10, 20, 30, 50, 100, 200, 500, 1000)


def page(found: Comparisons, failures: Sequence[str] | None) -> str:
    """The page: the verdict, every row, the part that changed, and both timelines.

    Args:
        failures: why the gate closes; None if there is no gate.
    """
    lead = max(found.rows, key=_importance)
    largest = max(abs(100 * (each.verdict.ratio - 1)) for each in found.rows)
    lines, problem = found.timelines, ""
    try:
        timelines(lines)
    except ValueError as error:
        lines, problem = {}, str(error)
    names = [_name(lead), lead.variant]  # the lead's timelines stand first
    lines = dict(sorted(lines.items(), key=lambda line: line[0][3:] not in names))
    return rendered(
        "compare.html.jinja",
        found=found,
        failures=failures,
        lead=lead,
        counts=Counter(str(each.verdict) for each in found.rows),
        moved=max(lead.parts, key=lambda part: abs(operator.sub(*lead.parts[part])), default=None),
        end=next((end for end in _ENDS if largest <= end), 10 * _ENDS[-1]),
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
