"""The repository's pages show what its published rows say."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tools.pages import rows as published
from tools.pages.fill import render

from bench_harness.core import Case, Row
from bench_harness.experiments import get, names
from bench_harness.report.frame import to_frame
from bench_harness.training import settings as of
from bench_harness.training.moments import MOMENTS

ROOT = Path(__file__).parents[3]
RESULTS, ASSIGNMENT = ROOT / "docs" / "results", ROOT / "docs" / "assignment"


def tracked(name: str) -> list[Path]:
    """Files of this name in the places that hold pages."""
    places = ("", "docs/**/", "packages/*/", "packages/*/docs/")
    return sorted(file for place in places for file in ROOT.glob(place + name))


PAGES = [page for page in tracked("*.md") if "\n<!-- /bench-harness -->" in page.read_text("utf-8")]
PROBLEMS = (
    "benchmarking_script",
    "nsys_profile",
    "mixed_precision_accumulation",
    "benchmarking_mixed_precision",
    "memory_profiling",
    "pytorch_attention",
    "torch_compile",
    "flash_forward",
    "flash_backward",
    "flash_backward_triton",
    "flash_benchmarking",
    "leaderboard",
    "distributed_communication_single_node",
    "naive_ddp",
    "naive_ddp_benchmarking",
    "minimal_ddp_flat_benchmarking",
    "ddp_overlap_individual_parameters",
    "ddp_overlap_individual_parameters_benchmarking",
    "ddp_overlap_bucketed",
    "ddp_bucketed_benchmarking",
    "communication_accounting",
    "optimizer_state_sharding",
    "optimizer_state_sharding_accounting",
)


def listed(page: Path) -> object:
    """A page as a parameter; READMEs are checked with each change, the others take minutes."""
    marks = [] if page.name == "README.md" else [pytest.mark.nightly]
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


@pytest.mark.parametrize("page", [listed(page) for page in PAGES])
def test_pages_show_what_the_rows_say(page: Path) -> None:
    made = render(page)
    assert made.problems == []
    relative = page.relative_to(ROOT)
    assert made.text == page.read_text(encoding="utf-8"), f"fill {relative}"
    for picture in made.pictures:
        assert picture.is_file(), f"fill {relative}"


def test_every_recipe_is_shown_on_a_page() -> None:
    """And every source by one of the recipes of its file."""
    marked: dict[Path, set[str]] = {}
    for page in PAGES:
        for file, block in re.findall(r"<!-- bench-harness: (\S+)#(\S+) -->", page.read_text()):
            marked.setdefault((page.parent / file).resolve(), set()).add(block)
    assert set(marked) == {file.resolve() for file in tracked("*.tables.toml")}
    for file, blocks in marked.items():
        recipes = tomllib.loads(file.read_text(encoding="utf-8"))
        assert set(recipes["block"]) == blocks, file
        shown: set[str] = set()
        for block in recipes["block"].values():
            shown.update(block.get("measured", []))
            shown.update(value[0] for value in block.get("value", {}).values())
            shown.update(block[way]["source"] for way in ("show", "figure") if way in block)
        assert set(recipes.get("source", {})) == shown, file


def test_every_problem_has_its_page() -> None:
    about = {"index", "deliverables", "course-files", "course-tests"}
    assert {page.stem for page in ASSIGNMENT.glob("*.md")} == {*about, *PROBLEMS}
    index = (ASSIGNMENT / "index.md").read_text(encoding="utf-8")
    assert all(f"]({name}.md)" in index for name in PROBLEMS)


def test_the_evidence_stays_small() -> None:
    """All of docs/; a file of rows that is larger than 20 kB is compressed."""
    sizes = {file: file.stat().st_size for file in (ROOT / "docs").rglob("*") if file.is_file()}
    assert sum(sizes.values()) <= 2_600_000
    assert [file.name for file in sizes if file.suffix == ".jsonl" and sizes[file] > 20_000] == []


@pytest.mark.nightly
def test_every_file_of_rows_has_the_command_that_measures_it_again(
    bench: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """One line each, on one page; those of bench-harness list their cases under ``--dry-run``."""
    page = (RESULTS / "index.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if ".jsonl" in line]
    table = [cells for cells in lines if len(cells) == 3]
    linked = {name for cells in table for name in re.findall(r"\]\(([^/)]+)\)", cells[0])}
    assert linked == {file.name for file in RESULTS.glob("*.jsonl*")}
    for _, _, command in table:
        words = shlex.split(command.strip("`"))
        if words[0] == "bench-harness":
            words = [str(ROOT / word) if word.endswith(".toml") else word for word in words]
            planned = bench(*words[1:], "--dry-run", "--json")
            assert planned.returncode == 0, (command, planned.stderr)
            assert json.loads(planned.stdout)["cases"], command
        else:
            assert words[0] in ("pytest", "python", "torchrun")
            assert any((ROOT / word).is_file() for word in words), command


def test_rows_of_a_file_come_from_one_commit() -> None:
    """Rows of faults have no commit: what they hold are times on a CPU, under gloo."""
    for file in sorted(RESULTS.glob("*.jsonl*")):
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
        cases = [json.loads(line) for line in text.splitlines()]
        assert len({case.get("commit") for case in cases}) == 1, file.name
        measured = [
            case for case in cases if not case["measured_on"].startswith("2 CPU cores, gloo")
        ]
        assert all("commit" in case for case in measured), file.name


def test_a_dry_run_would_have_said_how_long_published_cases_take() -> None:
    """Within a factor of two, by calculation alone: all but few, and all of them together."""
    ratios, expected, took = [], 0.0, 0.0
    for file in sorted(RESULTS.glob("*.jsonl*")):
        seconds = {row["case_key"]: row for row in published.read(file) if "seconds" in row}
        for row in seconds.values():
            config = row["config"]
            whole = (
                row["experiment"] != "attention" or "features" in config
            )  # else of an old version
            if row["experiment"] in names() and whole and config.get("device") != "cpu":
                case = Case(experiment=row["experiment"], config=config)
                work = get(row["experiment"]).work_s(case)
                assert work is not None
                work += config.get("max_seconds", 0.0) * bool(config.get("interval"))
                ratios.append(work / row["seconds"])
                expected, took = expected + work, took + row["seconds"]
    right = sum(0.5 <= ratio <= 2 for ratio in ratios)
    print(f"{right} of {len(ratios)} cases are right, {expected / took:.2f} of all seconds")
    assert len(ratios) > 100
    assert right > 0.98 * len(ratios)
    assert 0.67 < expected / took < 1.5


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.jsonl*")), ids=lambda file: file.stem)
def test_published_rows_have_their_circumstances_and_true_labels(file: Path) -> None:
    cases: dict[str, list[Row]] = {}
    for row in published.read(file):
        assert row["measured_on"]
        cases.setdefault(row["case_key"], []).append(row)
    for rows in cases.values():
        if rows[0]["experiment"] == "train-step":
            variants = [of.stored(row["settings"]) for row in rows]
            assert [row["variant"] for row in rows] == of.labels(variants)


def test_every_published_cell_of_the_attention_grid_has_ten_samples() -> None:
    files = sorted(RESULTS.glob("flash-*.jsonl*"))
    assert len(files) == 5
    for row in (row for file in files for row in published.read(file)):
        if row.get("status") == "oom":
            assert "naive" in row["config"]["variants"], row["label"]
            continue
        assert len(row["samples_ms"]) >= 10, (row["label"], row["variant"], row["sequence"])


MEMORY = [
    (row["label"], row)
    for name in ("sharding-memory.jsonl", "sharding-alone.jsonl.gz")
    for row in published.read(RESULTS / name)
    if "memory" in row and row["settings"]["optimizer"]["name"] == "sharded"
]


@pytest.mark.parametrize(
    ("label", "row"), MEMORY, ids=[f"{row['variant']} {label}" for label, row in MEMORY]
)
def test_measured_memory_is_as_predicted(label: str, row: Row) -> None:
    """Parameters, gradients and optimizer state, within 3 % of what the allocator counts."""
    moments = {moment["moment"]: moment for moment in row["memory"]}
    before, after = moments[MOMENTS[2]], moments[MOMENTS[3]]
    assert after["state_bytes"] == pytest.approx(after["predicted_state_bytes"], rel=0.001)
    expected = sum(before[f"predicted_{part}_bytes"] for part in ("parameter", "gradient", "state"))
    assert before["allocated_bytes"] == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("moment", [MOMENTS[0], MOMENTS[2], MOMENTS[3]])
def test_a_rank_weighed_alone_holds_what_one_of_two_does(moment: str) -> None:
    """What stands in for machines with more GPUs than were there."""

    def held(name: str, label: str) -> dict[str, int]:
        return {
            row["variant"]: next(m for m in row["memory"] if m["moment"] == moment)[
                "allocated_bytes"
            ]
            for row in published.read(RESULTS / name)
            if row["label"] == label and "memory" in row
        }

    two = "train-step xl b4 s512 bf16 2 ranks"
    alone = held("sharding-alone.jsonl.gz", f"{two} rank 0 alone")
    real = held("sharding-memory.jsonl", two)
    assert len(alone) == 5
    for name, found in alone.items():
        assert found == pytest.approx(real[name], rel=0.005), name


@pytest.mark.nightly
def test_the_picture_of_throughput_draws_flash_attention_4_once_rows_hold_it() -> None:
    """It is drawn wherever it was measured: rows are made for it, at every length but one."""
    rows = published.read(RESULTS / "attention-fp16.jsonl.gz")
    rows = [row for row in rows if any(part in row["label"] for part in ("h32 d64", "h16 d128"))]
    made = [
        {**row, "variant": "flash-attn-4", "median_ms": 1.05 * row["median_ms"]}
        for row in rows
        if row["variant"] == "flashattn-triton" and row["sequence"] != 512
    ]
    pictures = {p.name: p.figure for p in get("attention").figures(to_frame([*rows, *made]))}
    picture = pictures["attention_throughput"]
    names = [text.get_text() for text in picture.legends[0].get_texts()]
    assert "flash-attn-4" in names
    for plot in picture.axes:
        lines = {line.get_label(): line for line in plot.get_lines()}
        ours, peer = (lines[name] for name in ("flashattn-triton", "flash-attn-4"))
        assert list(peer.get_xdata()) == list(ours.get_xdata())[1:]
        assert list(peer.get_ydata()) == pytest.approx(list(ours.get_ydata())[1:], rel=0.06)
        assert peer.get_color() not in {
            line.get_color()
            for name, line in lines.items()
            if name in names and name != "flash-attn-4"
        }
