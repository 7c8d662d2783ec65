"""Variants as text and as tables: one meaning, one label, and any class by its name."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bench_harness import experiments, options, workload
from bench_harness.convert import split
from bench_harness.training import constructors
from bench_harness.training import settings as of

Bench = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[3]
TUNED = {"name": "torch-ddp", "bucket_cap_mb": 100, "gradient_as_bucket_view": True}

SAME = [
    ("bucketed(bucket_size_mb=1)", {"wrapper": {"name": "bucketed", "bucket_size_mb": 1}}),
    ("BucketedDDP(bucket_size_mb=1)", {"wrapper": {"name": "bucketed", "bucket_size_mb": 1.0}}),
    (
        "ddp_lite:BucketedDDP(bucket_size_mb=1)",
        {"wrapper": "ddp_lite:BucketedDDP", "bucket_size_mb": 1},
    ),
    ("bucketed(bucket_size_mb=1)", {"wrapper": "bucketed(bucket_size_mb=1)"}),
    (
        "torch DDP(bucket_cap_mb=100, gradient_as_bucket_view) + ZeroRedundancyOptimizer",
        {"wrapper": TUNED, "optimizer": "zero-redundancy"},
    ),
    (
        'sharded(reduce_gradients, overlap="next-forward"), precision=bf16',
        {
            "optimizer": {"name": "sharded", "reduce_gradients": True, "overlap": "next-forward"},
            "precision": "bf16",
        },
    ),
    ("naive, compile=blocks", {"wrapper": "naive", "compile": "blocks"}),
    ("bucketed(wire_dtype=none)", {"wrapper": "bucketed"}),
]


@pytest.mark.parametrize(("text", "table"), SAME, ids=[text for text, _ in SAME])
def test_text_and_table_are_the_same_variant(text: str, table: dict[str, object]) -> None:
    first, second = of.read(text, {}), of.read(table, {})
    assert first == second
    assert first.table() == second.table()


@pytest.mark.parametrize("name", ["naive", "flat", "overlap", "bucketed", "torch-ddp"])
def test_a_class_that_is_named_itself_has_its_own_defaults(name: str) -> None:
    """A short name may have another default; where, the registry says so."""
    known = constructors.WRAPPERS[name]
    here = {key: each.default for key, each in constructors.signatures()[name].items()}
    own = {
        key: each.default
        for key, each in inspect.signature(
            workload.imported(known.target, "wrapper")
        ).parameters.items()
        if isinstance(each.default, bool | int | float | str)
    }
    others = {key: value for key, value in own.items() if here.get(key, value) != value}
    assert others == dict(known.of_class)
    named = of.read({"wrapper": known.target}, {}).wrapper
    assert dict(named.arguments) == others


def test_classes_of_one_name_are_told_apart_in_every_label() -> None:
    variants = [
        of.read({"wrapper": name}, {})
        for name in ("bucketed", "before:BucketedDDP", "before:BucketedDDP(copy)", "naive")
    ]
    assert of.labels(variants) == [
        "BucketedDDP",
        "before:BucketedDDP",
        "before:BucketedDDP(copy)",
        "NaiveDDP",
    ]


def test_a_list_parts_variants_outside_of_brackets_and_quotes() -> None:
    text = "naive, bucketed(bucket_size_mb=1, copy) + sgd, precision=bf16, a:B(c='x,y')"
    assert split(text) == [
        "naive",
        "bucketed(bucket_size_mb=1, copy) + sgd, precision=bf16",
        "a:B(c='x,y')",
    ]


def test_labels_of_shipped_variants_are_read_again_as_the_same_variant() -> None:
    """Every one that its label says whole: it leaves out a learning rate, and a bound's wrapper.

    A class without a short name is read again from the label that has its package.
    """
    files = sorted(ROOT.glob("tools/pages/presets/*.toml"))
    names = [*options.shipped(), *map(str, files)]
    seen = 0
    for name in names:
        for case in options.load_preset(name).cases():
            if case.experiment != "train-step":
                continue
            for table in case.config.get("variants", []):
                variant = of.read(table, {})
                if variant.communicates and "lr" not in table["optimizer"]:
                    shared = {each: getattr(variant, each) for each in of.SHARED}
                    label = variant.label(whole=any(":" in each.name for each in variant.calls))
                    assert of.read(label, shared) == variant
                    seen += 1
    assert seen > 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bucketed(bucket_size_mb=1", r"must close what it opens"),
        ("bucketed(size=1)", r"bucketed key must be one of bucket_size_mb, .*, but got 'size'"),
        ("bucketed(copy, copy)", "must have each argument once, but got copy twice"),
        ("naive + flat", "variant must have one wrapper, but got naive and flat"),
        ("sgd + adamw", "variant must have one optimizer, but got sgd and adamw"),
        ("naive, fast", "must have settings as name=value, but got 'fast'"),
        ("naive, speed=1", "variant key must be one of .*, but got 'speed'"),
        ("na!ve", r"must be of the form name\(argument=value, flag\)"),
        ("bucketed(bucket_size_mb=1 2)", "must be a number, a word or a text in quotes"),
        ("nope(a=1)", "wrapper must be one of .*, but got 'nope'"),
    ],
)
def test_what_is_no_variant_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        of.read(text, {})


def test_the_command_line_takes_variants_with_arguments(bench: Bench) -> None:
    done = bench(
        *("train-step", "--variants", "naive,bucketed(bucket_size_mb=1, copy)", "--device", "cpu"),
        *("--optimizer", "sgd(momentum=0.9)", "--dry-run", "--json"),
    )
    assert done.returncode == 0, done.stderr
    values = options.build(
        experiments.get("train-step"),
        {"variants": "naive,bucketed(bucket_size_mb=1, copy)", "optimizer": "sgd(momentum=0.9)"},
        written=True,
    )
    (case,) = experiments.get("train-step").cases(**values)
    assert case.config["variants"][2]["wrapper"] == {
        "name": "bucketed",
        "bucket_size_mb": 1.0,
        "copy": True,
    }
    assert case.config["variants"][2]["optimizer"] == {"name": "sgd", "momentum": 0.9}


CLASSES = """
import torch
import torch.distributed as dist
from torch import nn

class Averaged(nn.Module):
    def __init__(self, module, *, divide=True):
        super().__init__()
        self.module, self.divide = module, divide

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                if self.divide:
                    parameter.grad /= dist.get_world_size()

class Descent(torch.optim.SGD):
    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, lr=lr)
"""
TINY = (
    *("--sizes", "custom", "--d-model", "16", "--d-ff", "32", "--num-layers", "1"),
    *("--num-heads", "2", "--vocab-size", "32", "--batches", "2", "--sequences", "8"),
    *("--rounds", "1", "--blocks", "1", "--calls", "1", "--warmup", "1", "--interval", "0"),
    *("--device", "cpu", "--output", "out"),
)


@pytest.mark.slow  # ranks of a process that imports torch
def test_a_wrapper_and_an_optimizer_of_the_user_s_are_proven_and_timed(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "classes.py").write_text(CLASSES)
    done = bench(
        *("train-step", "--variants"),
        "classes:Averaged + classes:Descent(lr=0.1),"
        "classes:Averaged(divide=false) + classes:Descent(lr=0.1)",
        *TINY,
    )
    rows = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    by_variant = {row["variant"]: row for row in rows}
    assert by_variant["Averaged + Descent(lr=0.1)"]["status"] == "ok", done.stdout
    assert len(by_variant["Averaged + Descent(lr=0.1)"]["samples_ms"]) == 1
    wrong = by_variant["Averaged(divide=False) + Descent(lr=0.1)"]
    assert wrong["status"] == "error", "sums in place of averages are refused by the proof"
    assert done.returncode == 1
    assert sorted(rows[0]["config"]["user_code"]["sources"]) == [
        "classes:Averaged",
        "classes:Descent",
    ]


@pytest.mark.slow  # a process that imports torch
@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("classes:Averaged(share=2)", r"takes \(divide\), but got share: got an unexpected"),
        ("classes:Missing", "wrapper must be an importable package.module:name"),
        ("naive + classes:Descent(rate=1)", r"optimizer classes:Descent must be given arguments"),
    ],
)
def test_arguments_are_checked_against_the_signature_before_anything_runs(
    bench: Bench, tmp_path: Path, variant: str, message: str
) -> None:
    (tmp_path / "classes.py").write_text(CLASSES)
    done = bench("train-step", "--variants", variant, *TINY)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert re.search(message, done.stderr), done.stderr
    assert not (tmp_path / "out").exists()
