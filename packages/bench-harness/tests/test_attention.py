"""The experiment ``attention``: implementations, their proof, the grid of problems, its tables."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from bench_harness import attentions, experiments
from bench_harness.core import Case, Row
from bench_harness.display.plots import png_bytes
from bench_harness.experiments import attention_measure
from bench_harness.experiments.attention_measure import Attempts, Problem
from bench_harness.report.frame import to_frame
from flashattn_triton import flash_attention

CPU = torch.device("cpu")
QUICK: dict[str, Any] = {
    "dtypes": ("fp32",),
    "head_dims": (8,),
    "sequences": (24,),
    "rep_ms": 0.0,
    "warmup_ms": 0.0,
    "rounds": 2,
    "samples": 4,
    "interval": 0.0,
    "device": "cpu",
}


def stored(case: Case, rows: list[Row]) -> list[Row]:
    """Rows as the runner stores them."""
    about = {"experiment": "attention", "label": case.label, "case_key": case.key, "status": "ok"}
    return [{**about, **row.pop("ended", {}), **row, "config": dict(case.config)} for row in rows]


def run(**options: Any) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """Rows of all cases, and the tables by title."""
    experiment = experiments.get("attention")
    rows: list[Row] = []
    for case in experiment.cases(**{**QUICK, **options}):
        found = experiment.run(case, lambda text: None)
        json.dumps(found, allow_nan=False)
        rows += stored(case, found)
    frame = to_frame(rows)
    return frame, tables_of(frame)


def tables_of(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    return {table.title: table.frame for table in experiments.get("attention").tables(frame)}


def test_many_lengths_are_timed_together_with_what_the_first_time_costs(
    module: ModuleType,
) -> None:
    """A library that plans for each length: its first time through all of them takes longer."""
    planned: set[int] = set()

    def planning(query, key, value, *, causal):
        if query.shape[2] not in planned:
            planned.add(query.shape[2])
            time.sleep(0.1)
        attend = torch.nn.functional.scaled_dot_product_attention
        return attend(query, key, value, is_causal=causal)

    module.planning = planning  # type: ignore[attr-defined]
    options = {"sequences": (8, 40), "varying": 12, "samples": 3, "heads": 2}
    frame, tables = run(variants=("user_kernels:planning", "naive", "fa3-fwd"), **options)
    timed = frame[frame["status"] == "ok"].set_index(["variant", "phase"])
    assert len(timed) == 2 * 2, "forward, and forward with backward"
    assert frame[frame["status"] == "skipped"]["variant"].tolist() == ["fa3-fwd"]
    assert len(planned) >= 10, "lengths between the shortest and the longest"
    assert (min(planned), max(planned)) == (8, 40)
    first = timed.loc[("user_kernels:planning", "forward")]
    assert first["first_ms"] > 100 * (len(planned) - 1)
    assert len(first["samples_ms"]) == 3
    assert timed["varied"].eq(12).all()
    grid = tables["Attention grid"]
    assert grid["lengths up to that (count)"].dropna().eq(12).all()
    assert grid["first time (ms)"].notna().sum() == 4


@pytest.mark.parametrize(
    "wrong", [{"varying": 1}, {"sequences": (8,)}, {"features": ("sinks",)}, {"packed": (8, 16)}]
)
def test_many_lengths_need_a_range_of_plain_problems(wrong: dict[str, Any]) -> None:
    given = {"varying": 5, "sequences": (8, 16), **wrong}
    with pytest.raises(ValueError, match="varying must be at least 2 lengths"):
        experiments.get("attention").cases(**{**QUICK, **given})


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A user's module with kernels."""
    made = ModuleType("user_kernels")
    monkeypatch.setitem(sys.modules, "user_kernels", made)
    return made


def test_backward_of_a_compiled_attention_is_timed_over_a_kept_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which the compiler's defaults do not allow."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    frame, _ = run(variants=("naive-compiled",), passes=("backward",), rounds=1, samples=2)
    assert frame["status"].tolist() == ["ok"]


def test_the_grid() -> None:
    variants = ("flashattn-triton", "naive", "sdpa-math", "flash-attn-4")
    passes = ("forward", "training forward", "backward", "forward+backward")
    frame, tables = run(
        variants=variants, sequences=(24, 48), dtypes=("fp32", "bf16"), heads=2, passes=passes
    )
    timed = frame[frame["status"] == "ok"]
    assert set(timed["variant"]) == {*variants} - {"flash-attn-4"}
    assert set(timed["phase"]) == set(passes)
    assert timed["samples_ms"].map(len).min() >= 4
    assert (timed[timed["dtype"] == "fp32"]["error_dq"] < 1e-5).all()
    naive = timed[timed["variant"] == "naive"]
    assert (naive["saved_bytes"] == naive["predicted_saved_bytes"]).all()
    missing = frame[frame["status"] == "skipped"]
    assert set(missing["variant"]) == {"flash-attn-4"}
    assert missing["error"].str.contains("Install its package").all()

    grid = tables["Attention grid"]
    own = grid[grid["attention"] == "flashattn-triton"]
    ratio = "speedup over the first (ratio)"
    quiet = frame.assign(timer_overhead_ms=0.0)
    quiet["samples_ms"] = [[5.0] * 5 if isinstance(s, list) else None for s in frame["samples_ms"]]
    assert (tables_of(quiet)["Attention grid"][ratio].dropna() == 1).all()
    loud = quiet.assign(samples_ms=[s and [1.0, 9.0, 2.0, 7.0] for s in quiet["samples_ms"]])
    assert ratio not in tables_of(loud)["Attention grid"], "unstable figures take part in no ratio"
    assert set(own["tier"]) == {"tiled"}
    assert not grid["prediction missed"].eq(True).any()
    lines = tables["Attention passes"]
    assert len(lines) == 2 * 2 * 3  # dtypes × lengths × variants
    assert sorted(lines["backward (ms)"]) == sorted(
        grid[grid["pass"] == "backward"]["median (ms)"].dropna()
    )
    beside = tables["Attention side by side"]
    assert len(beside) == 2 * 2 * 4  # dtypes × lengths × passes
    assert beside["fewest samples (count)"].min() == grid["samples (count)"].min()
    faster = quiet.assign(
        samples_ms=[
            [
                {"flashattn-triton": 1.0, "naive": 2.0, "sdpa-math": 1.0 if length == 24 else 0.5}[
                    name
                ]
            ]
            * 5
            if isinstance(samples, list)
            else None
            for name, length, samples in zip(
                quiet["variant"], quiet["sequence"], quiet["samples_ms"], strict=True
            )
        ]
    )
    against = tables_of(faster)["Attention against each other"]
    assert len(against) == 2 * 2 * 4, "dtypes × other variants × passes"
    lines_of = against.set_index(["against", "dtype", "pass"])
    assert lines_of.loc[("naive", "fp32", "backward"), "problems (count)":].tolist() == [
        *(2, 2, 0.5, 0.5, 0.5)
    ]
    assert lines_of.loc[("sdpa-math", "bf16", "forward"), "problems (count)":].tolist() == [
        *(2, 0, 1.0, 1.5, 2.0)
    ]
    assert "Attention against each other" not in tables_of(loud)
    pictures = {each.name: each.figure for each in experiments.get("attention").figures(frame)}
    assert {f"attention_{name}" for name in (*passes, "throughput", "memory")} <= pictures.keys()
    assert png_bytes(pictures["attention_throughput"])
    drawn = [value for plot in pictures["attention_errors_gradients"].axes
             for line in plot.get_lines() for value in line.get_ydata()]  # fmt: skip
    assert len(drawn) == len(lines)


@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        ({"window": (5, -1), "softcap": 4.0, "heads": 4, "kv_heads": 2}, {"sdpa-math"}),
        ({"masks": ("full",), "window": (2, 3), "clock": ("host",)}, {"sdpa-math"}),
        ({"clock": ("cool",)}, set()),
        ({"value_head_dim": 12, "features": ["deterministic"], "heads": 2}, {"sdpa-math"}),
        ({"heads": 4, "kv_heads": 2, "tokens": 48}, set()),
        ({"packed": (5, 1, 9), "heads": 4, "kv_heads": 2}, {"sdpa-math", "naive"}),
    ],
)
def test_an_implementation_is_proven_on_the_problem_or_skipped(
    options: dict[str, Any], skipped: set[str]
) -> None:
    frame, tables = run(
        variants=("flashattn-triton", "naive", "sdpa-math"), passes=("forward",), **options
    )
    assert set(frame[frame["status"] == "skipped"]["variant"]) == skipped
    timed = frame[frame["status"] == "ok"]
    assert set(timed["variant"]) == {"flashattn-triton", "naive", "sdpa-math"} - skipped
    assert (timed[["error_out", "error_dq", "error_dk", "error_dv"]] < 1e-5).all(axis=None)
    assert (timed["flops"] > 0).all()
    assert len(tables["Attention passes"]) == 3 - len(skipped)


def test_tables_keep_clocks_apart() -> None:
    frame, tables = run(variants=("naive",), passes=("forward",), clock=("host", "wall"))
    lengths = frame["sequence"].nunique()
    assert sorted(tables["Attention passes"]["clock"]) == ["host"] * lengths + ["wall"] * lengths


def test_what_is_wrong_or_fails_is_out_and_the_others_go_on(module: ModuleType) -> None:
    def kernel(change: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
            return change(query, key, value, causal)

        return attend

    naive = attentions.naive

    def raises(*_: object) -> Tensor:
        raise RuntimeError("illegal\nmemory")

    module.good = kernel(lambda q, k, v, c: naive(q, k, v, causal=c))
    module.scaled = kernel(lambda q, k, v, c: 1.01 * naive(q, k, v, causal=c))
    module.nan = kernel(lambda q, k, v, c: float("nan") * naive(q, k, v, causal=c))
    module.gradient = kernel(lambda q, k, v, c: naive(q.detach() + 0 * q, k, v, causal=c))
    module.raises = kernel(raises)
    module.refuses = kernel(lambda q, k, v, c: attentions.find("flex")(q, k, v, causal=c))
    wanted = ("good", "scaled", "nan", "gradient", "raises", "refuses", "missing")
    frame, _ = run(variants=tuple(f"user_kernels:{name}" for name in wanted), passes=("forward",))
    found = frame.assign(name=frame["variant"].str.partition(":")[2]).set_index("name")
    assert found["status"].to_dict() == {
        "good": "ok",
        **dict.fromkeys(("scaled", "nan", "gradient", "raises"), "error"),
        **dict.fromkeys(("refuses", "missing"), "skipped"),
    }
    errors = found["error"].to_dict()
    for name in ("scaled", "nan", "gradient"):
        assert "must be at most 0.0001 of its largest value" in errors[name]
    assert errors["raises"] == "RuntimeError: illegal memory"
    assert "must get CUDA tensors" in errors["refuses"]
    assert "must be importable" in errors["missing"]


def test_rows_say_which_of_pytorch_s_kernels_really_ran() -> None:
    variants = ("sdpa", "sdpa-math", "flashattn-triton-tiled", "naive")
    frame, tables = run(variants=variants, passes=("forward",))
    by_name = frame.set_index("variant")["ran"].to_dict()
    assert by_name["sdpa"] in ("flash", "math"), "what PyTorch chooses on this processor"
    assert (by_name["sdpa-math"], by_name["flashattn-triton-tiled"]) == ("math", "tiled")
    assert pd.isna(by_name["naive"])
    shown = tables["Attention grid"].set_index("attention")["PyTorch's kernel"]
    assert shown["sdpa-math"] == "math"


def test_an_implementation_without_backward_is_compared_and_timed_in_forward_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def heads_last(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        inputs = (x.transpose(1, 2) for x in (query, key, value))
        return attentions.naive(*inputs, causal=causal).transpose(1, 2) * scale

    package = ModuleType("fa3_fwd_interface")
    package.flash_attn_func = heads_last  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", package)
    monkeypatch.setattr(attentions, "_refuse_cpu", lambda *_: None)
    scale = 1.0
    frame, _ = run(variants=("fa3-fwd", "naive"), passes=("forward", "backward"))
    timed = frame[["variant", "phase"]].itertuples(index=False, name=None)
    assert set(timed) == {("fa3-fwd", "forward"), ("naive", "forward"), ("naive", "backward")}
    own = frame[frame["variant"] == "fa3-fwd"].iloc[0]
    assert own["error_out"] < 1e-5
    assert pd.isna(own["error_dq"])
    scale = 1.5
    frame, _ = run(variants=("fa3-fwd", "naive"), passes=("forward",))
    wrong = frame[frame["variant"] == "fa3-fwd"].iloc[0]
    assert wrong["status"] == "error"
    assert "error of out must be at most" in wrong["error"]

    def packed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **lengths: Any) -> Tensor:
        starts = lengths["cu_seqlens_q"].tolist()
        assert starts == lengths["cu_seqlens_k"].tolist() == [0, 3, 8]
        assert lengths["max_seqlen_q"] == lengths["max_seqlen_k"] == 5
        pieces = [heads_last(*(x[None, a:b] for x in (q, k, v)), causal=causal)[0]
                  for a, b in itertools.pairwise(starts)]  # fmt: skip
        return torch.cat(pieces)

    package.flash_attn_varlen_func = packed  # type: ignore[attr-defined]
    scale = 1.0
    frame, _ = run(variants=("fa3-fwd",), passes=("forward",), packed=(3, 5))
    assert frame["status"].tolist() == ["ok"]


def test_lack_of_memory_ends_the_case(module: ModuleType) -> None:
    def greedy(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
        raise torch.OutOfMemoryError("no")

    module.greedy = greedy
    with pytest.raises(torch.OutOfMemoryError):
        run(variants=("user_kernels:greedy",))


def test_an_installed_package_registers_an_implementation(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, tmp_path: Path
) -> None:
    module.attend = attentions.naive
    metadata = tmp_path / "user_kernels-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: user-kernels\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text(
        f"[{attentions.ENTRY_POINT_GROUP}]\nmine = user_kernels:attend\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert attentions.names()[-1] == "mine"
    assert attentions.find("mine") is attentions.naive


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variants": ("flsh",)}, r"variants must be flashattn-triton, .* but got 'flsh'"),
        ({"variants": ()}, "variants must hold a value, but got none"),
        ({"heads": 3, "kv_heads": 2}, "kv_heads must divide heads, but got 2 of 3"),
        ({"window": (1,)}, "window must be two numbers of keys"),
        (
            {"features": ("bias",), "packed": (3, 4)},
            "features must name at least one, .* plain or deterministic, but got bias",
        ),
        ({"rounds": 0}, "rounds must be positive, but got 0"),
    ],
)
def test_bad_options_name_what_is_valid(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experiments.get("attention").cases(**options)


def test_large_scores_are_apart() -> None:
    cases = experiments.get("attention").cases(
        sequences=(1024, 65536), head_dims=(64,), device="cpu"
    )
    linear = ["flashattn-triton", "sdpa-flash", "sdpa-cudnn", "flex"]
    assert [(case.config["sequences"], case.config["variants"]) for case in cases] == [
        ([1024], ["flashattn-triton", "naive", "naive-compiled", *linear[1:]]),
        ([65536], linear),
        ([65536], ["flashattn-triton", "naive"]),
        ([65536], ["flashattn-triton", "naive-compiled"]),
    ]
    alone = experiments.get("attention").cases(
        sequences=(65536,), head_dims=(64,), variants=("naive",), device="cpu"
    )
    assert [case.config["variants"] for case in alone] == [["naive"]]


def test_the_portable_tier_and_peers_of_a_gpu_are_skipped_on_a_cpu() -> None:
    names = ["flashattn-triton-portable", "flashattn-triton-compiled", "flex"]
    attempts = Attempts(names, a_problem(), CPU)
    attempts.prove()
    assert {name: end["status"] for name, end in attempts.ended.items()} == dict.fromkeys(
        names, "skipped"
    )
    assert all("CUDA" in end["error"] for end in attempts.ended.values())


_HIDDEN = {
    "window": {"window": (4, None)},
    "window, softcap": {"causal": False, "window": (3, None), "softcap": 2.0},
    "window to the right": {"causal": False, "window": (None, 2)},
}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", ["plain", "alibi", "bias", *_HIDDEN])
def test_flex_attention_gets_the_problem_s_mask_and_scores(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Uncompiled, and without gradients, which a CPU can run."""
    problem = a_problem(feature="plain" if kind in _HIDDEN else kind)
    settings = {**problem.settings(CPU), **_HIDDEN.get(kind, {})}
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(attentions, "_refuse_cpu", lambda *_: None)
    query, key, value = (x.detach() for x in problem.tensors(CPU)[:3])
    with torch.no_grad():
        found = attentions.find("flex")(query, key, value, **settings)
        wanted = attentions.naive(query, key, value, **settings)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def a_problem(**different: Any) -> Problem:
    shape = {"batch": 2, "heads": 4, "kv_heads": 4, "sequence": 21, "head_dim": 8}
    common: dict[str, Any] = {**shape, "value_head_dim": 8, "dtype": "fp32", "causal": True}
    return Problem(**{**common, **different})


def test_what_features_cost_is_measured_beside_plain_attention() -> None:
    """Every implementation that takes a feature is proven with it, gradients included."""
    features = ("plain", "sinks", "alibi", "bias", "deterministic")
    variants = ("flashattn-triton", "naive", "sdpa-math", "sdpa-efficient")
    passes = ("forward", "forward+backward")
    frame, tables = run(
        variants=variants, features=features, passes=passes, heads=4, kv_heads=4, batch=2,
    )  # fmt: skip
    timed = frame[frame["status"] == "ok"]
    taken = {name: set(group["feature"]) for name, group in timed.groupby("variant")}
    assert taken == {
        "flashattn-triton": {*features},
        "naive": {*features},
        "sdpa-math": {"plain", "alibi", "bias"},
    }
    errors = timed[[name for name in timed if name.startswith("error_d")]]
    assert (errors.fillna(0) < 1e-5).all(axis=None)
    for name in ("sinks", "bias"):
        assert set(timed[timed[f"error_d{name}"].notna()]["feature"]) == {name}
    flops = timed[timed["phase"] == "forward"].groupby("feature")["flops"].first()
    assert flops["plain"] == flops["bias"]
    assert (timed["length"] == "s24").all()

    lines = tables["Attention features"].set_index(["attention", "feature"])
    assert len(lines) == 2 * 4 + 2
    quiet = frame.assign(timer_overhead_ms=0.0)
    quiet["samples_ms"] = [
        [3.0 if feature == "bias" else 2.0] * 5 if status == "ok" else None
        for feature, status in zip(frame["feature"], frame["status"], strict=True)
    ]
    lines = tables_of(quiet)["Attention features"].set_index(["attention", "feature"])
    lines = lines.sort_index()
    assert (lines.loc[("naive", "bias"), [f"{each} (ratio)" for each in passes]] == 1.5).all()
    assert (lines.loc[("naive", "alibi"), [f"{each} (ratio)" for each in passes]] == 1.0).all()
    assert lines.loc[("naive", "bias"), "forward (ms)"] == 3.0
    ratios = tables_of(quiet)["Attention grid"].set_index(["attention", "feature"]).sort_index()
    assert (ratios.loc[("naive", "bias"), "speedup over the first (ratio)"] == 1.0).all()


@pytest.mark.parametrize(
    ("feature", "masks"),
    [
        *((feature, {}) for feature in ("plain", "sinks", "alibi", "bias")),
        ("plain", {"causal": False, "window": (3, 2), "softcap": 4.0}),
        ("plain", {"window": (4, None)}),
    ],
)
def test_the_reference_takes_some_queries_at_a_time_and_is_the_definition(
    monkeypatch: pytest.MonkeyPatch, feature: str, masks: dict[str, Any]
) -> None:
    """That of flashattn-triton, which stores all scores at once."""
    problem = a_problem(feature=feature, **masks)
    tensors, settings = problem.tensors(CPU), problem.settings(CPU)
    monkeypatch.setattr(attention_measure, "_SCORES", 4 * 21)  # at most four queries
    found = attention_measure.exact(problem, tensors, settings)
    *inputs, grad_out = tensors
    out = flash_attention(*inputs, layout="bhsd", implementation="reference", **settings)
    learned = attention_measure.learned(settings)
    wanted = torch.autograd.grad(out, (*inputs, *learned.values()), grad_out)
    names = ("out", "dq", "dk", "dv", *(f"d{name}" for name in learned))
    assert found.keys() == set(names)
    shared, every = feature in ("sinks", "bias"), feature == "sinks"
    for name, exactly in zip(names, (out, *wanted), strict=True):
        part = exactly if every else exactly[:, -1:]
        part = part if shared else part[-1:]
        torch.testing.assert_close(found[name], part, atol=1e-5, rtol=1e-5)
