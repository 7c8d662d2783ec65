"""The built documentation site: complete, whole, and without a request to any other host."""

import html
import importlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from tools import browser

from shard_optim.accounting import STAGES, rank_memory

pytestmark = [pytest.mark.nightly, pytest.mark.release]

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ["basics_model", "bench_harness", "ddp_lite", "flashattn_triton", "shard_optim"]
# Attributes that make a browser load something as it opens the page.
LOADED = {
    ("script", "src"),
    ("img", "src"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("object", "data"),
    ("link", "href"),
}


class Document(HTMLParser):
    """What a page loads, where its links lead, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.anchors.add(value)
            elif (tag, name) in LOADED and value:
                self.loaded.append(value)
            elif tag == "a" and name == "href" and value:
                self.links.append(value)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="needs the dependency group docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def documents(site: Path) -> dict[Path, Document]:
    # The page for missing addresses is for servers: its links begin at the server's root.
    return {path: Document(path) for path in site.rglob("*.html") if path.name != "404.html"}


def test_nothing_is_loaded_from_another_host(site: Path, documents: dict[Path, Document]) -> None:
    for path, document in documents.items():
        outside = [each for each in document.loaded if re.match(r"(\w+:)?//", each)]
        assert not outside, f"{path.relative_to(site)} loads {outside}"
    for sheet in site.rglob("*.css"):
        loaded = re.findall(r"(?:url\(|@import)\s*[\"']?((?:\w+:)?//[^\"')]+)", sheet.read_text())
        assert not loaded, f"{sheet.relative_to(site)} loads {loaded}"


def test_links_lead_somewhere(site: Path, documents: dict[Path, Document]) -> None:
    broken = []
    for path, document in documents.items():
        for link in {*document.links, *document.loaded}:
            if re.match(r"\w+:", link):
                continue
            target, _, anchor = unquote(link).partition("#")
            leads_to = (path.parent / target.partition("?")[0]).resolve() if target else path
            if not leads_to.is_file():
                broken.append(f"{path.relative_to(site)}: {link} is no file")
            elif anchor and leads_to in documents and anchor not in documents[leads_to].anchors:
                broken.append(f"{path.relative_to(site)}: {link} has no such anchor")
    assert not broken, "\n".join(broken)


# Where the browser itself looks for updates and the time.
OWN_HOSTS = (".google.com", ".googleapis.com", ".gvt1.com")


#: Loads every page in both frames, and says how far content and tables reach beyond their room; of
#: a phone's table, how far the first number behind the first column is outside of the window.
ALL_PAGES = """<body data-found=""><script>
const frames = [1280, 390].map((width) => {
  const frame = document.createElement("iframe");
  frame.style = `width:${width}px;height:900px;border:0`;
  document.body.append(frame);
  return frame;
});
const load = (frame, page) => new Promise((done) => {
  frame.onload = () => setTimeout(done, 50);
  frame.src = page;
});
const probe = ({contentDocument: page}) => [
  ["page", page.documentElement.scrollWidth - page.documentElement.clientWidth, 0],
  ...[...page.querySelectorAll("article table:not([class])")].map((table) => {
    const room = table.closest(".md-typeset__scrollwrap") ?? table.parentElement;
    const cells = [...table.querySelectorAll("tbody tr:first-child td")].slice(1);
    const number = cells.find((cell) => /^-?[\\d.,]+( \\[|$)/.test(cell.innerText.trim()));
    const right = number?.getBoundingClientRect().right ?? 0;
    return [table.tHead?.innerText.slice(0, 60), table.scrollWidth - room.clientWidth,
      Math.round(right - page.documentElement.clientWidth)];
  }),
];
(async () => {
  const found = [];
  for (const page of PAGES) {
    await Promise.all(frames.map((frame) => load(frame, page)));
    found.push([page, ...frames.map(probe)]);
  }
  document.body.dataset.found = JSON.stringify(found);
})();
</script></body>"""


@pytest.mark.skipif(browser.find() is None, reason="needs Chromium on the PATH")
def test_every_page_on_a_desk_and_a_phone_in_a_browser(
    site: Path, documents: dict[Path, Document], tmp_path: Path
) -> None:
    """Pages fit the window, tables their column; a phone shows a number of each table. There is no
    error on the console, and no request to another host."""
    pages = sorted(path.relative_to(site).as_posix() for path in documents)
    frames, log = site / "all-pages.html", tmp_path / "net.json"
    frames.write_text(ALL_PAGES.replace("PAGES", json.dumps(pages)))
    try:
        done = browser.run(
            frames,
            # A page may look into its frames, although each file is an origin of its own.
            *("--disable-web-security", "--allow-file-access-from-files", "--dump-dom"),
            *("--virtual-time-budget=600000", "--enable-logging=stderr"),
            *(f"--log-net-log={log}", "--host-resolver-rules=MAP * ~NOTFOUND"),
            timeout_s=280,
        )
    finally:
        frames.unlink()
    assert re.findall(".*CONSOLE.*", done.stderr) == []
    asked = re.findall(r'"url":"(https?://([^/"]+)[^"]*)"', log.read_text(errors="replace"))
    assert not [url for url, host in asked if not host.endswith(OWN_HOSTS)]
    found = re.search(r'data-found="([^"]+)"', done.stdout)
    assert found is not None, done.stdout[:500]
    probed = json.loads(html.unescape(found[1]))
    assert [page for page, *_ in probed] == pages
    problems = []
    for page, desk, phone in probed:
        problems += [f"{page} {head!r}: {wide} px too wide" for head, wide, _ in desk if wide > 0]
        problems += [f"{page}: {wide} px too wide for a phone" for _, wide, _ in phone[:1] if wide]
        problems += [f"{page} {head!r}: no number on a phone" for head, _, out in phone if out > 0]
    assert not problems, "\n".join(problems)


def test_the_search_index_is_a_script(site: Path) -> None:
    """A page opened from a folder may load scripts, but not data."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = ")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_in_the_reference(
    package: str, site: Path, documents: dict[Path, Document]
) -> None:
    page = documents[site / "reference" / f"{package.replace('_', '-')}.html"]
    names = {f"{package}.{name}" for name in importlib.import_module(package).__all__}
    assert names <= page.anchors, sorted(names - page.anchors)


def test_the_picture_of_the_stages_is_the_accounting() -> None:
    """Bytes per parameter on one of eight ranks, at the end of each stage's bar."""
    drawn = (ROOT / "docs" / "pictures" / "zero-stages.svg").read_text()
    totals = re.findall(r'class="bold" text-anchor="start">([\d.]+)<', drawn)
    assert totals == [f"{rank_memory(1, world_size=8, stage=each).total:g}" for each in STAGES]


@pytest.mark.parametrize(
    ("package", "first"),
    [
        ("ddp_lite", "BucketedDDP"),
        ("shard_optim", "FullyShardedDataParallel"),
        ("flashattn_triton", "flash_attention"),
        ("basics_model", "TransformerLM"),
    ],
)
def test_a_reference_begins_with_what_people_use(package: str, first: str, site: Path) -> None:
    page = (site / "reference" / f"{package.replace('_', '-')}.html").read_text()
    anchors = re.findall(rf'id="({package}\.\w+)"', page)
    assert anchors[0] == f"{package}.{first}"
