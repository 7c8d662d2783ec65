"""One look for every picture, without pyplot's global state and without a display."""

from __future__ import annotations

import base64
import io
import weakref
from typing import TYPE_CHECKING, Any

from bench_harness.core import Bars
from bench_harness.display.bars import COLOURS, placed

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

#: A vector picture past this size (many points) is embedded as PNG instead.
_SVG_LIMIT_BYTES = 400_000

_DRAWN: weakref.WeakKeyDictionary[Figure | Bars, bytes] = weakref.WeakKeyDictionary()

_STYLE: Any = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "figure.dpi": 120,
    "font.size": 10,
    "grid.alpha": 0.3,
    "legend.fontsize": "small",
    "lines.markersize": 4,
    "svg.hashsalt": "bench-harness",  # the same rows give the same bytes
}


def new_figure(
    *, width: float = 5.6, height: float = 3.2, rows: int = 1, columns: int = 1, **subplots: Any
) -> tuple[Figure, np.ndarray[Any, Any]]:
    """A matplotlib figure in the report's style and its axes.

    Args:
        width, height: inches; a phone still shows a width of at most 6 legibly, half a page.
        rows, columns: of axes.
        subplots: further arguments of ``Figure.subplots``, as ``sharex=True``.

    Returns:
        The figure and an object array of axes, always of shape ``(rows, columns)``.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.rcsetup import cycler

    with mpl.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=COLOURS)}):
        figure = Figure(figsize=(width, height))
        axes = figure.subplots(rows, columns, squeeze=False, **subplots)
    return figure, axes


def draw_bars(bars: Bars) -> Figure:
    """The bars as a drawing, each with its name above it."""
    from matplotlib.patches import Patch

    shown = placed(bars)
    panels, colour = shown.panels, shown.colours
    count = sum(map(len, panels.values()))
    figure, axes = new_figure(rows=len(panels), height=0.6 + 0.35 * len(panels) + 0.36 * count)
    for plot, (title, panel) in zip(axes[:, 0], panels.items(), strict=True):
        for y, bar in enumerate(panel):
            for box in bar.boxes:
                plot.barh(y, box.width, 0.42, box.left, color=colour[box.name])
            if bar.whisker is not None:
                plot.plot(bar.whisker, [y, y], "-", color="#555555", linewidth=1.2)
                plot.plot(bar.whisker[1:], [y], ">" if bar.cut else "|", color="#555555")
            text = f"{bar.text} {shown.unit}" + ", unsteady" * (not bar.steady)
            size = 8.3 * min(1.0, 80 / (len(bar.name) or 1))  # so that long names fit the width
            plot.annotate(bar.name, (0, y - 0.25), (2, 0), textcoords="offset points",
                          va="bottom", fontsize=size)  # fmt: skip
            plot.annotate(text, (101, y), va="center", fontsize="small")
        plot.set_ylim(len(panel) - 0.6, -0.8)
        plot.set_xlim(0, 140)
        plot.set_title(title)
        plot.axis("off")
    if len(colour) > 1:
        handles = [Patch(color=each, label=name) for name, each in colour.items()]
        across = 4 if sum(map(len, colour)) < 60 else 2
        figure.legend(handles=handles, loc="outside upper center", ncols=across, fontsize="small")
    return figure


def png_bytes(figure: Figure | Bars) -> bytes:
    """The figure as PNG of 256 colours, which is a third of the size and looks the same."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(_render(figure, "png"))) as picture:
        # Transparency is lost by the palette; figures have none.
        picture.convert("RGB").quantize(256).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def svg_bytes(figure: Figure | Bars) -> bytes:
    """The figure as SVG without a background, which a dark page may invert.

    Drawn once, for its file and for the page: the layout of a figure stays as it was drawn first.
    """
    if figure not in _DRAWN:
        _DRAWN[figure] = _render(figure, "svg", transparent=True)
    return _DRAWN[figure]


def data_uri(figure: Figure | Bars) -> str:
    """A picture as a ``data:`` address for an offline page: SVG, or PNG where that is smaller."""
    svg = svg_bytes(figure)
    if len(svg) <= _SVG_LIMIT_BYTES:
        return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return "data:image/png;base64," + base64.b64encode(png_bytes(figure)).decode()


def _render(figure: Figure | Bars, file_format: str, *, transparent: bool = False) -> bytes:
    import matplotlib as mpl

    if isinstance(figure, Bars):
        figure = draw_bars(figure)
    buffer = io.BytesIO()
    # Metadata would hold the date, and for SVG the address of an ontology.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if file_format == "svg" else {}
    for legend in [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]:
        legend.set_frame_on(False)
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, format=file_format, metadata=metadata, transparent=transparent)
    figure.set_layout_engine("none")  # what was laid out once stays for the other format
    return buffer.getvalue()
