"""Models of other libraries, and a user's own: every experiment takes them."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from bench_harness import experiments, options
from bench_harness.report.frame import to_frame
from bench_harness.user_code import fitting, imported_module, parse_inputs, scalar_loss

Bench = Callable[..., subprocess.CompletedProcess[str]]
CPU = torch.device("cpu")
MODELS = """
import torch
from torch import nn

def language_model(layers=1):
    from transformers import GPT2Config, GPT2LMHeadModel
    shape = GPT2Config(n_embd=16, n_layer=layers, n_head=2, vocab_size=50, n_positions=32)
    return GPT2LMHeadModel(shape)

def vision_model(width=8):
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    )

cached = nn.Linear(3, 1)

def kept():
    return cached

def around_kept():
    return nn.Sequential(nn.ReLU(), cached)

class OnDictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, batch):
        return {"loss": (self.layer(batch["x"]) * batch["mask"]).square().mean()}

def square(output):
    return output.square()

def detached(output):
    return output.detach().mean()

def gives_nothing():
    print("words")

def leaves():
    raise SystemExit("done")

def starts_a_program():
    import subprocess
    subprocess.Popen(["sleep", "654"])
    return nn.Linear(4, 2)

def forks():
    import os
    os.fork()
    return nn.Linear(4, 2)

def prints_and_hangs():
    import time
    print("words")
    time.sleep(600)
"""
#: Five lines each in the documentation: a transformers model with its own loss, a vision model with
#: a loss of torch's, a module that takes a dictionary.
SUBJECTS: dict[str, dict[str, Any]] = {
    "transformers": {
        "model": "models:language_model",
        "model_args": {"layers": 2},
        "input": "input_ids=int64[2x8]<50,labels=int64[2x8]<50",
    },
    "vision": {
        "model": "models:vision_model",
        "input": "float32[4x3x8x8]",
        "loss": "torch.nn.functional:cross_entropy",
        "target": "int64[4]<10",
    },
    "plain": {"model": "models:OnDictionary", "input": "{x=float32[3x4],mask=float32[3x2]}"},
}
SMALL: dict[str, dict[str, Any]] = {
    "model": {"samples": 2, "warmups": [1], "interval": 0},
    "memory": {"precisions": ["fp32"], "modes": ["step"], "second_step": True},
    "profile": {"warmup": 1},
}


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", SUBJECTS)
@pytest.mark.parametrize("name", SMALL)
def test_every_experiment_measures_it(name: str, kind: str) -> None:
    if kind == "transformers":
        pytest.importorskip("transformers")
    experiment = experiments.get(name)
    values = options.build(experiment, {"device": "cpu", **SMALL[name], **SUBJECTS[kind]})
    (case,) = experiment.cases(**values)
    rows = experiment.run(case, lambda text: None)
    json.dumps(rows, allow_nan=False)
    about = {"label": case.label, "case_key": case.key, "status": "ok"}
    frame = to_frame({**about, **row, "config": case.config} for row in rows)
    tables = {table.title: table.frame for table in experiment.tables(frame)}
    assert tables
    assert all(figure.figure for figure in experiment.figures(frame))
    first = next(iter(tables.values()))
    assert set(first["model"]) == {SUBJECTS[kind]["model"]}
    if name == "memory":
        peaks = frame[frame["kind"] == "phase"].set_index("phase")
        # The state of the first step is there when the second begins.
        kept = peaks.loc["first step", "end_bytes"] - peaks.loc["model", "end_bytes"]
        assert kept >= 8 * fitting(SUBJECTS[kind], CPU), "AdamW's two moments"
        assert set(tables["Peak memory"]["mode"]) == {"second step"}
        assert peaks["case_peak_bytes"].iloc[0] >= peaks.loc["backward", "peak_bytes"]


def test_ranks_train_a_model_of_another_library() -> None:
    """One start of two ranks: a wrapper, a sharded peer, arguments, the model's own loss.

    Without the process that looks at a model first, which would import the library once more.
    """
    pytest.importorskip("transformers")
    experiment = experiments.get("train-step")
    few = {"rounds": 1, "blocks": 2, "calls": 1, "warmup": 1, "interval": 0, "device": "cpu"}
    given = {**SUBJECTS["transformers"], "variants": ["naive", "fsdp2"], **few}
    (case,) = experiment.cases(**options.build(experiment, given))
    assert case.config["model_args"] == {"layers": 2}
    rows = experiment.run(case, lambda text: None)
    assert [row["variant"] for row in rows] == ["no communication", "NaiveDDP", "FSDP2"]
    assert all(row["weight_error"] < 1e-2 for row in rows[1:])


def test_ranks_train_a_model_whose_first_parameter_is_frozen_and_whose_loss_is_zero(
    bench: Bench, models: Path
) -> None:
    (models / "frozen.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    module = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3))\n"
        "    module[0].weight.requires_grad_(False)\n"
        "    for parameter in module[1].parameters():\n"
        "        nn.init.zeros_(parameter)\n"
        "    return module\n"
    )
    done = bench(
        *("train-step", "--model", "frozen:build", "--input", "float32[4x8]", "--device", "cpu"),
        *("--rounds", "2", "--blocks", "2", "--calls", "1", "--warmup", "1", "--interval", "0"),
        *("--variants", "naive,bucketed", "--output", "out", "--json"),
    )
    assert done.returncode == 0, done.stdout
    (table, *_) = json.loads(done.stdout)["tables"]["train-step"].values()
    assert [row["variant"] for row in table] == ["no communication", "NaiveDDP", "BucketedDDP"]
    rows = [json.loads(line) for line in (models / "out/results.jsonl").read_text().splitlines()]
    assert [row["status"] for row in rows] == ["ok"] * 3
    assert all(row["losses"][0] == 0 for row in rows)
    assert all(row["round"] == [0, 0, 1, 1] for row in rows)
    assert all(len(row["optimizer_ms"]) == 2 for row in rows)


def test_a_module_that_a_factory_returns_twice_is_refused() -> None:
    """Compiling it, or the hooks of a wrapper, would stay for the next variant."""
    held = imported_module({"model": "models:kept", "input": "float32[2x3]"}, CPU, "fp32")
    for name in ("kept", "around_kept"):
        with pytest.raises(ValueError, match="must be a factory that returns a new module"):
            imported_module({"model": f"models:{name}", "input": "float32[2x3]"}, CPU, "fp32")
    fresh = [imported_module(SUBJECTS["plain"], CPU, "fp32").module for _ in range(2)]
    assert held.module not in fresh


def test_a_model_with_sharded_blocks_is_found_by_its_longest_list() -> None:
    from bench_harness.training.adapters import blocks_of

    module = torch.nn.Module()
    module.small = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    module.layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
    assert blocks_of(module) == list(module.layers)
    with pytest.raises(ValueError, match="but got Linear, which has none"):
        blocks_of(torch.nn.Linear(2, 2))


def test_the_loss_is_the_user_s_function_of_output_and_target() -> None:
    workload = imported_module(SUBJECTS["vision"], CPU, "fp32", batch_seed=0)
    output = workload.module(*workload.args)
    torch.manual_seed(0)
    torch.randn(4, 3, 8, 8)
    target = torch.randint(10, (4,))
    expected = torch.nn.functional.cross_entropy(output, target)
    torch.testing.assert_close(workload.loss(), expected)
    assert fitting(SUBJECTS["vision"], CPU) == sum(p.numel() for p in workload.module.parameters())


def test_inputs_may_be_dictionaries() -> None:
    args, kwargs = parse_inputs("{a=int64[2]<3,b={c=bool[4]}},float32[1], more={d=float32[5]}", CPU)
    assert args[0]["b"]["c"].dtype == torch.bool
    assert args[1].shape == (1,)
    assert kwargs["more"]["d"].shape == (5,)
    with pytest.raises(ValueError, match="but got 'int64\\[2\\]<3}'"):
        parse_inputs("{a=int64[2]},int64[2]<3}", CPU)


def test_a_dictionary_s_loss_is_found() -> None:
    one = torch.tensor([2.0, 4.0])
    assert scalar_loss({"loss": torch.tensor(5.0), "logits": one}) == 5
    assert scalar_loss({"hidden": one}) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input", "float32[4x3x8]"], "input must fit the model, but got 'float32[4x3x8]': "),
        (["--input", "float32[4x4x8x8]"], "input must fit the model, but got"),
        (
            ["--input", "float32[4x3x8x8]", "--loss", "models:square"],
            "loss must return a tensor of one element, but 'models:square' returned (4, 10)",
        ),
        (
            ["--input", "float32[4x3x8x8]", "--loss", "models:detached"],
            "loss must be computed from the model's parameters, but got a tensor without",
        ),
        (
            ["--input", "float32[4x3x8x8]", "--loss", "models:missing"],
            "loss must be an importable package.module:name, but got 'models:missing'",
        ),
        (
            ["--input", "float32[4x3x8x8]", "--model-args", "depth=2"],
            "must be a factory that can be called with (depth=2), but 'models:vision_model' raised "
            "TypeError",
        ),
        (["--input", "float32[4x3x8x8]", "--model-args", "depth"], "name=value pairs as in TOML"),
        (["--input", "float32[4x3x8x8]", "--target", "int64[4]<10"], "target must come with loss"),
        ([], "model and input must be given together"),
    ],
)
def test_what_does_not_fit_is_one_line_before_anything_is_made(
    bench: Bench, models: Path, arguments: list[str], message: str
) -> None:
    done = bench("profile", "--model", "models:vision_model", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in models.iterdir()} - {"__pycache__"} == {"models.py"}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("gives_nothing", "must be a factory that returns a torch.nn.Module, but"),
        ("leaves", "raised SystemExit: done. Correct the factory"),
        ("starts_a_program", "must leave no processes behind, but got 1 that stayed"),
        ("forks", "must leave no processes behind, but got 1 that stayed"),
    ],
)
def test_a_factory_that_misbehaves_is_one_line_and_leaves_nothing(
    bench: Bench, models: Path, factory: str, message: str
) -> None:
    done = bench("profile", "--model", f"models:{factory}", "--input", "float32[3x4]")
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert {path.name for path in models.iterdir()} - {"__pycache__"} == {"models.py"}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            assert process.cmdline() != ["sleep", "654"]


def test_a_factory_that_prints_and_hangs_ends_in_time(
    bench: Bench, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench_harness.user_code._LIMIT_S", 4.0)
    done = bench("memory", "--model", "models:prints_and_hangs", "--input", "float32[1]")
    assert done.returncode == 2
    assert "must be imported, made and called once within 4 s, but took longer" in done.stderr
    assert "words" not in done.stdout + done.stderr
