"""Hook of MkDocs: pages that stand elsewhere in the repository become pages of the site.

MkDocs reads ``docs/`` only. READMEs, changelogs and the pages of the packages stay where GitHub and
the package index show them; this hook adds them under the path that they have in the repository.

Links are written for the repository: relative to the file, or absolute on GitHub where a page also
stands on a package index. Here a link to a file of the site becomes a link inside the site, and a
link to any other file of the repository leads to GitHub, so that every page reads the same in both
places and the site loads nothing from the network.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = (
    "*.md",
    "examples/*.md",
    "packages/*/*.md",
    "packages/*/docs/*.md",
    "packages/*/results/*.md",
)
BADGE = re.compile(r"^\[!\[[^\]]*\]\(https://[^)]*\)\]\([^)]*\)\n", re.MULTILINE)
RENDERED = re.compile(r"^<!-- /?bench-harness.*?-->\n", re.MULTILINE | re.DOTALL)
# Code comes first, so that what looks like a link inside it is left alone.
CODE_OR_LINK = re.compile(
    r"^(?P<mark>```+|~~~+)(?P<info>[^\n]*)\n(?P<block>.*?^(?P=mark) *$)"
    r"|(?P<code>`+)(?!`).+?(?<!`)(?P=code)(?!`)"
    r"|!\[(?P<alt>[^\]]*)\]\((?P<picture>[^)\s]+)\)"
    r"|\]\((?P<link>[^)\s]+)\)",
    re.DOTALL | re.MULTILINE,
)
SPHINX_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages from outside ``docs/``, but for the root README: the home page replaces it."""
    for path in [path for pattern in ELSEWHERE for path in sorted(ROOT.glob(pattern))]:
        if (name := path.relative_to(ROOT).as_posix()) != "README.md":
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Translates links and the words of fences; drops badges and the recipes of rendered blocks."""
    paths = {_repository_path(file): file.src_uri for file in files}
    here = _repository_path(page.file)
    if here.startswith("docs/assignment/"):
        page.meta["search"] = {"boost": 0.2}  # long pages, which others are to be found before
        page.meta["hide"] = ["toc"]  # and wide tables

    def translated(found: re.Match[str]) -> str:
        if found["mark"]:
            return f"{found['mark']}{_info(found['info'])}\n{found['block']}"
        if found["code"]:
            return found[0]
        given = found["picture"] or found["link"]
        target = _target(given, here, page.file.src_uri, paths, config.extra["source"])
        if not found["picture"]:
            return f"]({target})"
        # A picture of another host is not loaded: its text stays.
        return found["alt"] if "://" in target else f"![{found['alt']}]({target})"

    return CODE_OR_LINK.sub(translated, BADGE.sub("", RENDERED.sub("", markdown)))


def on_page_content(html: str, **_: object) -> str:
    """Docstrings use Sphinx's roles and its "::" before code, which Markdown does not know."""
    return SPHINX_ROLE.sub("<code>", html).replace("::</p>", ":</p>")


def _repository_path(file: File) -> str:
    return file.src_uri if file.generated_by else f"docs/{file.src_uri}"


def _target(given: str, here: str, page: str, paths: dict[str, str], source: str) -> str:
    """Where a link leads in the site; ``here`` is its page in the repository, ``page`` there."""
    path, hash_, anchor = given.partition("#")
    raw = source.replace("//github.com/", "//raw.githubusercontent.com/")
    absolute = re.fullmatch(rf"(?:{source}/(?:blob|tree)|{raw})/main/(.+)", path)
    if absolute:
        path = absolute[1].rstrip("/")
    elif "://" in given or not path or path.startswith("mailto:"):
        return given
    else:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
    for candidate in (path, f"{path}/index.md", f"{path}/README.md"):
        if candidate in paths:
            relative = posixpath.relpath(paths[candidate], posixpath.dirname(page) or ".")
            return f"{relative}{hash_}{anchor}"
    if not (ROOT / path).exists():
        return given  # MkDocs names it
    return f"{source}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}{hash_}{anchor}"


def _info(info: str) -> str:
    """What a fence says to scripts/run_readme.py, as a title above the code."""
    language, *words = info.split() or [""]
    given = dict(word.partition("=")[::2] for word in words)
    says = {"file": "{}", "ranks": "torchrun --nproc-per-node {}", "gpu": "needs a GPU"}
    title = ", ".join(text.format(given[word]) for word, text in says.items() if word in given)
    language = "sh" if language == "console" else language
    return f'{language} title="{title}"' if title else language
