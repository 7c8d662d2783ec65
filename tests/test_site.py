"""The built documentation site: complete, whole, and without a request to any other host."""

import importlib
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from scripts import draw_pictures

pytestmark = pytest.mark.nightly

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


@pytest.mark.parametrize("name", draw_pictures.PICTURES)
def test_pictures_are_as_the_script_draws_them(name: str) -> None:
    drawn = draw_pictures.PICTURES[name]()
    assert drawn == (draw_pictures.FOLDER / f"{name}.svg").read_text()
