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

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from tools import browser

ROOT = Path(__file__).resolve().parents[1]
#: Pages of bench-harness, and where the commands of :data:`MEASURE` leave them in FOLDER/runs.
OWN = {"report": "a/report.html", "comparison": "comparison.html", "timeline": "timeline.html"}
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
MEASURE = r"""
for run in a b; do
    python -m bench_harness train-step --device cpu --sizes custom --d-model 64 --d-ff 128 \
        --num-layers 2 --num-heads 2 --vocab-size 256 --sequences 64 --calls 2 --profiled \
        --variants naive,bucketed,torch-ddp --output $run
done
python -m bench_harness compare a b --page comparison.html
find a/artifacts -name '*.json.gz' | sort | xargs \
    python -m bench_harness trace --page timeline.html > tables.txt
"""
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


def run(script: str, folder: Path) -> None:
    """Runs a shell script whose Python is this one, in a folder that may not exist yet."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script], cwd=folder, env=environment, check=True
    )


def main(arguments: list[str]) -> None:
    """The command line."""
    folder, asked = Path(arguments[0]).absolute(), arguments[1:] or [*OWN, *PAGES]
    pages = {name: folder / "runs" / OWN[name] for name in asked if name in OWN}
    if pages:
        run(MEASURE, folder / "runs")
    if of_site := [page for page in asked if page not in OWN]:
        site = folder / "site"
        run(f"python -m mkdocs build --quiet --strict --site-dir {shlex.quote(str(site))}", ROOT)
        files = site.rglob("*.html") if asked == ["site"] else (site / page for page in of_site)
        pages |= {"-".join(f.relative_to(site).with_suffix("").parts): f for f in sorted(files)}
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
    except (browser.BrowserError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
