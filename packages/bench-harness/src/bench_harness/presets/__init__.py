"""Presets: which experiments run, and with which options, as TOML files that a user can copy.

A preset has a ``description`` and one table per experiment, whose keys are the experiment's
options. An array of tables (``[[model]]``) runs an experiment once per table::

    description = "Two sizes of the model, forward only"

    [model]
    sizes = ["small", "medium"]
    modes = ["forward"]

A table ``cuda`` within it takes its place where there is a GPU::

    [model.cuda]
    sizes = ["xl"]
"""

from __future__ import annotations

import importlib.resources
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_harness import experiments, options, user_code
from bench_harness.core import Case
from bench_harness.environment import gpu_count


@dataclass(frozen=True)
class Preset:
    """A read and checked preset.

    Attributes:
        name: of the shipped preset, or the file's without suffix.
        runs: experiment and complete options, in running order.
    """

    name: str
    description: str
    runs: list[tuple[str, dict[str, Any]]]

    def cases(self) -> list[Case]:
        """Every case of every run."""
        return [
            case for name, values in self.runs for case in experiments.get(name).cases(**values)
        ]


def shipped() -> list[str]:
    """The names of the presets in this package."""
    files = importlib.resources.files(__name__).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def text(name: str) -> str:
    """The file of a shipped preset.

    Raises:
        ValueError: no such preset.
    """
    if name not in shipped():
        raise ValueError(
            f"preset must be one of {', '.join(shipped())}, but got {name!r}. Correct the name."
        )
    return (importlib.resources.files(__name__) / f"{name}.toml").read_text(encoding="utf-8")


def load(name: str) -> Preset:
    """A shipped preset by name, or a preset file by path (ending in ``.toml``).

    Raises:
        ValueError: no such preset, not TOML, an unknown experiment, or options it does not take.
    """
    if name in shipped():
        return _parse(name, name, text(name))
    if not name.endswith(".toml"):
        raise ValueError(
            f"preset must be one of {', '.join(shipped())}, or a file NAME.toml, but got {name!r}. "
            "Correct the name."
        )
    try:
        return _parse(Path(name).stem, name, Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"preset {name} must be a readable file, but got an error: {error.strerror}. Correct "
            "the path."
        ) from None
    except UnicodeDecodeError:
        raise ValueError(
            f"preset {name} must be text in UTF-8, but got other bytes. Save it as UTF-8."
        ) from None


def _parse(name: str, source: str, toml: str) -> Preset:
    try:
        content = tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(
            f"preset {source} must be TOML, but got an error: {error}. Correct it."
        ) from None
    description = content.pop("description", "")
    runs, has_gpu = [], gpu_count() > 0
    for experiment_name, tables in content.items():
        try:
            experiment = experiments.get(experiment_name)
            for table in tables if isinstance(tables, list) else [tables]:
                plain = {k: v for k, v in _table(experiment_name, table).items() if k != "cuda"}
                on_gpu = _table(f"{experiment_name}.cuda", table.get("cuda", plain))
                both = [options.build(experiment, given) for given in (plain, on_gpu)]
                for values, given in zip(both, (plain, on_gpu), strict=True):
                    user_code.refuse_ignored(values, given)
                runs.append((experiment_name, both[has_gpu]))
        except ValueError as error:
            raise ValueError(f"preset {source}: {error}") from None
    if not runs:
        raise ValueError(
            f"preset {source} must name at least one experiment, but got none. Add a table, such "
            "as [model]."
        )
    order = experiments.names()
    runs.sort(key=lambda run: order.index(run[0]))
    return Preset(name, str(description), runs)


def _table(name: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be a table of options, but got {given!r}. Write [{name}].")
    return given
