"""Marked blocks of Markdown, filled from published rows; and publishing them from runs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.pages import __main__ as pages
from tools.pages import rows as published
from tools.pages.fill import figure, render

from bench_harness.report.write import grid
from bench_harness.store import Store

Bench = Callable[..., subprocess.CompletedProcess[str]]

PAGE = """# Mine

<!-- bench-harness: mine.tables.toml#times -->
old
<!-- /bench-harness -->

<!-- bench-harness: mine.tables.toml#cost -->
<!-- /bench-harness -->

The end.
"""

RECIPES = """[source.toy]
rows = "rows.jsonl"
experiment = "toy"
table = "Toy <times>"
cases = ["toy ok"]

[block.times]
measured = ["toy"]

[block.times.show]
source = "toy"
columns = ["variant", ["median (ms)", "time (ms)"]]
where = { variant = ["plain", "double"] }
sort = "median (ms)"
digits = 1

[block.cost]
text = "Doubling takes {{ (double / plain) | figure(2) }} times as long as {{ plain | figure }} ms."

[block.cost.value]
plain = ["toy", "median (ms)", { variant = "plain" }]
double = ["toy", "median (ms)", { variant = "double" }]

[block.cost.figure]
source = "toy"
name = "line"
file = "line.png"
title = "A line"
"""


def row(variant: str, samples: list[float], **more: object) -> dict[str, object]:
    config = {"kind": "ok", "number": 0, "broken": False, "label": "toy ok"}
    about = {"experiment": "toy", "case_key": "ok", "label": "toy ok", "config": config}
    ended = {"status": "ok", "error": None, "detail": None, "seconds": 1.25, "started": "t0"}
    where = {"environment": "abc", "commit": "c0ffee", "clock": "wall"}
    return {**about, **ended, **where, "variant": variant, "samples_ms": samples, **more}


@pytest.fixture
def tool(
    installed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Bench:
    """``python -m tools.pages`` in this process, in an empty current directory."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = pages.main(arguments)
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(list(arguments), code, captured.out, captured.err)

    return run


@pytest.fixture
def page(installed: Path, tmp_path: Path) -> Path:
    """A page beside published rows."""
    with Store(tmp_path / "run").open_for_writing() as writer:
        writer.append([row("double", [2, 4, 6, 2468.81234567]), row("plain", [1, 2, 3, 1234.4])])
        gpu = {"name": "GPU 9000", "memory_gib": 1}
        content = {"gpus": [gpu, gpu], "driver": "1.2", "packages": {"torch": "9.9"}}
        writer.write_json("env.json", {"abc": content})
    assert published.publish([Store(tmp_path / "run")], tmp_path / "rows.jsonl") == 1
    file = tmp_path / "mine.md"
    file.write_text(PAGE)
    (tmp_path / "mine.tables.toml").write_text(RECIPES)
    return file


def test_a_case_is_one_line_that_says_once_what_its_rows_share(page: Path) -> None:
    (line,) = map(json.loads, (page.parent / "rows.jsonl").read_text().splitlines())
    assert line["shared"] == {"clock": "wall"} | {"status": "ok"} or line["shared"] == {
        "clock": "wall"
    }
    assert line["measured_on"] == "2 × GPU 9000, driver 1.2, torch 9.9"
    rows = published.read(page.parent / "rows.jsonl")
    assert [each["variant"] for each in rows] == ["double", "plain"]
    assert rows[0]["samples_ms"] == [2, 4, 6, 2468.81]
    assert all(each["clock"] == "wall" and each["status"] == "ok" for each in rows)


def test_blocks_are_filled_and_the_rest_stays(tool: Bench, page: Path) -> None:
    done = tool("fill", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    where = "- 2 × GPU 9000, driver 1.2, torch 9.9, commit c0ffee: [rows](rows.jsonl)"
    assert where in text
    assert "| variant | time (ms) |\n| --- | ---: |" in text
    assert text.index("| plain |") < text.index("| double |")
    assert "old" not in text
    assert "times as long as" in text
    assert "![A line](line.png)" in text
    assert (page.parent / "line.png").read_bytes().startswith(b"\x89PNG")
    assert text.startswith("# Mine\n")
    assert text.endswith("\nThe end.\n")
    again = render(page)
    assert again.text == text
    assert tool("fill", str(page), "--check").returncode == 0


def test_an_outdated_page_fails_the_check_and_is_left_alone(tool: Bench, page: Path) -> None:
    done = tool("fill", str(page), "--check")
    assert done.returncode == 1
    assert f"{page} is outdated. Run python -m tools.pages fill {page}." in " ".join(
        done.stderr.split()
    )
    assert page.read_text() == PAGE
    assert not (page.parent / "line.png").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"rows.jsonl"', '"gone.jsonl"', "rows must be a readable file, but got .*gone.jsonl"),
        (
            '["toy ok"]',
            '["toy oak"]',
            "must hold cases of experiment toy named toy oak, but got none",
        ),
        ('"Toy <times>"', '"Toy"', "table must be one of Toy <times>, but got 'Toy'"),
        ('["variant", ["median', '["variants", ["median', "column must be one of .*'variants'"),
        ("digits = 1", "digit = 1", "show key must be one of .*, but got 'digit'"),
        ('sort = "median', 'sort = "medium', "column must be one of .*'medium"),
        (
            "| figure }} ms",
            "| figures }} ms",
            "its values fill in, but got: No filter named 'figures",
        ),
        ("(double / plain)", "(twice / plain)", "'twice' is undefined"),
        ('{ variant = "plain" }]', '{ variant = "plane" }]', "must be one cell, but got 0"),
        ('name = "line"', 'name = "lines"', "figure must be one of line, but got 'lines'"),
        ('["plain", "double"]', '["plane"]', "where must match rows, but got none"),
        ('"line.png"', '"../line.png"', "figure file must be a PNG file in the page's folder"),
        ('"line.png"', '"/tmp/line.png"', "figure file must be a PNG file in the page's folder"),
        ('"line.png"', '"setup.py"', "figure file must be a PNG file in the page's folder"),
        ("(double / plain)", "(double.__class__.__mro__)", "access to attribute '__class__'"),
        ("measured = [", "measure = [", "block key must be one of .*, but got 'measure'"),
        ('table = "Toy', "table = Toy", "must be a readable TOML file, but got .*mine.tables.toml"),
        ("[block.times.show]", "[bloc.times.show]", "toml key must be one of source, block"),
    ],
)
def test_what_is_wrong_in_a_block_is_one_line(
    tool: Bench, page: Path, old: str, new: str, message: str
) -> None:
    """It names file, line and key; the block stays as it is, and so does the file."""
    (page.parent / "mine.tables.toml").write_text(RECIPES.replace(old, new))
    done = tool("fill", str(page))
    assert done.returncode in (1, 2)
    assert re.search(message, done.stderr), done.stderr
    assert str(page) in done.stderr


def test_the_other_blocks_go_on(tool: Bench, page: Path) -> None:
    mark = "<!-- bench-harness: mine.tables.toml#broken -->\nkept\n<!-- /bench-harness -->\n"
    page.write_text(mark + PAGE)
    (page.parent / "mine.tables.toml").write_text(
        RECIPES + '[source.no]\nrows = "gone.jsonl"\n[block.broken.show]\nsource = "no"\n'
    )
    done = tool("fill", str(page))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"{page}:1: rows must be a readable file" in done.stderr
    text = page.read_text()
    assert "kept" in text
    assert "| plain |" in text


def test_a_recipe_in_the_page_itself_is_refused(tool: Bench, page: Path) -> None:
    inline = '# Mine\n\n<!-- bench-harness\nmeasured = ["toy"]\n-->\n<!-- /bench-harness -->\n'
    page.write_text(inline)
    done = tool("fill", str(page))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{page}:3: a block must begin with <!-- bench-harness: FILE.toml#BLOCK -->" in line
    assert page.read_text() == inline


def test_a_block_in_a_code_block_is_an_example(page: Path) -> None:
    example = "```text\n<!-- bench-harness: x.toml#y -->\n<!-- /bench-harness -->\n```\n\n"
    page.write_text(example + PAGE)
    made = render(page)
    assert made.problems == []
    assert made.text.startswith(example)


@pytest.mark.parametrize("after", ["", PAGE])
def test_a_block_that_is_not_closed_is_named_and_kept(tool: Bench, page: Path, after: str) -> None:
    text = "# Title\n\n<!-- bench-harness: mine.tables.toml#times -->\nkept\n"
    page.write_text(text + after)
    done = tool("fill", str(page))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{page}:3: a block must begin with" in line
    assert "and end with <!-- /bench-harness -->, but got" in line
    assert page.read_text().startswith(text)
    assert ("| plain |" in page.read_text()) == bool(after)


def test_paths_are_relative_to_the_recipes_and_links_to_the_page(page: Path) -> None:
    folder = page.parent / "side"
    folder.mkdir()
    shown = 'interval = ["median (ms)", "number", "number"]\nsort'
    recipes = RECIPES.replace("rows.jsonl", "../rows.jsonl").replace("sort", shown, 1)
    (folder / "mine.tables.toml").write_text(recipes)
    page.write_text(PAGE.replace("mine.tables.toml", "side/mine.tables.toml"))
    made = render(page)
    assert made.problems == []
    assert "| variant | time (ms) |\n| --- | ---: |\n" in made.text
    assert "| plain | 1234.4 [0.0, 0.0] |" in made.text
    assert "![A line](side/line.png)" in made.text
    assert list(made.pictures) == [folder / "line.png"]


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("gone.toml#times", "recipes must be a readable TOML file, but got .*gone.toml"),
        (
            "mine.tables.toml#no",
            "block of mine.tables.toml must be one of times, cost, but got 'no'",
        ),
    ],
)
def test_a_mark_that_names_no_recipe_is_one_line(page: Path, mark: str, message: str) -> None:
    page.write_text(f"<!-- bench-harness: {mark} -->\nkept\n<!-- /bench-harness -->\n")
    made = render(page)
    assert made.text == page.read_text()
    (problem,) = made.problems
    assert re.search(message, problem), problem


PLAIN = """[source.rows]
rows = "rows.jsonl"
where = { clock = "wall" }
fields = [["variant", "what"], ["memory.peak", "peak (GiB)", 1024]]

[block.times.show]
source = "rows"
"""


def test_rows_themselves_are_shown(page: Path) -> None:
    rows = [
        row(name, [1.0], memory={"peak": peak}, clock=clock)
        for name, peak, clock in (("a", 1024, "wall"), ("b", 4096, "wall"), ("c", 1, "gpu"))
    ]
    line = published.case_line(rows, {})
    (page.parent / "rows.jsonl").write_text(json.dumps(line) + "\n")
    (page.parent / "mine.tables.toml").write_text(PLAIN)
    page.write_text(PAGE[: PAGE.index("<!-- bench-harness: mine.tables.toml#cost")])
    made = render(page)
    assert made.problems == []
    assert "| what | peak (GiB) |\n| --- | ---: |\n| a | 1 |\n| b | 4 |\n" in made.text


def test_thousands_of_samples_are_published_evenly() -> None:
    samples = [float(i) for i in range(1201)]
    for measured, kept in ((samples, samples[::3]), (samples[:500], samples[:500])):
        assert published.case_line([row("a", measured)], {})["rows"][0]["samples_ms"] == kept


def test_publishing_nothing_says_so(tool: Bench, page: Path) -> None:
    done = tool("publish", "other.jsonl", str(page.parent / "run"), "--only", "nothing")
    assert done.returncode == 2
    assert "cases must be in the runs, but got none for nothing" in done.stderr
    done = tool("publish", "other.jsonl", str(page.parent / "run"), "--only", "toy")
    assert done.returncode == 0
    assert done.stdout == "1 case in other.jsonl\n"


def test_a_damaged_file_of_rows_is_named(page: Path) -> None:
    (page.parent / "rows.jsonl").write_text("[1]\n")
    (problem, *_) = render(page).problems
    assert "rows.jsonl line 1 must be a case with its rows" in problem


def test_a_compressed_file_holds_the_same_rows(page: Path) -> None:
    stores = [Store(page.parent / "run")]
    plain, small = page.parent / "rows.jsonl", page.parent / "rows.jsonl.gz"
    assert published.publish(stores, small) == 1
    assert published.read(small) == published.read(plain)
    content = small.read_bytes()
    assert published.publish(stores, small) == 1
    assert small.read_bytes() == content
    for damaged in (content[:-9], plain.read_bytes(), content[:20] + bytes(9) + content[29:]):
        small.write_bytes(damaged)
        with pytest.raises(ValueError, match="must be a readable file"):
            published.read(small)


JUNIT = """<testsuites>
<testsuite tests="9" skipped="2" failures="{}" errors="0" time="61.4"/>
</testsuites>"""


def test_a_run_of_gpu_tests_is_recorded_once_and_shown_by_versions(tool: Bench, page: Path) -> None:
    folder = page.parent
    (folder / "one.xml").write_text(JUNIT.format(0))
    tested = ["tested", "one.xml", "--part", "one GPU", "--target", "tests.json", "--commit"]
    machine = ["--machine", "2 × NVIDIA H100, torch 2.11.0, triton 3.6.0"]
    for commit in ("old", "new"):
        assert tool(*tested, commit, *machine).returncode == 0
    page.write_text("<!-- bench-harness: mine.toml#v -->\n<!-- /bench-harness -->\n")
    (folder / "mine.toml").write_text('[block.v.versions]\ntests = "tests.json"\nrows = "."\n')
    made = render(page)
    assert made.problems == []
    assert "one GPU: 7 passed, 2 skipped in 1 min 1 s, on 2 × H100 at new" in made.text
    assert "at old" not in made.text

    (folder / "one.xml").write_text(JUNIT.format(3))
    failed = tool(*tested, "bad", *machine)
    assert failed.returncode == 2
    assert "recorded tests must pass, but got 3 failures" in failed.stderr


def test_numbers_stand_to_the_right_and_pipes_are_escaped() -> None:
    import pandas as pd

    frame = pd.DataFrame({"a|b": ["x|y", "z"], "ms": [1.25, None]})
    assert grid(frame, digits=1) == "| a\\|b | ms |\n| --- | ---: |\n| x\\|y | 1.2 |\n| z |  |"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (1234.4, 3, "1,230"),
        (0.012345, 3, "0.0123"),
        (5, 3, "5.00"),
        (2.0, 2, "2.0"),
        (99.96, 3, "100"),
        (1998235200, 3, "2,000,000,000"),
        (0, 3, "0.00"),
    ],
)
def test_figures_have_significant_digits(value: float, digits: int, text: str) -> None:
    assert figure(value, digits) == text
