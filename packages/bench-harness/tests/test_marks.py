"""What pictures and pages say about how sure their figures are."""

from __future__ import annotations

import itertools
import math
import re

import pandas as pd
import pytest

from bench_harness import experiments
from bench_harness.core import Bar, Bars, Figure, plural
from bench_harness.display.bars import COLOURS, colours, placed
from bench_harness.display.cells import quantity, readable, scale, with_intervals
from bench_harness.display.lines import Panel, draw_lines, points
from bench_harness.display.plots import png_bytes
from bench_harness.display.row_tables import steady
from bench_harness.report import Report, Section
from bench_harness.report.build import headlines, on_cpu, tiles
from bench_harness.report.frame import to_frame
from bench_harness.report.write import render
from bench_harness.stats import with_summary

STEADY, SHAKY = [10.0, 10.1, 9.9, 10.0, 10.05, 9.95], [10.0, 30.0, 5.0, 22.0, 8.0, 40.0]


def test_points_have_intervals_and_unstable_ones_are_rings() -> None:
    rows = with_summary(pd.DataFrame({"size": [1, 2], "samples_ms": [STEADY, SHAKY]}))
    assert steady(rows).to_list() == [True, False]
    found = points(rows, "size", "median_ms", ("ci_low_ms", "ci_high_ms"))
    assert found["steady"].to_list() == [True, False]
    assert (found["low"] < found["y"]).all()
    assert found["high"][1] - found["y"][1] > 5
    (plot,) = draw_lines([Panel(y="time (ms)", lines={"a": found})], x="size").axes
    line, rings, cut, _ = plot.get_lines()
    assert line.get_linestyle() == "None", "two points are not joined"
    assert (list(rings.get_xdata()), rings.get_markerfacecolor()) == ([2], "white")
    assert list(cut.get_xdata()) == [2], "what reaches beyond the axis is cut with a mark"
    assert found["high"][1] > plot.get_ylim()[1] >= found["y"].max()


def test_bars_have_the_scale_of_their_panel_and_a_cut_interval_is_marked() -> None:
    bars = Bars(
        "ms",
        {
            "one": [Bar("a", {"x": 1500.0, "y": 500.0}, 1000.0, 2500.0, steady=False)],
            "two": [Bar("b", {"x": 100.0}, 90.0, 110.0), Bar("c", {"x": 200.0}, float("nan"))],
        },
    )
    shown = placed(bars)
    assert (shown.unit, list(shown.colours)) == ("ms", ["x", "y"])
    (a,), (b, c) = shown.panels.values()
    assert [(box.left, box.width) for box in a.boxes] == [(0, 75), (75, 25)]
    assert (a.text, a.whisker, a.cut, a.steady) == ("2000 [1000, 2500]", (50, 100), True, False)
    assert (b.text, b.whisker, b.cut) == ("100 [90, 110]", (45, 55), False)
    assert (c.text, c.whisker) == ("200", None)
    assert png_bytes(bars).startswith(b"\x89PNG")


def test_a_page_shows_bars_as_text() -> None:
    bars = Bars("ms", {"": [Bar("<a>", {"x": 3.0}, 2.0, 4.0, steady=False)]})
    section = Section(
        name="toy", summary="Toy", cases=[], tables=[], problems=[],
        figures=[Figure("bars", "Bars", bars)],
    )  # fmt: skip
    lists = {name: [] for name in ("runs", "commits", "notes", "headlines", "tiles")}
    page = render(Report(name="r", environments={}, sections=[section], on_cpu=False, **lists))
    bar = re.search(r'<div class="bar">.*?</span></div>', page, re.DOTALL)
    assert bar is not None
    assert "<span>&lt;a&gt;</span>" in bar[0]
    assert 'style="width:100.00%' in bar[0]
    assert "3 [2, 4] <em>unsteady</em>" in bar[0]
    assert "<img" not in page


def test_a_name_has_one_colour_everywhere_and_others_differ_within_a_picture() -> None:
    many = colours(["naive", "mine", "sdpa-flash", "other-one"])
    assert many["naive"] == colours(["naive"])["naive"] == COLOURS[1]
    assert len(set(many.values())) == 4


def test_names_at_the_ends_of_lines_do_not_overlap() -> None:
    ends = {"a": 1.0, "b": 1.01, "c": 100.0, "d": 99.9}
    rows = pd.DataFrame({"x": [1, 2, 4], "y": 1.0, "low": 1.0, "high": 1.0, "steady": True})
    lines = {name: rows.assign(y=[1.0, 1.0, end]) for name, end in ends.items()}
    (plot,) = draw_lines([Panel(y="", lines=lines, log=False)], x="").axes
    places = sorted(text.xy[1] for text in plot.texts)
    assert len(places) == 4
    assert all(b - a >= 0.074 for a, b in itertools.pairwise(places))
    assert places[-1] <= 1.001


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (6.58e-5, "TFLOP/s", "65.8 MFLOP/s"),
        (1_998_235_200, "count", "2.0 B"),
        (41 * 2**20, "B", "41 MiB"),
        (0.0312, "ms", "31.2 µs"),
        (12.5, "GB/s", "12.5 GB/s"),
        (3, "ranks", "3 ranks"),
    ],
)
def test_quantities_are_read_by_people(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_columns_change_to_units_that_suit_them_together() -> None:
    frame = pd.DataFrame(
        {
            "name": ["a", "b"],
            "parameters (count)": [1_998_235_200, 128_625_408],
            "TFLOP/s": [6.58e-5, 1e-5],
            "median (ms)": [3.0, 4.0],
            "runs (count)": [3, 4],
        }
    )
    shown = readable(frame)
    assert list(shown) == [*("name", "parameters (B)", "MFLOP/s", "median (ms)", "runs (count)")]
    assert shown["parameters (B)"].to_list() == [1.998, 0.1286]
    assert shown["MFLOP/s"].to_list() == [65.8, 10.0]
    assert scale([0, float("nan")], "GB") == ("GB", 1.0)


def row(experiment: str, samples: list[float], **more: object) -> dict[str, object]:
    about = {"experiment": experiment, "case_key": experiment, "label": f"{experiment} case"}
    config = {"device": "cpu", "world_size": 2}
    return {**about, "status": "ok", "config": config, "samples_ms": samples, **more}


def test_headlines_quote_what_is_steady_and_count_what_is_not() -> None:
    steps = [
        {"phase": "step", "variant": "bf16", **row("model", SHAKY)},
        {"phase": "step", "variant": "fp32", **row("model", STEADY)},
    ]
    shaky = "1 of 2 timed figures scatter or drift too much"
    first, last = headlines(steps)
    assert first.startswith("fp32 takes 10 ms for step, ")
    assert "unsteady" in first or "cannot tell" in first
    assert last.startswith(shaky)
    assert on_cpu(steps)
    assert headlines([steps[1]]) == ["fp32 takes 10 ms for step (model case)."]
    assert headlines([{**steps[0], "status": "error", "samples_ms": None}]) == [
        "1 of 1 case did not finish, the first: model case."
    ]


def test_several_experiments_on_a_cpu_begin_with_what_they_have_shown() -> None:
    attention = {"phase": "forward", "variant": "naive", **row("attention", STEADY)}
    steps = [{"variant": name, **row("train-step", STEADY)} for name in ("a", "b")]
    many = {**row("allreduce", STEADY), "config": {"device": "cpu", "world_size": 4}}
    assert headlines([many, attention, *steps])[0] == (
        "3 cases worked on this CPU: attention agrees with its definition in fp32 (1 variant), and "
        "training on 2 ranks ends with the weights of plain averaging (2 variants). Only a GPU "
        "tells how fast they are."
    )
    assert not headlines(steps)[0].startswith("1 case")
    on_gpus = [{**each, "config": {"device": "cuda"}} for each in (attention, *steps)]
    assert "worked" not in headlines(on_gpus)[0]


def test_what_is_unsteady_has_its_interval_and_a_busy_cpu_is_named() -> None:
    alone = {"phase": "step", "variant": "fp32", **row("model", SHAKY)}
    first, last = headlines([alone])
    assert "for step [" in first
    assert first.endswith("ms], unsteady (model case).")
    busy = {**alone, "machine_after": {"load_1min": 9.0, "cpus": 2}}
    assert "unsteady; load 9.0 on 2 cores, so run again when it is idle" in headlines([busy])[0]
    assert last.startswith("1 of 1 timed figure scatter")


def test_tiles_show_the_step_its_throughput_the_peak_and_the_largest_cost() -> None:
    peak = {"kind": "phase", "phase": "backward", "peak_bytes": 2**30, **row("memory", [])}
    cost = {"kind": "kernel", "phase": "forward", "kernel": "gemm", "share": 73.0, "total_ms": 9.0}
    only = {**cost, "phase": "optimizer", "kernel": "adam", "share": 100.0, "total_ms": 2.0}
    rows = [
        {"variant": "no communication", "tokens": 100, **row("train-step", STEADY)},
        {"variant": "NaiveDDP", "tokens": 100, **row("train-step", [2 * s for s in STEADY])},
        {**peak, "samples_ms": None},
        {**cost, **row("profile", []), "samples_ms": None},
        {**only, **row("profile", []), "samples_ms": None},
    ]
    step, *rest = tiles(rows)
    assert step[:2] == ("step", "20 ms")
    assert step[2].startswith("NaiveDDP [")
    assert rest == [
        ("throughput", "10,000 tokens/s", "NaiveDDP"),
        ("peak memory", "1 GiB", "backward"),
        ("largest cost", "73 % of forward", "gemm"),
    ]
    assert tiles([{**rows[2], "status": "oom"}]) == []


def test_both_ends_of_an_interval_share_a_column() -> None:
    frame = pd.DataFrame(
        {"median (ms)": [2.0, 3.0], "95 % low (ms)": [1.5, None], "95 % high (ms)": [2.25, None]}
    )
    shown = with_intervals(frame)
    assert list(shown) == ["median (ms)", "95 % interval (ms)"]
    assert shown["95 % interval (ms)"].to_list() == ["[1.5, 2.25]", ""]


def test_a_timing_of_the_last_experiment_comes_first_and_has_its_verdict() -> None:
    def step(name: str, variant: str, samples: list[float]) -> dict[str, object]:
        return {"variant": variant, **row(name, samples)}

    slow = [3 * sample for sample in STEADY]
    rows = [step("model", "bf16", STEADY), step("model", "fp32", slow)]
    rows += [step("train-step", "torch DDP", slow), step("train-step", "NaiveDDP", SHAKY)]
    first, second, last = headlines([{**each, "config": {"device": "cuda"}} for each in rows])
    assert first == "bf16 takes 10 ms, 0.33 of fp32: faster, sure (model case)."
    assert second.startswith("NaiveDDP beside torch DDP: cannot tell, ")
    assert second.endswith(" (train-step case).")
    assert last.startswith("1 of 4 timed figures")


def test_the_fastest_way_to_train_is_compared_with_pytorch_s() -> None:
    def step(variant: str, factor: float) -> dict[str, object]:
        samples = [factor * sample for sample in STEADY]
        return {"variant": variant, **row("train-step", samples)}

    rows = [step("no communication", 1), step("torch DDP", 2), step("BucketedDDP", 1.5)]
    rows.append(step("NaiveDDP", 1.6))
    assert headlines(rows) == [
        "BucketedDDP takes 15 ms, 0.75 of torch DDP: faster, sure (train-step case)."
    ]
    assert headlines([rows[0]]) == ["no communication takes 10 ms (train-step case)."]


def test_unstable_steps_take_part_in_no_ratio() -> None:
    def step(wrapper: str, samples: list[float]) -> dict[str, object]:
        settings = {"wrapper": {"name": wrapper}, "optimizer": {"name": "adamw"}}
        return {"variant": wrapper, "settings": settings, **row("train-step", samples)}

    twice = [2 * sample for sample in STEADY]
    rows = [step("none", STEADY), step("naive", twice), step("flat", [4 * s for s in SHAKY])]
    (table, *_) = experiments.get("train-step").tables(to_frame(rows))
    ratios = table.frame.set_index("variant")["speedup over naive (ratio)"]
    assert ratios["naive"] == 1
    assert pd.isna(ratios["flat"]), "unstable figures take part in no ratio"


def test_rows_of_another_version_say_nothing() -> None:
    assert headlines([row("train-step", STEADY), row("memory", STEADY)]) == []


def test_one_is_singular() -> None:
    assert [plural(1, "case"), plural(2, "case")] == ["1 case", "2 cases"]


def test_rates_are_drawn_where_the_interval_ends_at_the_median() -> None:
    """Rounding makes the turned interval of a rate end a hair beyond the rate itself."""
    rows = [
        {
            **row("allreduce", [0.1 + 0.01 * number] * 5),
            "variant": "all_reduce",
            "backend": "gloo",
            "size_bytes": 1000 * 7**number,
        }
        for number in range(8)
    ]
    (figure,) = experiments.get("allreduce").figures(to_frame(rows))
    assert png_bytes(figure.figure)


@pytest.mark.parametrize(
    "samples",
    [
        [0.02157760643179956] * 2,
        [math.nextafter(0.3, 1.0), 0.3, 0.3, 0.3, math.nextafter(0.3, 0.0)],
    ],
    ids=["no interval", "a hair"],
)
def test_one_rate_is_drawn_where_its_interval_is_a_hair(samples: list[float]) -> None:
    about = {"variant": "broadcast", "backend": "gloo", "size_bytes": 10_000, "world_size": 2}
    (figure,) = experiments.get("allreduce").figures(
        to_frame([{**row("allreduce", samples), **about}])
    )
    assert png_bytes(figure.figure)
