"""Pictures of the site as a reader sees it, on a desk and on a phone, by day and by night.

    python -m scripts.screenshots FOLDER                     # the first pages that a newcomer opens
    python -m scripts.screenshots FOLDER results/index.html  # these
    python -m scripts.screenshots FOLDER all                 # every page, which takes long

It builds the site into FOLDER/site and writes FOLDER/PAGE-WIDTH-SCHEME.png, for widths of 1280 and
390 pixels and both colour schemes. It needs Chromium and the dependency group docs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from tools import browser

ROOT = Path(__file__).resolve().parents[1]
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
WIDTHS = (1280, 390)
HEIGHT = 2400
SCHEMES = {"light": [], "dark": ["--force-dark-mode"]}
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


def main(arguments: list[str]) -> None:
    """The command line."""
    folder, *pages = map(Path, arguments)
    site = folder / "site"
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    subprocess.run([*build, "--site-dir", str(site.absolute())], cwd=ROOT, check=True)
    if pages == [Path("all")]:
        pages = sorted(page.relative_to(site) for page in site.rglob("*.html"))
    for page in pages or map(Path, PAGES):
        for width in WIDTHS:
            for scheme, options in SCHEMES.items():
                name = "-".join(page.with_suffix("").parts)
                target = folder / f"{name}-{width}-{scheme}.png"
                shoot(site / page, target, width, options)
                print(target)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        main(sys.argv[1:])
    except browser.BrowserError as error:
        sys.exit(str(error))
