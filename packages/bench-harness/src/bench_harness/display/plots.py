"""One look for every picture, without pyplot's global state and without a display."""

from __future__ import annotations

import base64
import io
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

    from bench_harness.core import Figure as Picture

#: Colours that stay apart for colour-blind readers and in grey print (Okabe and Ito, 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")

#: A vector picture past this size (many points) is embedded as PNG instead.
_SVG_LIMIT_BYTES = 400_000

_DRAWN: weakref.WeakKeyDictionary[Figure, bytes] = weakref.WeakKeyDictionary()

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
    "hatch.linewidth": 0.6,
    "legend.fontsize": "small",
    "lines.markersize": 4,
    "svg.hashsalt": "bench-harness",  # the same rows give the same bytes
}


def new_figure(
    *, width: float = 5.6, height: float = 3.2, rows: int = 1, columns: int = 1, **subplots: Any
) -> tuple[Figure, np.ndarray[Any, Any]]:
    """A matplotlib figure in the report's style and its axes.

    Args:
        width: inches; at most 6 is a picture of half a page, which a phone still shows legibly.
        height: inches.
        rows: rows of axes.
        columns: columns of axes.
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


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG of 256 colours, which is a third of the size and looks the same."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(_render(figure, "png"))) as picture:
        # Transparency is lost by the palette; figures have none.
        picture.convert("RGB").quantize(256).save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def svg_bytes(figure: Figure) -> bytes:
    """The figure as SVG without a background, which a dark page may invert.

    Drawn once, for its file and for the page: the layout of a figure stays as it was drawn first.
    """
    if figure not in _DRAWN:
        _DRAWN[figure] = _render(figure, "svg", transparent=True)
    return _DRAWN[figure]


def data_uri(picture: Picture) -> str:
    """A picture as a ``data:`` address for an offline page: SVG, or PNG where that is smaller."""
    svg = svg_bytes(picture.figure)
    if len(svg) <= _SVG_LIMIT_BYTES:
        return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()
    return "data:image/png;base64," + base64.b64encode(png_bytes(picture.figure)).decode()


def _render(figure: Figure, file_format: str, *, transparent: bool = False) -> bytes:
    import matplotlib as mpl

    buffer = io.BytesIO()
    # Metadata would hold the date, and for SVG the address of an ontology.
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if file_format == "svg" else {}
    for legend in [*figure.legends, *filter(None, (axes.get_legend() for axes in figure.axes))]:
        legend.set_frame_on(False)
    with mpl.rc_context(_STYLE):
        figure.savefig(buffer, format=file_format, metadata=metadata, transparent=transparent)
    figure.set_layout_engine("none")  # what was laid out once stays for the other format
    return buffer.getvalue()
