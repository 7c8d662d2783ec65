"""Options of an experiment from the command line or a preset: both mirror its ``Options`` class.

A field is declared once, in the dataclass. From it come the command's parameters with their types,
defaults and help, the keys that a preset's table may hold, and the checks of both.
"""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
import typing
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from bench_harness.convert import allows_none, converted, is_list, kinds
from bench_harness.experiments import Experiment
from bench_harness.training.calls import split

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


_IN_VARIANT = 'Write it in each variant, as { wrapper = "flat", %s }.'
#: Options of earlier versions, by experiment or for all: what to do instead.
REMOVED = {
    "checkpoint_blocks": _IN_VARIANT % "checkpoint_blocks = 1",
    "keep_attention": _IN_VARIANT % "keep_attention = true",
    "cuda_graph": _IN_VARIANT % "cuda_graph = true",
    "elementwise": 'Compile the layers, with compile = "blocks".',
    "optimizer": "Measure it with train-step, whose variants have optimizers.",
    "deterministic": 'Set features = ["deterministic"].',
    "additions": "Leave it out: 0.01 is added 1000 times.",
    "attention": "Profile it with train-step, whose variants have attentions.",
    "autocast": "Leave it out: both dtypes are shown.",
    "device_gb": "Leave it out, or call bench_harness.mesh_accounting.mesh_rows.",
    "shard_device_gb": "Leave it out, or call bench_harness.mesh_accounting.mesh_rows.",
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
                    f"option must be one of {', '.join(known)}, but got {name!r}. "
                    + REMOVED.get(name, "Correct it.")
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
            str,
            typer.Option(flag, *ALIASES.get(option.name, ()), help=text, metavar=metavar),
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
