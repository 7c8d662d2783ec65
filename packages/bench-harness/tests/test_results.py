"""The repository's measured answers: every problem has one, made from the committed rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench_harness import experiments
from bench_harness.report import write_up
from bench_harness.report.frame import to_frame
from bench_harness.report.write import table_stem
from bench_harness.store import Store

RESULTS = Path(__file__).parents[3] / "docs" / "results"
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


@pytest.fixture(scope="module")
def pages() -> list[write_up.Page]:
    return write_up.build(RESULTS)


def test_every_problem_is_answered_in_order(pages: list[write_up.Page]) -> None:
    assert tuple(page.name for page in pages) == PROBLEMS
    for page in pages:
        assert page.headline
        assert page.answer
        assert page.measured, f"{page.name} says what it was measured on"
        assert page.tables


def test_every_answer_has_two_to_four_sentences(pages: list[write_up.Page]) -> None:
    counts = {page.name: sentences(" ".join(page.answer)) for page in pages}
    assert not {name: count for name, count in counts.items() if not 2 <= count <= 4}


def sentences(text: str) -> int:
    """Sentences of a text: what ends with a full stop before a space or at its end."""
    return len(re.findall(r"[.!?](?=\s|$)", re.sub(r"`[^`]*`", "code", text)))


def test_sentences_are_counted() -> None:
    assert sentences("It takes 5.3 ms (`a. b`), 2.0 times less. So it is: faster. Why?") == 3


def test_every_page_has_a_picture(pages: list[write_up.Page]) -> None:
    assert [page.name for page in pages if not page.figures and not page.pictures] == []


def test_the_index_holds_what_the_rows_say(pages: list[write_up.Page]) -> None:
    index = (RESULTS / "index.md").read_text(encoding="utf-8")
    for page in pages:
        line = f"| [{page.name}]({page.name}.md) | {page.headline} |"
        assert line in index, "run bench-harness report docs/results --write-up"


def test_the_pages_hold_the_answers_and_link_to_what_exists(pages: list[write_up.Page]) -> None:
    for page in pages:
        text = (RESULTS / f"{page.name}.md").read_text(encoding="utf-8")
        for paragraph in page.answer:
            assert paragraph in text, "run bench-harness report docs/results --write-up"
        for address in re.findall(r"\]\(([^)#]+)\)", text):
            assert (RESULTS / address).exists(), f"{page.name} links to {address}"


def test_step_times_are_a_file_too() -> None:
    run = RESULTS / "assignment-h200"
    rows = [row for row in Store(run).load().rows if row["experiment"] == "ddp"]
    title = "Step times for comparison by column"
    (table,) = (t for t in experiments.get("ddp").tables(to_frame(rows)) if t.title == title)
    file = run / "tables" / f"{table_stem('ddp', title)}.csv"
    assert file.read_text() == table.frame.to_csv(index=False), "run bench-harness report on it"
