"""Pictures of the site and of reports as a reader sees them, on a desk and a phone, day and night.

    python -m tools.screenshots FOLDER                              # what a newcomer opens first
    python -m tools.screenshots FOLDER report comparison timeline   # the pages of bench-harness
    python -m tools.screenshots FOLDER results/index.html           # a page of the site
    python -m tools.screenshots FOLDER site                         # every page, which takes long

For pages of the site it builds the site into FOLDER/site, which needs the dependency group docs.
For the others it measures a small training step twice into FOLDER/runs, a minute on two cores:
``report`` is the page of the first run, ``comparison`` that of both, and ``timeline`` that of the
recorded steps. It writes FOLDER/PAGE-WIDTH-SCHEME.png, for widths of 1280 and 390 pixels and both
colour schemes, and needs Chromium.
"""

import contextlib
import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from tools import browser

from bench_harness import cli

ROOT = Path(__file__).resolve().parents[1]
#: Pages of bench-harness, and of the site.
OWN = ("report", "comparison", "timeline")
PAGES = (
    "index.html",
    "start/index.html",
    "results/index.html",
    "results/data-parallel.html",
    "results/attention.html",
    "results/sharding.html",
    "reference/ddp-lite.html",
    "packages/ddp-lite/index.html",
)
#: What the pages of bench-harness show.
MEASURED = (
    *("train-step", "--device", "cpu", "--sizes", "custom", "--d-model", "64", "--d-ff", "128"),
    *("--num-layers", "2", "--num-heads", "2", "--vocab-size", "256", "--sequences", "64"),
    *("--variants", "naive,bucketed,torch-ddp", "--calls", "2", "--profiled"),
)
WIDTHS = (1280, 390)
HEIGHT = 2400
SCHEMES = {"light": [], "dark": ["--blink-settings=preferredColorScheme=0"]}
#: A headless window is at least 500 pixels wide, so a frame has the page's width.
FRAME = '<body style="margin:0"><iframe src="{}" style="width:{}px;height:{}px;border:0"></iframe>'


def shoot(page: Path, target: Path, width: int, options: list[str]) -> None:
    """Writes the picture of one page at one width."""
    with tempfile.TemporaryDirectory(prefix="screenshot-") as folder:
        frame = Path(folder) / "frame.html"
        frame.write_text(FRAME.format(page.absolute().as_uri(), width, HEIGHT))
        size = f"--window-size={max(width, 500)},{HEIGHT}"
        # The time in which fonts, search and tabs come to rest.
        settled = "--virtual-time-budget=4000"
        browser.run(frame, f"--screenshot={target.absolute()}", size, settled, *options)
    with Image.open(target) as picture:
        picture.crop((0, 0, width, HEIGHT)).save(target)


def own_pages(folder: Path) -> dict[str, Path]:
    """The pages of bench-harness by name, measured unless the folder holds them."""
    runs = [folder / "runs" / name for name in ("a", "b")]
    commands = [[*MEASURED, "--output", str(run)] for run in runs]
    pages = {name: folder / "runs" / f"{name}.html" for name in OWN[1:]}
    commands.append(["compare", *map(str, runs), "--page", str(pages["comparison"])])
    for command in commands:
        if cli.main(command):
            raise browser.BrowserError(f"bench-harness {' '.join(command)} failed")
    traces = sorted((runs[0] / "artifacts").rglob("*.json.gz"))
    with contextlib.redirect_stdout(io.StringIO()):  # its tables are on the page
        cli.main(["trace", *map(str, traces), "--page", str(pages["timeline"])])
    return {"report": runs[0] / "report.html", **pages}


def site_pages(folder: Path, asked: list[str]) -> dict[str, Path]:
    """Pages of the site by the names of their pictures."""
    site = folder / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run([*build, "--site-dir", str(site.absolute())], cwd=ROOT, check=True)
    files = site.rglob("*.html") if asked == ["site"] else (site / page for page in asked)
    return {"-".join(f.relative_to(site).with_suffix("").parts): f for f in sorted(files)}


def main(arguments: list[str]) -> None:
    """The command line."""
    folder, asked = Path(arguments[0]), arguments[1:] or [*OWN, *PAGES]
    pages: dict[str, Path] = {}
    if set(asked) & set(OWN):
        pages |= {name: page for name, page in own_pages(folder).items() if name in asked}
    if of_site := [page for page in asked if page not in OWN]:
        pages |= site_pages(folder, of_site)
    for name, page in pages.items():
        for width in WIDTHS:
            for scheme, options in SCHEMES.items():
                target = folder / f"{name}-{width}-{scheme}.png"
                shoot(page, target, width, options)
                print(target)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1:])
    except browser.BrowserError as error:
        sys.exit(str(error))
