"""Options from the command line and from presets mirror the experiment's dataclass."""

from __future__ import annotations

import inspect
import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench_harness import distributed, environment, experiments, options, runner
from bench_harness.experiments import Experiment


@pytest.fixture
def toy(installed: Path) -> Experiment:
    return experiments.get("toy")


def test_an_unknown_experiment_names_those_that_exist(installed: Path) -> None:
    with pytest.raises(ValueError, match=r"must be one of accounting, .*, toy, but got 'tyo'"):
        experiments.get("tyo")


def test_a_plug_in_that_does_not_import_is_named(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(experiments.base._BUILT_IN, "lost", "no_such_module:Lost")
    with pytest.raises(
        ValueError,
        match=r"experiment lost must be importable as no_such_module:Lost, but got an error",
    ):
        experiments.get("lost")


def test_defaults_fill_what_is_not_given(toy: Experiment) -> None:
    assert options.build(toy, {"seconds": 2}) == {
        "kinds": ("ok",),
        "repeats": 1,
        "seconds": 2.0,
        "note": None,
        "flag": False,
        "broken_report": False,
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "ok"}, "toy: option must be one of kinds, repeats, .*, but got 'kind'"),
        ({"kinds": "odd"}, "toy: kinds must be one of .*, but got 'odd'"),
        ({"kinds": ["ok", 3]}, "toy: kinds must be a list of str, but got \\['ok', 3\\]"),
        ({"repeats": "2"}, "toy: repeats must be of type int, but got '2'"),
        ({"repeats": True}, "toy: repeats must be of type int, but got True"),
        ({"repeats": 1.5}, "toy: repeats must be of type int, but got 1.5"),
        ({"repeats": 0}, "toy: repeats must be at least 1, but got 0"),
        ({"flag": 1}, "toy: flag must be of type bool, but got 1"),
        ({"seconds": float("nan")}, "toy: seconds must be finite, but got nan"),
    ],
)
def test_wrong_options_name_what_is_valid(
    toy: Experiment, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        options.build(toy, given)


@pytest.mark.parametrize("name", ["model", "memory", "profile", "train-step", "attention"])
def test_a_measurement_of_nothing_is_refused(name: str) -> None:
    batch = "batches" if name == "train-step" else "batch"
    for option in ("sequences", batch):
        with pytest.raises(ValueError, match=rf"{name}: {option} must be positive, but got .*-4"):
            options.build(experiments.get(name), {option: -4})
    for given in ({"samples": 0}, {"sizes_mb": [0.5, 0]}, {"world_sizes": [0]}):
        with pytest.raises(ValueError, match=r"allreduce: .* must be positive, but got "):
            options.build(experiments.get("allreduce"), given)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("model", "warmups"),
        ("train-step", "warmup"),
        ("attention", "interval"),
        ("allreduce", "max_seconds"),
    ],
)
def test_less_than_nothing_is_refused(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: {option} must be 0 or more, but got .*-1"):
        options.build(experiments.get(name), {option: -1})
    assert options.build(experiments.get(name), {option: 0})[option] in (0, (0,), 0.0)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("attention", "kv_heads"),
        ("attention", "value_head_dim"),
        *(("model", option) for option in ("vocab_size", "d_model", "num_layers")),
    ],
)
def test_nothing_is_not_taken_for_the_default(name: str, option: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: {option} must be positive, but got 0"):
        options.build(experiments.get(name), {option: 0})


def test_a_number_within_a_variant_must_be_finite() -> None:
    variant = {"wrapper": {"name": "bucketed", "bucket_size_mb": math.nan}}
    with pytest.raises(ValueError, match="train-step: variants must be finite, but got "):
        options.build(experiments.get("train-step"), {"variants": [variant]})


def test_an_experiment_of_a_preset_without_a_case_is_refused(tmp_path: Path) -> None:
    """It was left out in silence where another one had cases."""
    (tmp_path / "mine.toml").write_text('[model]\nsizes = []\n[accounting]\nsizes = ["small"]\n')
    with pytest.raises(ValueError, match=r"mine\.toml: model: sizes must hold a value, but got no"):
        options.load_preset(str(tmp_path / "mine.toml"))


@pytest.mark.parametrize(
    ("experiment", "name"),
    [
        ("model", "precisions"),
        ("model", "attentions"),
        ("model", "modes"),
        ("memory", "modes"),
        ("attention", "variants"),
        ("allreduce", "operations"),
        ("allreduce", "sizes_mb"),
        ("train-step", "variants"),
    ],
)
def test_an_empty_list_is_refused_before_anything_is_measured(experiment: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"{experiment}: {name} must hold a value, but got none"):
        options.build(experiments.get(experiment), {name: []})


@pytest.mark.parametrize("experiment", ["model", "memory", "train-step", "profile"])
def test_a_custom_size_needs_every_dimension(experiment: str) -> None:
    given = {"sizes": ["small", "custom"], "d_model": 8, "num_layers": 1}
    with pytest.raises(ValueError, match=r"'custom' must come with .* none for d_ff, num_heads"):
        options.build(experiments.get(experiment), given)


@pytest.mark.parametrize("experiment", ["model", "memory", "train-step", "profile"])
@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"sizes": ["small"], "d_model": 32, "num_heads": 3}, "d_model=32 and num_heads=3"),
        ({"sizes": ["xl", "small"], "d_model": 1600}, "d_model=1600 and num_heads=12"),
        (
            {"sizes": ["custom"], "d_model": 6, "num_heads": 2, "d_ff": 8, "num_layers": 1},
            "d_model=6 and num_heads=2",
        ),
    ],
)
def test_heads_that_do_not_divide_the_width_are_refused_before_anything_is_measured(
    experiment: str, given: dict[str, Any], found: str
) -> None:
    with pytest.raises(ValueError, match=f"{experiment}: num_heads must divide d_model .*{found}"):
        options.build(experiments.get(experiment), given)


def test_options_that_would_have_no_effect_beside_each_other_are_refused() -> None:
    train_step = experiments.get("train-step")
    for given, text in (
        ({"alone": True, "nsight": True}, "alone must come without nsight, but got both"),
        ({"alone": True, "profiled": True}, "alone must come without profiled"),
        ({"nsight": True, "all_reduces": True}, "nsight must come without all_reduces"),
    ):
        with pytest.raises(ValueError, match=text):
            options.build(train_step, given)
    options.build(train_step, {"profiled": True, "all_reduces": True})
    with pytest.raises(ValueError, match=r"memory: modes must hold step beside second_step"):
        options.build(experiments.get("memory"), {"modes": ["forward"], "second_step": True})


def test_without_a_gpu_a_case_of_ranks_on_gpus_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not measured on 0 ranks."""
    monkeypatch.setattr(distributed, "gpu_count", lambda: 0)
    monkeypatch.setattr("bench_harness.experiments.base.gpu_count", lambda: 0)
    for name in ("allreduce", "train-step"):
        experiment = experiments.get(name)
        (case,) = experiment.cases(device="cuda")
        assert "must have 1 CUDA device, but got 0" in str(experiment.missing(case))


def test_every_option_has_a_parameter_with_its_default(toy: Experiment) -> None:
    parameters = {each.name: each for each in options.parameters(toy)}
    assert list(parameters) == ["kinds", "repeats", "seconds", "note", "flag", "broken_report"]
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters.values())
    given = {name: each.default for name, each in parameters.items()}
    assert options.build(toy, given, written=True) == options.build(toy, {})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("kinds", "ok, oom", ("ok", "oom")),
        ("kinds", "", ()),
        ("repeats", "3", 3),
        ("seconds", "1e-3", 0.001),
        ("note", "none", None),
        ("note", "any, thing", "any, thing"),
    ],
)
def test_texts_become_values(toy: Experiment, name: str, text: str, value: object) -> None:
    assert options.build(toy, {name: text}, written=True)[name] == value


@pytest.mark.parametrize(
    "arguments",
    [
        ("model", "--model-size", "small", "--context-length", "64", "--num-steps", "3"),
        ("attention", "--implementation", "naive,sdpa", "--batch-size", "2"),
        ("allreduce", "--world-size", "2"),
        ("train-step", "--size", "small", "--implementation", "naive", "--num-steps", "20"),
    ],
)
def test_names_of_other_programs_of_the_assignment_are_understood(
    bench: Callable[..., subprocess.CompletedProcess[str]], arguments: tuple[str, ...]
) -> None:
    done = bench(*arguments, "--device", "cpu", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr


PAGES = sorted(Path(__file__).parents[3].glob("tools/pages/presets/*.toml"))


@pytest.mark.parametrize("name", [*options.shipped(), *(str(file) for file in PAGES)])
def test_a_shipped_preset_gives_cases_with_keys_of_their_own(name: str) -> None:
    preset = options.load_preset(name)
    assert preset.description
    cases = preset.cases()
    assert len({case.key for case in cases}) == len(cases) > 0


def test_quick_runs_every_experiment() -> None:
    assert (
        list(dict.fromkeys(name for name, _ in options.load_preset("quick").runs))
        == experiments.names()
    )


def test_quick_takes_sizes_at_which_a_gpu_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By calculation within 90 seconds, and two GPUs compare wrappers with torch DDP."""
    monkeypatch.setattr(environment, "busy", lambda: 1.0)  # whatever else this machine does
    on_cpu = options.load_preset("quick").cases()
    monkeypatch.setattr(environment, "busy", lambda: 1.0)
    for module in (environment, options, distributed):
        monkeypatch.setattr(module, "gpu_count", lambda: 2)
    cases = {case.experiment: case for case in options.load_preset("quick").cases()}
    assert list(cases) == list(dict.fromkeys(case.experiment for case in on_cpu))
    timed = [name for name in cases if name != "accounting"]
    assert all(cases[name].config["device"] == "cuda" for name in timed)
    attention = cases["attention"].config
    assert (attention["heads"], attention["sequences"]) == (16, [4096])
    step = cases["train-step"].config
    assert (step["size"], step["world_size"]) == ("small", 2)
    assert "torch-ddp" in [variant["wrapper"]["name"] for variant in step["variants"]]
    expected = (runner._expected_s(case) for case in cases.values())
    assert sum(seconds or 0.0 for seconds in expected) < 90


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[toy", "must be TOML"),
        ("[toy.cuda]\nkind = 3", "option must be one of .*, but got 'kind'"),
        ('description = "x"', "must name at least one experiment"),
        ("\ufeff[tyo]", "experiment must be one of .*toy.*, but got 'tyo'"),
        ("toy = 3", "toy must be a table of options, but got 3"),
        ("[toy]\nkinds = [3]", "toy: kinds must be a list of str, but got \\[3\\]"),
    ],
)
def test_a_wrong_preset_names_the_file_and_what_is_valid(
    installed: Path, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        options.load_preset(str(file))
    assert "mine.toml" in str(error.value)


def test_a_preset_runs_in_the_registry_s_order(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[[toy]]\n[model]\n[[toy]]\nrepeats = 2\n")
    names = [name for name, _ in options.load_preset(str(tmp_path / "mine.toml")).runs]
    assert names == ["model", "toy", "toy"]
