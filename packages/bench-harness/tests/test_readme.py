"""What the README and the pages about presets and extensions show works as shown."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from bench_harness import attentions, cli, experiments, options
from bench_harness.report.frame import to_frame

PACKAGE = Path(__file__).parents[1]
README = "".join(
    (PACKAGE / page).read_text(encoding="utf-8")
    for page in ("README.md", "docs/presets.md", "docs/extending.md")
)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}(?: [^\n]*)?\n(.*?)```", README, re.DOTALL)


def test_the_example_experiment_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = (block for block in blocks("python") if "class Sleep" in block)
    example: Any = ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", example)  # dataclasses look their module up
    exec(code, example.__dict__)
    experiment = example.Sleep()
    values = options.build(experiment, {"milliseconds": [1]})
    (case,) = experiment.cases(**values)
    (row,) = experiment.run(case, print)
    (table,) = experiment.tables(to_frame([{**row, "config": case.config, "status": "ok"}]))
    assert table.frame["median_ms"][0] >= 1


def test_the_example_preset_is_valid(tmp_path: Path) -> None:
    (text,) = (block for block in blocks("toml") if "description" in block)
    (tmp_path / "example.toml").write_text(text)
    names = [name for name, _ in options.load_preset(str(tmp_path / "example.toml")).runs]
    assert names == ["model", "allreduce", "allreduce"]


def test_the_example_of_variants_is_valid(tmp_path: Path) -> None:
    (text,) = (block for block in blocks("toml") if "[train-step]" in block)
    (tmp_path / "steps.toml").write_text(text)
    (case,) = options.load_preset(str(tmp_path / "steps.toml")).cases()
    assert len(case.config["variants"]) == 6, "five, and the step without communication"


def test_the_example_entry_point_uses_the_registry_s_group() -> None:
    found = [tomllib.loads(text) for text in blocks("toml") if "entry-points" in text]
    groups = [group for each in found for group in each["project"]["entry-points"]]
    assert groups == [attentions.ENTRY_POINT_GROUP, experiments.base.ENTRY_POINT_GROUP]


@pytest.mark.parametrize("name", experiments.names())
def test_every_experiment_is_listed(name: str) -> None:
    assert f"`{name}`" in README


def test_pages_name_commands_that_exist() -> None:
    root = PACKAGE.parents[1]
    pages = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("packages/*/docs/*.md")]
    pages += root.glob("packages/*/README.md")
    known = set(typer.main.get_command(cli.application(["--help"])).commands)  # type: ignore[attr-defined]
    assert {"run", "compare", "train-step"} <= known
    for page in pages:
        text = page.read_text(encoding="utf-8")
        code = [
            *re.findall(r"`([^`\n]+)`", text),
            *re.findall(r"```console.*?\n(.*?)```", text, re.S),
        ]
        command = r"\bbench-harness (?!bench-harness)([a-z][a-z-]+)"  # which may follow --package
        named = {name for each in code for name in re.findall(command, each)}
        assert named <= known, (page, named - known)
