"""The report as a reader's browser shows it: a headless Chromium opens real pages."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
from tools import browser

from bench_harness import report
from bench_harness.store import Store

pytestmark = pytest.mark.skipif(browser.find() is None, reason="needs Chromium on the PATH")

#: Where the browser itself looks for updates and the time.
OWN_HOSTS = (".google.com", ".googleapis.com", ".gvt1.com")

#: Sorts the first table by its last column, twice, and leaves the orders where the test reads them.
CLICKS = """
<script>
const table = document.querySelector("table.sortable");
const column = table.tHead.rows[0].cells.length - 1;
const order = () => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent.trim());
const button = table.tHead.rows[0].cells[column].querySelector("button");
const orders = [order()];
for (const _ of [1, 2]) { button.click(); orders.push(order()); }
document.body.dataset.orders = JSON.stringify(orders);
</script>
"""


def row(number: int, median: float) -> dict[str, object]:
    config = {"kind": "ok", "number": number, "broken": False, "label": f"toy ok {number}"}
    about = {"experiment": "toy", "case_key": str(number), "label": f"toy ok {number}"}
    ended = {"status": "ok", "error": None, "detail": None, "seconds": 1.25, "started": "t0"}
    where = {"environment": "abc", "commit": "c0ffee", "config": config}
    return {**about, **ended, **where, "variant": "plain", "samples_ms": [median] * 4}


@pytest.fixture
def page(installed: Path, tmp_path: Path) -> Path:
    """The page of a run of three cases, whose medians do not sort like text."""
    store = Store(tmp_path / "run")
    with store.open_for_writing() as writer:
        for number, median in enumerate((9.5, 100.0, 20.0)):
            writer.append([row(number, median)])
        writer.write_json("env.json", {"abc": {"cpu": "fast", "gpus": []}})
    return report.write(report.build(store), store.folder)


def opened(page: Path, *options: str) -> str:
    return browser.run(page, "--dump-dom", *options).stdout


def test_the_page_renders_without_errors(page: Path) -> None:
    done = browser.run(page, "--dump-dom", "--enable-logging=stderr")
    assert "<h1>toy</h1>" in done.stdout, "what was measured, not the folder"
    assert done.stdout.count("<img") == 1
    assert "CONSOLE" not in done.stderr, done.stderr


def test_an_error_in_a_page_would_be_seen(page: Path) -> None:
    page.write_text(page.read_text() + "<script>missing();</script>")
    done = browser.run(page, "--dump-dom", "--enable-logging=stderr")
    assert re.search(r"CONSOLE.*missing is not defined", done.stderr)


def test_tables_sort_by_number(page: Path) -> None:
    page.write_text(page.read_text().replace("</body>", CLICKS + "</body>"))
    found = re.search(r'data-orders="([^"]*)"', opened(page))
    assert found is not None
    before, up, down = json.loads(html.unescape(found[1]))
    assert before == ["9.5", "100", "20"]
    assert up == ["9.5", "20", "100"]
    assert down == ["100", "20", "9.5"]


def requests(page: Path, log: Path) -> set[str]:
    """The addresses that a page made the browser ask for."""
    opened(page, f"--log-net-log={log}", "--host-resolver-rules=MAP * ~NOTFOUND")
    text = log.read_text(errors="replace")
    return {
        url
        for url, host in re.findall(r'"url":"(https?://([^/"]+)[^"]*)"', text)
        if not host.endswith(OWN_HOSTS)
    }


def test_nothing_outside_the_page_is_asked_for(page: Path, tmp_path: Path) -> None:
    picture = '<img src="https://example.invalid/picture.png">'
    assert requests(page, tmp_path / "net.json") == set()
    # The policy of the page holds back what would ask, and without it the log shows the request.
    page.write_text(page.read_text().replace("<h1>", picture + "<h1>"))
    assert requests(page, tmp_path / "held.json") == set()
    page.write_text(page.read_text().replace("Content-Security-Policy", "X-None"))
    assert requests(page, tmp_path / "seen.json") == {"https://example.invalid/picture.png"}


@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_its_window(
    page: Path, width: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a phone nothing but a table's own box is wider than the window."""
    probe = "<script>document.body.dataset.wide = document.documentElement.scrollWidth;</script>"
    frame = tmp_path / "frame.html"
    page.write_text(page.read_text().replace("</body>", probe + "</body>"))
    # A frame is as narrow as a phone; the window itself has a least width.
    source = html.escape(page.read_text(), quote=True)
    frame.write_text(
        f'<iframe style="width:{width}px;height:600px;border:0" srcdoc="{source}"></iframe>'
        "<script>onload = () => { const inner = document.querySelector('iframe');"
        "document.body.dataset.wide = inner.contentDocument.body.dataset.wide; };</script>"
    )
    found = re.search(r'<body data-wide="(\d+)"', opened(frame))
    assert found is not None
    assert int(found[1]) <= width


def test_a_missing_browser_is_named(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(page.parent))
    with pytest.raises(browser.BrowserError, match=r"one of chromium, .* found none"):
        browser.run(page)
