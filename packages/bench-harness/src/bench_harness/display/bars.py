"""Where the boxes of bars begin and end, and what stands beside them, for a page and for a drawing.

The scale of a panel follows the bars themselves. An interval that reaches beyond it is cut, and
marked there.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from bench_harness.core import Bar, Bars
from bench_harness.display.cells import scale

#: Colours that stay apart for colour-blind readers (after Okabe and Ito, 2008), on light pages and
#: on dark ones.
COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#8a9199"),
)
#: Colours, by their place in the palette, of names that several pictures show.
_FIXED = {
    name: position
    for position, names in enumerate(
        (
            ("flashattn-triton", "forward", "training forward", "matmul", "all_reduce"),
            ("naive", "backward", "other", "reduce_scatter", "exposed communication"),
            ("sdpa-flash", "optimizer", "fused attention", "all_gather"),
            ("sdpa-cudnn", "communication", "broadcast"),
            ("flex", "naive-compiled", "loss"),
            ("flashattn-triton-portable", "inference", "norms and elementwise"),
            ("flash-attn-4", "model", "attention"),
            ("whole step", "idle, waiting for the host", "activations and buffers"),
        )
    )
    for name in names
} | {"computation": 0, "matrix products": 0, "communication, exposed": 1, "copies": 3}


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: the same in every picture, and different within one if possible."""
    chosen: dict[str, str] = {}
    for name in dict.fromkeys(map(str, names)):
        own = _FIXED.get(name, zlib.crc32(name.encode()) % len(COLOURS))
        order = [*COLOURS[own:], *COLOURS[:own]]
        free = [colour for colour in order if colour not in chosen.values()]
        chosen[name] = COLOURS[own] if name in _FIXED or not free else free[0]
    return chosen


class Box(NamedTuple):
    """A part of a bar: its name and text, and where it begins and how long it is, in per cent."""

    name: str
    text: str
    left: float
    width: float


class Placed(NamedTuple):
    """A bar on the scale of its panel, on which 100 is the longest one.

    Attributes:
        text: its length with its interval.
        whisker: both ends of the interval.
        cut: whether the interval goes on beyond the scale.
    """

    name: str
    text: str
    boxes: list[Box]
    whisker: tuple[float, float] | None
    cut: bool
    steady: bool


class Drawing(NamedTuple):
    """Bars as they are shown: the unit that suits them, a colour for each part, and the panels."""

    unit: str
    colours: dict[str, str]
    panels: dict[str, list[Placed]]


def placed(bars: Bars) -> Drawing:
    """The bars on the scales of their panels."""
    every = [bar for panel in bars.panels.values() for bar in panel]
    unit, divisor = scale([sum(bar.parts.values()) for bar in every], bars.unit)
    made = {}
    for title, panel in bars.panels.items():
        longest = max((sum(bar.parts.values()) for bar in panel), default=0.0) or 1.0
        made[title] = [_placed(bar, longest, divisor) for bar in panel]
    return Drawing(unit, colours(name for bar in every for name in bar.parts), made)


def _placed(bar: Bar, longest: float, divisor: float) -> Placed:
    boxes, left, share = list[Box](), 0.0, 100 / longest
    for name, length in bar.parts.items():
        boxes.append(Box(name, f"{length / divisor:.4g}", left * share, length * share))
        left += length
    text, low, high = f"{left / divisor:.4g}", bar.low, bar.high
    if low is None or high is None or not math.isfinite(low + high):
        return Placed(bar.name, text, boxes, None, False, bar.steady)
    text += f" [{low / divisor:.4g}, {high / divisor:.4g}]"
    whisker = min(low * share, 100.0), min(high * share, 100.0)
    return Placed(bar.name, text, boxes, whisker, high > 1.02 * longest, bar.steady)
