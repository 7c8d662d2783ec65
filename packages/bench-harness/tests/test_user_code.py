"""A user's own model: its code is part of a case, and mistakes in naming it are one line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench_harness import experiments, user_code
from bench_harness.core import Case

Bench = Callable[..., subprocess.CompletedProcess[str]]

FACTORY = """
from torch import nn
from mine.layers import width

def build():
    return nn.Linear(3, width())
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package ``mine`` in the current directory."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "model.py").write_text(FACTORY)
    (folder / "layers.py").write_text("def width():\n    return 3\n")
    (folder / "unused.py").write_text("")
    yield folder
    assert "mine" not in sys.modules  # only the processes of cases import it


def cases(name: str = "mine.model:build") -> list[Case]:
    options = {"model": name, "input": "float32[4x3]", "modes": ("forward",)}
    return user_code.identified(experiments.get("model").cases(**options))


def test_a_case_knows_the_code_behind_its_name(package: Path) -> None:
    (first,) = cases()
    assert first.config["user_code"]["parameters"] == 12
    (again,) = cases()
    assert again.key == first.key
    (package / "unused.py").write_text("# nothing imports this")
    assert cases()[0].key == first.key
    (package / "layers.py").write_text("def width():\n    return 4\n")
    (wider,) = cases()
    assert wider.key != first.key
    assert wider.config["user_code"]["parameters"] == 16
    assert not list(package.glob("**/*.pyc"))  # which could outlive an edit
    (package / "model.py").write_text(FACTORY + "# only a comment\n")
    assert cases()[0].key != wider.key


def test_a_module_outside_packages_counts_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "alone.py").write_text("import helper\nbuild = helper.build\n")
    helper = "from torch import nn\ndef build():\n    return nn.Linear(3, {})\n"
    (tmp_path / "helper.py").write_text(helper.format(1))
    (first,) = cases("alone:build")
    (tmp_path / "helper.py").write_text(helper.format(2))
    (second,) = cases("alone:build")
    assert (first.config["user_code"]["parameters"], first.key != second.key) == (4, True)


def test_a_factory_that_changes_the_folder_leaves_the_traces_in_the_run(
    tmp_path: Path, bench: Bench
) -> None:
    (tmp_path / "moves.py").write_text(
        "import os\n"
        "from torch import nn\n"
        "def build():\n"
        "    os.chdir(os.path.expanduser('~'))\n"
        "    return nn.Linear(3, 1)\n"
    )
    arguments = ["--model", "moves:build", "--input", "float32[2x3]", "--device", "cpu"]
    assert bench("profile", *arguments, "--output", "out").returncode == 0
    assert list((tmp_path / "out" / "artifacts").glob("*/trace.trimmed.json.gz"))


def test_an_edited_model_is_measured_again(package: Path, bench: Bench) -> None:
    arguments = ["model", "--model", "mine.model:build", "--input", "float32[4x3]"]
    arguments += ["--modes", "forward", "--samples", "3", "--interval", "0", "--output", "out"]
    assert bench(*arguments).returncode == 0
    assert "0 of 1 case left" in bench(*arguments).stdout
    (package / "layers.py").write_text("def width():\n    return 3 + 0\n")
    assert "0 of 1 case left" not in bench(*arguments).stdout
    rows = [json.loads(line) for line in Path("out/results.jsonl").read_text().splitlines()]
    assert len({row["case_key"] for row in rows}) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nope:f", "--input", "float32[2x3]"], "No module named 'nope'"),
        (["--model", "mine.model:gone", "--input", "float32[2x3]"], "no attribute 'gone'"),
        (["--model", "mine.model:build", "--input", "float99[2x3]"], "but got 'float99[2x3]'"),
        (["--model", "mine.model:build", "--input", "2x3"], "but got '2x3'"),
        (["--model", "mine.model:build"], "model and input"),
        (
            ["--model", "mine.model:build", "--input", "float32[2x3]", "--sizes", "small"],
            "options beside model must apply to it, but got sizes, which describe",
        ),
        (
            ["--model", "mine.model:build", "--input", "float32[2x3]", "--d-model=64"],
            "but got d_model, which",
        ),
    ],
)
def test_wrong_use_is_one_whole_line_and_leaves_nothing(
    bench: Bench, tmp_path: Path, arguments: list[str], message: str
) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    done = bench("model", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == before


def test_a_preset_is_refused_alike(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(
        '[model]\nmodel = "mine.model:build"\ninput = "float32[2x3]"\nsizes = ["small"]\n'
    )
    done = bench("run", "mine.toml", "--dry-run")
    assert done.returncode == 2
    assert "but got sizes" in done.stderr


def test_a_peer_whose_package_is_missing_is_skipped(bench: Bench, tmp_path: Path) -> None:
    """Its line names the preset, its table, the key and the remedy; the others are measured."""
    (tmp_path / "mine.toml").write_text(
        '[attention]\nvariants = ["naive", "nope.kernels:f"]\nsequences = [8]\nhead_dims = [8]\n'
        'heads = 1\nrounds = 1\nsamples = 1\ninterval = 0\npasses = ["forward"]\n'
    )
    done = bench("run", "mine.toml", "--output", "out")
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "nope.kernels:f skipped" in line]
    assert line.strip().startswith("preset mine.toml: attention: nope.kernels:f skipped: ")
    assert "No module named 'nope'. Install its package, or leave it out of variants." in line
    rows = [json.loads(line) for line in Path("out/results.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows if row["status"] == "ok"] == ["naive"]


def test_other_commands_leave_the_path_alone(bench: Bench) -> None:
    assert bench("toy", "--dry-run").returncode == 0
    assert str(Path.cwd()) not in sys.path
