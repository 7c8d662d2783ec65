"""The report: made from rows alone, in one page that needs no network."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest
from rich.console import Console
from tools import browser

from bench_harness import experiments, report, runner, terminal
from bench_harness.core import Figure, Table
from bench_harness.display.cells import cell, split
from bench_harness.report.frame import to_frame
from bench_harness.report.write import csv as as_csv
from bench_harness.report.write import markdown, table_stem
from bench_harness.store import Store, StoreError

Bench = Callable[..., subprocess.CompletedProcess[str]]
MACHINE = {"gpus": [{"throttle_reasons": ["power limit"]}], "load_1min": 0.5}


def row(kind: str, status: str = "ok", **more: object) -> dict[str, object]:
    config = {"kind": kind, "number": 0, "broken": False, "seconds": 0.0, "label": f"toy {kind}"}
    return {
        "experiment": "toy",
        "case_key": kind,
        "label": f"toy {kind}",
        "status": status,
        "error": None,
        "detail": None,
        "environment": "abc",
        "commit": "c0ffee",
        "started": "t0",
        "seconds": 1.25,
        "config": config,
        **more,
    }


@pytest.fixture
def store(installed: Path, tmp_path: Path) -> Store:
    store = Store(tmp_path / "run")
    with store.open_for_writing() as writer:
        writer.append(
            [
                row(
                    "ok",
                    variant="plain",
                    samples_ms=[1, 2, 3, 4],
                    machine_before=MACHINE,
                    machine_after=MACHINE,
                ),
                row(
                    "ok",
                    variant="<b>double</b>",
                    samples_ms=[2, 4, 6, 8],
                    machine_before=MACHINE,
                    machine_after=MACHINE,
                ),
            ]
        )
        writer.append([row("oom", "oom", error="no room", detail="Traceback <here>")])
        writer.append([row("gone", experiment="elsewhere")])
        writer.write_json("env.json", {"abc": {"cpu": "fast", "gpus": [], "packages": {"a": None}}})
        writer.write_json(
            "run.json", [{"command": "bench-harness toy", "started": "2026-01-02T03:04:05"}]
        )
    return store


class Page(HTMLParser):
    """Checks that tags are balanced, and collects addresses."""

    VOID = frozenset({"meta", "img", "br", "link"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids |= {value or "" for name, value in attrs if name == "id"}

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_report_is_written_from_rows_alone(store: Store) -> None:
    built = report.build(store)
    page = report.write(built, store.folder).read_text()
    assert [section.name for section in built.sections] == ["toy", "elsewhere"]
    assert built.counts == {"ok": 2, "oom": 1}
    for text in ("toy oom", "no room", "Traceback &lt;here&gt;", "c0ffee", "fast", "not installed"):
        assert text in page
    assert "GPU slowed down: power limit" in page
    assert "&lt;b&gt;double&lt;/b&gt;" in page
    assert "<b>" not in page
    with (store.folder / "tables" / "toy-times.csv").open() as file:
        assert [line["median (ms)"] for line in csv.DictReader(file)] == ["4", "8"]
    assert "A note & more." in (store.folder / "tables" / "toy-times.md").read_text()
    assert (store.folder / "figures" / "toy-line.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (store.folder / "figures" / "toy-line.svg").read_bytes()


def test_the_page_asks_for_nothing_outside_itself(store: Store) -> None:
    text = report.write(report.build(store), store.folder).read_text()
    assert not re.search(r"https?:", text)
    parsed = Page(text)
    for address in parsed.addresses:
        if address.startswith("#"):
            assert address[1:] in parsed.ids
        elif not address.startswith("data:image/"):
            assert (store.folder / address).is_file()
    assert "default-src 'none'" in text


def test_a_broken_table_is_named_and_the_rest_is_shown(store: Store) -> None:
    config = {"kind": "odd", "number": 0, "broken": True}
    with store.open_for_writing() as writer:
        writer.append([row("odd", config=config, variant="plain", samples_ms=[1, 2, 3, 4])])
    built = report.build(store)
    (problem,) = built.sections[0].problems
    assert problem.startswith("tables: KeyError: 'no such column'")
    assert "Could not be shown" in report.write(built, store.folder).read_text()
    assert len(built.sections[0].figures) == 1


def test_damage_and_mixed_environments_are_said(store: Store) -> None:
    with store.open_for_writing() as writer:
        writer.write_json("env.json", {"abc": {}, "def": {}})
    with store.results.open("a") as file:
        file.write('{"torn')
    damage, again, mixed = report.build(store).notes
    assert "results.jsonl line 5 is damaged and was left out: it is not a JSON object" in damage
    assert "measures what is missing again" in again
    assert "2 environments" in mixed


def test_a_folder_without_rows_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="RUN must be a run folder"):
        report.build(Store(tmp_path))
    with Store(tmp_path).open_for_writing():
        pass
    with pytest.raises(StoreError, match=r"must hold a complete case, but got none\. Let a case"):
        report.build(Store(tmp_path))
    (tmp_path / "results.jsonl").write_text('{"schema": 0}\nnone\n')
    with pytest.raises(
        StoreError, match=r"got none: line 1 is damaged, its schema is 0: line 2 is"
    ):
        report.build(Store(tmp_path))


def test_configuration_becomes_columns_beside_the_measurement() -> None:
    frame = to_frame([{"a": 1, "config": {"b": 2, "a": 3}}, {"samples_ms": [1, 2], "config": {}}])
    assert list(frame.columns) == ["a", "b", "config.a", "samples_ms"]
    assert frame["samples_ms"][1] == [1, 2]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (float("nan"), ""),
        (pd.NA, ""),
        (True, "yes"),
        (12345678, "12345678"),
        (1234567.8, "1.23457e+06"),
        (0.125, "0.125"),
        ("text", "text"),
        ((1, 2), "(1, 2)"),
    ],
)
def test_cells(value: object, text: str) -> None:
    assert cell(value) == text


def test_table_files_carry_the_experiment_once() -> None:
    assert table_stem("ddp", "Time per step (ms)") == "ddp-time-per-step-ms"
    assert table_stem("ddp", "DDP: time") == "ddp-time"


@pytest.mark.parametrize("colour", [True, False])
def test_the_terminal_stays_within_80_columns(store: Store, colour: bool) -> None:
    file = io.StringIO()
    console = Console(
        file=file, width=80, force_terminal=colour, color_system="truecolor" if colour else None
    )
    with store.open_for_writing() as writer:
        writer.append([row("bad", "error", error="a long story " * 20)])
    built = report.build(store)
    terminal.tables((each for part in built.sections for each in part.tables), console)
    terminal.summary(built, Path("runs/toy-01/report.html"), console)
    text = re.sub(r"\x1b\[[0-9;]*m", "", file.getvalue())
    assert (text != file.getvalue()) is colour
    assert all(len(line) <= 80 for line in text.splitlines())
    for part in ("Toy <times>", "<b>double</b>", "error", "a long story", "toy-01/report.html"):
        assert part in text


@pytest.mark.parametrize("columns", [1, 5, 9, 30])
def test_a_table_of_any_width_fits_the_terminal(columns: int) -> None:
    frame = pd.DataFrame({f"long name {i} (px)": [1.5 * 10**i, None, 3.0] for i in range(columns)})
    tables = [Table("Wide", frame, "")]
    file = io.StringIO()
    terminal.tables(tables, Console(file=file, width=80))
    lines = file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    shown = " ".join(file.getvalue().split())
    assert all(shown.count(f" {i} ") >= 1 for i in range(columns)), "no column is left out"
    assert shown.count("(px)") == shown.count("long"), "headings are whole"
    below = sum("──" in line for line in lines) - 1  # grids that begin with the first column
    assert shown.count("(px)") == columns + below


def shown(frame: pd.DataFrame) -> str:
    tables = [Table("Toy", frame, "")]
    file = io.StringIO()
    terminal.tables(tables, Console(file=file, width=80))
    return file.getvalue()


def test_a_table_of_equal_rows_is_shown_and_one_without_rows_is_not() -> None:
    alike = pd.DataFrame({f"an equal number {i} (ms)": [1.5, 1.5] for i in range(9)})
    assert shown(alike).count("1.5") >= 18
    assert shown(pd.DataFrame()) == ""
    assert shown(pd.DataFrame({"phase": []})) == ""


def test_what_all_rows_share_stands_once_below_a_table_that_is_too_wide() -> None:
    frame = pd.DataFrame(
        {"variant": ["a", "b"], "device under test": ["H100"] * 2}
        | {f"measured {i} (ms)": [1.0 + i, 2.0 + i] for i in range(6)}
    )
    tables = [Table("Wide", frame, "")]
    texts = {}
    for width in (60, 200):
        file = io.StringIO()
        terminal.tables(tables, Console(file=file, width=width))
        texts[width] = file.getvalue()
    assert texts[60].count("H100") == 1
    assert "device under test H100" in " ".join(texts[60].split())
    assert texts[200].count("H100") == 2, "it fits"


def test_a_wide_table_says_once_what_all_rows_share() -> None:
    wide = pd.DataFrame(
        {"size": ["xl", "xl"], "ms": [1.0, 2.0], **{c: ["", ""] for c in "abcdefg"}}
    )
    constant, rest = split(wide)
    assert constant == {"size": "xl"}
    assert list(rest.columns) == ["ms"]
    narrow = wide[["size", "ms"]]
    assert split(narrow)[1] is narrow


@pytest.mark.skipif(browser.find() is None, reason="needs Chromium on the PATH")
def test_the_page_renders_and_sorts_in_a_browser(store: Store) -> None:
    page = report.write(report.build(store), store.folder)
    click = "<script>document.querySelectorAll('.sortable button')[3].click()</script>"
    page.write_text(page.read_text().replace("</body>", 2 * click + "</body>"))
    done = browser.run(page, "--dump-dom", "--enable-logging=stderr")
    assert "CONSOLE" not in done.stderr
    times = done.stdout[: done.stdout.index('id="cases"')]
    assert 'aria-sort="descending"' in times
    assert times.index("&lt;b&gt;double") < times.index(">plain<")


WRONG = [None, 3, -1, 10**400, True, "x", "../../etc", "=1+1", [], [None], {}, {"gpus": 3}]


def test_no_wrong_value_costs_more_than_its_row(store: Store, bench: Bench) -> None:
    """Every field of a row with every kind of wrong value: reports, resuming, comparing go on."""
    (good, *_) = map(json.loads, store.results.read_text().splitlines())
    good = {**good, "case_rows": 1}
    with store.results.open("a") as file:
        more = ("samples_device_ms", "timeline", "waterfall")
        for name in [*(good.keys() - {"schema"}), *more]:  # newer ones are refused
            for index, value in enumerate(WRONG):
                own = {**good, "case_key": f"{name}{index}", "label": f"{name} {value}"[:60]}
                file.write(json.dumps({**own, name: value}) + "\n")
            without = {**good, "case_key": f"no-{name}"}
            file.write(json.dumps({k: v for k, v in without.items() if k != name}) + "\n")
    loaded = store.load()
    assert len(loaded.damaged) > 100
    assert "its case_key is '../../etc'" in loaded.damaged.values()
    assert runner.plan([], store) == []
    built = report.build(store)
    page = report.write(built, store.folder).read_text()
    toy = next(section for section in built.sections if section.name == "toy")
    assert toy.tables, toy.problems
    assert "more lines are damaged and were left out" in page
    other = Store(store.folder.with_name("other"))
    other.folder.mkdir()
    text = store.results.read_text()
    other.results.write_text(text.replace('"started": "', '"started": "later '))
    same = bench("compare", str(store.folder), str(other.folder), "--page", "page.html")
    assert same.returncode == 0, same.stderr


def test_a_picture_that_cannot_be_drawn_costs_itself_only(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bench_harness.display.plots import new_figure

    def figures(self: object, rows: object) -> list[Figure]:
        good, _ = new_figure()
        bad, axes = new_figure()
        axes[0, 0].set_title("$\\frac{1}{$")  # drawn only when it is saved
        return [Figure("bad", "Bad", bad), Figure("good", "Good", good)]

    monkeypatch.setattr(type(experiments.get("toy")), "figures", figures)
    built = report.build(store)
    page = report.write(built, store.folder).read_text()
    assert "Could not be shown: picture bad: ValueError" in page
    assert (store.folder / "figures" / "toy-good.png").is_file()
    assert "Toy &lt;times&gt;" in page


@pytest.mark.parametrize(("ended", "case"), [("skipped", "ok"), ("error", "error")])
def test_a_variant_that_was_not_measured_is_named_with_its_case(
    store: Store, ended: str, case: str
) -> None:
    measured = row("ok", variant="plain", samples_ms=[1, 2, 3, 4], started="t1")
    without = row("ok", ended, variant="lost", error="lost must be installed", started="t1")
    with store.open_for_writing() as writer:
        writer.append([measured, without])
    built = report.build(store)
    (line,) = [each for each in built.sections[0].cases if each["label"] == "toy ok"]
    assert (line["status"], line["error"]) == (case, f"lost {ended}: lost must be installed")
    file = io.StringIO()
    terminal.summary(built, Path("report.html"), Console(file=file, width=200))
    assert f"toy ok: lost {ended}: lost must be installed" in file.getvalue()


def test_a_case_of_which_no_table_can_be_made_is_left_out_by_name(store: Store) -> None:
    with store.open_for_writing() as writer:
        writer.append([row("short", variant="plain", samples_ms=[1])])  # the toy wants four
    built = report.build(store)
    toy = built.sections[0]
    assert [len(table.frame) for table in toy.tables] == [2]
    (problem,) = toy.problems
    assert problem.startswith("tables: IndexError")
    assert problem.endswith("Left out: toy short")


def test_no_text_is_a_formula_or_a_link(tmp_path: Path) -> None:
    frame = pd.DataFrame({"=name": ["=1+1", "@x", "-2", "plain"], "ms": [-1.5, 2.0, 3.0, 4.0]})
    assert as_csv(frame).splitlines() == [
        *("'=name,ms", "'=1+1,-1.5", "'@x,2.0", "'-2,3.0", "plain,4.0")
    ]
    shown = markdown(Table("T", pd.DataFrame({"a|b": ["[x](y)|<i>\nz", "`c`"]})))
    assert "a\\|b" in shown
    assert "\\[x](y)\\|&lt;i> z" in shown
    assert "\\`c\\`" in shown
