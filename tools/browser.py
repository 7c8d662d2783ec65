"""A headless Chromium, where one is installed: shows what a reader of a page sees, prints PDFs, and
takes pictures of the site and of reports, on a desk and a phone, day and night.

    python -m tools.browser FOLDER                              # what a newcomer opens first
    python -m tools.browser FOLDER report comparison timeline   # the pages of bench-harness
    python -m tools.browser FOLDER results/index.html           # a page of the site
    python -m tools.browser FOLDER site                         # every page, which takes long

For pages of the site it builds the site into FOLDER/site, which needs the dependency group docs.
For the others it measures a small training step twice into FOLDER/runs, a minute on two cores:
``report`` is the page of the first run, ``comparison`` that of both, and ``timeline`` that of the
recorded steps. It writes FOLDER/PAGE-WIDTH-SCHEME.png, for widths of 1280 and 390 pixels and both
colour schemes, and needs Chromium.
"""

import itertools
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

#: Names under which Chromium and its relatives are installed.
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
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


class BrowserError(RuntimeError):
    """There is no browser, or it failed; the text says what to do, in one line."""


def find() -> str | None:
    """The path of a Chromium on the PATH; None if there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def run(page: Path, *options: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """Opens a local page headless, with a profile of its own, and waits until the browser ends.

    Raises:
        BrowserError: there is none, or it failed or did not end.
    """
    browser = find()
    if browser is None:
        raise BrowserError(
            f"needs Chromium: one of {', '.join(NAMES)} must be on the PATH; found none"
        )
    usual = ["--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    # Chromium's sandbox refuses to run as root, as in a container.
    usual += ["--no-sandbox"] * (os.geteuid() == 0)
    with tempfile.TemporaryDirectory(prefix="bench-browser-") as profile:
        where = (f"--user-data-dir={profile}", page.absolute().as_uri())
        command = [browser, *usual, *options, *where]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise BrowserError(f"{browser} did not end within {timeout_s:g} s") from None
    if done.returncode:
        raise BrowserError(f"{browser} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done


def shoot(page: Path, target: Path, width: int, options: list[str]) -> None:
    """Writes the picture of one page at one width."""
    with tempfile.TemporaryDirectory(prefix="screenshot-") as folder:
        frame = Path(folder) / "frame.html"
        frame.write_text(FRAME.format(page.absolute().as_uri(), width, HEIGHT))
        size = f"--window-size={max(width, 500)},{HEIGHT}"
        # The time in which fonts, search and tabs come to rest.
        settled = "--virtual-time-budget=4000"
        run(frame, f"--screenshot={target.absolute()}", size, settled, *options)
    with Image.open(target) as picture:
        picture.crop((0, 0, width, HEIGHT)).save(target)


def shell(script: str, folder: Path) -> None:
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
        shell(MEASURE, folder / "runs")
    if of_site := [page for page in asked if page not in OWN]:
        site = folder / "site"
        shell(f"python -m mkdocs build --quiet --strict --site-dir {shlex.quote(str(site))}", ROOT)
        files = site.rglob("*.html") if asked == ["site"] else (site / page for page in of_site)
        pages |= {"-".join(f.relative_to(site).with_suffix("").parts): f for f in sorted(files)}
    for (name, page), width, scheme in itertools.product(pages.items(), WIDTHS, SCHEMES):
        target = folder / f"{name}-{width}-{scheme}.png"
        shoot(page, target, width, SCHEMES[scheme])
        print(target)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1:])
    except (BrowserError, subprocess.CalledProcessError) as error:
        sys.exit(str(error))
