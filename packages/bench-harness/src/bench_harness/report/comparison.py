"""The page of two runs: the verdict, every row, the part that changed, and both timelines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench_harness.compare import Comparison, Comparisons, cells_of, percent
from bench_harness.core import Bar, Bars, Row
from bench_harness.display.timelines import timelines
from bench_harness.report.write import rendered
from bench_harness.store import replace_file

#: Ends of the axis of changes, in per cent on both sides; the least that holds every median.
_ENDS = (5, 10, 20, 30, 50, 100, 200, 500, 1000)


def write(found: Comparisons, page: Path, failures: Sequence[str] | None) -> None:
    """Writes the page.

    Args:
        failures: why the gate closes; None if there is no gate.

    Raises:
        StoreError: the page cannot be written.
    """
    lead = max(found.rows, key=_importance)
    largest = max(abs(100 * (each.verdict.ratio - 1)) for each in found.rows)
    end = next((end for end in _ENDS if largest <= end), 10 * _ENDS[-1])
    lines, problem = found.timelines, None
    try:
        lines = timelines(lines)
        first = [name for name in lines if name[3:] in (lead.variant, _name(lead))]
        lines = {name: lines[name] for name in [*first, *lines]}
    except ValueError as error:
        lines, problem = {}, str(error)
    text = rendered(
        "compare.html.jinja",
        found=found,
        title=_sentence(lead),
        lead=lead,
        tiles=_tiles(found, lead, failures),
        cells_of=cells_of,
        place=lambda verdict: _place(verdict.ratio, verdict.low, verdict.high, end),
        end=end,
        bars={_name(each): _bars(each) for each in [lead, *found.rows] if each.parts},
        lines=lines,
        problem=problem,
    )
    replace_file(page, text.encode())


def _importance(each: Comparison) -> tuple[bool, bool, float]:
    """The row with the largest difference that is sure stands first."""
    verdict = each.verdict
    told = verdict.direction in ("faster", "slower")
    return told, verdict.sure, abs(math.log(max(verdict.ratio, 1e-9)))


def _name(each: Comparison) -> str:
    return f"{each.label}: {each.variant}" if each.variant else each.label


def _sentence(each: Comparison) -> str:
    name, times, _, _, verdict = cells_of(each)
    times += f" for {name}" * bool(each.variant)
    change = percent(each.verdict.ratio)[1:]
    if each.verdict.direction in ("faster", "slower"):
        return f"B is {change} % {verdict}: {times}"
    if each.verdict.direction == "same":
        return f"B takes as long as A: {times}"
    return f"Cannot tell whether B is faster or slower than A: {times}"


def _tiles(
    found: Comparisons, lead: Comparison, failures: Sequence[str] | None
) -> list[tuple[str, str, str]]:
    _, _, change, ends, _ = cells_of(lead)
    counts = Counter(str(each.verdict) for each in found.rows)
    tiles = [
        ("change of the median", change, ends),
        ("rows", str(len(found.rows)), ", ".join(f"{n} {what}" for what, n in counts.items())),
    ]
    if lead.parts:
        moved = {part: new - old for part, (old, new) in lead.parts.items()}
        part = max(moved, key=lambda each: abs(moved[each]))
        size = f"{moved[part]:+.3g} of {sum(moved.values()):+.3g} ms"
        tiles.append(("where it changed", part, size.replace("-", "\N{MINUS SIGN}")))
    if failures is not None:
        tiles.append(("gate", "fails" if failures else "passes", ", ".join(failures)))
    return tiles


def _bars(each: Comparison) -> Bars:
    return Bars(
        "ms",
        {
            "": [
                Bar(run, {part: pair[side] for part, pair in each.parts.items()})
                for side, run in enumerate("AB")
            ]
        },
    )


def _place(ratio: float, low: float | None, high: float | None, end: int) -> Row:
    """Where a change and its interval stand on the axis, in per cent of its width."""

    def at(value: float) -> float:
        return 50 + 50 * max(-1.0, min(1.0, 100 * (value - 1) / end))

    left, right = (at(ratio if value is None else value) for value in (low, high))
    return {"at": at(ratio), "left": left, "width": right - left, "cut": right == 100}
