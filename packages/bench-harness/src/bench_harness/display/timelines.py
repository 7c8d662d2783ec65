"""Timelines as rows hold them: read, checked, and the bars that a drawing needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from bench_harness.core import Row, Timelines

#: Gaps narrower than this share of the window cannot be seen in a drawing and are closed.
_RESOLUTION = 1 / 2000
#: Positions in ``bench_harness.traces.timeline.WORK``.
_OTHER, _COMMUNICATION, _COPY = 2, 3, 4
#: A start and a length.
_Bars: TypeAlias = list[tuple[float, float]]


def timelines(lines: Mapping[str, Any]) -> Timelines:
    """Timelines of rows, by variant.

    Raises:
        ValueError: a row holds something else; rows may be a stranger's.
    """
    try:
        read = {name: _read(line) for name, line in lines.items()}
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"timeline must hold the ranks of a step, but got something else: {error!r}. Record "
            "it again."
        ) from None
    return Timelines(read)


def bars_of(line: Row) -> tuple[float, float, dict[str, _Bars]]:
    """Of the rank that is drawn: its step and its exposed communication in ms, and its bars."""
    rank = line["ranks"][line["drawn"]]
    gap = rank["window_ns"] * _RESOLUTION
    spans: dict[str, list[tuple[int, int]]] = {"computation": [], "communication": []}
    for lane in rank["lanes"]:
        end = 0
        for space, duration, name in _triples(lane["spans"]):
            start, end = end + space, end + space + duration
            if (work := rank["work"][name]) != _COPY:
                where = "communication" if work == _COMMUNICATION else "computation"
                spans[where].append((start, end))
    return (
        rank["window_ns"] / 1e6,
        rank["exposed_ns"] / 1e6,
        {
            "computation": _joined(spans["computation"], gap),
            "late": _joined(rank["late"], gap),
            "communication": _joined(spans["communication"], gap),
        },
    )


def _joined(spans: Iterable[Sequence[int]], gap: float) -> _Bars:
    """Starts and lengths in ms, with narrow gaps closed."""
    joined: list[list[int]] = []
    for start, end in sorted(map(tuple, spans)):
        if joined and start <= joined[-1][1] + gap:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    return [(start / 1e6, (end - start) / 1e6) for start, end in joined]


def _triples(spans: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    return zip(spans[::3], spans[1::3], spans[2::3], strict=True)


def _read(line: Row) -> Row:
    """A row's timeline, checked; one of before names were kept holds merged spans."""
    if "ranks" not in line:
        return {"drawn": 0, "ranks": [_without_names(line)]}
    for rank in line["ranks"]:
        count = len(rank["names"])
        numbers = [rank["window_ns"], rank["exposed_ns"], rank["merged_ns"], rank["offset_ns"]]
        numbers += [end for span in rank["late"] for end in span]
        numbers += [end for _, *ends in rank["phases"] for end in ends]
        texts = [*rank["names"], *(phase[0] for phase in rank["phases"])]
        for lane in rank["lanes"]:
            texts.append(lane["name"])
            numbers += lane["spans"]
            if any(not name < count for _, _, name in _triples(lane["spans"])):
                raise IndexError("a span without a name")
        if not all(isinstance(text, str) for text in texts) or len(rank["work"]) != count:
            raise TypeError("a name that is no text")
        if not all(type(number) is int and 0 <= number < 2**53 for number in numbers):
            raise TypeError("a time that is no number of nanoseconds")
        if not all(work in range(_COPY + 1) for work in rank["work"]):
            raise TypeError("an unknown kind of work")
    line["ranks"][line["drawn"]]
    return {"drawn": line["drawn"], "ranks": line["ranks"]}


def _without_names(line: Row) -> Row:
    lanes = []
    for position, (name, key) in enumerate(
        (("computation", "compute_us"), ("communication", "communication_us"))
    ):
        before, flat = 0, list[int]()
        for start, end in ((int(1e3 * s), int(1e3 * e)) for s, e in line[key]):
            flat += (start - before, end - start, position)
            before = end
        lanes.append({"name": name, "spans": flat})
    return {
        "window_ns": int(1e3 * line["window_us"]),
        "exposed_ns": int(1e6 * line["exposed_ms"]),
        "names": ["computation (names not kept)", "communication (names not kept)"],
        "work": [_OTHER, _COMMUNICATION],
        "lanes": lanes,
        "phases": [],
        "late": [[int(1e3 * end) for end in span] for span in line.get("late_us", [])],
        "merged_ns": int(1e3 * line["window_us"] * _RESOLUTION),
        "offset_ns": 0,
    }
