"""Timelines as rows hold them, checked before a page draws them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench_harness.core import Row, Timelines

#: How many kinds of work there are in ``bench_harness.traces.timeline.WORK``.
_KINDS = 5


def timelines(lines: Mapping[str, Any]) -> Timelines:
    """Timelines of rows, by variant.

    Raises:
        ValueError: a row holds something else; rows may be a stranger's.
    """
    for name, line in lines.items():
        try:
            line["ranks"][line["drawn"]]
            for rank in line["ranks"]:
                _check(rank)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"timeline must hold the ranks of a step, but got {error!r} for {name!r}. Record "
                "it again."
            ) from None
    return Timelines(lines)


def _check(rank: Row) -> None:
    names, work = rank["names"], rank["work"]
    texts, numbers = [*names], [rank["window_ns"], rank["exposed_ns"], rank["offset_ns"]]
    for lane in rank["lanes"]:
        texts.append(lane["name"])
        numbers += lane["spans"]
        if len(lane["spans"]) % 3 or max(lane["spans"][2::3], default=-1) >= len(names):
            raise IndexError("a span without a name")
    for name, *ends in rank["phases"]:
        texts.append(name)
        numbers += ends
    numbers += [end for span in rank["late"] for end in span]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a name that is no text")
    if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
        raise TypeError("a time that is no number of nanoseconds")
    if len(work) != len(names) or not all(each in range(_KINDS) for each in work):
        raise TypeError("an unknown kind of work")
