"""The report as a reader's browser shows it: a headless Chromium opens real pages."""

from __future__ import annotations

import html
import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tools import browser

from bench_harness import report
from bench_harness.store import Store

pytestmark = pytest.mark.skipif(browser.find() is None, reason="needs Chromium on the PATH")

Bench = Callable[..., subprocess.CompletedProcess[str]]

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


#: What makes the browser prefer dark pages.
DARK = ("--blink-settings=preferredColorScheme=0",)
#: In a frame as wide as a phone or a desk: what is too wide or too small, by computed style.
PROBE = """
const small = [...document.querySelectorAll("body *")].filter((each) =>
  each.checkVisibility() && each.textContent.trim() &&
  parseFloat(getComputedStyle(each).fontSize) < 11).map((each) => each.outerHTML.slice(0, 80));
// Text of a drawing is 8.3 points or more; how many pixels has one?
const drawn = [...document.images].filter((each) => each.checkVisibility()).map((each) =>
  each.clientWidth / each.naturalWidth * 96 / 72);
found = { wide: document.documentElement.scrollWidth, small, drawn: Math.min(9, ...drawn),
  paper: getComputedStyle(document.body).backgroundColor };
"""

#: Uses the first timeline as a reader does.
TIMELINE = """
const box = document.querySelector(".timeline"), canvas = box.querySelector("canvas");
const find = (selector) => box.querySelector(selector), data = canvas.dataset;
const range = () => [+data.from, +data.to];
const frame = () => new Promise(requestAnimationFrame);
const pixels = () => {
  const copy = Object.assign(document.createElement("canvas"), { width: canvas.width,
    height: canvas.height }).getContext("2d", { willReadFrequently: true });
  copy.drawImage(canvas, 0, 0);
  const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
  const style = getComputedStyle(box).getPropertyValue("--match").trim();
  const [r, g, b] = [1, 3, 5].map((at) => parseInt(style.slice(at, at + 2), 16));
  let count = 0;
  for (let i = 0; i < data.length; i += 4)
    count += data[i] === r && data[i + 1] === g && data[i + 2] === b;
  return count;
};
const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
await frame();
found.whole = range();
found.before = pixels();
find("[value='+']").click();
await frame();
found.zoomed = range();
press("ArrowRight");
await frame();
found.moved = range();
press("-"); press("-");
await frame();
found.out = range();
find("[type=search]").value = "NVJET";
find("[type=search]").dispatchEvent(new Event("input"));
await frame();
found.matches = +data.matches;
found.lit = pixels();
press("+"); press("+");
find("[type=search]").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
await frame();
found.next = range();
press("0");
find("details").open = true;
await frame();
await new Promise((done) => setTimeout(done, 50));
found.table = [...box.querySelectorAll("tbody tr")].map((line) => line.innerText.split("\\t"));
const rect = canvas.getBoundingClientRect();
const over = (x, y) => canvas.dispatchEvent(new PointerEvent("pointermove",
  { clientX: rect.left + x, clientY: rect.top + y }));
over(68 + (canvas.clientWidth - 76) * 0.3, 22 + 22 + 18 + 8);
found.tip = find(".tip").hidden ? null : find(".tip").innerText;
find("select").selectedIndex = 1;
find("select").dispatchEvent(new Event("change"));
await frame();
found.name = find("select").value;
found.pictures = document.images.length;
found.status = find("[role=status]").textContent;
found.focus = canvas.tabIndex;
"""


def seen(page: Path, width: int, script: str, *options: str) -> dict[str, Any]:
    """What a script puts into ``found`` in a page of that width; nothing may be complained of."""
    inner = "<script>(async () => {{ let found = {{}};{}document.body.dataset.found = {}"
    inner = inner.format(script, "JSON.stringify(found); })().catch(console.error);</script>")
    # Time is virtual, and frames take no part in it.
    frames = "<body><script>requestAnimationFrame = (act) => setTimeout(act, 1);</script>"
    text = page.read_text().replace("<body>", frames).replace("</body>", inner + "</body>")
    source = html.escape(text, quote=True)
    frame = page.with_name("frame.html")
    # A frame is as narrow as a phone; the window itself has a least width.
    frame.write_text(
        f'<iframe style="width:{width}px;height:900px;border:0" srcdoc="{source}"></iframe>'
        "<script>onload = () => setTimeout(() => { const inner = document.querySelector('iframe');"
        "document.body.dataset.found = inner.contentDocument.body.dataset.found; }, 1500);</script>"
    )
    shown = ("--dump-dom", "--enable-logging=stderr", "--virtual-time-budget=5000")
    done = browser.run(frame, *shown, *options)
    assert re.findall(".*CONSOLE.*", done.stderr) == []
    held = re.search(r'<body data-found="([^"]*)"', done.stdout)
    assert held is not None
    found: dict[str, Any] = json.loads(html.unescape(held[1]))
    return found


def assert_fits(found: dict[str, Any], width: int) -> None:
    assert found["wide"] <= width
    assert found["small"] == []
    assert found["drawn"] * 8.3 >= 11


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_the_page_fits_its_window(page: Path, width: int, dark: bool) -> None:
    """On a phone nothing but a table's own box is wider than the window, whatever a name is."""
    page.write_text(page.read_text().replace("<nav>", f"<ol><li>{'word' * 50}</li></ol><nav>"))
    assert_fits(seen(page, width, PROBE, *DARK[:dark]), width)
    page.write_text(page.read_text().replace("<h1>", "<h1 style='width:1300px;font-size:9px'>"))
    found = seen(page, width, PROBE)
    assert found["wide"] > width
    assert len(found["small"]) == 1


def span(name: str, category: str, start: float, end: float, stream: int) -> dict[str, object]:
    where = {"pid": 1, "tid": stream, "args": {"correlation": start}}
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": end - start, **where}


EVIL = "b<img src=x onerror=alert(1)><script>.json"


@pytest.fixture
def timeline_page(bench: Bench, tmp_path: Path) -> Path:
    """Two recordings on one time axis, 100 and 80 µs long; names are a stranger's."""
    for name, end in (("a.json", 100), (EVIL, 80)):
        events = [
            span("phase:forward", "user_annotation", 0, 50, 1),
            span("nvjet_tst_128x256", "kernel", 0, 40, 7),
            span("elementwise_kernel", "kernel", 50, end, 7),
            *(span("nvjet_small", "kernel", 10 * i, 10 * i + 2, 8) for i in range(4)),
            span("ncclDevKernel_AllReduce_Sum_f32", "kernel", 20, 60, 20),
        ]
        (tmp_path / name).write_text(json.dumps({"traceEvents": events}))
    done = bench("trace", "a.json", EVIL, "--page", "page.html")
    assert done.returncode == 0, done.stderr
    return tmp_path / "page.html"


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_a_timeline_is_searched_zoomed_and_read_out(
    timeline_page: Path, width: int, dark: bool
) -> None:
    scheme = DARK[:dark]
    found = seen(timeline_page, width, PROBE + TIMELINE, *scheme)
    assert_fits(found, width)
    assert found["paper"] == ("rgb(21, 24, 27)" if dark else "rgb(255, 255, 255)")
    assert found["whole"] == [0, 100_000], "nanoseconds of the longer one"
    assert found["zoomed"] == [25_000, 75_000]
    assert found["moved"] == [35_000, 85_000]
    assert found["out"] == [0, 100_000]
    assert found["before"] == 0
    assert found["matches"] == 2 * 5
    assert found["lit"] > 1000, "what matches is drawn in the colour of matches"
    assert found["next"] == [0, 80_000], "the first match and as much on both sides"
    table = {name: numbers for name, *numbers in found["table"]}
    assert table["nvjet_tst_128x256"] == ["0.04 ms", "1", "0.04 ms", "1"]
    assert table["nvjet_small"] == ["0.008 ms", "4", "0.008 ms", "4"]
    assert table["elementwise_kernel"] == ["0.05 ms", "1", "0.03 ms", "1"]
    assert found["tip"] == "nvjet_tst_128x256\n40 µs, from 0 ms on stream 7"
    assert (found["name"], found["pictures"]) == (EVIL, 0), "a name is text"
    assert "of 80 µs" in found["status"], "both sides show the second recording"
    assert found["focus"] == 0


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_a_comparison_fits_its_window(
    page: Path, bench: Bench, rank: object, tmp_path: Path, width: int, dark: bool
) -> None:
    """A row of many words, a far interval, an unknown case, and two timelines."""
    lines = (page.parent / "results.jsonl").read_text().splitlines()
    recorded = {"drawn": 0, "ranks": [rank] * 3}
    for run in ("a", "b"):
        store = Store(tmp_path / run)
        with store.open_for_writing() as writer:
            for number, line in enumerate(lines):
                row = json.loads(line) | {"timeline": recorded, "waterfall": {"products": 3.0}}
                times = [row["samples_ms"][0] * (1 + (run == "b") * number), 1.0] * 3
                name = "a variant of very many words " * (3 * number + 1)
                row |= {"samples_ms": times, "variant": name, "started": f"in {run}"}
                writer.append([row])
            writer.append([row | {"case_key": run, "label": "alone"}])
    assert bench("compare", "a", "b", "--page", "compare.html").returncode == 0
    scheme = DARK[:dark]
    drawn = """
    const canvas = document.querySelector("canvas"), rest = () => new Promise((done) =>
      setTimeout(done, 20));
    await rest();
    Object.assign(found, { to: canvas.dataset.to, few: canvas.clientHeight });
    document.querySelector(".timeline [type=checkbox]").click();
    await rest();
    found.many = canvas.clientHeight;
    """
    found = seen(tmp_path / "compare.html", width, PROBE + drawn, *scheme)
    assert_fits(found, width)
    assert found["to"] == "9000"
    assert found["many"] - found["few"] == 2 * 2 * (22 + 18 + 18), "all three ranks of both runs"


@pytest.mark.nightly  # measures twice
@pytest.mark.timeout(600)
def test_one_command_takes_pictures_of_a_report_a_comparison_and_a_timeline(
    bench: Bench, tmp_path: Path
) -> None:
    browser.main([str(tmp_path), *browser.OWN])
    for name in browser.OWN:
        for width in (1280, 390):
            papers = []
            for scheme in ("light", "dark"):
                with Image.open(tmp_path / f"{name}-{width}-{scheme}.png") as shown:
                    assert shown.width == width
                    papers.append(shown.convert("RGB").getpixel((3, 3)))
            assert papers == [(255, 255, 255), (21, 24, 27)]


@pytest.mark.nightly
def test_a_page_with_100_mb_of_trace_behind_it_opens_in_five_seconds(
    bench: Bench, tmp_path: Path
) -> None:
    launch, kernel, text = span("cudaLaunchKernel", "cuda_runtime", 0, 3, 1), "", ""
    with (tmp_path / "big.json").open("w") as file:
        file.write('{"traceEvents": [')
        for number in range(170_000):
            name, stream = (("nvjet_tst_TNN", 7), ("ncclDevKernel_AllReduce_Sum_f32", 20))[
                number % 3 == 2
            ]
            kernel = span(name, "kernel", 25 * number + 20, 25 * number + 40, stream)
            kernel |= {"args": {"correlation": number, "grid": [2, 66, 1], "queued": "0" * 300}}
            launch |= {"ts": 25 * number, "args": {"correlation": number}}
            text = f"{json.dumps(launch)},{json.dumps(kernel)}"
            file.write(text + ("," if number < 169_999 else "]}"))
        assert file.tell() > 100e6
    assert bench("trace", "big.json", "--page", "page.html").returncode == 0
    picture = tmp_path / "page.png"
    begin = time.perf_counter()
    browser.run(tmp_path / "page.html", f"--screenshot={picture}", "--window-size=1280,900")
    assert time.perf_counter() - begin < 5, "with the start of the browser"
    with Image.open(picture) as shown:
        pixels = shown.convert("RGB").getcolors(1 << 24) or []
    blue = sum(count for count, (red, _, blue) in pixels if blue - red > 40)
    assert blue > 5000, "products are drawn"


def test_a_missing_browser_is_named(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(page.parent))
    with pytest.raises(browser.BrowserError, match=r"one of chromium, .* found none"):
        browser.run(page)
