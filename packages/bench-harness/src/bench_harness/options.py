"""Options of an experiment from the command line or a preset: both mirror its ``Options`` class.

A field is declared once, in the dataclass. From it come the command's parameters with their types,
defaults and help, the keys that a preset's table may hold, and the checks of both.

Presets are TOML files that a user can copy. One has a ``description`` and a table per experiment,
whose keys are the experiment's options. An array of tables (``[[model]]``) runs an experiment once
per table::

    description = "Two sizes of the model, forward only"

    [model]
    sizes = ["small", "medium"]
    modes = ["forward"]

A table ``cuda`` within it takes its place where there is a GPU::

    [model.cuda]
    sizes = ["xl"]
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import inspect
import json
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from bench_harness import experiments, user_code
from bench_harness.convert import allows_none, converted, is_list, kinds, split
from bench_harness.core import Case
from bench_harness.environment import gpu_count
from bench_harness.experiments import Experiment

#: Names that other programs of the course's assignment have for an option.
ALIASES = {
    "sizes": ("--model-size", "--size"),
    "sequences": ("--context-length",),
    "batch": ("--batch-size",),
    "batches": ("--batch-size",),
    "samples": ("--num-steps",),
    "blocks": ("--num-steps",),
    "warmups": ("--num-warmups",),
    "warmup": ("--num-warmups",),
    "variants": ("--implementation",),
    "world_sizes": ("--world-size",),
}


@dataclasses.dataclass(frozen=True)
class Declared:
    """One field of an ``Options`` class; with dashes, its name is the command-line option's."""

    name: str
    hint: Any
    default: Any
    help: str
    choices: tuple[str, ...] | None = None


def declared(experiment: Experiment) -> list[Declared]:
    """The options of an experiment, in declaration order, those of a base class last."""
    hints = typing.get_type_hints(experiment.Options)
    bases = filter(dataclasses.is_dataclass, experiment.Options.__mro__[1:])
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    fields = dataclasses.fields(experiment.Options)
    return [
        Declared(each.name, hints[each.name], each.default, **{"help": "", **each.metadata})
        for each in sorted(fields, key=lambda field: field.name in inherited)
    ]


def build(
    experiment: Experiment, values: Mapping[str, Any], *, written: bool = False
) -> dict[str, Any]:
    """Complete and checked options from some given ones.

    Args:
        values: by field name; from a preset, with lists for tuples.
        written: as texts of the command line, tuples with commas.

    Returns:
        Every field of ``Options``, ready for :meth:`Experiment.cases`.

    Raises:
        ValueError: unknown name, wrong type, not one of the choices, or values that do not fit
            together; the message starts with the experiment's name and says what is valid.
    """
    known = {option.name: option for option in declared(experiment)}
    try:
        for name in values:
            if name not in known:
                raise ValueError(
                    f"option must be one of {', '.join(known)}, but got {name!r}. Correct it."
                )
        given = {name: _checked(known[name], value, written) for name, value in values.items()}
        options = experiment.Options(**given)
        # Defaults are checked too, so that 1 and 1.0 of a float option make the same case.
        return {name: _checked(o, getattr(options, name), False) for name, o in known.items()}
    except ValueError as error:
        raise ValueError(f"{experiment.name}: {error}") from None


def _checked(option: Declared, value: Any, written: bool) -> Any:
    many = is_list(option.hint)
    if written and isinstance(value, str):
        value = _read(option, value)
    elif many and not isinstance(value, (list, tuple)):
        value = [value]
    found = converted(option.name, value, option.hint, written=written)
    try:
        json.dumps(found, allow_nan=False, default=str)
    except ValueError:
        raise ValueError(f"{option.name} must be finite, but got {found}. Correct it.") from None
    for item in found if many else [found]:
        if option.choices is not None and item not in option.choices:
            raise ValueError(
                f"{option.name} must be one of {', '.join(option.choices)}, but got {item!r}. "
                "Correct it."
            )
    return found


def _read(option: Declared, text: str) -> Any:
    """A text of the command line, cut at commas where the option takes several values."""
    if is_list(option.hint):
        if "dict" in kinds(option.hint):  # variants, whose arguments have commas of their own
            return split(text)
        return [item.strip() for item in text.split(",") if item.strip()]
    if text == "none" and allows_none(option.hint):
        return None
    if kinds(option.hint) == ["dict"]:  # as an inline table of a preset
        try:
            return tomllib.loads(f"value = {{{text}}}")["value"]
        except tomllib.TOMLDecodeError:
            raise ValueError(
                f"{option.name} must be name=value pairs as in TOML, but got {text!r}. Write "
                'layers=2,kind="small".'
            ) from None
    return text


def parameters(experiment: Experiment) -> list[inspect.Parameter]:
    """The experiment's options as parameters of a typer command."""
    return [_parameter(option) for option in declared(experiment)]


def _parameter(option: Declared) -> inspect.Parameter:
    flag = "--" + option.name.replace("_", "-")
    text = option.help
    if option.choices is not None:
        text = f"{text.rstrip('.')}: {', '.join(option.choices)}."
    annotation: Any
    if option.hint is bool:
        annotation = Annotated[bool, typer.Option(f"{flag}/--no-{flag[2:]}", help=text)]
        default = option.default
    else:
        metavar = "|".join(kinds(option.hint)).upper() + ",..." * is_list(option.hint)
        # Kept as text here and read by :func:`build`, so that one place words the errors.
        annotation = Annotated[
            str, typer.Option(flag, *ALIASES.get(option.name, ()), help=text, metavar=metavar)
        ]
        default = _written(option.default)
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _written(value: Any) -> str:
    """A default as text of the command line."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(_written, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


#: The presets of this package.
_SHIPPED = importlib.resources.files("bench_harness") / "presets"


@dataclasses.dataclass(frozen=True)
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
        return [c for name, values in self.runs for c in experiments.get(name).cases(**values)]


def shipped() -> list[str]:
    """The names of the presets in this package."""
    files = _SHIPPED.iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


def preset_text(name: str) -> str:
    """The file of a shipped preset.

    Raises:
        ValueError: no such preset.
    """
    if name not in shipped():
        raise ValueError(
            f"preset must be one of {', '.join(shipped())}, but got {name!r}. Correct the name."
        )
    return (_SHIPPED / f"{name}.toml").read_text(encoding="utf-8")


def load_preset(name: str) -> Preset:
    """A shipped preset by name, or a preset file by path (ending in ``.toml``).

    Raises:
        ValueError: no such preset, not TOML, an unknown experiment, or options it does not take.
    """
    if name in shipped():
        return _parse(name, name, preset_text(name))
    if not name.endswith(".toml"):
        valid = f"{', '.join(shipped())}, or a file NAME.toml"
        raise ValueError(f"preset must be one of {valid}, but got {name!r}. Correct the name.")
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", error)
        text = f"preset {name} must be a file in UTF-8, but got an error: {reason}. Correct it."
        raise ValueError(text) from None
    return _parse(Path(name).stem, name, text)


def _parse(name: str, source: str, toml: str) -> Preset:
    try:
        content = tomllib.loads(toml)
    except tomllib.TOMLDecodeError as error:
        text = f"preset {source} must be TOML, but got an error: {error}. Correct it."
        raise ValueError(text) from None
    description = content.pop("description", "")
    runs, has_gpu = [], gpu_count() > 0
    for experiment_name, tables in content.items():
        try:
            experiment = experiments.get(experiment_name)
            for table in tables if isinstance(tables, list) else [tables]:
                plain = {k: v for k, v in _table(experiment_name, table).items() if k != "cuda"}
                on_gpu = _table(f"{experiment_name}.cuda", table.get("cuda", plain))
                both = [build(experiment, given) for given in (plain, on_gpu)]
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
