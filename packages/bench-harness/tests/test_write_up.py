"""Answers over rows: pages and index, with every figure taken from a table."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench_harness.report import write_up
from bench_harness.store import Store

Bench = Callable[..., subprocess.CompletedProcess[str]]

ANSWER = """+++
title = "How long <it> takes"
order = {order}
headline = "{{{{ plain | figure }}}} ms"
setup = "A toy."
commands = ["bench-harness toy"]

[[part]]
runs = ["run"]
experiment = "toy"
cases = ["toy ok"]
figures = ["line"]

[[part.table]]
title = "Toy <times>"
columns = ["variant", "median (ms)"]
where = {{ variant = "plain" }}

[cell]
plain = ["Toy <times>", "median (ms)", {{ variant = "plain" }}]
double = ["Toy <times>", "median (ms)", {{ variant = "double", kind = "ok" }}]
+++
{words}
"""
WORDS = (
    "Doubling takes {{ (double / plain) | figure(2) }} times as long,\n"
    "as `double` says & means.\n\nA second paragraph."
)


def row(variant: str, samples: list[float]) -> dict[str, object]:
    config = {"kind": "ok", "number": 0, "broken": False, "label": "toy ok"}
    about = {"experiment": "toy", "case_key": "ok", "label": "toy ok", "config": config}
    ended = {"status": "ok", "error": None, "detail": None, "seconds": 1.25, "started": "t0"}
    where = {"environment": "abc", "commit": "c0ffee"}
    return {**about, **ended, **where, "variant": variant, "samples_ms": samples}


@pytest.fixture
def folder(installed: Path, tmp_path: Path) -> Path:
    """A results folder with one run and one answer."""
    with Store(tmp_path / "run").open_for_writing() as writer:
        writer.append([row("plain", [1, 2, 3, 1234.4]), row("double", [2, 4, 6, 2468.8])])
        gpu = {"name": "GPU 9000", "memory_gib": 1}
        content = {"gpus": [gpu, gpu], "driver": "1.2", "packages": {"torch": "9.9"}}
        writer.write_json("env.json", {"abc": content})
    answer(tmp_path, "takes_time", WORDS)
    return tmp_path


def answer(folder: Path, name: str, words: str, order: int = 1) -> None:
    (folder / "answers").mkdir(exist_ok=True)
    (folder / "answers" / f"{name}.md").write_text(ANSWER.format(order=order, words=words))


def test_a_page_holds_answer_setup_table_and_picture(folder: Path) -> None:
    (page,) = write_up.write(folder)
    assert page.headline == "1,230 ms"
    text = (folder / "takes_time.md").read_text()
    assert "Doubling takes 2.0 times as long, as `double` says & means." in text
    assert "- 2 × GPU 9000, driver 1.2, torch 9.9, commit c0ffee" in text
    assert "bench-harness toy" in text
    assert re.search(r"\| plain +\| 1234.4 +\|", text)
    assert "| double" not in text
    for address in re.findall(r"\]\(([^)]+)\)", text):
        assert (folder / address).is_file(), address
    assert (folder / "pictures" / "takes_time-line.png").read_bytes().startswith(b"\x89PNG")


def test_a_label_sets_a_part_apart(folder: Path) -> None:
    with Store(folder / "run").open_for_writing() as writer:
        again = {"label": "toy again", "case_key": "again"}
        writer.append([row("plain", [8.0] * 4) | again, row("double", [8.0] * 4) | again])
    file = folder / "answers" / "takes_time.md"
    part = """[[part]]
runs = ["run"]
experiment = "toy"
cases = ["toy again"]
label = "second time"
figures = ["line"]

[[part.table]]
title = "Toy <times>"

[cell]
again = ["Toy <times> (second time)", "median (ms)", { variant = "plain" }]
"""
    words = file.read_text().replace("[cell]\n", part).replace("Doubling takes", "{{ again }} ms.")
    file.write_text(words)
    (page,) = write_up.write(folder)
    assert page.headline == "1,230 ms", "cells of the other part are not meant"
    assert page.answer[0].startswith("8.0 ms.")
    assert [table.title for table in page.tables] == ["Toy <times>", "Toy <times> (second time)"]
    pictures = sorted(path.name for path in (folder / "pictures").iterdir())
    assert pictures == ["takes_time-line-second-time.png", "takes_time-line.png"]


def test_notes_stand_under_their_heading(folder: Path) -> None:
    answer(folder, "takes_time", WORDS + "\n\n## Notes\n\nIt is a `toy`.\n")
    (page,) = write_up.write(folder)
    assert len(page.answer) == 2
    assert page.notes == ["It is a `toy`."]
    text = (folder / "takes_time.md").read_text()
    order = ("A second paragraph.", "## Notes", "It is a `toy`.", "## Setup")
    assert sorted(order, key=text.index) == list(order)


def test_a_whole_label_names_only_its_case(folder: Path) -> None:
    with Store(folder / "run").open_for_writing() as writer:
        again = {"label": "toy ok again", "case_key": "again"}
        writer.append([row("plain", [8.0] * 4) | again, row("double", [8.0] * 4) | again])
    (page,) = write_up.build(folder)  # "toy ok" is a case
    assert page.headline == "1,230 ms"
    file = folder / "answers" / "takes_time.md"
    file.write_text(file.read_text().replace('["toy ok"]', '["toy o"]'))
    with pytest.raises(ValueError, match="must be one cell; it is 2"):
        write_up.build(folder)


def test_the_index_has_a_line_per_answer_in_their_order(folder: Path) -> None:
    answer(folder, "another", "Words.", order=0)
    (folder / "answers" / "index.md").write_text("# Mine\n\n{{ problems }}\n\nThe end.\n")
    write_up.write(folder)
    index = (folder / "index.md").read_text()
    assert index.startswith("# Mine\n\n| problem | answer |\n|---|---|\n")
    assert index.index("[another](another.md) | 1,230 ms") < index.index("[takes_time]")
    assert index.endswith("The end.\n")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (', kind = "ok"', ', kind = "no"', "must be one cell; it is 0"),
        (', { variant = "plain" }]', "]", "must be one cell; it is 2"),
        (
            '["Toy <times>", "median (ms)", { v',
            '["Toy", "median (ms)", { v',
            "table must be one of",
        ),
        ("(double / plain)", "(twice / plain)", "'twice' is undefined"),
        ('title = "Toy <times>"', 'title = "Toy"', "table must be one of Toy <times>; found 'Toy'"),
        ('"variant", "median', '"variant", "mean', "column of 'Toy <times>' must be one of kind"),
        ('variant = "plain" }', 'variant = "plane" }', "must have rows where"),
        ('["line"]', '["lines"]', "figure must be one of line; found 'lines'"),
        (
            '["toy ok"]',
            '["toy oak"]',
            r"find rows of toy in run whose case holds one of \['toy oak",
        ),
        ("setup =", "set_up =", "key must be one of .*; found 'set_up'"),
        ("order = 1\n", "", "must have order"),
        ("| figure }}", "| figures }}", "its text cannot be filled in: No filter named 'figures'"),
        ("+++\n", "---\n", r"must begin with TOML between two lines of \+\+\+"),
        ('"A toy."', "A toy.", "must be TOML"),
    ],
)
def test_what_is_wrong_in_an_answer_is_named(
    folder: Path, old: str, new: str, message: str
) -> None:
    file = folder / "answers" / "takes_time.md"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match=rf"(?s)takes_time.md: .*{message}"):
        write_up.write(folder)
    assert not (folder / "takes_time.md").exists()


FILE_ANSWER = """+++
title = "Another program's rows"
order = 2
headline = "{{ size | figure }} GiB"

[[part]]
file = "other/rows.jsonl"
pictures = [["other/drawn.png", "Drawn there", "By the other program."]]

[[part.table]]
title = "Sizes"
fields = [["variant", "wrapper"], ["memory.peak", "peak (GiB)", 1024]]
where = { precision = "bf16" }

[cell]
size = ["Sizes", "peak (GiB)", { wrapper = "naive" }]
+++
Words.
"""


@pytest.mark.parametrize("array", [True, False])
def test_rows_of_another_program_are_shown(folder: Path, array: bool) -> None:
    other = folder / "other"
    other.mkdir()
    about = {"world_size": 2, "hardware": "GPU 9000", "torch": "9.9", "commit": "0123456789abcdef"}
    measured = [
        {"variant": "naive", "precision": "bf16", "memory": {"peak": 2048}, **about},
        {"variant": "flat", "precision": "bf16", "memory": {"peak": 1536}, **about},
        {"variant": "naive", "precision": "fp32", "memory": {"peak": 4096}, **about},
    ]
    text = json.dumps(measured) if array else "".join(json.dumps(row) + "\n" for row in measured)
    (other / "rows.jsonl").write_text(text)
    (other / "drawn.png").write_bytes(b"\x89PNG")
    (folder / "answers" / "other.md").write_text(FILE_ANSWER)
    page = write_up.write(folder)[1]
    assert page.headline == "2.00 GiB"
    assert page.measured == ["2 × GPU 9000, torch 9.9, commit 0123456789ab"]
    assert page.tables[0].frame.to_dict("list") == {
        "wrapper": ["naive", "flat"],
        "peak (GiB)": [2.0, 1.5],
    }
    written = (folder / "other.md").read_text()
    assert "![Drawn there](other/drawn.png)" in written
    assert "[other/rows.jsonl](other/rows.jsonl)" in written


def test_rows_that_agree_are_shown_by_their_median(folder: Path) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "drawn.png").write_bytes(b"\x89PNG")
    rows = [
        {"variant": name, "precision": "bf16", "memory": {"peak": 1024 * peak}}
        for name, peak in (("naive", 1), ("flat", 9), ("naive", 2), ("naive", 6))
    ]
    (folder / "other" / "rows.jsonl").write_text(json.dumps(rows))
    (folder / "answers" / "other.md").write_text(
        FILE_ANSWER.replace("where =", 'by = ["variant"]\nwhere =')
    )
    assert write_up.build(folder)[1].tables[0].frame.to_dict("list") == {
        "wrapper": ["naive", "flat"],
        "peak (GiB)": [2.0, 9.0],
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("other/rows.jsonl", "other/no.jsonl", "cannot read .*no.jsonl: No such file"),
        ("other/drawn.png", "other/no.png", "cannot read .*no.png: No such file"),
        ("memory.peak", "memory.size", "column of 'other/rows.jsonl' must be one of .*memory.peak"),
        ('"bf16"', '"fp8"', "must have rows where"),
        ("pictures =", "figures =", "key of a part with a file must be one of"),
    ],
)
def test_what_is_wrong_with_another_program_s_rows_is_named(
    folder: Path, old: str, new: str, message: str
) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "drawn.png").write_bytes(b"\x89PNG")
    rows = [{"variant": "naive", "precision": "bf16", "memory": {"peak": 1}}]
    (folder / "other" / "rows.jsonl").write_text(json.dumps(rows))
    (folder / "answers" / "other.md").write_text(FILE_ANSWER.replace(old, new))
    with pytest.raises(ValueError, match=rf"(?s)other.md: .*{message}"):
        write_up.build(folder)


def test_a_folder_without_answers_is_one_line(bench: Bench, tmp_path: Path) -> None:
    done = bench("report", str(tmp_path), "--write-up")
    assert done.returncode == 2
    assert "answers/NAME.md; found none" in done.stderr
    assert done.stderr.count("\n") == 1


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
    assert write_up._figure(value, digits) == text
