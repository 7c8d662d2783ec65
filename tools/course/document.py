"""The answers of one edition as one HTML file and one PDF, with their pictures inside.

A document holds what the course grades: of each page the questions, the asked form, the answers,
what stands between an answer and the next question, and the pictures. Tables of rows stay on the
pages. Chromium prints the PDF.
"""

from __future__ import annotations

import base64
import importlib
import re
from pathlib import Path
from typing import Any

from tools import browser
from tools.course.questions import PAGES, Part, parts

_COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
_PICTURE = re.compile(r"!\[(?P<title>[^\]]*)\]\((?P<file>[^)]+\.png)\)")
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?!https?:)[^)]*\)")
_STYLE = """
body { font: 11pt/1.45 Georgia, serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-top: 3rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
blockquote { border-left: 4px solid #00796b; margin: 0; padding: .2rem 1rem; background: #f2f8f7; }
table { border-collapse: collapse; font-size: .85em; margin: .8rem 0; }
td, th { border-bottom: 1px solid #ccc; padding: .15rem .6rem; text-align: left; }
code { font-size: .85em; overflow-wrap: anywhere; } pre { overflow-x: auto; }
img { max-width: 100%; }
@media print { h2, blockquote, table { break-inside: avoid; } h2 { break-after: avoid; } }
"""


def write(edition: int, folder: Path, *, pdf: bool = True) -> list[Path]:
    """Writes ``answers-EDITION.html`` and ``answers-EDITION.pdf``, and returns their paths.

    Raises:
        ValueError: the group docs is not installed.
        BrowserError: there is no Chromium, which prints the PDF, or it failed.
    """
    try:
        markdown: Any = importlib.import_module("markdown")
    except ImportError:
        raise ValueError(
            "the document must have the library markdown, but it is not installed. Give the "
            "command under uv run --group docs."
        ) from None
    body = markdown.markdown(
        text(edition), extensions=["tables", "pymdownx.superfences", "sane_lists"]
    )
    folder.mkdir(parents=True, exist_ok=True)
    title = f"Systems and parallelism, edition of {edition}"
    page = (
        f"<!doctype html>\n<html lang=en><head><meta charset=utf-8><title>{title}</title>"
        f"<style>{_STYLE}</style></head><body>\n{body}\n</body></html>\n"
    )
    html = folder / f"answers-{edition}.html"
    html.write_text(_PNG.sub(_embedded, page), encoding="utf-8")
    if not pdf:
        return [html]
    target = folder / f"answers-{edition}.pdf"
    browser.run(html, f"--print-to-pdf={target.resolve()}", "--no-pdf-header-footer")
    return [html, target]


def text(edition: int) -> str:
    """The document as Markdown, whose pictures are absolute paths."""
    chosen = [part for part in parts() if edition in part.editions]
    pages = dict.fromkeys(part.page for part in chosen)
    found = [_page([part for part in chosen if part.page == page]) for page in pages]
    return "\n\n".join([f"# Systems and parallelism: answers to the edition of {edition}", *found])


def _page(chosen: list[Part]) -> str:
    """Title, answers and pictures of one page."""
    file = PAGES / f"{chosen[0].page}.md"
    shown = _COMMENT.sub("", file.read_text(encoding="utf-8"))
    title = shown.splitlines()[0]
    problems = ", ".join(dict.fromkeys(f"`{part.problem}`" for part in chosen))
    answers = (
        shown[shown.index("\n## ") :].split("\n## Setup\n", 1)[0].split("\n## With numbers\n")[0]
    )
    seen = set(_PICTURE.findall(answers))
    pictures = [
        f"![{name}]({path})" for name, path in _PICTURE.findall(shown) if (name, path) not in seen
    ]
    whole = "\n\n".join([title, f"Problem {problems}", answers.strip(), *pictures])
    whole = _LINK.sub(lambda match: match["text"], whole)
    return _PICTURE.sub(
        lambda match: f"![{match['title']}]({(file.parent / match['file']).resolve()})", whole
    )


_PNG = re.compile(r'src="(?P<path>/[^"]+\.png)"')


def _embedded(match: re.Match[str]) -> str:
    data = base64.b64encode(Path(match["path"]).read_bytes()).decode()
    return f'src="data:image/png;base64,{data}"'
