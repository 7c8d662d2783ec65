"""Draws the explaining pictures of the documentation: ``python -m tools.pages draw``.

They show an order of events or a formula, never a measurement. Each is an SVG file of a few
kilobytes under ``docs/pictures/`` that brings its own background, light or dark as the reader's
system asks, so that it is readable on any page. A test draws them again and compares.
"""

from collections.abc import Iterator
from pathlib import Path

from shard_optim.accounting import STAGES, rank_memory

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures"
WIDTH = 560
# The colours of bench-harness's plots, with text that is readable on them.
STYLE = """
text { font: 14px system-ui, sans-serif; fill: #1c2024 }
.small { font-size: 12px } .soft { fill: #5f6b76 } .bold { font-weight: 600 }
.card { fill: #ffffff } .box { stroke: #9aa5b1; fill: #f4f6f8 }
.name { font-size: 13px } .line { stroke: #9aa5b1; fill: none }
.compute { fill: #0072b2 } .backward { fill: #2b8cc4 } .communication { fill: #d55e00 }
.update { fill: #007a5a } .copy { fill: #8a5a83 } .on { fill: #ffffff }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ec } .soft { fill: #a9b4be } .card { fill: #1e2129 }
.box { fill: #2a2f3a; stroke: #6b7683 } .line { stroke: #6b7683 } .on { fill: #ffffff }
}
"""


def svg(height: int, title: str, parts: list[str]) -> str:
    """A whole file; ``title`` is read aloud by screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n"
        f'<rect class="card" width="{WIDTH}" height="{height}" rx="8"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    """One line of text whose baseline is at y."""
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{words}</text>'


def rect(x: float, y: float, width: float, height: float, style: str) -> str:
    """A box."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" class="{style}"/>'
    )


def event(x: float, y: float, width: float, words: str, style: str, height: float = 22) -> str:
    """A box of a timeline, with its name inside."""
    label = text(x + width / 2, y + height - 6.5, words, "on small", "middle")
    return rect(x, y, width - 1.5, height, style) + label


def legend(y: float, entries: list[tuple[str, str]], left: float = 16) -> list[str]:
    """Coloured squares with their meanings, in one row."""
    parts = []
    for style, words in entries:
        parts += [rect(left, y - 11, 12, 12, style), text(left + 17, y, words, "small")]
        left += 30 + 6.6 * len(words)
    return parts


# ---- the four wrappers ---------------------------------------------------------------------------

LAYERS = (3, 2, 1)  # in the order in which backward reaches them
FORWARD, BACKWARD, COPY, UPDATE = 1.0, 2.0, 1.1, 1.0
FIXED, PER_LAYER = 0.6, 0.7  # of a reduction: whatever its size, and for each layer's gradients


def wrapper_events(
    reductions: list[tuple[int, ...]], *, during_backward: bool, copy: bool = False
) -> Iterator[tuple[str, float, float, str, str]]:
    """Row, start, length, name and colour of what one training step does.

    Args:
        reductions: the layers whose gradients each one sends. A layer that is in two of them has
            two parameters, which are sent one by one.
        during_backward: whether a reduction starts as soon as its gradients are there.
        copy: whether gradients are copied into one flat tensor first.
    """
    now = 0.0
    for _ in LAYERS:
        yield "compute", now, FORWARD, "F", "compute"
        now += FORWARD
    ready = {}
    for layer in LAYERS:
        yield "compute", now, BACKWARD, f"B{layer}", "backward"
        now += BACKWARD
        ready[layer] = now
    if copy:
        yield "compute", now, COPY, "copy", "copy"
        now += COPY
    sent = 0.0
    for layers in reductions:
        start = max(sent, max(ready[layer] for layer in layers) if during_backward else now)
        times = reductions.count(layers)
        length = FIXED + PER_LAYER * len(layers) / times
        yield "network", start, length, "R" + "".join(map(str, layers)), "communication"
        sent = start + length
    yield "compute", max(now, sent), UPDATE, "O", "update"


def wrappers() -> str:
    """What NaiveDDP, FlatDDP, OverlapDDP and BucketedDDP do in one step."""
    single: list[tuple[int, ...]] = [(3,), (3,), (2,), (2,), (1,), (1,)]
    steps = [
        ("NaiveDDP", wrapper_events(single, during_backward=False)),
        ("FlatDDP", wrapper_events([(3, 2, 1)], during_backward=False, copy=True)),
        ("OverlapDDP", wrapper_events(single, during_backward=True)),
        ("BucketedDDP", wrapper_events([(3, 2), (1,)], during_backward=True)),
    ]
    left, unit, height = 84, 29.4, 92
    parts = []
    for index, (name, events) in enumerate(steps):
        top = 14 + index * height
        parts += [text(16, top + 12, name, "bold")]
        end = 0.0
        for row, start, length, label, style in events:
            y = top + (22 if row == "compute" else 48)
            parts.append(event(left + start * unit, y, length * unit, label, style))
            end = max(end, start + length)
        parts += [
            text(16, top + 38, "compute", "small soft"),
            text(16, top + 64, "network", "small soft"),
            f'<path class="line" d="M{left + end * unit:g} {top + 18}v58"/>',
        ]
    bottom = 14 + len(steps) * height + 8
    parts += legend(
        bottom,
        [
            ("compute", "F forward"),
            ("backward", "B backward of a layer"),
            ("communication", "R reduction"),
            ("update", "O optimizer"),
        ],
    )
    return svg(bottom + 14, "One training step with each of the four wrappers of ddp-lite", parts)


# ---- memory of ZeRO's stages ---------------------------------------------------------------------


def stages() -> str:
    """Bytes per parameter on one of eight ranks, for ZeRO's stages."""
    ranks, left, unit = 8, 128, 24.0
    names = ["0: replicas", "1: optimizer state", "2: + gradients", "3: + parameters"]
    parts = [text(16, 26, f"Bytes per parameter on each of {ranks} ranks, fp32 and Adam", "bold")]
    for index, (stage, name) in enumerate(zip(STAGES, names, strict=True)):
        memory = rank_memory(1, world_size=ranks, stage=stage)
        y, x = 44 + index * 38, float(left)
        parts.append(text(16, y + 18, name, "small"))
        for amount, style in (
            (memory.parameters, "compute"),
            (memory.gradients, "communication"),
            (memory.optimizer_state, "update"),
        ):
            parts.append(rect(x, y, amount * unit - 1.5, 26, style))
            if amount >= 1:
                parts.append(
                    text(x + amount * unit / 2, y + 18, f"{amount:g}", "on small", "middle")
                )
            x += amount * unit
        parts.append(text(x + 6, y + 18, f"{memory.total:g}", "bold"))
    bottom = 44 + len(names) * 38 + 16
    parts += legend(
        bottom,
        [("compute", "parameters"), ("communication", "gradients"), ("update", "optimizer state")],
    )
    return svg(bottom + 14, "Memory of the stages of ZeRO", parts)


# ---- the forward kernel --------------------------------------------------------------------------


def forward_kernel() -> str:
    """One producer and two consumers of the Hopper forward kernel, over three tiles of keys."""
    left, unit, tiles, stages = 104, 15.0, 3, 2
    load, product, softmax = 1.8, 1.8, 5.0
    parts = []
    for name, kind, y in (
        ("producer", "TMA loads", 30),
        ("consumer 0", "tensor cores", 84),
        ("", "exponentials", 110),
        ("consumer 1", "tensor cores", 164),
        ("", "exponentials", 190),
    ):
        parts += [text(16, y - 6, name, "bold"), text(16, y + 15.5, kind, "small soft")]

    # Consumers take turns: each issues two products while the other computes exponentials.
    released: dict[str, float] = {}  # when both consumers have read a tile
    for consumer, top in ((0, 84), (1, 164)):
        start = load + consumer * 2 * product
        for j in range(tiles + 1):
            now = start + j * 4 * product
            if j < tiles:
                parts.append(event(left + now * unit, top, product * unit, f"S{j}", "compute"))
                now += product
                released[f"K{j}"] = now
                parts.append(event(left + now * unit, top + 26, softmax * unit, f"P{j}", "update"))
            if j:
                parts.append(event(left + now * unit, top, product * unit, f"O{j - 1}", "backward"))
                released[f"V{j - 1}"] = now + product
    now = 0.0
    for j in range(tiles):
        for name in ("K", "V"):
            now = max(now, released.get(f"{name}{j - stages}", 0.0))
            parts.append(event(left + now * unit, 30, load * unit, f"{name}{j}", "copy"))
            now += load
    parts += legend(
        242,
        [
            ("copy", "K, V load of a tile"),
            ("compute", "S = Q Kᵀ"),
            ("backward", "O += P V"),
            ("update", "P = exp(S)"),
        ],
    )
    return svg(256, "The forward kernel on Hopper: loads, products and softmax at once", parts)


# ---- architecture --------------------------------------------------------------------------------


def architecture() -> str:
    """Which package depends on which."""
    lower = [
        ("basics-model", "the workload"),
        ("flashattn-triton", "attention"),
        ("ddp-lite", "averaged gradients"),
        ("shard-optim", "1/N on each rank"),
    ]
    width, gap = 120, 16
    parts = [
        rect(16, 16, WIDTH - 32, 50, "box"),
        text(WIDTH / 2, 37, "bench-harness", "bold", "middle"),
        text(WIDTH / 2, 55, "measures all four, and your own model", "small soft", "middle"),
        rect(16, 174, WIDTH - 32, 34, "box"),
        text(WIDTH / 2, 196, "torch, and Triton on Linux", "", "middle"),
    ]
    for index, (name, what) in enumerate(lower):
        x = 16 + index * (width + gap)
        middle = x + width / 2
        parts += [
            rect(x, 92, width, 56, "box"),
            text(middle, 116, name, "bold name", "middle"),
            text(middle, 134, what, "small soft", "middle"),
            f'<path class="line" d="M{middle:g} 66v26M{middle:g} 148v26"/>',
        ]
    # shard-optim, the last one, stands on its neighbour.
    parts.append(f'<path class="line" d="M{16 + 3 * (width + gap):g} 120h-{gap}l6 -4m-6 4l6 4"/>')
    return svg(224, "The five packages and what they depend on", parts)


PICTURES = {
    "architecture": architecture,
    "forward-kernel": forward_kernel,
    "wrappers": wrappers,
    "zero-stages": stages,
}


def main() -> None:
    """Writes every picture."""
    FOLDER.mkdir(exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    main()
